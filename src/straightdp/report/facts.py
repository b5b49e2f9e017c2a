"""What a report may say, as plain values. Guarantee: what was computed from private records without noise has
no place in `PublicFacts`, so a page made from it alone cannot show any of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

GRADIENT_KEYS = ("step", "q10", "q50", "q90", "clip_fraction", "batch")
REFERENCES = ("real private training records", "public images", "public model only", "released moments alone")


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
    """Accuracy in [0, 1], on held-out real records, of the classifier `probe` trained on the data `name` names."""

    name: str
    mean: float
    std: float | None
    note: str
    probe: str = "LeNet"

    def __post_init__(self) -> None:
        if not 0 <= self.mean <= 1 or not (self.std is None or self.std >= 0):
            raise ValueError(
                f"score {self.name!r} must have a mean in [0, 1] and a std that is None or at least 0 "
                f"but has {self.mean} and {self.std}; give fractions, not percentages"
            )


@dataclass(frozen=True)
class Quality:
    """How far the `n` images that `name` names are from the held-out real records. The first of several is the
    synthetic data, the others are what it is compared with, named as in `REFERENCES`.

    `precision` is the share of these images that look like held-out records, `recall` the share of held-out
    records that look like one of these images, `per_class` the mean over classes of the distance within a class;
    None where it was not measured.
    """

    name: str
    n: int
    distance: float
    precision: float | None
    recall: float | None
    per_class: float | None
    note: str

    def __post_init__(self) -> None:
        _finite(f"quality {self.name!r}", self.distance, self.per_class)
        _shares(f"quality {self.name!r}", self.precision, self.recall)


@dataclass(frozen=True)
class LabelAware:
    """Whether the images that `name` names are what their labels say; None where it was not measured.

    `consistency` is the share in which a classifier trained on private records finds the label that the image
    has, `domain_rate` the share that a private-or-public classifier takes for private.
    """

    name: str
    consistency: float | None
    domain_rate: float | None
    note: str = ""

    def __post_init__(self) -> None:
        _shares(f"label-aware facts of {self.name!r}", self.consistency, self.domain_rate)


@dataclass(frozen=True)
class ClassDistance:
    """Distance of one class's synthetic images to the held-out records of that class; `reference` is that of the
    private training records of the class. None where it was not measured: a class may have too few."""

    label: str
    distance: float | None
    reference: float | None = None

    def __post_init__(self) -> None:
        _finite(f"the distance of class {self.label!r}", self.distance, self.reference)


@dataclass(frozen=True, eq=False)
class Neighbour:
    """One synthetic picture, (H, W, C) uint8, and the private training records nearest to it, (k, H, W, C) uint8,
    nearest first, with their distances."""

    label: str
    sample: np.ndarray
    nearest: np.ndarray
    distances: tuple[float, ...]

    def __post_init__(self) -> None:
        ClassPictures(self.label, self.sample[None])
        ClassPictures(self.label, self.nearest)
        _finite(f"the distances of a sample of class {self.label!r}", *self.distances)
        shapes, k = {self.sample.shape, self.nearest.shape[1:]}, len(self.distances)
        if not k or k != len(self.nearest) or list(self.distances) != sorted(self.distances) or len(shapes) > 1:
            raise ValueError(
                f"a sample of class {self.label!r}, {self.sample.shape}, has nearest records {self.nearest.shape} and "
                f"the distances {self.distances}; give records of its shape, one distance each, nearest first"
            )


@dataclass(frozen=True, eq=False)
class Neighbours:
    """How near synthetic images come to private training records. `synthetic` and `heldout` hold one distance an
    image: to its nearest training record, in the `space` named. Held-out records are the yardstick."""

    shown: tuple[Neighbour, ...]
    synthetic: Sequence[float]
    heldout: Sequence[float]
    space: str

    def __post_init__(self) -> None:
        _finite("nearest-record distances", *self.synthetic, *self.heldout)
        if not len(self.synthetic) or not len(self.heldout):
            raise ValueError("nearest-record distances need both sets; leave `neighbours` None when one is missing")
        if len({len(one.distances) for one in self.shown}) > 1:
            raise ValueError("samples have different numbers of nearest records; give each of them the same")


@dataclass(frozen=True)
class AuditFact:
    """An attack on `what`: with the confidence given, ε is at least `lower_bound`. The guarantee claims that it is
    at most `claimed`. `positive_control` says what the same attack found where it must find something."""

    claimed: float
    lower_bound: float
    confidence: float
    what: str
    positive_control: str

    def __post_init__(self) -> None:
        if not self.claimed >= 0 or not 0 <= self.lower_bound < math.inf or not 0 < self.confidence < 1:
            raise ValueError(
                f"the audit of {self.what!r} must have claimed >= 0, a finite lower bound >= 0 and a confidence "
                f"between 0 and 1 but has {self.claimed}, {self.lower_bound} and {self.confidence}"
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
    headline; `gradient_norms` is empty, or has all `GRADIENT_KEYS` with lists of one length, NaN allowed.

    `distance_name` is "FID" only with the published Inception weights; `features_note` says which features.
    """

    scores: tuple[Score, ...] = ()
    gradient_norms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    holdout_n: int = 0
    notes: tuple[str, ...] = ()
    quality: tuple[Quality, ...] = ()
    distance_name: str = "FD-slim"
    features_note: str = ""
    label_aware: tuple[LabelAware, ...] = ()
    class_distances: tuple[ClassDistance, ...] = ()
    neighbours: Neighbours | None = None
    audit: tuple[AuditFact, ...] = ()

    def __post_init__(self) -> None:
        lengths = {key: len(values) for key, values in self.gradient_norms.items()}
        if lengths and (set(lengths) != set(GRADIENT_KEYS) or len(set(lengths.values())) > 1):
            raise ValueError(
                f"gradient_norms must be empty or have the keys {', '.join(GRADIENT_KEYS)} with lists of one "
                f"length but has {lengths}; fill in what is missing or leave all of it out"
            )


def _finite(what: str, *values: float | None) -> None:
    wrong = [value for value in values if value is not None and not math.isfinite(value)]
    if wrong:
        raise ValueError(f"{what} must be finite but has {wrong[0]}; leave out what was not measured")


def _shares(what: str, *values: float | None) -> None:
    wrong = [value for value in values if value is not None and not 0 <= value <= 1]
    if wrong:
        raise ValueError(f"{what} must have shares in [0, 1] or None but has {wrong[0]}; give fractions")
