"""One caption per class, from a template."""

from __future__ import annotations

from collections import Counter
from string import Formatter

from straightdp.errors import BadInput


def from_template(template: str, classes: tuple[str, ...]) -> tuple[str, ...]:
    """`template` with {label} replaced by each class name, in the order of `classes`.

    Guarantee: captions differ from class to class. The template holds the plain field {label} once or more,
    and no other field; a brace of its own is written {{ or }}.
    """
    cure = "write a template such as 'a picture of {label}'"
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise BadInput(f"caption template {template!r} is not well formed ({error}); {cure}") from None
    fields = [(field, spec or "", how or "") for _, field, spec, how in parts if field is not None]
    if unknown := [field for field in fields if field != ("label", "", "")]:
        raise BadInput(
            f"caption template {template!r} has a field other than the plain {{label}} "
            f"({''.join(unknown[0])!r}); {cure}"
        )
    if not fields:
        raise BadInput(f"caption template {template!r} has no {{label}}, so all classes would read alike; {cure}")
    captions = tuple(template.format(label=name) for name in classes)
    repeated = [caption for caption, count in Counter(captions).items() if count > 1]
    if repeated:
        raise BadInput(f"caption {repeated[0]!r} would stand for more than one class; give each class its own name")
    return captions
