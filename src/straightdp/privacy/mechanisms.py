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
from typing import ClassVar, Literal

import numpy as np
import torch

from straightdp.nets.rowwise import row_sum

CPU = torch.device("cpu")
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
    device: torch.device = CPU  # where `vectors` works

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
            total[block] += rows.sum(dim=0).cpu().numpy()
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
    device = CPU

    def sensitivity(self, relation: Relation) -> float:
        return 1.0 if relation is Relation.ADD_OR_REMOVE_ONE else math.sqrt(2)

    def noise_shape(self) -> dict[str, tuple[int, float]]:
        pairs = self.width * (self.width - 1) // 2
        return {"diagonal": (self.blocks * self.width, 1.0), "pairs": (self.blocks * pairs, math.sqrt(0.5))}

    def exact(self, z: torch.Tensor, y: torch.Tensor) -> dict[str, np.ndarray]:
        """The pre-noise value in grid units. No records give zeros."""
        total = np.zeros((self.blocks, self.width, self.width), dtype=np.int64)
        for block, rows in _chunks(self, z, y, self.radius, self.radius * 2.0**-15):
            u = rows.double()
            total[block] += (u.T @ u).to(torch.int64).cpu().numpy()  # integers below 2^30 * CHUNK < 2^53: exact
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


@dataclass(frozen=True)
class FactorSum:
    """Each record adds [left right^T, rest] to the block of its class, where left, right and rest are vectors of its
    own: gradients of a linear map are of this form, and too long to be written out record by record.

    |left|^2 |right|^2 + |rest|^2 <= bound^2 is enforced: right is brought to length 1, and left and rest shrink
    together. left and right are rounded toward zero onto grids of 2^-15, so that every product is a multiple of
    2^-30 and float64 adds them without rounding.
    """

    factors: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    p: int
    q: int
    r: int
    bound: float = 1.0
    blocks: int = 1
    device: torch.device = CPU

    condition: ClassVar[Condition] = "class"

    @property
    def width(self) -> int:
        return self.p * self.q + self.r

    @property
    def grid(self) -> float:
        return self.bound * 2.0**-30

    def sensitivity(self, relation: Relation) -> float:
        return self.bound if relation is Relation.ADD_OR_REMOVE_ONE else 2 * self.bound

    def noise_shape(self) -> dict[str, tuple[int, float]]:
        return {"rows": (self.blocks * self.width, 1.0)}

    def exact(self, z: torch.Tensor, y: torch.Tensor) -> dict[str, np.ndarray]:
        """The pre-noise value in grid units. No records give zeros."""
        total = torch.zeros(self.blocks, self.width, dtype=torch.int64)
        products = self.p * self.q
        for part, labels in _slices(z, y, CHUNK, self.device):
            left, right, rest = self._rounded(*self.factors(part, labels))
            for block, rows in _blocks(labels, self.blocks):
                product = left[rows].T @ right[rows]  # integers below 2^30 * CHUNK < 2^53: exact
                total[block, :products] += product.flatten().to(torch.int64).cpu()
                total[block, products:] += rest[rows].sum(dim=0).cpu()
        return {"rows": total.numpy().ravel()}

    def _rounded(self, left: torch.Tensor, right: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """left and right in units of 2^-15 of (bound, 1), whole numbers in float64; rest in grid units."""
        left, right, rest = left.double() / self.bound, right.double(), rest.double() / self.bound
        length = row_sum(right.square()).sqrt()
        tiny = length < 1e-140  # squares so small have lost digits, and so has their root: taken for 0
        left = torch.where(tiny, torch.zeros_like(left), left * length)
        right = torch.where(tiny, torch.zeros_like(right), right / length.clamp_min(1e-300))
        joined = torch.cat([left, rest], dim=1)
        clipped = _clipped(torch.where(torch.isfinite(length), joined, torch.nan), 1.0)
        right = torch.where(torch.isfinite(length), right, torch.zeros_like(right)) * (CLIP_MARGIN - self.q * 2.0**-52)
        left, rest = clipped[:, : self.p], clipped[:, self.p :]
        return torch.trunc(left * 2.0**15), torch.trunc(right * 2.0**15), torch.trunc(rest * 2.0**30).to(torch.int64)

    def assemble(self, noisy: dict[str, np.ndarray]) -> np.ndarray:
        return (noisy["rows"].astype(np.float64) * self.grid).reshape(self.blocks, self.width)


@dataclass(frozen=True)
class VoteSum:
    """Each record adds one vote to the place that `places` gives it, (n,) whole numbers below `width`, in the block of
    its class. A place out of range is no vote. Adding or removing a record moves one place by one."""

    places: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    width: int
    blocks: int

    grid: ClassVar[float] = 2.0**-20
    condition: ClassVar[Condition] = "class"

    def sensitivity(self, relation: Relation) -> float:
        return 1.0 if relation is Relation.ADD_OR_REMOVE_ONE else math.sqrt(2)

    def noise_shape(self) -> dict[str, tuple[int, float]]:
        return {"votes": (self.blocks * self.width, 1.0)}

    def exact(self, z: torch.Tensor, y: torch.Tensor) -> dict[str, np.ndarray]:
        """The pre-noise value in grid units. No records give zeros."""
        total = np.zeros(self.blocks * self.width, dtype=np.int64)
        if len(z):
            places, labels = self.places(z, y).cpu().numpy().astype(np.int64), y.numpy()
            cast = (places >= 0) & (places < self.width)
            np.add.at(total, labels[cast] * self.width + places[cast], 2**20)
        return {"votes": total}

    def assemble(self, noisy: dict[str, np.ndarray]) -> np.ndarray:
        return (noisy["votes"].astype(np.float64) * self.grid).reshape(self.blocks, self.width)


BoundedSum = RowSum | OuterSum | FactorSum | VoteSum


def _slices(z: torch.Tensor, y: torch.Tensor, size: int, device: torch.device):
    """Flat records in float64 and what they are conditioned on, a slice at a time, on the device."""
    for start in range(0, len(z), size):
        part = z[start : start + size].flatten(1).to(device).double()
        yield part, y[start : start + size].to(device)


def _blocks(labels: torch.Tensor, blocks: int):
    """Each block that has records in a slice, and which of them they are."""
    if blocks == 1:
        yield 0, slice(None)
        return
    for block in labels.unique().tolist():
        yield block, labels == block


def _chunks(statistic: RowSum | OuterSum, z: torch.Tensor, y: torch.Tensor, bound: float, grid: float):
    """(block, that block's clipped vectors in grid units) over slices of the records."""
    size = max(1, min(CHUNK, LARGEST // statistic.width))
    for part, given in _slices(z, y, size, statistic.device):
        rows = clip_to_grid(statistic.vectors(part, given), bound, grid)
        for block, chosen in _blocks(given, statistic.blocks):
            yield block, rows[chosen]


def clip_to_grid(vectors: torch.Tensor, bound: float, grid: float) -> torch.Tensor:
    """Vectors in grid units, int64. Guarantee: no norm above `bound`. A vector that is not finite becomes zero."""
    return torch.trunc(_clipped(vectors.double(), bound) / grid).to(torch.int64)


def _clipped(vectors: torch.Tensor, bound: float) -> torch.Tensor:
    norms = row_sum(vectors.square()).sqrt()  # in an order that no other record has a say in
    margin = CLIP_MARGIN - vectors.shape[1] * 2.0**-52  # a norm of many numbers is off by more
    scale = (bound * margin / norms.clamp_min(1e-300)).clamp_max(1.0)
    return torch.where(torch.isfinite(norms), vectors * scale, torch.zeros_like(vectors))
