"""Improved precision and recall (Kynkaanniemi et al., 2019): one number for realism, one for coverage."""

from __future__ import annotations

from torch import Tensor

from straightdp.metrics.neighbours import BLOCK, nearest, squared_distances

TIE = 1e-12  # squared distances closer than this, relative to the points' squared lengths, are equal


def precision_recall(real: Tensor, fake: Tensor, k: int = 3, block: int = BLOCK) -> tuple[float, float]:
    """The share of fake features (m, p) in the reach of the real ones (n, p), and of the real in that of the fake.

    A set's reach is the union of the balls about its points, each as wide as the distance to the point's k-th
    neighbour in the set, itself left out but its copies not; a ball's edge belongs to it. ValueError for fewer
    than k + 1 records on either side, or k < 1.
    """
    for name, records in (("real", real), ("fake", fake)):
        if not 1 <= k < len(records):
            raise ValueError(f"k = {k} wants k >= 1 and more than k records, but {len(records)} {name} ones came")
    return _share_within(fake, real, k, block), _share_within(real, fake, k, block)


def _share_within(points: Tensor, centres: Tensor, k: int, block: int) -> float:
    radii = nearest(centres, centres, k + 1, block)[0][:, k]  # the nearest of the k + 1 is the centre itself
    inside = 0
    for _, squared, scale in squared_distances(points.flatten(1), centres.flatten(1).double(), block):
        inside += int((squared <= radii.square() + TIE * scale).any(dim=1).sum())
    return inside / len(points)
