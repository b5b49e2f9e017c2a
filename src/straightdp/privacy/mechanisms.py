"""Bounded sums of records, before the noise: what the vault may compute, and how far one record can move it.

A sum maps each record to a vector and says how long that vector can be. The bound is enforced here, in the
arithmetic that is used: vectors are clipped in float64 and rounded toward zero onto a fixed-point grid, so no
norm grows, and added as integers, so the total has no rounding of its own.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

CLIP_MARGIN = 1 - 1e-12  # for the rounding of a float64 norm
CHUNK = 4096
LARGEST = 2**25  # numbers in a chunk's vectors

Vectors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(z (n, d) float64, the records' condition) to one vector a record, (n, width) float64."""

Condition = Literal["class", "caption"]
"""What a sum sees of a record beside z: its class y, (n,), or the features of its caption e, (n, m) float64."""


class Relation(enum.Enum):
    """Which neighbours a sensitivity speaks of. The accounting uses ADD_OR_REMOVE_ONE."""

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"


@dataclass(frozen=True)
class RowSum:
    """Each record adds its vector, of length at most `bound`, to the block of its class (or to the only block).

    `replace_bound` is how far one replacement moves the whole, when that is known to be less than 2 `bound`.
    """

    vectors: Vectors
    width: int
    bound: float
    blocks: int = 1
    replace_bound: float | None = None
    condition: Condition = "class"

    @property
    def grid(self) -> float:
        return self.bound * 2.0**-30

    def sensitivity(self, relation: Relation) -> float:
        if relation is Relation.ADD_OR_REMOVE_ONE:
            return self.bound
        return self.replace_bound or 2 * self.bound

    def noise_shape(self) -> dict[str, tuple[int, float]]:
        """Per group of coordinates: how many, and their noise relative to the mechanism's."""
        return {"rows": (self.blocks * self.width, 1.0)}

    def exact(self, z: torch.Tensor, y: torch.Tensor) -> dict[str, np.ndarray]:
        """The pre-noise value in grid units. No records give zeros."""
        total = np.zeros((self.blocks, self.width), dtype=np.int64)
        for block, rows in _chunks(self, z, y, self.bound, self.grid):
            total[block] += rows.sum(axis=0, dtype=np.int64)
        return {"rows": total.ravel()}

    def assemble(self, noisy: dict[str, np.ndarray]) -> np.ndarray:
        return (noisy["rows"].astype(np.float64) * self.grid).reshape(self.blocks, self.width)


@dataclass(frozen=True)
class OuterSum:
    """Each record adds u u^T, where u is its vector over `radius`, clipped to the unit ball: one matrix a block.

    ||u u^T||_F = ||u||^2 <= 1 bounds add/remove; two such matrices are at an angle of at most 90 degrees, so a
    replacement moves the sum by at most sqrt 2. u is rounded onto a grid of 2^-15, so every product is a multiple
    of 2^-30 and float64 adds them without rounding. Off the diagonal a symmetric matrix counts each entry twice
    in its norm, so entries there get 1/sqrt 2 of the noise.
    """

    vectors: Vectors
    width: int
    radius: float
    blocks: int = 1
    condition: Condition = "class"

    grid = 2.0**-30

    def sensitivity(self, relation: Relation) -> float:
        return 1.0 if relation is Relation.ADD_OR_REMOVE_ONE else math.sqrt(2)

    def noise_shape(self) -> dict[str, tuple[int, float]]:
        pairs = self.width * (self.width - 1) // 2
        return {"diagonal": (self.blocks * self.width, 1.0), "pairs": (self.blocks * pairs, math.sqrt(0.5))}

    def exact(self, z: torch.Tensor, y: torch.Tensor) -> dict[str, np.ndarray]:
        """The pre-noise value in grid units. No records give zeros."""
        total = np.zeros((self.blocks, self.width, self.width), dtype=np.int64)
        for block, rows in _chunks(self, z, y, self.radius, self.radius * 2.0**-15):
            u = rows.astype(np.float64)
            total[block] += (u.T @ u).astype(np.int64)  # integers below 2^30 * CHUNK < 2^53: exact
        i, j = np.triu_indices(self.width, k=1)
        diagonal = np.einsum("bii->bi", total)
        return {"diagonal": diagonal.ravel(), "pairs": total[:, i, j].ravel()}

    def assemble(self, noisy: dict[str, np.ndarray]) -> np.ndarray:
        matrix = np.zeros((self.blocks, self.width, self.width))
        i, j = np.triu_indices(self.width, k=1)
        matrix[:, i, j] = noisy["pairs"].reshape(self.blocks, -1) * self.grid
        matrix += matrix.transpose(0, 2, 1)
        k = np.arange(self.width)
        matrix[:, k, k] = noisy["diagonal"].reshape(self.blocks, -1) * self.grid
        return matrix * self.radius**2


BoundedSum = RowSum | OuterSum


def _chunks(statistic: BoundedSum, z: torch.Tensor, y: torch.Tensor, bound: float, grid: float):
    """(block, that block's clipped vectors in grid units) over slices of the records."""
    size = max(1, min(CHUNK, LARGEST // statistic.width))
    for start in range(0, len(z), size):
        part = y[start : start + size]
        rows = clip_to_grid(statistic.vectors(z[start : start + size].flatten(1).double(), part), bound, grid)
        if statistic.blocks == 1:
            yield 0, rows
            continue
        labels = part.numpy()
        for block in np.unique(labels):
            yield int(block), rows[labels == block]


def clip_to_grid(vectors: torch.Tensor, bound: float, grid: float) -> np.ndarray:
    """Vectors in grid units, int64. Guarantee: no norm above `bound`. A vector that is not finite becomes zero."""
    vectors = vectors.double()
    norms = vectors.norm(dim=1, keepdim=True)
    margin = CLIP_MARGIN - vectors.shape[1] * 2.0**-52  # a norm of many numbers is off by more
    scale = (bound * margin / norms.clamp_min(1e-300)).clamp_max(1.0)
    clipped = torch.where(torch.isfinite(norms), vectors * scale, torch.zeros_like(vectors))
    return torch.trunc(clipped / grid).to(torch.int64).numpy()
