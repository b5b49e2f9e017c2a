"""DP-HP (Vinaroz et al., 2022): Hermite features of the Gaussian kernel, by Mehler's formula, cut off at an order.

One number x is mapped to phi_0, ..., phi_order with sum_k phi_k(x) phi_k(x') = exp(-(x - x')^2 / 2 l^2) in the limit.
A record's features are those of each pixel (the sum kernel) and products of those of two pixels (the product kernel).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from straightdp.errors import BadInput
from straightdp.privacy.mechanisms import RowSum
from straightdp.rivals.dp_merf import median_squared_distance
from straightdp.rivals.embedding import ROOM, Numbers, as_seen

GRID = 2**16  # points on which the largest length of a pixel's features is looked for


class DpHp:
    """phi = [sqrt(1 - alpha) phi_s; sqrt(alpha) phi_p] / m, where m is the largest length that this can have.

    phi_s holds order + 1 values of every pixel over sqrt d, as (order + 1, d); phi_p the (pair_order + 1)^2 products
    of every pair over sqrt(pairs), as (pair_order + 1, pair_order + 1, pairs).
    """

    def __init__(self, d: int, pairs: Tensor, length_squared: float, *, order: int, pair_order: int, alpha: float):
        """`pairs` (2, pairs) are the pixels that are multiplied; `length_squared` is l^2, of one pixel."""
        # Pixels are picked by a product with 0 and 1: the gradient of an index is added up in no fixed order
        choose = torch.zeros(d, pairs.numel(), dtype=torch.float64)
        choose[pairs.flatten(), torch.arange(pairs.numel())] = 1
        self._numbers = Numbers(choose)
        self.rho = math.sqrt(length_squared**2 + 1) - length_squared
        self.order, self.pair_order = order, pair_order
        longest = (1 - alpha) * longest_square(self.rho, order) + alpha * longest_square(self.rho, pair_order) ** 2
        scale = ROOM / math.sqrt(longest)
        self._scales = scale * math.sqrt((1 - alpha) / d), scale * math.sqrt(alpha / pairs.shape[1])
        self.width = d * (order + 1) + pairs.shape[1] * (pair_order + 1) ** 2

    @classmethod
    def fit(
        cls,
        public_z: Tensor,
        *,
        order: int = 20,
        pairs: int = 1_500,
        pair_order: int = 3,
        alpha: float = 0.5,
        seed: int = 0,
    ) -> DpHp:
        """l^2 is one pixel's share of the median squared distance between public records.

        (The median over pixels themselves is 0 where most are background.) `seed` chooses the records that are
        compared. The pairs are those with the largest products of public variances, or all there are if fewer.
        """
        z = public_z.flatten(1).cpu().double()
        d = z.shape[1]
        if d < 2:
            raise BadInput("records of one pixel have no pairs of pixels; DP-HP needs at least 2")
        squared = median_squared_distance(z, torch.Generator().manual_seed(seed))
        chosen = widest_pairs(z.var(dim=0), pairs)
        return cls(d, chosen, squared / d, order=order, pair_order=pair_order, alpha=alpha)

    def phi(self, z: Tensor) -> Tensor:
        """(n, d) to (n, width), differentiable, in z's precision."""
        (choose,) = self._numbers.like(z)
        alone, together = self._scales
        one, other = hermite(z @ choose, self.rho, self.pair_order).chunk(2, dim=2)
        products = one[:, :, None] * other[:, None]
        return torch.cat([hermite(z, self.rho, self.order).flatten(1) * alone, products.flatten(1) * together], dim=1)

    def statistic(self, classes: int, device: torch.device) -> RowSum:
        return RowSum(lambda z, _: self.phi(as_seen(z)), self.width, bound=1.0, blocks=classes, device=device)

    def class_sums(self, z: Tensor) -> Tensor:
        return self.phi(z.flatten(0, 1)).unflatten(0, z.shape[:2]).sum(dim=1)

    def digest(self) -> str:
        return self._numbers.digest("dp-hp", self.rho, self.order, self.pair_order, self._scales)


def hermite(x: Tensor, rho: float, order: int) -> Tensor:
    """phi_0, ..., phi_order of every number in x (n, m), as (n, order + 1, m)."""
    found = [(1 - rho**2) ** 0.25 * torch.exp(-rho / (1 + rho) * x**2)]
    if order:
        found.append(math.sqrt(2 * rho) * x * found[0])
    for k in range(1, order):
        found.append(math.sqrt(2 * rho / (k + 1)) * x * found[k] - rho * math.sqrt(k / (k + 1)) * found[k - 1])
    return torch.stack(found, dim=1)


def longest_square(rho: float, order: int) -> float:
    """An upper bound, within 1 / (l GRID) of the least, on s(x) = sum_k phi_k(x)^2 over x in [-1, 1].

    With all orders s would be 1. By Cauchy-Schwarz |s'| <= 2 sqrt(s) sqrt(sum phi_k'^2), where the last sum is at most
    the kernel's d^2/dx dx' at x = x', 1 / l^2: so s grows by 1 / (l GRID) at most from the grid's nearest point.
    """
    x = torch.linspace(0, 1, GRID + 1, dtype=torch.float64)  # s is even
    slope = 2 / math.sqrt((1 - rho**2) / (2 * rho))
    seen = hermite(x[None], rho, order).square().sum(dim=1)
    return min(1.0, float(seen.max()) + slope / (2 * GRID))


def widest_pairs(variances: Tensor, pairs: int) -> Tensor:
    """(2, pairs): the pixels whose variances have the largest products, each pair once."""
    ranked = variances.argsort(descending=True, stable=True)[: pairs + 1]  # one further down has `pairs` better ones
    i, j = torch.triu_indices(len(ranked), len(ranked), 1).unbind()
    products = variances[ranked[i]] * variances[ranked[j]]
    best = products.argsort(descending=True, stable=True)[:pairs]
    return torch.stack([ranked[i[best]], ranked[j[best]]])
