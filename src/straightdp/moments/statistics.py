"""What is summed over private records, as bounded sums that the vault evaluates. Nothing here reads a record."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from straightdp.moments.basis import Basis
from straightdp.privacy.mechanisms import OuterSum, RowSum

PAIR_BOUND = math.sqrt(1.25)  # (1, f / 2R): one count and half a unit
PAIR_REPLACE_BOUND = math.sqrt(2.5)


def class_moments(basis: Basis, classes: int) -> RowSum:
    """The whitened pairs (n_y, S_y / 2R) of Proposition B.1, all classes stacked, over clipped features.

    One record is one count and at most half a unit of sum: sqrt(5/4) under add/remove, sqrt(5/2) under replacement.
    """
    scale = 2 * basis.radius

    def vectors(z: Tensor, y: Tensor) -> Tensor:
        f = basis.features(z)
        f = f * (basis.radius / f.norm(dim=1, keepdim=True).clamp_min(1e-300)).clamp_max(1.0)
        return torch.cat([torch.ones(len(f), 1, dtype=f.dtype), f / scale], dim=1)

    return RowSum(vectors, 1 + len(basis.P), PAIR_BOUND, classes, PAIR_REPLACE_BOUND)


def residual_second_moments(basis: Basis, means: Tensor) -> OuterSum:
    """Per class, sum of r r^T with r = f - mu_y around the *released* feature means, clipped to its own radius."""

    def vectors(z: Tensor, y: Tensor) -> Tensor:
        return basis.features(z) - means[y]

    return OuterSum(vectors, len(basis.P), basis.residual_radius, len(means))


def residual_trace(basis: Basis, means: Tensor) -> RowSum:
    """Sum of min(||r||^2, w^2) / w^2 with w a public wide radius: one number that undoes the residual clip."""

    def vectors(z: Tensor, y: Tensor) -> Tensor:
        r = basis.features(z) - means[y]
        return (r.square().sum(dim=1, keepdim=True) / basis.widest_residual**2).clamp_max(1.0)

    return RowSum(vectors, 1, 1.0, replace_bound=1.0)


def shared_second_moment(basis: Basis) -> OuterSum:
    """Sum of f f^T over all records in the public basis, features clipped to R_feat."""
    return OuterSum(lambda z, y: basis.features(z), len(basis.P), basis.radius)


def shared_second_moment_of_records(basis: Basis) -> OuterSum:
    """Sum of z z^T over all records, d x d, as the paper's text has it; z is taken from the public mean."""
    return OuterSum(lambda z, y: z - basis.mean, len(basis.mean), basis.image_radius)
