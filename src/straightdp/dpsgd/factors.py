"""What a backward pass leaves of each parameter's per-record gradient, and two questions to it: how long, and how much.

Every kind answers `norms()`, per record the gradient's squared norm and a bound on that value's own rounding error, and
`weighted(factor)`, the sum over records of factor times gradient; for checks, `sizes()` says how large the terms were
that cancel in it. Only what is no larger than an activation is kept: the gradient of a matrix stays the pair (a, g)
that it is the product of, but for a small one, which is kept from its norm on.

A record whose factor is zero adds exactly zero, whatever its values are; `finite` says that all are finite, which
saves looking.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from straightdp.dpsgd import kernels

EPS = 2.0**-24  # unit rounding of float32
SLACK = 64  # units of rounding allowed beside the terms of a sum: chunks of 256 values, lanes and trees of sums
TINY = 2.0**-126  # its smallest normal value: a square below may vanish


@dataclass(frozen=True)
class Outer:
    """A linear map's weight (and bias): sum over the record's tokens of g a^T (and of g).

    `a` is (n, tokens, d), `g` is (n, tokens, p), both of the dtype that the map ran in. With more than one group (a
    grouped convolution) they are (n * groups, tokens, ...), a record's groups side by side.
    """

    a: Tensor
    g: Tensor
    bias: bool
    groups: int = 1
    _kept: list[Tensor] = field(default_factory=list, repr=False, compare=False)  # what the norms left for the sum

    @property
    def ghost(self) -> bool:
        """Whether sum_{s,t} (a_s . a_t)(g_s . g_t) is cheaper than ||sum_t g_t a_t^T||^2."""
        tokens, d, p = self.a.shape[1], self.a.shape[2], self.g.shape[2]
        return tokens * (d + p) < d * p

    @property
    def small(self) -> bool:
        """Whether each record's gradient is kept from its norm for the sum: it has half as many values as a and g."""
        tokens, d, p = self.a.shape[1], self.a.shape[2], self.g.shape[2]
        return self.groups == 1 and tokens > 1 and 2 * d * p <= tokens * (d + p)

    @property
    def fused(self) -> bool:
        return self.groups == 1 and self.a.shape[1] > 1 and kernels.usable(self.a)

    def norms(self) -> tuple[Tensor, Tensor]:
        tokens, d, p = self.a.shape[1], self.a.shape[2], self.g.shape[2]
        if self.fused:
            weight, aa, gg, sums = self._fused_norms()
            bias, unit = sums.square().sum(dim=1), kernels.EPS
        else:
            a, g = self.a.float(), self.g.float()
            aa, gg, sums = squared_length(a), squared_length(g), g.sum(dim=1)
            if self.small:
                gradient = g.mT @ a
                self._kept[:] = [gradient, sums] if self.bias else [gradient]
                weight = squared_length(gradient)
            else:
                weight = self._plain(a, g, aa, gg)
            bias, unit = squared_length(sums), EPS
        terms = tokens + SLACK + (max(d, p) if self.ghost or tokens == 1 else 0)
        # k-term products are off by k units times (sum_t |a_t||g_t|)^2, at most |a|^2 |g|^2 by Cauchy-Schwarz;
        # squares may have vanished from the one while the other is large.
        squared, error = weight, 2 * terms * unit * aa * gg + tokens * TINY * (p * aa + d * gg)
        if self.bias:
            squared, error = squared + bias, error + 2 * (tokens + max(d, p) + SLACK) * unit * tokens * gg
        if self.groups > 1:
            squared, error = (x.reshape(-1, self.groups).sum(dim=1) for x in (squared, error))
        return squared, error

    def _fused_norms(self) -> tuple[Tensor, ...]:
        """(||dW||^2, |a|^2, |g|^2, and the bias's gradient), per record; computed once."""
        if not self._kept:
            *parts, sums = kernels.outer_norms(self.a, self.g, self.ghost)
            self._kept.extend([*(part.sum(dim=1) for part in parts), sums])
        return tuple(self._kept)

    def _plain(self, a: Tensor, g: Tensor, aa: Tensor, gg: Tensor) -> Tensor:
        if a.shape[1] == 1:
            return aa * gg
        if self.ghost:
            return ((a @ a.mT) * (g @ g.mT)).sum(dim=(1, 2))
        return squared_length(g.mT @ a)

    def weighted(self, factor: Tensor, *, finite: bool = False) -> tuple[Tensor, ...]:
        """(weight's sum as (groups * p, d), bias's sum if there is one)."""
        if self.fused:
            weight = kernels.weighted_outer(self.a, self.g, factor).sum(dim=0)
            if not self.bias:
                return (weight,)
            return weight, torch.where(factor[:, None] > 0, self._fused_norms()[3], 0.0).T @ factor
        if self._kept:
            return tuple(_sum_of(value, factor, finite=finite) for value in self._kept)
        factor = factor.repeat_interleave(self.groups)[:, None, None]
        a, g = self.a.float(), self.g.float()
        if not finite:
            a, g = torch.where(factor > 0, a, 0.0), torch.where(factor > 0, g, 0.0)
        g = g * factor
        if self.groups == 1:
            weight, bias = g.flatten(0, 1).T @ a.flatten(0, 1), g.sum(dim=(0, 1))
        else:
            by_group = [x.unflatten(0, (-1, self.groups)).transpose(0, 1).flatten(1, 2) for x in (g, a)]
            weight = (by_group[0].mT @ by_group[1]).flatten(0, 1)
            bias = by_group[0].sum(dim=1).flatten()
        return (weight, bias) if self.bias else (weight,)

    def sizes(self) -> tuple[Tensor, ...]:
        """Per record, for weight and bias, a bound on the sum of the terms' norms."""
        aa, gg = (x.float().square().sum(dim=(1, 2)).reshape(-1, self.groups).sum(dim=1) for x in (self.a, self.g))
        sizes = (aa * gg).sqrt(), (self.a.shape[1] * gg).sqrt()
        return sizes if self.bias else sizes[:1]

    def joined(self, other: Outer) -> Outer:
        """The same parameters used again in one pass: their tokens side by side."""
        return Outer(torch.cat([self.a, other.a], dim=1), torch.cat([self.g, other.g], dim=1), self.bias, self.groups)


def _sum_of(value: Tensor, factor: Tensor, *, finite: bool) -> Tensor:
    """Records' gradients (n, ...), each by its factor, added up."""
    shaped = factor.reshape(-1, *[1] * (value.dim() - 1))
    value = value if finite else torch.where(shaped > 0, value, 0.0)
    return (factor @ value.flatten(1)).reshape(value.shape[1:])


@dataclass(frozen=True)
class Scatter:
    """An embedding's table: g_t lands in row ids_t. `ids` is (n, tokens), `g` is (n, tokens, p); id -1 is ignored."""

    ids: Tensor
    g: Tensor
    rows: int

    def norms(self) -> tuple[Tensor, Tensor]:
        g = torch.where(self.ids[..., None] >= 0, self.g.float(), 0.0)
        same = self.ids[:, :, None] == self.ids[:, None, :]
        squared = ((g @ g.mT) * same).sum(dim=(1, 2))
        terms = g.shape[1] + g.shape[2] + SLACK
        return squared, 2 * terms * EPS * g.shape[1] * g.square().sum(dim=(1, 2))

    def weighted(self, factor: Tensor, *, finite: bool = False) -> tuple[Tensor, ...]:
        factor = torch.where(self.ids >= 0, factor[:, None], 0.0)[..., None]
        g = torch.where(factor > 0, self.g.float(), 0.0) * factor
        table = g.new_zeros(self.rows, g.shape[-1])
        return (table.index_add(0, self.ids.clamp_min(0).flatten(), g.flatten(0, 1)),)

    def sizes(self) -> tuple[Tensor, ...]:
        return ((self.g.shape[1] * self.g.float().square().sum(dim=(1, 2))).sqrt(),)

    def joined(self, other: Scatter) -> Scatter:
        return Scatter(torch.cat([self.ids, other.ids], dim=1), torch.cat([self.g, other.g], dim=1), self.rows)


@dataclass(frozen=True)
class Whole:
    """A parameter no larger than a record's activation (a norm's gain, a bias, a position table): (n, *shape).

    `size` bounds, per record, the squared norm of the sum of the absolute values that `value` was summed from;
    `terms` is how many there were.
    """

    value: Tensor
    size: Tensor
    terms: int

    def norms(self) -> tuple[Tensor, Tensor]:
        squared = self.value.reshape(len(self.value), -1).square().sum(dim=1)
        return squared, 2 * (self.terms + self.value[0].numel() + SLACK) * EPS * (self.size + squared)

    def weighted(self, factor: Tensor, *, finite: bool = False) -> tuple[Tensor, ...]:
        factor = factor.reshape(-1, *[1] * (self.value.dim() - 1))
        return ((torch.where(factor > 0, self.value, 0.0) * factor).sum(dim=0),)

    def sizes(self) -> tuple[Tensor, ...]:
        return (self.size.sqrt(),)

    def joined(self, other: Whole) -> Whole:
        size = (self.size.sqrt() + other.size.sqrt()).square()
        return Whole(self.value + other.value, size, self.terms + other.terms + 1)


Factor = Outer | Scatter | Whole


def squared_length(x: Tensor) -> Tensor:
    """Squared norm per record, without a copy of the squares.

    In chunks: on a CPU a norm adds its squares one by one, and a long sum of equal values always rounds the same way.
    """
    flat = x.reshape(len(x), -1)
    if missing := -flat.shape[1] % 256:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return torch.linalg.vector_norm(flat.unflatten(1, (-1, 256)), dim=2).square().sum(dim=1)


def summed(values: Tensor, n: int, shape: tuple[int, ...]) -> Whole:
    """Per-row gradients (rows, ..., *shape), record-major, summed over a record's rows."""
    values = values.float().reshape(n, -1, *shape)
    terms = values.shape[1]
    return Whole(values.sum(dim=1), terms * values.flatten(1).square().sum(dim=1), terms)
