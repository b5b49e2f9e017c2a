"""A lower bound on epsilon from one training run (Steinke, Nasr and Jagielski, 2023, appendix D).

m canaries are each put among the records, or left out, by a fair coin of its own. Who sees only what was released, and
the canaries, then guesses of r of them whether they are in. Under (epsilon, delta) and add/remove a guess is right with
probability at most q = 1 / (1 + e^-epsilon), but for delta; more right guesses than that refute the claim.

The bound holds with confidence 1 - beta if four things do: the coins were independent and fair (not: exactly half in),
the scores come from released values, public randomness and records that no coin moves, r was fixed before any score was
seen, and no other audit was made of the run: two share beta. The best of several fractions or scores is no such bound.
A bound of 0 proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit
from scipy.stats import binom

CERTAIN = 64.0  # at this epsilon a wrong guess has probability 1e-28: p is 1 whatever was found


@dataclass(frozen=True)
class OneRun:
    """m canaries, r guesses, v of them right, and the epsilon that was refuted."""

    m: int
    r: int
    v: int
    bound: float

    @property
    def accuracy(self) -> float:
        """Of the guesses; coin flips have 0.5."""
        return self.v / self.r


def p_value(epsilon: float, m: int, r: int, v: int, delta: float) -> float:
    """At most how likely v or more right guesses of r are if the run is (epsilon, delta)-DP; 1 at most.

    p = P[Bin(r, q) >= v] + 2 m delta max_{i = 1..v} (1/i) sum_{j = 1..i} P[Bin(r, q) = v - j]

    Wrong guesses are counted instead of right ones, because 1 - q keeps its digits where q is close to 1.
    """
    if not 0 <= v <= r <= m:
        raise ValueError(f"v right of r guesses on m canaries wants 0 <= v <= r <= m, but {v}, {r} and {m} came")
    if not (epsilon >= 0 and 0 <= delta <= 1):
        raise ValueError(f"epsilon >= 0 and 0 <= delta <= 1 were expected, but {epsilon} and {delta} came")
    wrong, i = expit(-epsilon), np.arange(1, v + 1)
    just_short = np.cumsum(binom.pmf(r - v + i, r, wrong)) / i
    return min(1.0, float(binom.cdf(r - v, r, wrong) + 2 * m * delta * just_short.max(initial=0.0)))


def lower_bound(m: int, r: int, v: int, delta: float, beta: float = 0.05) -> float:
    """The largest epsilon with p < beta, by bisection; 0 if there is none.

    Guarantee: the epsilon returned, unless it is 0, has itself been refuted: rounding does not raise it.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta between 0 and 1 was expected, but {beta} came")
    if p_value(0.0, m, r, v, delta) >= beta:
        return 0.0
    low, high = 0.0, CERTAIN
    while low < (middle := (low + high) / 2) < high:
        if p_value(middle, m, r, v, delta) < beta:
            low = middle
        else:
            high = middle
    return low


def guesses(m: int, fraction: float) -> int:
    """r, an even number of at most fraction m: as many guesses of "in" as of "out". No score has a say in it."""
    if not 0 < fraction <= 1:
        raise ValueError(f"a fraction of the canaries above 0 and at most 1 was expected, but {fraction} came")
    if (half := int(fraction * m / 2)) < 1:
        raise ValueError(f"a fraction of {fraction} of {m} canaries leaves none to guess on")
    return 2 * half


def audit(scores: np.ndarray, included: np.ndarray, fraction: float, delta: float, beta: float = 0.05) -> OneRun:
    """Guess "in" for the r / 2 canaries of the highest scores and "out" for the r / 2 of the lowest.

    `scores` (m,) are higher for canaries that look trained on; `included` (m,) says which were; `fraction`, of the
    canaries that are guessed on, is a declared constant. Equal scores are put in an order that was drawn beforehand,
    since the order of the rows may say who is in. ValueError for a score that is not a number.
    """
    scores, included = np.asarray(scores, dtype=np.float64), np.asarray(included)
    if scores.ndim != 1 or scores.shape != included.shape or included.dtype != bool:
        raise ValueError(f"one score and one bool a canary were expected, but {scores.shape} and {included.shape} came")
    if np.isnan(scores).any():
        raise ValueError("a canary's score is not a number; a run that diverged cannot be audited")
    m, r = len(scores), guesses(len(scores), fraction)
    shuffled = np.random.default_rng(0).permutation(m)
    order = shuffled[np.argsort(scores[shuffled], kind="stable")]
    v = int(included[order[m - r // 2 :]].sum() + (~included[order[: r // 2]]).sum())
    return OneRun(m, r, v, lower_bound(m, r, v, delta, beta))
