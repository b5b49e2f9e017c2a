"""From label names to class indices, with every way a label can be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from straightdp.errors import BadInput


def check_classes(classes: tuple[str, ...] | None) -> None:
    """Refuse a class list that is empty or names a class twice."""
    if classes is None:
        return
    if not classes:
        raise BadInput("the class list is empty; name at least one class, or leave private.classes out")
    seen: set[str] = set()
    for name in classes:
        if name in seen:
            raise BadInput(f"class {name!r} is listed twice in {_short(classes)}; name each class once")
        seen.add(name)


def index(
    names: Sequence[str], classes: tuple[str, ...] | None, where: Callable[[int], str]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Each record's label name as int64 position in the class list, and that list.

    Without `classes` the list is the distinct names, sorted: whole numbers as numbers, then text. With it, a
    label outside the list is refused (`where(i)` says which record). A declared class may have no record: were that
    refused, the mere existence of a release would tell that every class has one.
    """
    found = set(names)
    order = tuple(sorted(found, key=number_key))
    if classes is not None:
        order = classes
        if outside := found - set(classes):
            i = next(i for i, name in enumerate(names) if name in outside)
            raise BadInput(
                f"{where(i)} has label {names[i]!r}, which is not in the class list {_short(classes)}; "
                "add it to private.classes or mend the label"
            )
    position = {name: i for i, name in enumerate(order)}
    return np.fromiter((position[name] for name in names), np.int64, len(names)), order


def names_of(values: np.ndarray, classes: tuple[str, ...] | None, where: Callable[[int], str]) -> Sequence[str]:
    """Labels as stored in an array (text or whole numbers) to label names.

    Numbers name themselves ("3"), unless a class list is given that holds a name which is not a number: then
    a number is a position in that list. Only the list decides which, never the data.
    """
    if values.dtype.kind == "U":
        return values.tolist()
    if classes is None or all(_is_number(name) for name in classes):
        return [str(value) for value in values.tolist()]
    bad = np.flatnonzero((values < 0) | (values >= len(classes)))
    if len(bad):
        raise BadInput(
            f"{where(int(bad[0]))} has label {values[bad[0]]}, which is not a position in the class list "
            f"{_short(classes)} (0 to {len(classes) - 1}); add the missing class or mend the label"
        )
    return [classes[value] for value in values.tolist()]


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def number_key(name: str) -> tuple[bool, int, str]:
    """Sorts whole numbers as numbers, before all other names, which sort as text."""
    return (False, int(name), name) if _is_number(name) else (True, 0, name)


def _short(classes: tuple[str, ...]) -> str:
    shown = ", ".join(classes[:12])
    return f"({shown}, ... {len(classes)} in all)" if len(classes) > 12 else f"({shown})"
