"""Neighbours: how far one record moves each mechanism before the noise, against what is declared."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from straightdp.moments import statistics
from straightdp.moments.basis import Basis, exact_bits, fit_basis, on_grid
from straightdp.moments.release import release_parts
from straightdp.privacy.mechanisms import OuterSum, Relation, RowSum, clip_to_grid
from straightdp.recipe import parse

D, P, CLASSES = 12, 5, 3


def make_basis(seed=0) -> Basis:
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64))
    mean = torch.randn(D, generator=generator, dtype=torch.float64) * 0.1
    return Basis(
        mean, on_grid(q[:P], exact_bits(D)), radius=1.3, residual_radius=0.7, widest_residual=2.0, image_radius=1.9
    )


BASIS = make_basis()
MEANS = torch.randn(CLASSES, P, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 0.3
CENTRES = torch.randn(CLASSES, 4, P, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
ALL = {
    "class moments": statistics.class_moments(BASIS, CLASSES),
    "residual second moments": statistics.residual_second_moments(BASIS, MEANS.__getitem__, CLASSES),
    "residual trace": statistics.residual_trace(BASIS, MEANS.__getitem__),
    "component sums": statistics.component_sums(BASIS, CENTRES),
    "shared second moment": statistics.shared_second_moment(BASIS),
    "shared second moment of records": statistics.shared_second_moment_of_records(BASIS),
}


def exact_vector(statistic, z, y) -> np.ndarray:
    """The pre-noise value in the coordinates in which the noise is isotropic."""
    groups, shapes = statistic.exact(z, y), statistic.noise_shape()
    return np.concatenate([groups[k] / shapes[k][1] for k in groups]).astype(np.float64) * statistic.grid


def records(seed, n, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, D, generator=generator) * scale
    return z, torch.randint(CLASSES, (n,), generator=generator)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(0, 20), scale=st.sampled_from([1e-8, 0.1, 1.0, 50.0, 1e30]))
def test_adding_or_removing_one_record_stays_within_the_sensitivity(name, seed, n, scale):
    statistic = ALL[name]
    z, y = records(seed, n + 1, scale)
    move = exact_vector(statistic, z, y) - exact_vector(statistic, z[:-1], y[:-1])
    assert np.linalg.norm(move) <= statistic.sensitivity(Relation.ADD_OR_REMOVE_ONE) * (1 + 1e-12)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 1.0, 50.0]))
def test_replacing_one_record_stays_within_the_sensitivity(name, seed, scale):
    statistic = ALL[name]
    z, y = records(seed, 6, scale)
    other_z, other_y = z.clone(), y.clone()
    new_z, new_y = records(seed + 1, 1, scale)
    other_z[2], other_y[2] = new_z[0], new_y[0]
    move = exact_vector(statistic, z, y) - exact_vector(statistic, other_z, other_y)
    assert np.linalg.norm(move) <= statistic.sensitivity(Relation.REPLACE_ONE) * (1 + 1e-9)


@pytest.mark.parametrize("name", ALL)
def test_the_worst_neighbour_attains_the_sensitivity_within_one_percent(name):
    statistic = ALL[name]
    z, y = records(0, 8)
    far = BASIS.mean + 1e3 * BASIS.P[0]
    worst_z, worst_y = torch.cat([z, far[None].float()]), torch.cat([y, torch.tensor([1])])
    move = exact_vector(statistic, worst_z, worst_y) - exact_vector(statistic, z, y)
    assert np.linalg.norm(move) >= 0.99 * statistic.sensitivity(Relation.ADD_OR_REMOVE_ONE)


def test_the_worst_replacement_of_the_pair_is_the_papers_root_of_five_halves():
    statistic = ALL["class moments"]
    z, y = records(0, 4)
    one, other = (BASIS.mean + s * 1e3 * BASIS.P[k] for s, k in ((1, 0), (-1, 1)))
    a = exact_vector(statistic, torch.cat([z, one[None].float()]), torch.cat([y, torch.tensor([0])]))
    b = exact_vector(statistic, torch.cat([z, other[None].float()]), torch.cat([y, torch.tensor([2])]))
    assert math.isclose(np.linalg.norm(a - b), math.sqrt(2.5), rel_tol=0.01)
    assert np.linalg.norm(a - b) <= statistic.sensitivity(Relation.REPLACE_ONE)


def test_the_worst_replacement_among_components_is_two_in_one_place_and_less_elsewhere():
    statistic = ALL["component sums"]
    one, other, elsewhere = (
        (BASIS.mean + (CENTRES[0, j] + s * 0.75 * torch.nn.functional.one_hot(torch.tensor(0), P)) @ BASIS.P)[None]
        for s, j in ((1, 0), (-1, 0), (1, 1))
    )
    y = torch.tensor([0])
    a, b, c = (exact_vector(statistic, z, y) for z in (one, other, elsewhere))
    assert all(np.linalg.norm(v) == pytest.approx(math.sqrt(17 / 16), rel=1e-6) for v in (a, b, c))
    assert np.linalg.norm(a - b) == pytest.approx(statistic.sensitivity(Relation.REPLACE_ONE), rel=1e-6)
    assert np.linalg.norm(a - c) == pytest.approx(math.sqrt(17 / 8), rel=1e-6)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_record_that_is_not_finite_adds_nothing(name, bad):
    statistic = ALL[name]
    z, y = records(3, 5)
    spoilt = torch.cat([z, torch.full((1, D), bad)])
    move = exact_vector(statistic, spoilt, torch.cat([y, torch.tensor([0])])) - exact_vector(statistic, z, y)
    assert np.linalg.norm(move) <= statistic.sensitivity(Relation.ADD_OR_REMOVE_ONE)
    assert np.isfinite(exact_vector(statistic, spoilt, torch.cat([y, torch.tensor([0])]))).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_rounding_onto_the_grid_never_lengthens(values, bound):
    vector = torch.tensor([values], dtype=torch.float64)
    on_grid = clip_to_grid(vector, bound, bound * 2.0**-15).numpy().astype(object)  # exact integers
    assert sum(int(v) ** 2 for v in on_grid[0]) <= (2**15) ** 2
    length = min(float(vector.norm()), bound)
    assert math.sqrt(sum(int(v) ** 2 for v in on_grid[0])) * bound * 2.0**-15 <= length * (1 + 1e-9)


def test_sums_equal_a_slow_loop():
    z, y = records(9, 40)
    counts = ALL["class moments"].assemble(ALL["class moments"].exact(z, y))
    outer = ALL["residual second moments"].assemble(ALL["residual second moments"].exact(z, y))
    for label in range(CLASSES):
        f = (z[y == label].double() - BASIS.mean) @ BASIS.P.T
        clipped = torch.stack([v * min(1.0, 1.3 / float(v.norm())) for v in f])
        assert math.isclose(counts[label, 0], len(f), rel_tol=1e-6)
        np.testing.assert_allclose(
            counts[label, 1:] * 2.6, clipped.sum(dim=0), atol=1e-4
        )  # z is read on a grid of 2^-16
        r = torch.stack([v * min(1.0, 0.7 / float(v.norm())) for v in f - MEANS[label]])
        np.testing.assert_allclose(outer[label], sum(torch.outer(v, v) for v in r), atol=40 * 0.7**2 * 2.0**-14)


def test_no_records_give_zeros():
    for statistic in ALL.values():
        z, y = records(0, 0)
        assert not exact_vector(statistic, z, y).any()


def test_paper_mode_declares_the_papers_constants_and_tight_mode_the_true_ones():
    paper = {p.id: p.sensitivity for p in release_parts(parse({"privacy": {"mode": "paper"}}))}
    tight = {p.id: p.sensitivity for p in release_parts(parse({}))}
    assert paper == {"release/means": 2.0, "release/covariance": 2.0}
    assert tight["release/means"] == pytest.approx(math.sqrt(1.25))
    assert tight["release/covariance"] == tight["release/trace"] == 1.0


def test_a_generic_row_sum_knows_both_relations():
    plain = RowSum(lambda z, y: z, D, 3.0)
    assert plain.sensitivity(Relation.ADD_OR_REMOVE_ONE) == 3.0
    assert plain.sensitivity(Relation.REPLACE_ONE) == 6.0
    assert OuterSum(lambda z, y: z, D, 3.0).sensitivity(Relation.REPLACE_ONE) == pytest.approx(math.sqrt(2))


def test_a_records_features_do_not_depend_on_its_batch():
    """To the bit: else removing one record could move others across the grid."""
    generator = torch.Generator().manual_seed(0)
    z = torch.rand(300, 784, generator=generator).mul(255).round().div(127.5).sub(1)
    basis = fit_basis(z, torch.arange(300) % 3, parse({}).release)
    whole = basis.features(z.double())
    for n in (1, 2, 7, 64, 299):
        assert torch.equal(basis.features(z[:n].double()), whole[:n])
        assert torch.equal(basis.features(z[-n:].double()), whole[-n:])
