"""Several components a class: released class Gaussians are split, and the parts moved by noisy sums round by round.

Lloyd's algorithm, of which only the sums see records (`statistics.component_sums`); all here is post-processing of
released values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from straightdp.moments.covariance import project_psd
from straightdp.moments.statistics import COMPONENT_COUNT

DRAWS, ITERATIONS = 4000, 15
OFF, MOST = 0.36, 64  # of `as_many`


def as_many(std: float, records: float, p: int, least: float) -> int:
    """How many Gaussians a class of `records` is worth: as many as a round's noise, of `std` on each of the p numbers
    of a sum, leaves the centre of one with an equal share of records off by no more than OFF of the residuals' radius,
    and as have `least` records each; from 2 to MOST. Of declared numbers alone."""
    noise = std * p**0.5
    told_apart = min(OFF * records / noise if noise else records, records / least)
    return int(min(max(told_apart, 2), MOST))


def split(means: Tensor, covariance: Tensor, k: int) -> Tensor:
    """First centres, (Y, k, p): k means of draws of each class's released Gaussian, by a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    values, vectors = torch.linalg.eigh(covariance)
    roots = vectors * values.clamp_min(0.0).sqrt().unsqueeze(1)
    draws = torch.randn(len(means), DRAWS, means.shape[1], generator=generator, dtype=means.dtype) @ roots.mT
    return means[:, None] + torch.stack([k_means(x, k, generator) for x in draws])


def k_means(x: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """k-means++, then Lloyd's iterations. A centre that loses its points goes to 0, the mean of the draws' law."""
    centres, nearest = x[:1], x.new_full((len(x),), torch.inf)
    while len(centres) < k:
        nearest = torch.minimum(nearest, (x - centres[-1]).square().sum(dim=1))
        chosen = torch.multinomial(nearest.clamp_min(1e-300), 1, generator=generator)
        centres = torch.cat([centres, x[chosen]])
    for _ in range(ITERATIONS):
        place = torch.cdist(x, centres).argmin(dim=1)
        sums = torch.zeros_like(centres).index_add_(0, place, x)
        centres = sums / torch.bincount(place, minlength=k).clamp_min(1)[:, None]
    return centres


def moved(centres: Tensor, noisy: Tensor, radius: float, std: float) -> tuple[Tensor, Tensor, Tensor]:
    """(centres (Y, k, p), weights (Y, k), by what variance each centre is off (Y, k, p)) after a round. `noisy`
    (Y, k, 1 + p) has noise of `std` on every number.

    A component's centre goes by the mean of its records' clipped residuals. Of each feature's step it keeps what a
    Wiener filter does: the power of all components' steps beyond the noise, against its own noise, so that one with few
    records stays where it was. A count is taken for no less than what noise can hide.
    """
    counts = (noisy[..., 0] / COMPONENT_COUNT).clamp_min(max(2 * std / COMPONENT_COUNT, 1.0))
    step, error = noisy[..., 1:] * radius / counts[..., None], (std * radius / counts).square()
    share = counts / counts.sum()
    power = torch.einsum("yk,ykp->p", share, step.square())
    signal = (power - (share * error).sum()).clamp_min(0.0)
    gain = signal / (signal + error[..., None]).clamp_min(1e-300)
    return centres + gain * step, counts / counts.sum(dim=1, keepdim=True), gain * error[..., None]


def within(covariance: Tensor, means: Tensor, centres: Tensor, weights: Tensor, off: Tensor, floor: float) -> Tensor:
    """(Y, p, p): what is left of each class's covariance for its components, less the spread of their centres around
    the class's mean, but for what these are off by: taking that off too leaves directions in which noise outweighs the
    class next to no width, and held-out records of KMNIST were less likely. Without noise the class keeps its second
    moment."""
    deviation = centres - means[:, None]
    between = torch.einsum("yk,yki,ykj->yij", weights, deviation, deviation)
    between = between - torch.diag_embed(torch.einsum("yk,ykp->yp", weights, off))
    return project_psd(covariance - between, floor)
