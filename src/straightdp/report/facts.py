"""What a report may say, as plain values. Guarantee: what was computed from private records without noise has
no place in `PublicFacts`, so a page made from it alone cannot show any of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

GRADIENT_KEYS = ("step", "q10", "q50", "q90", "clip_fraction", "batch")


@dataclass(frozen=True)
class MechanismFact:
    """One declared mechanism; `epsilon_alone` is what its declared executions alone cost at the run's δ."""

    id: str
    what: str
    kind: str
    sensitivity: float
    sigma: float
    q: float | None
    count: int
    executed: int
    epsilon_alone: float


@dataclass(frozen=True)
class AssumptionFact:
    """Something taken as public knowledge, so outside the guarantee, and where it came from."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, eq=False)
class ClassPictures:
    """Pictures of one class, (n, H, W, C) uint8 with C = 1 or 3; n = 0 is allowed."""

    label: str
    images: np.ndarray

    def __post_init__(self) -> None:
        shape, dtype = self.images.shape, self.images.dtype
        if len(shape) != 4 or shape[3] not in (1, 3) or dtype != np.uint8 or 0 in shape[1:3]:
            raise ValueError(
                f"pictures of class {self.label!r} must be (n, H, W, 1 or 3) uint8 but are {shape} {dtype}; "
                "convert them before building the facts"
            )


@dataclass(frozen=True)
class Score:
    """Accuracy in [0, 1], on held-out real records, of a classifier trained on the data that `name` names."""

    name: str
    mean: float
    std: float | None
    note: str

    def __post_init__(self) -> None:
        if not 0 <= self.mean <= 1 or not (self.std is None or self.std >= 0):
            raise ValueError(
                f"score {self.name!r} must have a mean in [0, 1] and a std that is None or at least 0 "
                f"but has {self.mean} and {self.std}; give fractions, not percentages"
            )


@dataclass(frozen=True, eq=False)
class PublicFacts:
    """All that may be published: released values, declared constants, public pictures, and what follows."""

    title: str
    version: str
    epsilon_budget: float
    epsilon: float
    delta: float
    unit: str
    adjacency: str
    n: int
    mode: str
    accountant: str
    releasable: bool
    why_not: str
    mechanisms: tuple[MechanismFact, ...]
    assumptions: tuple[AssumptionFact, ...]
    classes: tuple[str, ...]
    synthetic: tuple[ClassPictures, ...]
    public: tuple[ClassPictures, ...]
    moments: tuple[ClassPictures, ...]
    n_synthetic: int
    stages: tuple[tuple[str, float], ...]
    files: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, eq=False)
class PrivateFacts:
    """Computed from private records without noise, for the internal edition alone. The first score is the
    headline; `gradient_norms` is empty, or has all `GRADIENT_KEYS` with lists of one length, NaN allowed."""

    scores: tuple[Score, ...] = ()
    gradient_norms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    holdout_n: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        lengths = {key: len(values) for key, values in self.gradient_norms.items()}
        if lengths and (set(lengths) != set(GRADIENT_KEYS) or len(set(lengths.values())) > 1):
            raise ValueError(
                f"gradient_norms must be empty or have the keys {', '.join(GRADIENT_KEYS)} with lists of one "
                f"length but has {lengths}; fill in what is missing or leave all of it out"
            )
