"""The Frechet distance between two sets of features, each taken as a Gaussian, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased covariance of (n, p) features, n >= 2."""
    x = features.double()
    mean = x.mean(dim=0)
    centred = x - mean
    return mean, centred.T @ centred / (len(x) - 1)


def frechet(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> float:
    """|m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)).

    The trace of the root is the sum of the singular values of sqrt(S1) sqrt(S2), which loses no digits to a root.
    """
    (m1, s1), (m2, s2) = one, two
    cross = torch.linalg.svdvals(_root(s1) @ _root(s2)).sum()
    return float((m1 - m2).square().sum() + s1.trace() + s2.trace() - 2 * cross)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp_min(0).sqrt()) @ vectors.T
