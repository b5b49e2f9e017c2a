"""What the one-shot rivals share: phi, a map of records to vectors, whose class sums are released once.

The release is mu = (1/n) sum_i phi(x_i) e_{y_i}, with |phi| <= 1 and n public; `matching` fits a generator to it.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

from straightdp.moments.basis import Z_BITS, on_grid
from straightdp.privacy.mechanisms import FactorSum, RowSum

ROOM = 1 - 1e-9
"""What phi is multiplied by, so that rounding never takes its length over 1 and the vault's clip never acts."""


class Embedding(Protocol):
    """phi: a record z (flattened, in [-1, 1]) to a vector of length at most 1, by construction, in exact arithmetic.

    Guarantee: what a record adds to the statistic is the same to the bit whatever records are beside it.
    """

    @property
    def width(self) -> int:
        """How many numbers phi has."""
        ...

    def statistic(self, classes: int, device: torch.device) -> RowSum | FactorSum:
        """What the vault sums, working on `device`: phi into the block of the record's class. Its bound is 1."""
        ...

    def class_sums(self, z: Tensor) -> Tensor:
        """Of as many images of every class, z (classes, n, d): the sums of phi, (classes, width), differentiable."""
        ...

    def digest(self) -> str:
        """A hash of all that decides phi."""
        ...


class Numbers:
    """The tensors that decide phi: float64 on the CPU, and copied once to wherever records are."""

    def __init__(self, *tensors: Tensor):
        self._tensors = tensors
        self._copies: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}

    def like(self, z: Tensor) -> tuple[Tensor, ...]:
        """On z's device and of its type."""
        key = z.device, z.dtype
        if key not in self._copies:
            self._copies[key] = tuple(tensor.to(*key) for tensor in self._tensors)
        return self._copies[key]

    def digest(self, *about: object) -> str:
        """A hash of the tensors and of what else there is to say, by its repr."""
        shapes = [tuple(tensor.shape) for tensor in self._tensors]
        values = b"".join(tensor.contiguous().numpy().tobytes() for tensor in self._tensors)
        return hashlib.sha256(repr((about, shapes)).encode() + values).hexdigest()


def as_seen(z: Tensor) -> Tensor:
    """Records as the vault's side takes them: within [-1, 1], on a grid on which float64 adds products exactly."""
    return on_grid(z.clamp(-1, 1), Z_BITS)
