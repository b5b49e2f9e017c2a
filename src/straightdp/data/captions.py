"""Captions from a template: one per class, or one per combination of class and slot words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import Formatter

import numpy as np

from straightdp.errors import BadInput

LIMIT = 10_000  # combinations of one template
_CURE = "write a template such as 'a picture of {label}'"
_RESERVED = {"label": "the class", "text": "a record's own text"}


@dataclass(frozen=True)
class Template:
    """A caption text with fields, and the words each field may hold: "label" first, then the slots as declared.

    Guarantee, when made by `read`: every field has its words and every slot its field, there are at most
    10,000 combinations, and no two of them read alike, white space aside. Combination m is row m of
    `combinations()` and entry m of `captions()`; the label varies slowest, the last slot fastest.
    """

    text: str
    slots: dict[str, tuple[str, ...]]

    @classmethod
    def read(cls, text: str, classes: Sequence[str], slots: Mapping[str, Sequence[str]] = {}) -> Template:
        """The template `text` over the class names and the slots' words, or a refusal that says what is wrong.

        The text holds the plain field {label} and each slot's plain field once or more, in any order, and no
        other field; a brace of its own is written {{ or }}. An empty class list is fine: it has no captions.
        """
        for name, words in slots.items():
            _check_slot(name, words)
        _check_fields(text, ("label", *slots), may_list=True)
        template = cls(text, {"label": tuple(classes)} | {name: tuple(words) for name, words in slots.items()})
        if (count := math.prod(map(len, template.slots.values()))) > LIMIT:
            raise BadInput(
                f"caption template {text!r} should have at most {LIMIT:,} combinations of class and words but has "
                f"{count:,}; shorten the class list or a slot's list of words"
            )
        template._check_distinct()
        return template

    def captions(self) -> tuple[str, ...]:
        """The text of every combination, in the order of `itertools.product` over the slots."""
        names = tuple(self.slots)
        every = itertools.product(*self.slots.values())
        return tuple(self.text.format_map(dict(zip(names, words, strict=True))) for words in every)

    def combinations(self) -> np.ndarray:
        """int64 (M, number of slots, "label" among them): which word of each slot caption m is made of."""
        sizes = tuple(map(len, self.slots.values()))
        return np.ascontiguousarray(np.indices(sizes, np.int64).reshape(len(sizes), -1).T)

    def index(self, caption: str) -> int | None:
        """The position of `caption` in `captions()`, or None if it is none of them.

        White space is collapsed and stripped, and case does not count, except between captions that case
        alone tells apart: there it must match.
        """
        plain = _collapsed(caption)
        found = self._positions.get(plain.casefold(), {})
        return next(iter(found.values())) if len(found) == 1 else found.get(plain)

    @cached_property
    def _positions(self) -> dict[str, dict[str, int]]:
        """Caption without case, to caption as written, to its position."""
        positions: dict[str, dict[str, int]] = {}
        for i, caption in enumerate(map(_collapsed, self.captions())):
            positions.setdefault(caption.casefold(), {})[caption] = i
        return positions

    def _check_distinct(self) -> None:
        first: dict[str, tuple[str, ...]] = {}
        for caption, words in zip(self.captions(), itertools.product(*self.slots.values()), strict=True):
            plain = _collapsed(caption)
            if plain not in first:
                first[plain] = words
                continue
            other = first[plain]
            if other[1:] == words[1:]:
                raise BadInput(f"caption {caption!r} would stand for more than one class; give each class its own name")
            raise BadInput(
                f"caption {caption!r} would stand for more than one combination, {_listed(other)} and "
                f"{_listed(words)}; word the template or its slots so that no two read alike"
            )


def from_template(template: str, classes: tuple[str, ...]) -> tuple[str, ...]:
    """`template` with {label} replaced by each class name, in the order of `classes`.

    Guarantee: captions differ from class to class. The template holds the plain field {label} once or more,
    and no other field; a brace of its own is written {{ or }}.
    """
    _check_fields(template, ("label",), may_list=False)
    return Template.read(template, classes).captions()


def _check_slot(name: str, words: Sequence[str]) -> None:
    if name in _RESERVED:
        raise BadInput(f"slot {name!r} has a name that is kept for {_RESERVED[name]}; call it something else")
    if isinstance(words, str):
        raise BadInput(f"slot {name!r} should be a list of words but is the text {words!r}; write [{words!r}]")
    if not words:
        raise BadInput(f"slot {name!r} has no words; list at least one, or take the slot and its field out")
    seen: set[str] = set()
    for word in words:
        if word in seen:
            raise BadInput(f"slot {name!r} lists the word {word!r} twice; list each word once")
        seen.add(word)


def _check_fields(text: str, names: tuple[str, ...], may_list: bool) -> None:
    """Refuse a text whose fields are not exactly `names`, each plain. `may_list`: the caller could list a slot."""
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise BadInput(f"caption template {text!r} is not well formed ({error}); {_CURE}") from None
    fields = [(field, spec or "", how or "") for _, field, spec, how in parts if field is not None]
    for field, spec, how in fields:
        plain = field.isidentifier() and not spec and not how
        if plain and field in names:
            continue
        known = ", ".join(f"{{{name}}}" for name in names)
        more = f", or list the words of {field!r} in slots" if may_list and plain and field not in _RESERVED else ""
        raise BadInput(
            f"caption template {text!r} has a field other than the plain {known} "
            f"({field + spec + how!r}); {_CURE}{more}"
        )
    used = {field for field, _, _ in fields}
    if "label" not in used:
        raise BadInput(f"caption template {text!r} has no {{label}}, so all classes would read alike; {_CURE}")
    if unused := [name for name in names if name not in used]:
        raise BadInput(
            f"slot {unused[0]!r} has words but caption template {text!r} has no {{{unused[0]}}}; add that field or "
            "take the slot out"
        )


def _collapsed(caption: str) -> str:
    return " ".join(caption.split())


def _listed(words: tuple[str, ...]) -> str:
    return f"({', '.join(map(repr, words))})"
