"""What is summed over private records, as bounded sums that the vault evaluates. Nothing here reads a record."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from straightdp.moments.basis import Basis
from straightdp.moments.text import TextBasis
from straightdp.nets.rowwise import row_sum
from straightdp.privacy.mechanisms import Condition, OuterSum, RowSum

PAIR_BOUND = math.sqrt(1.25)  # (1, f / 2R): one count and half a unit
PAIR_REPLACE_BOUND = math.sqrt(2.5)
CROSS_BOUND = math.sqrt(2)
CROSS_REPLACE_BOUND = 2 * math.sqrt(2)
COMPONENT_COUNT = 0.25
COMPONENT_BOUND = math.sqrt(1 + COMPONENT_COUNT**2)  # (1/4, r / R): a quarter of a count and one unit


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


def global_mean(basis: Basis) -> RowSum:
    """One sum of clipped features over all records, f / R: N is declared, so nothing is counted."""

    def vectors(z: Tensor, y: Tensor) -> Tensor:
        f = basis.features(z) / basis.radius
        return f * (1 / f.norm(dim=1, keepdim=True).clamp_min(1e-300)).clamp_max(1.0)

    return RowSum(vectors, len(basis.P), 1.0)


def cross_moments(basis: Basis, text: TextBasis, width: int) -> RowSum:
    """The whitened cross moments of equation (5), both blocks in one vector: f e^T / R_feat R_txt and e e^T / R_txt^2.

    Each block has norm at most 1, so together sqrt 2 under add/remove and 2 sqrt 2 under replacement. Of the symmetric
    block the upper triangle is kept, off the diagonal times sqrt 2: the same norm, and every entry noised once. `width`
    is that of a row of the design, which holds the intercept.
    """
    i, j = torch.triu_indices(width, width).unbind()
    double = torch.where(i == j, 1.0, math.sqrt(2)).double()

    def vectors(z: Tensor, e: Tensor) -> Tensor:
        f = basis.features(z) / basis.radius
        f = f * (1 / f.norm(dim=1, keepdim=True).clamp_min(1e-300)).clamp_max(1.0)
        row = text.design(e)
        cross = (f[:, :, None] * row[:, None, :]).flatten(1)
        return torch.cat([cross, row[:, i] * row[:, j] * double], dim=1)

    size = len(basis.P) * width + len(i)
    return RowSum(vectors, size, CROSS_BOUND, replace_bound=CROSS_REPLACE_BOUND, condition="caption")


def split_cross_moments(values: Tensor, p: int, width: int) -> tuple[Tensor, Tensor]:
    """The two blocks out of the vector: (p, width), and a symmetric (width, width)."""
    cross, rest = values[: p * width].reshape(p, width), values[p * width :]
    i, j = torch.triu_indices(width, width).unbind()
    square = torch.zeros(width, width, dtype=values.dtype)
    square[i, j] = torch.where(i == j, rest, rest / math.sqrt(2))
    return cross, square + square.T - torch.diag(square.diagonal())


MeanOf = Callable[[Tensor], Tensor]
"""Released feature means, (n, p), for the records' condition."""


def residual_second_moments(basis: Basis, mean_of: MeanOf, blocks: int, condition: Condition = "class") -> OuterSum:
    """Per block, sum of r r^T with r = f - mean around the *released* feature means, clipped to its own radius."""

    def vectors(z: Tensor, given: Tensor) -> Tensor:
        return basis.features(z) - mean_of(given)

    return OuterSum(vectors, len(basis.P), basis.residual_radius, blocks, condition)


def residual_trace(basis: Basis, mean_of: MeanOf, condition: Condition = "class") -> RowSum:
    """Sum of min(||r||^2, w^2) / w^2 with w a public wide radius: one number that undoes the residual clip."""

    def vectors(z: Tensor, given: Tensor) -> Tensor:
        r = basis.features(z) - mean_of(given)
        return (r.square().sum(dim=1, keepdim=True) / basis.widest_residual**2).clamp_max(1.0)

    return RowSum(vectors, 1, 1.0, replace_bound=1.0, condition=condition)


def component_sums(basis: Basis, centres: Tensor) -> RowSum:
    """Per class, the pairs (1/4, r / R) of its components side by side: each record adds its own in the place of the
    nearest *released* centre of its class, r = f - centre clipped to the residuals' radius. centres is (Y, k, p).

    One record fills one place: sqrt(17/16) under add/remove. Of a replacement the worst keeps the place, where the
    quarters cancel and the residuals are opposite: 2.
    Guarantee: a record's place is the same to the bit whatever batch it is in.
    """
    classes, k, p = centres.shape

    def vectors(z: Tensor, y: Tensor) -> Tensor:
        f = basis.features(z)
        distances = [row_sum((f - centres[y, j]).square()) for j in range(k)]
        every, place = torch.arange(len(f)), torch.cat(distances, dim=1).argmin(dim=1)
        r = (f - centres[y, place]) / basis.residual_radius
        r = r * (1 / row_sum(r.square()).sqrt().clamp_min(1e-300)).clamp_max(1.0)
        rows = torch.zeros(len(f), k, 1 + p, dtype=f.dtype)
        rows[every, place, 0], rows[every, place, 1:] = COMPONENT_COUNT, r
        return rows.flatten(1)

    return RowSum(vectors, k * (1 + p), COMPONENT_BOUND, classes, replace_bound=2.0)


def shared_second_moment(basis: Basis) -> OuterSum:
    """Sum of f f^T over all records in the public basis, features clipped to R_feat."""
    return OuterSum(lambda z, y: basis.features(z), len(basis.P), basis.radius)


def shared_second_moment_of_records(basis: Basis) -> OuterSum:
    """Sum of z z^T over all records, d x d, as the paper's text has it; z is taken from the public mean."""
    return OuterSum(lambda z, y: z - basis.mean, len(basis.mean), basis.image_radius)
