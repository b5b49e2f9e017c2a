"""Nearest neighbours in Euclidean distance, a block of queries at a time, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 500  # queries at a time: 40 MB of distances to 10,000 references


def nearest(queries: Tensor, references: Tensor, k: int, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """The distances to each query's k nearest references and their rows, both (n, k), nearest first.

    Records of any shape are compared flattened. A query that is among the references finds itself or a copy of
    itself, at distance exactly 0. ValueError for fewer than k references, or k < 1.
    """
    if not 1 <= k <= len(references):
        raise ValueError(f"the {k} nearest were asked for among {len(references)} records")
    a, b = queries.flatten(1), references.flatten(1).double()
    distances = torch.zeros(len(a), k, dtype=torch.float64, device=b.device)
    indices = torch.zeros(len(a), k, dtype=torch.int64, device=b.device)
    for rows, squared, _ in squared_distances(a, b, block):
        near = squared.topk(k, largest=False).indices
        exact, order = (a[rows].double()[:, None] - b[near]).square().sum(dim=2).sort(dim=1)
        distances[rows], indices[rows] = exact.sqrt(), near.gather(1, order)
    return distances, indices


def squared_distances(a: Tensor, b: Tensor, block: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each block of rows of a: the rows, |a_i - b_j|^2, and the scale |a_i|^2 + |b_j|^2 of their rounding errors.

    a is (n, p), b (m, p) and already float64. An error is about 1e-15 of the scale, so a distance may be below 0.
    """
    norms = b.square().sum(dim=1)
    for start in range(0, len(a), block):
        rows = slice(start, start + block)
        part = a[rows].double()
        scale = part.square().sum(dim=1, keepdim=True) + norms
        yield rows, torch.addmm(scale, part, b.T, alpha=-2), scale
