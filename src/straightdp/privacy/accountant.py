"""What a declared workload costs: the PLD accountant, and nothing of our own inside it.

Adjacency is add/remove of one record throughout. Connect-the-dots discretisation (the library's default) makes
every figure an upper bound on the true epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from straightdp.errors import BudgetRefused

ADJACENCY = "add_or_remove_one"
RENYI_ORDERS = (*range(2, 17), *range(20, 65, 4), 80, 96, 128, 256, 1024)  # whole ones, which are quick
SMALLEST_SIGMA = 0.2  # below this the discretised loss distribution has tens of millions of points


@dataclass(frozen=True)
class Declaration:
    """One mechanism of the workload, before it runs. `sigma` is the noise's standard deviation over the sensitivity."""

    id: str
    what: str
    kind: Literal["gaussian", "poisson_gaussian"]
    sensitivity: float
    sigma: float
    q: float | None = None
    count: int = 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"noise_std": self.sigma * self.sensitivity}


def epsilon(workload: Sequence[Declaration], delta: float, interval: float) -> float:
    """The composed epsilon of the whole workload at `delta`. An empty workload costs 0."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=interval)
    return _composed(accountant, workload, delta)


def rdp_epsilon(workload: Sequence[Declaration], delta: float) -> float:
    """A bound on the same by Renyi divergences: looser, and much faster when there are many noise multipliers."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    return _composed(RdpAccountant(RENYI_ORDERS, neighboring_relation=relation), workload, delta)


def _composed(accountant: Any, workload: Sequence[Declaration], delta: float) -> float:
    from dp_accounting.dp_event import DpEvent, GaussianDpEvent, PoissonSampledDpEvent

    events: dict[DpEvent, int] = {}  # of equal mechanisms, which compose in one go
    precision = 0.0  # Gaussian mechanisms compose exactly: 1 / sigma^2 adds up
    for part in workload:
        if not (math.isfinite(part.sigma) and part.sigma >= SMALLEST_SIGMA):
            raise BudgetRefused(
                f"mechanism {part.id} has noise multiplier {part.sigma:.3g}, below {SMALLEST_SIGMA}; lower epsilon"
            )
        if part.kind == "gaussian":
            precision += part.count / part.sigma**2
        elif part.kind == "poisson_gaussian" and part.q is not None and 0 < part.q <= 1:
            event = PoissonSampledDpEvent(part.q, GaussianDpEvent(part.sigma))
            events[event] = events.get(event, 0) + part.count
        else:
            raise BudgetRefused(f"mechanism {part.id} of kind {part.kind!r} with rate {part.q} cannot be accounted")
    if precision:
        events[GaussianDpEvent(1 / math.sqrt(precision))] = 1
    if not events:
        return 0.0
    for event, count in events.items():
        if count:
            accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def calibrate(
    workload_at: Callable[[float], Sequence[Declaration]],
    budget: float,
    delta: float,
    interval: float,
    *,
    quick: bool = False,
) -> float:
    """The largest m in a search range for which the workload's epsilon is at most `budget`.

    `workload_at(m)` must cost more as m grows. Guarantee: epsilon(workload_at(result)) <= budget. `quick` searches by
    Renyi divergences instead, which bound the true cost too: that the accountant agrees must still be seen.
    """

    def fits(m: float) -> bool:
        workload = workload_at(m)
        return (rdp_epsilon(workload, delta) if quick else epsilon(workload, delta, interval)) <= budget

    low, high = 0.0, gaussian_mu(budget, delta)
    while fits(high):
        low, high = high, 1.5 * high
        if high > 50:
            raise BudgetRefused(f"no noise scale spends epsilon = {budget:g}: lower it or release more")
    if low == 0.0:
        low = high / 1.5
        while not fits(low):
            low, high = low / 1.5, low
            if low < 1e-6:
                raise BudgetRefused(
                    f"the fixed noise multipliers alone cost more than epsilon = {budget:g}: raise them or the budget"
                )
    while high / low > 1 + (1e-3 if quick else 1e-5):
        middle = math.sqrt(low * high)
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def gaussian_mu(budget: float, delta: float) -> float:
    """mu = 1/sigma of the one Gaussian mechanism that costs (budget, delta) exactly (analytic Gaussian mechanism)."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    def excess(mu: float) -> float:
        gap = norm.cdf(mu / 2 - budget / mu) - math.exp(budget + norm.logcdf(-mu / 2 - budget / mu))
        return float(gap) - delta

    return float(brentq(excess, 1e-7, 100.0))  # type: ignore[arg-type]
