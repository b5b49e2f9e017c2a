"""The Frechet distance within each class: a generator that ignores its captions shows here."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from straightdp.metrics.frechet import frechet_between


def per_class_frechet(real: Tensor, real_y: Tensor, fake: Tensor, fake_y: Tensor, classes: int) -> list[float | None]:
    """The distance between real (n, p) and fake (m, p) features of each class 0 .. classes - 1.

    None for a class with fewer than 2 records on either side. A class has few records, and the distance grows as
    they get fewer: compare only figures from equal counts.
    """
    pairs = [(real[real_y == c], fake[fake_y == c]) for c in range(classes)]
    return [frechet_between(one, two) if min(len(one), len(two)) >= 2 else None for one, two in pairs]


def mean_of(distances: Sequence[float | None]) -> float | None:
    """The mean over the classes that have a distance; None if none has."""
    known = [distance for distance in distances if distance is not None]
    return sum(known) / len(known) if known else None
