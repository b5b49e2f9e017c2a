"""What each line of a transcript must look like, strictly: a number is a number and nothing is left over."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from straightdp.privacy.accountant import Declaration
from straightdp.privacy.ledger import VERSION, TranscriptError

Positive = Annotated[float, Field(gt=0)]

KNOWN: dict[str, tuple[str, float]] = {
    "release/means": ("gaussian", math.sqrt(1.25)),
    "release/mean": ("gaussian", 1.0),
    "release/cross": ("gaussian", math.sqrt(2)),
    "release/covariance": ("gaussian", 1.0),
    "release/trace": ("gaussian", 1.0),
    **{f"release/components/{k}": ("gaussian", math.sqrt(17) / 4) for k in range(1, 10)},
    "release/votes": ("gaussian", 1.0),
    "dpsgd/gradients": ("poisson_gaussian", 1.0),
    "rival/embedding": ("gaussian", 1.0),
    "rival/votes": ("gaussian", 1.0),
}
"""Each mechanism of the project: its kind, and the least sensitivity that may be declared for it."""


def known(id: str) -> tuple[str, float] | None:
    """What is known of a mechanism. DP-SGD may be several, one a time bucket: dpsgd/gradients/1 and so on."""
    return KNOWN.get("dpsgd/gradients" if re.fullmatch(r"dpsgd/gradients/([1-9]|1[0-6])", id) else id)


class Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    line: int
    previous: str


class Accountant(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Literal["pld"]
    interval: Annotated[float, Field(ge=1e-6, le=0.01)]


class Header(Line):
    kind: Literal["header"]
    version: Literal[VERSION]  # type: ignore[valid-type]
    epsilon: Positive
    delta: Annotated[float, Field(ge=1e-12, lt=1)]
    unit: Literal["one record"]
    adjacency: Literal["add_or_remove_one"]
    n: Annotated[int, Field(ge=1)]
    mode: Literal["tight", "paper"]
    noise: Literal["os", "pinned", "audit", "leaky"]
    accountant: Accountant
    recipe: str


class Assumption(Line):
    kind: Literal["assumption"]
    name: str
    value: str
    source: str


class Mechanism(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    id: str
    what: str
    kind: Literal["gaussian", "poisson_gaussian"]
    sensitivity: Positive
    sigma: Positive
    noise_std: Positive
    q: Annotated[float, Field(gt=0, le=1)] | None
    count: Annotated[int, Field(ge=1)]

    def declaration(self) -> Declaration:
        return Declaration(**self.model_dump(exclude={"noise_std"}))


class Declare(Line):
    kind: Literal["declare"]
    mechanism: Mechanism


class Certificate(Line):
    kind: Literal["certificate"]
    epsilon: Annotated[float, Field(ge=0)]


class Execute(Line):
    kind: Literal["execute"]
    id: str
    step: Annotated[int, Field(ge=0)]
    clip: Positive | None = None


class Totals(Line):
    kind: Literal["totals"]
    executed: dict[str, int]
    epsilon: Annotated[float, Field(ge=0)]
    files: dict[str, str]


KINDS: dict[str, type[Line]] = {
    "header": Header,
    "assumption": Assumption,
    "declare": Declare,
    "certificate": Certificate,
    "execute": Execute,
    "totals": Totals,
}


def read_entry(number: int, entry: dict[str, Any]) -> Any:
    """One entry as its kind's model, or the reason why it is none."""
    kind = KINDS.get(str(entry.get("kind")))
    if kind is None:
        raise TranscriptError(number, f"is of an unknown kind {entry.get('kind')!r}")
    try:
        return kind.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise TranscriptError(number, f"has a {where} that cannot be: {first['msg']}") from None
