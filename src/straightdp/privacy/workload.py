"""From a recipe's weights to declared noise multipliers: the paper's split, and joint calibration.

paper: each stage is calibrated alone to its share of epsilon (weights renormalised over the active stages).
tight: a weight is a share of the privacy spent, measured as mu^2 of Gaussian DP; one scale m is then solved for
so that the composed epsilon equals the budget. A `sigma` given in the recipe is kept as it is in both, and the other
stage gets what it leaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from straightdp.errors import BudgetRefused
from straightdp.privacy.accountant import Declaration, calibrate, epsilon
from straightdp.recipe import DpSgd, Privacy, Recipe, Release

GRADIENTS = "dpsgd/gradients"
Shape = tuple[float, ...]
"""C_k / C_ref of each time bucket: its noise multiplier is the common one divided by this. One bucket is uniform."""

UNIFORM: Shape = (1.0,)


def bucket_id(k: int, buckets: int) -> str:
    """The mechanism that the steps of bucket k execute."""
    return GRADIENTS if buckets == 1 else f"{GRADIENTS}/{k + 1}"


def bucket_steps(steps: int, k: int, buckets: int) -> int:
    """Buckets take turns: step s belongs to bucket s mod K."""
    return len(range(k, steps, buckets))


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


def certify(
    recipe: Recipe, parts: tuple[ReleasePart, ...], shape: Shape = UNIFORM, *, quick: bool = False
) -> Certificate:
    """Declare the whole workload and prove that it fits the budget, before any private read.

    Guarantee: certificate.epsilon <= recipe.privacy.epsilon, or BudgetRefused. `quick` searches for the noise by Renyi
    divergences, which leaves a little of the budget unused; the certificate is the PLD accountant's either way.
    """
    privacy = recipe.privacy
    release, dpsgd = solve(privacy, recipe.release if parts else None, recipe.dpsgd, shape, quick=quick)
    workload = []
    if release is not None:
        for part in parts:
            sigma = release / math.sqrt(part.part)
            workload.append(Declaration(part.id, part.what, "gaussian", part.sensitivity, sigma))
    if dpsgd is not None:
        workload += gradients(recipe.dpsgd, dpsgd, shape)
    total = epsilon(workload, privacy.delta, privacy.interval)
    if total > privacy.epsilon:
        raise BudgetRefused(f"the workload costs epsilon = {total:.4g}, the budget is {privacy.epsilon:g}")
    return Certificate(tuple(workload), total, privacy.delta, privacy.interval)


def certify_one(privacy: Privacy, part: Declaration) -> Certificate:
    """A workload of one Gaussian mechanism, with the least noise that fits the budget.

    Guarantee: certificate.epsilon <= privacy.epsilon, or BudgetRefused.
    """

    def at(m: float) -> list[Declaration]:
        return [replace(part, sigma=math.sqrt(part.count) / m)]

    workload = at(calibrate(at, privacy.epsilon, privacy.delta, privacy.interval))
    total = epsilon(workload, privacy.delta, privacy.interval)
    return Certificate(tuple(workload), total, privacy.delta, privacy.interval)


def gradients(section: DpSgd, sigma: float, shape: Shape = UNIFORM) -> list[Declaration]:
    """All DP-SGD steps, one declaration a time bucket. A clipped sum moves by C: the sensitivity is 1 in units of C."""
    what = f"clipped gradient sums of Poisson batches ({section.draws} draws a record)"
    buckets = len(shape)
    return [
        Declaration(
            bucket_id(k, buckets),
            what if buckets == 1 else f"{what}, time bucket {k + 1} of {buckets}",
            "poisson_gaussian",
            1.0,
            sigma / c,
            section.q,
            bucket_steps(section.steps, k, buckets),
        )
        for k, c in enumerate(shape)
    ]


def solve(
    privacy: Privacy, release: Release | None, dpsgd: DpSgd, shape: Shape = UNIFORM, *, quick: bool = False
) -> tuple[float | None, float | None]:
    """(sigma of the release taken as one mechanism, sigma of DP-SGD at shape 1); None for a stage that does not run."""
    release_on = release is not None and (release.weight > 0 or release.sigma is not None)
    dpsgd_on = dpsgd.steps > 0 and (dpsgd.weight > 0 or dpsgd.sigma is not None)
    if not (release_on or dpsgd_on):
        raise BudgetRefused("neither the release nor DP-SGD has a weight: there is nothing to declare")
    w_release = release.weight if release is not None and release_on and release.sigma is None else 0.0
    w_dpsgd = dpsgd.weight if dpsgd_on and dpsgd.sigma is None else 0.0
    fixed = (release.sigma if release is not None and release_on else None, dpsgd.sigma if dpsgd_on else None)

    def scaled(shares: tuple[float, float], kept: tuple, budget: float) -> tuple[float | None, float | None]:
        """Both multipliers when the free stages have these shares of mu^2 and all together cost `budget`."""

        def sigmas(m: float) -> tuple[float | None, float | None]:
            return (
                release_sigma(m, shares[0]) if shares[0] else kept[0],
                dpsgd_sigma(m, shares[1], dpsgd, shape) if shares[1] else kept[1],
            )

        def workload(m: float) -> list[Declaration]:
            return _pair(dpsgd, *sigmas(m), shape)

        return sigmas(calibrate(workload, budget, privacy.delta, privacy.interval, quick=quick))

    total, alone = w_release + w_dpsgd, (None, None)
    if total == 0:
        return fixed
    if privacy.mode == "tight" or any(sigma is not None for sigma in fixed):
        return scaled((w_release / total, w_dpsgd / total), fixed, privacy.epsilon)
    return (  # the paper's split: each free stage alone, at its own share of epsilon
        scaled((1, 0), alone, privacy.epsilon * w_release / total)[0] if w_release else None,
        scaled((0, 1), alone, privacy.epsilon * w_dpsgd / total)[1] if w_dpsgd else None,
    )


def release_sigma(m: float, share: float) -> float:
    """A Gaussian mechanism with mu^2 = share * m^2."""
    return 1 / (m * math.sqrt(share))


def dpsgd_sigma(m: float, share: float, dpsgd: DpSgd, shape: Shape = UNIFORM) -> float:
    """DP-SGD whose central-limit mu^2 = sum_k T_k q^2 (exp(c_k^2 / sigma^2) - 1) is share * m^2."""
    target = math.log(share * m**2) - math.log(dpsgd.steps * dpsgd.q**2)
    if len(set(shape)) == 1:
        return shape[0] / math.sqrt(math.log1p(math.exp(target)))
    from scipy.optimize import brentq
    from scipy.special import logsumexp

    weights = [bucket_steps(dpsgd.steps, k, len(shape)) / dpsgd.steps for k in range(len(shape))]

    def excess(log_sigma: float) -> float:
        x = [(c / math.exp(log_sigma)) ** 2 for c in shape]
        logs = [v + math.log(-math.expm1(-v)) for v in x]  # log(exp(v) - 1)
        return float(logsumexp(logs, b=weights)) - target  # type: ignore[arg-type]

    log_sigma = brentq(excess, math.log(1e-2 * max(shape)), math.log(1e6 * max(shape)), xtol=1e-13)
    return math.exp(float(log_sigma))  # type: ignore[arg-type]


def _pair(dpsgd: DpSgd, release: float | None, gradient: float | None, shape: Shape = UNIFORM) -> list[Declaration]:
    workload = []
    if release is not None:
        workload.append(Declaration("release", "", "gaussian", 1.0, release))
    if gradient is not None:
        workload += gradients(dpsgd, gradient, shape)
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
