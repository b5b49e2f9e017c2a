"""The audit of released sums: who knows every other record reads the coins off a sum without noise, and no other."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from straightdp.audits import one_run
from straightdp.audits.sums import canary_scores


def planted(seed: int, m: int = 60, classes: int = 4, width: int = 33, alike: float = 3.0):
    """Canaries that have much in common, their classes and the coins."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=width) * alike
    return common + rng.normal(size=(m, width)) / 8, rng.integers(0, classes, m), rng.random(m) < 0.5


def left(vectors, y, included, noise=0.0, seed=0):
    total = noise * np.random.default_rng(seed).normal(size=(y.max() + 1, vectors.shape[1]))
    for vector, c in zip(vectors[included], y[included], strict=True):
        total[c] += vector
    return total


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1e-3, 0.1, 1.0]))
def test_coins_are_read_off_a_sum_without_noise(seed, declared):
    vectors, y, included = planted(seed)
    scores = canary_scores(left(vectors, y, included), vectors, y, declared)
    for c in np.unique(y):
        inside, outside = scores[(y == c) & included], scores[(y == c) & ~included]
        if len(inside) and len(outside):
            assert inside.min() > outside.max()


def test_noise_that_was_declared_hides_them_and_the_bound_stays_below_the_claim():
    """sigma = 4 on sums that move by 1: epsilon is about 1 at delta 1e-5."""
    bounds = []
    for seed in range(40):
        vectors, y, included = planted(seed, m=200, alike=0.0)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        scores = canary_scores(left(vectors, y, included, 4.0, seed), vectors, y, 4.0)
        bounds.append(one_run.audit(scores, included, 0.5, 1e-5).bound)
    assert max(bounds) < 1.0
