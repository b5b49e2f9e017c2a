"""The Frechet distance of Gaussians: closed forms, scipy's matrix root, and covariances without full rank."""

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from straightdp.metrics.frechet import frechet, moments

SEEDS = st.integers(0, 10**6)


def gaussian(seed: int, p: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A random mean and a random covariance of the given rank."""
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(p, p if rank is None else rank))
    return torch.from_numpy(rng.normal(size=p)), torch.from_numpy(factor @ factor.T)


def by_scipy(a: np.ndarray, b: np.ndarray) -> float:
    """The definition on two feature sets, with numpy's covariance and scipy's root of the product."""
    one, two = (np.atleast_2d(np.cov(x, rowvar=False)) for x in (a, b))
    root = scipy.linalg.sqrtm(one @ two)
    return float(np.sum((a.mean(axis=0) - b.mean(axis=0)) ** 2) + np.trace(one + two - 2 * root.real))


def rounding(*gaussians: tuple[torch.Tensor, torch.Tensor]) -> float:
    """What float64 leaves of roots of products of eigenvalues: half its digits, for the smallest of them."""
    return 1e-7 * max(float(covariance.trace()) for _, covariance in gaussians)


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 30))
def test_diagonal_gaussians_have_a_closed_form(seed, p):
    """|m1 - m2|^2 + sum (s1 - s2)^2, where s are standard deviations."""
    rng = np.random.default_rng(seed)
    m1, m2 = rng.normal(size=(2, p))
    s1, s2 = rng.uniform(0, 3, size=(2, p))
    both = [(torch.from_numpy(m), torch.diag(torch.from_numpy(s**2))) for m, s in ((m1, s1), (m2, s2))]
    expected = np.sum((m1 - m2) ** 2) + np.sum((s1 - s2) ** 2)
    assert frechet(*both) == pytest.approx(expected, rel=1e-9, abs=rounding(*both))


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 20))
def test_equal_gaussians_are_at_distance_zero(seed, p):
    one = gaussian(seed, p)
    assert abs(frechet(one, one)) <= rounding(one)


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 20))
def test_the_distance_is_symmetric(seed, p):
    one, two = gaussian(seed, p), gaussian(seed + 1, p)
    assert frechet(one, two) == pytest.approx(frechet(two, one), rel=1e-9, abs=rounding(one, two))
    assert frechet(one, two) > 0


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 12), st.floats(0.01, 100), st.floats(-10, 10))
def test_turning_scaling_and_shifting_both_does_to_the_distance_what_it_does_to_lengths(seed, p, scale, shift):
    one, two = gaussian(seed, p), gaussian(seed + 1, p)
    turn = torch.from_numpy(np.linalg.qr(np.random.default_rng(seed).normal(size=(p, p)))[0]) * scale
    moved = [(turn @ m + shift, turn @ s @ turn.T) for m, s in (one, two)]
    assert frechet(*moved) == pytest.approx(scale**2 * frechet(one, two), rel=1e-6, abs=rounding(*moved))


def test_a_shift_alone_adds_its_square():
    (m, s), shift = gaussian(0, 7), torch.arange(7.0, dtype=torch.float64)
    assert frechet((m, s), (m + shift, s)) == pytest.approx(91, rel=1e-9)


@pytest.mark.parametrize(("n", "p"), [(50, 1), (40, 8), (200, 32), (400, 64)])
def test_on_features_it_is_what_scipys_matrix_root_gives(n, p):
    rng = np.random.default_rng(n)
    a = rng.normal(size=(n, p)) @ rng.normal(size=(p, p)) + 1
    b = rng.normal(size=(n + 7, p)) @ rng.normal(size=(p, p))
    found = frechet(moments(torch.from_numpy(a)), moments(torch.from_numpy(b)))
    assert found == pytest.approx(by_scipy(a, b), rel=1e-8)


def test_moments_are_numpys_in_float64_whatever_comes_in():
    x = np.random.default_rng(0).normal(size=(30, 5)).astype(np.float32) + 100
    mean, covariance = moments(torch.from_numpy(x))
    assert mean.dtype == covariance.dtype == torch.float64
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(covariance, np.cov(x.astype(np.float64), rowvar=False), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_covariances_without_full_rank_are_fine(rank):
    """In the plane that holds both, the distance is that of the small full-rank covariances."""
    p = 12
    directions = torch.from_numpy(np.linalg.qr(np.random.default_rng(1).normal(size=(p, p)))[0][:, :rank])
    small = [gaussian(seed, rank) for seed in (3, 4)]
    lifted = [(directions @ m, directions @ s @ directions.T) for m, s in small]
    expected = frechet(*small) if rank else 0.0
    assert frechet(*lifted) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert frechet(lifted[0], lifted[0]) == pytest.approx(0, abs=1e-6)


def test_a_point_and_a_gaussian_are_apart_by_the_gaussians_spread():
    mean, covariance = gaussian(5, 9)
    point = (mean, torch.zeros(9, 9, dtype=torch.float64))
    assert frechet((mean, covariance), point) == pytest.approx(float(covariance.trace()), rel=1e-9)
    assert frechet(point, (mean, covariance)) == pytest.approx(float(covariance.trace()), rel=1e-9)


def test_fewer_records_than_features_are_fine():
    """Two records in forty dimensions: covariances of rank one, and a distance that is known on a line."""
    line = torch.zeros(40, dtype=torch.float64)
    line[7] = 1.0
    a, b = (torch.tensor(v, dtype=torch.float64)[:, None] * line for v in ([0.0, 2.0], [3.0, 7.0]))
    expected = (1 - 5) ** 2 + (2**0.5 - 8**0.5) ** 2
    assert frechet(moments(a), moments(b)) == pytest.approx(expected, abs=1e-6)
