"""From a recipe's weights to declared noise multipliers: the paper's split, and joint calibration.

paper: each stage is calibrated alone to its share of epsilon (weights renormalised over the active stages).
tight: a weight is a share of the privacy spent, measured as mu^2 of Gaussian DP; one scale m is then solved for
so that the composed epsilon equals the budget. A `sigma` given in the recipe is kept as it is in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from straightdp.errors import BudgetRefused
from straightdp.privacy.accountant import Declaration, calibrate, epsilon
from straightdp.recipe import DpSgd, Privacy, Recipe, Release

GRADIENTS = "dpsgd/gradients"


@dataclass(frozen=True)
class ReleasePart:
    """One Gaussian mechanism of the release: its sensitivity, and its part of the release's privacy (mu^2)."""

    id: str
    what: str
    sensitivity: float
    part: float


@dataclass(frozen=True)
class Certificate:
    workload: tuple[Declaration, ...]
    epsilon: float
    delta: float
    interval: float


def certify(recipe: Recipe, parts: tuple[ReleasePart, ...]) -> Certificate:
    """Declare the whole workload and prove that it fits the budget, before any private read.

    Guarantee: certificate.epsilon <= recipe.privacy.epsilon, or BudgetRefused.
    """
    privacy = recipe.privacy
    release, dpsgd = solve(privacy, recipe.release if parts else None, recipe.dpsgd)
    workload = []
    if release is not None:
        for part in parts:
            sigma = release / math.sqrt(part.part)
            workload.append(Declaration(part.id, part.what, "gaussian", part.sensitivity, sigma))
    if dpsgd is not None:
        workload.append(gradients(recipe.dpsgd, dpsgd))
    total = epsilon(workload, privacy.delta, privacy.interval)
    if total > privacy.epsilon:
        raise BudgetRefused(f"the workload costs epsilon = {total:.4g}, the budget is {privacy.epsilon:g}")
    return Certificate(tuple(workload), total, privacy.delta, privacy.interval)


def gradients(section: DpSgd, sigma: float) -> Declaration:
    """All DP-SGD steps as one declaration. The clipped sum moves by C, so the sensitivity is 1 in units of C."""
    what = f"clipped gradient sums of Poisson batches ({section.draws} draws a record)"
    return Declaration(GRADIENTS, what, "poisson_gaussian", 1.0, sigma, section.q, section.steps)


def solve(privacy: Privacy, release: Release | None, dpsgd: DpSgd) -> tuple[float | None, float | None]:
    """(sigma of the release taken as one mechanism, sigma of DP-SGD); None for a stage that does not run."""
    release_on = release is not None and (release.weight > 0 or release.sigma is not None)
    dpsgd_on = dpsgd.steps > 0 and (dpsgd.weight > 0 or dpsgd.sigma is not None)
    if not (release_on or dpsgd_on):
        raise BudgetRefused("neither the release nor DP-SGD has a weight: there is nothing to declare")
    w_release = release.weight if release is not None and release_on and release.sigma is None else 0.0
    w_dpsgd = dpsgd.weight if dpsgd_on and dpsgd.sigma is None else 0.0
    fixed_release = release.sigma if release is not None and release_on else None
    fixed_dpsgd = dpsgd.sigma if dpsgd_on else None
    if w_release + w_dpsgd == 0:
        return fixed_release, fixed_dpsgd
    if privacy.mode == "paper":
        return _split(privacy, dpsgd, w_release, w_dpsgd, fixed_release, fixed_dpsgd)

    def sigmas(m: float) -> tuple[float | None, float | None]:
        total = w_release + w_dpsgd
        free_release = release_sigma(m, w_release / total) if w_release else None
        free_dpsgd = dpsgd_sigma(m, w_dpsgd / total, dpsgd) if w_dpsgd else None
        return fixed_release or free_release, fixed_dpsgd or free_dpsgd

    m = calibrate(lambda m: _pair(dpsgd, *sigmas(m)), privacy.epsilon, privacy.delta, privacy.interval)
    return sigmas(m)


def _split(
    privacy: Privacy,
    dpsgd: DpSgd,
    w_release: float,
    w_dpsgd: float,
    fixed_release: float | None,
    fixed_dpsgd: float | None,
) -> tuple[float | None, float | None]:
    """The paper's split: each free stage alone at its own share of epsilon."""
    total = w_release + w_dpsgd

    def scale(weight: float, workload_at: Callable[[float], list[Declaration]]) -> float:
        return calibrate(workload_at, privacy.epsilon * weight / total, privacy.delta, privacy.interval)

    if w_release:
        m = scale(w_release, lambda m: _pair(dpsgd, release_sigma(m, 1), None))
        fixed_release = release_sigma(m, 1)
    if w_dpsgd:
        m = scale(w_dpsgd, lambda m: _pair(dpsgd, None, dpsgd_sigma(m, 1, dpsgd)))
        fixed_dpsgd = dpsgd_sigma(m, 1, dpsgd)
    return fixed_release, fixed_dpsgd


def release_sigma(m: float, share: float) -> float:
    """A Gaussian mechanism with mu^2 = share * m^2."""
    return 1 / (m * math.sqrt(share))


def dpsgd_sigma(m: float, share: float, dpsgd: DpSgd) -> float:
    """DP-SGD whose central-limit mu^2 = T q^2 (exp(1/sigma^2) - 1) is share * m^2."""
    return 1 / math.sqrt(math.log1p(share * m**2 / (dpsgd.steps * dpsgd.q**2)))


def _pair(dpsgd: DpSgd, release: float | None, gradient: float | None) -> list[Declaration]:
    workload = []
    if release is not None:
        workload.append(Declaration("release", "", "gaussian", 1.0, release))
    if gradient is not None:
        workload.append(gradients(dpsgd, gradient))
    return workload


def alternatives(recipe: Recipe) -> list[tuple[str, float, float, float]]:
    """(name, release sigma, DP-SGD sigma, composed epsilon): what the paper's split leaves on the table.

    Empty unless both stages run.
    """
    privacy, dpsgd = recipe.privacy, recipe.dpsgd
    paper = privacy.model_copy(update={"mode": "paper"})
    tight = privacy.model_copy(update={"mode": "tight"})
    first_release, first_dpsgd = solve(paper, recipe.release, dpsgd)
    if first_release is None or first_dpsgd is None:
        return []
    kept = recipe.release.model_copy(update={"sigma": first_release})
    free_dpsgd = solve(tight, kept, dpsgd.model_copy(update={"sigma": None, "weight": 1.0}))[1]
    kept_dpsgd = dpsgd.model_copy(update={"sigma": first_dpsgd})
    free_release = solve(tight, recipe.release.model_copy(update={"sigma": None, "weight": 1.0}), kept_dpsgd)[0]
    rows = [
        ("each stage alone at its share of epsilon (the paper's split)", first_release, first_dpsgd),
        ("same release, DP-SGD freed by joint composition", first_release, free_dpsgd),
        ("same DP-SGD noise, release freed by joint composition", free_release, first_dpsgd),
    ]
    return [
        (name, a, b, epsilon(_pair(dpsgd, a, b), privacy.delta, privacy.interval))
        for name, a, b in rows
        if a is not None and b is not None
    ]


def alone(part: Declaration, delta: float, interval: float) -> float:
    """The epsilon this mechanism would cost if it were the only one."""
    return epsilon([part], delta, interval)
