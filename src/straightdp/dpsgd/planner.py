"""Time-heterogeneous allocation (appendix "The THA planner"): which clip and noise each part of [t_min, 1] gets.

Everything here is public: the shape C_beta(t) comes from the moment model of public records, the proxy that ranks the
candidates from how far that model's field is from their velocities. So the whole workload can be declared before the
first private read, and planning costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from straightdp.errors import BadInput, BudgetRefused
from straightdp.flow.path import interpolate, noise_like, velocity
from straightdp.moments.field import MomentModel
from straightdp.moments.release import release_parts
from straightdp.privacy.workload import GRADIENTS, Certificate, ReleasePart, Shape, certify
from straightdp.recipe import Recipe

BETAS = (0.0, 0.25, 0.5, 0.75, 1.0)
DRAWS = 256  # public records a bucket that the proxy looks at


@dataclass(frozen=True)
class Candidate:
    """One plan. `shape` is C_k / C_ref with geometric mean 1; `epsilon` is certified; `score` ranks, in nats."""

    beta: float
    shape: Shape
    sigmas: tuple[float, ...]
    epsilon: float
    score: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def edges(t_min: float, buckets: int) -> list[float]:
    """The ends of K equal parts of [t_min, 1]."""
    return [t_min + (1 - t_min) * k / buckets for k in range(buckets + 1)]


def profile(model: MomentModel, ends: Sequence[float]) -> list[float]:
    """w(t) sqrt(V(t)) / (1 - t) at the middle of each bucket; w = 1, as times are drawn uniformly."""
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(ends)], device=model.mu.device)
    return (model.posterior_trace(middles).sqrt() / (1 - middles)).tolist()


def shaped(values: Sequence[float], beta: float) -> Shape:
    """C_beta: the profile to the power beta, with geometric mean 1. beta = 0 is uniform."""
    logs = [beta * math.log(value) for value in values]
    mean = sum(logs) / len(logs)
    return tuple(math.exp(value - mean) for value in logs)


def residuals(
    model: MomentModel, z: Tensor, y: Tensor, ends: Sequence[float], generator: torch.Generator
) -> list[Tensor]:
    """Per bucket, how far the moment field is from the velocities of public records: what gradients grow with."""
    found = []
    for low, high in pairwise(ends):
        rows = torch.randint(len(z), (DRAWS,), generator=generator, device=z.device)
        t = low + (high - low) * torch.rand(DRAWS, generator=generator, device=z.device) * (1 - 1e-6)
        xi = noise_like(z[rows], generator)
        bar = model.velocity(interpolate(z[rows], xi, t), t, y[rows])
        found.append((velocity(z[rows], xi) - bar).flatten(1).norm(dim=1).cpu())
    return found


def proxy(shape: Shape, sigmas: Sequence[float], norms: Sequence[Tensor]) -> float:
    """Mean over buckets of log(E min(|r|, C_k) / (sigma_k C_k)): clipped signal over noise, in nats.

    C_ref is the median of all |r|, so that clips of any shape cut into the same records.
    """
    reference = max(float(torch.cat(list(norms)).median()), 1e-12)
    signals = [max(float(r.clamp_max(c * reference).mean()), 1e-12) for c, r in zip(shape, norms, strict=True)]
    noises = [sigma * c * reference for c, sigma in zip(shape, sigmas, strict=True)]
    return sum(math.log(s / n) for s, n in zip(signals, noises, strict=True)) / len(shape)


def candidates(
    recipe: Recipe, parts: tuple[ReleasePart, ...], values: Sequence[float], norms: Sequence[Tensor]
) -> list[Candidate]:
    """Every shape, its noise found by bisection on Renyi divergences and certified by the PLD accountant.

    Guarantee: each costs at most the budget, and uniform is the first of them. A shape that cannot be had for the
    budget is left out; if uniform cannot, the budget is refused.
    """
    found = []
    for beta in BETAS:
        shape = shaped(values, beta)
        try:
            certificate = _certified(recipe, parts, shape)
        except BudgetRefused:
            if beta == 0:
                raise
            continue
        sigmas = tuple(part.sigma for part in certificate.workload if part.id.startswith(GRADIENTS))
        found.append(Candidate(beta, shape, sigmas, certificate.epsilon, proxy(shape, sigmas, norms)))
    return found


def _certified(recipe: Recipe, parts: tuple[ReleasePart, ...], shape: Shape) -> Certificate:
    """Quickly; where the accountant's own discretisation outweighs what Renyi divergences lose, exactly."""
    try:
        return certify(recipe, parts, shape, quick=True)
    except BudgetRefused:
        return certify(recipe, parts, shape)


def start_of_times(recipe: Recipe, tau: float) -> float:
    """Where DP-SGD's times begin: at the recipe's t_min, else where the moments' reach ends."""
    t_min = tau if recipe.dpsgd.t_min is None else recipe.dpsgd.t_min
    if t_min >= 1:
        raise BadInput("distill.tau or dpsgd.t_min is 1, which leaves DP-SGD no times to train on; lower it")
    return t_min


def planned(
    recipe: Recipe, model: MomentModel, z: Tensor, y: Tensor, tau: float, generator: torch.Generator
) -> list[Candidate]:
    """The candidates for a recipe, given the moment model of its public records."""
    ends = edges(start_of_times(recipe, tau), min(recipe.dpsgd.buckets, recipe.dpsgd.steps))
    norms = residuals(model, z, y, ends, generator)
    return candidates(recipe, release_parts(recipe), profile(model, ends), norms)


def best(found: Sequence[Candidate]) -> Candidate:
    """The highest score; of equals the first, which is nearest to uniform. Never below uniform's (remark 3.1)."""
    return max(found, key=lambda candidate: candidate.score)


def describe(found: Sequence[Candidate]) -> str:
    """One line a candidate."""
    chosen = best(found)
    lines = [f"{'beta':>6}{'score':>9}{'epsilon':>9}  C_k / C_ref, sigma_k by time bucket"]
    for candidate in found:
        cells = ", ".join(f"{c:.2f} x {s:.3g}" for c, s in zip(candidate.shape, candidate.sigmas, strict=True))
        mark = "  <- chosen" if candidate is chosen else ""
        lines.append(f"{candidate.beta:>6g}{candidate.score:>9.3f}{candidate.epsilon:>9.4f}  {cells}{mark}")
    return "\n".join(lines)
