"""DP-NTK (Yang et al., 2023): the gradient of a random network's output, in closed form.

f(x) = W2 LN(ReLU(W1 x + b1)) + b2 with ten outputs; the features are the gradient of sum_k f_k by all its parameters.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from straightdp.moments.basis import exact_bits, on_grid
from straightdp.nets.rowwise import row_sum
from straightdp.privacy.mechanisms import FactorSum
from straightdp.rivals.embedding import ROOM, Numbers, as_seen

OUTPUTS = 10
EPS = 1e-5  # of the layer norm, torch's


class DpNtk:
    """phi = g / |g| for the gradient g of sum_k f_k.

    With a = W1 x + b1, h = LN(ReLU(a)), s its standard deviation and c = W2^T 1,
    delta = (c - mean(c) - h mean(c h)) / s where a > 0, and 0 elsewhere, the parts of g are
    delta x^T (by W1), delta (by b1), ten times h (by the rows of W2) and ten ones (by b2). Equal copies are kept once,
    times sqrt 10: the same lengths and inner products. So phi is [delta (x, 1)^T, sqrt 10 h, sqrt 10] / |g|.
    """

    def __init__(self, W1: Tensor, b1: Tensor, W2: Tensor):
        first = torch.cat([W1, b1[:, None]], dim=1).double()
        c = W2.double().sum(dim=0)
        self._numbers = Numbers(on_grid(first, exact_bits(first.shape[1], float(first.abs().max()))), c - c.mean())
        self._copies = math.sqrt(len(W2))
        self._p, self._q = first.shape
        self.width = self._p * self._q + self._p + 1

    @classmethod
    def fit(cls, d: int, width: int, seed: int) -> DpNtk:
        """A network as torch initialises it. It hangs on no data."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first, second = nn.Linear(d, width), nn.Linear(width, OUTPUTS)
        return cls(first.weight.detach(), first.bias.detach(), second.weight.detach())

    def factors(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """left (n, p), right (n, q) and rest (n, p + 1) of phi = [left right^T, rest], differentiable."""
        first, c = self._numbers.like(z)
        right = F.pad(z, (0, 1), value=1.0)
        a = right @ first.T
        active = F.relu(a)
        centred = active - row_sum(active) / self._p
        s = (row_sum(centred.square()) / self._p + EPS).sqrt()
        h = centred / s
        delta = (c - h * (row_sum(c * h) / self._p)) / s * (a > 0)
        rest = self._copies * F.pad(h, (0, 1), value=1.0)
        length = (row_sum(delta.square()) * row_sum(right.square()) + row_sum(rest.square())).sqrt()
        return delta * (ROOM / length), right, rest * (ROOM / length)

    def statistic(self, classes: int, device: torch.device) -> FactorSum:
        return FactorSum(
            lambda z, _: self.factors(as_seen(z)), self._p, self._q, self._p + 1, blocks=classes, device=device
        )

    def class_sums(self, z: Tensor) -> Tensor:
        left, right, rest = (part.unflatten(0, z.shape[:2]) for part in self.factors(z.flatten(0, 1)))
        product = left.transpose(1, 2) @ right  # a record's own p q numbers are never written out
        return torch.cat([product.flatten(1), rest.sum(dim=1)], dim=1)

    def digest(self) -> str:
        return self._numbers.digest("dp-ntk", self._copies)
