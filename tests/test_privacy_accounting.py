"""The accountant against published values and closed forms; calibration; the paper's table."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from straightdp.errors import BudgetRefused
from straightdp.moments.release import release_parts
from straightdp.privacy.accountant import Declaration, epsilon, gaussian_mu
from straightdp.privacy.workload import alternatives, certify, solve
from straightdp.recipe import parse


def gaussian(sigma, count=1, id="g"):
    return Declaration(id, "", "gaussian", 1.0, sigma, None, count)


def sampled(q, sigma, count, id="s"):
    return Declaration(id, "", "poisson_gaussian", 1.0, sigma, q, count)


def test_the_check_value_of_two_releases_and_two_thousand_steps():
    steps = [sampled(0.02, sigma, 500, f"s{sigma}") for sigma in (3.0, 4.0, 5.0, 6.0)]
    workload = [gaussian(20.0, id="a"), gaussian(30.0, id="b"), *steps]
    assert epsilon(workload, 1e-5, 1e-3) == pytest.approx(0.866625, abs=2e-4)
    assert epsilon(workload, 1e-5, 1e-4) == pytest.approx(0.863818, abs=2e-4)


@pytest.mark.parametrize(("budget", "sigma"), [(0.3, 11.238), (1.0, 3.731), (3.0, 1.391), (10.0, 0.500)])
def test_one_gaussian_alone(budget, sigma):
    assert 1 / gaussian_mu(budget, 1e-5) == pytest.approx(sigma, rel=1e-3)
    assert epsilon([gaussian(1 / gaussian_mu(budget, 1e-5))], 1e-5, 1e-4) == pytest.approx(budget, rel=2e-3)


def exact_delta(sigma, eps):
    """The analytic Gaussian mechanism's delta."""
    return norm.cdf(0.5 / sigma - eps * sigma) - math.exp(eps) * norm.cdf(-0.5 / sigma - eps * sigma)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.8, 30.0), st.integers(1, 4))
def test_composed_gaussians_never_cost_less_than_the_closed_form(sigma, count):
    total = epsilon([gaussian(sigma, count)], 1e-5, 1e-4)
    assert exact_delta(sigma / math.sqrt(count), total) <= 1e-5 * (1 + 1e-6)


def test_nothing_costs_nothing_and_unknown_kinds_are_refused():
    assert epsilon([], 1e-5, 1e-4) == 0.0
    with pytest.raises(BudgetRefused):
        epsilon([Declaration("x", "", "laplace", 1.0, 1.0)], 1e-5, 1e-4)  # type: ignore[arg-type]
    with pytest.raises(BudgetRefused):
        epsilon([gaussian(0.01)], 1e-5, 1e-4)
    with pytest.raises(BudgetRefused):
        epsilon([gaussian(math.nan)], 1e-5, 1e-4)


def paper_recipe(budget, **privacy):
    return parse(
        {
            "privacy": {"epsilon": budget, "n": 60_000, "interval": 1e-3, **privacy},
            "release": {"weight": 0.235},
            "dpsgd": {"weight": 0.765, "q": 0.02, "steps": 2000},
        }
    )


@pytest.mark.parametrize(
    ("budget", "split", "joint"),
    [(1.0, (14.06, 4.371), 3.575), (0.3, (42.3, 13.37), 10.73), (3.0, (5.13, 1.757), 1.494)],
)
def test_the_table_of_noise_multipliers_to_three_digits(budget, split, joint):
    rows = alternatives(paper_recipe(budget))
    assert rows[0][1:3] == pytest.approx(split, rel=2e-3)
    assert rows[1][1:3] == pytest.approx((split[0], joint), rel=2e-3)
    assert rows[0][3] < 0.85 * budget  # the split wastes a fifth
    for _, _, _, total in rows:
        assert total <= budget


def test_a_release_of_six_leaves_dp_sgd_at_4_363():
    recipe = parse({"privacy": {"interval": 1e-3}, "release": {"sigma": 6.0}, "dpsgd": {"q": 0.02, "steps": 2000}})
    assert solve(recipe.privacy, recipe.release, recipe.dpsgd)[1] == pytest.approx(4.363, rel=1e-3)


@pytest.mark.parametrize("mode", ["paper", "tight"])
@pytest.mark.parametrize("budget", [0.3, 1.0, 10.0])
def test_the_certificate_never_exceeds_the_budget(mode, budget):
    recipe = paper_recipe(budget, mode=mode)
    certificate = certify(recipe, release_parts(recipe))
    assert certificate.epsilon <= budget
    assert epsilon(certificate.workload, 1e-5, 1e-3) == certificate.epsilon
    if mode == "tight":
        assert certificate.epsilon > 0.999 * budget


def test_release_alone_and_dp_sgd_alone():
    only_release = parse({"dpsgd": {"steps": 0}})
    assert [p.kind for p in certify(only_release, release_parts(only_release)).workload] == ["gaussian"] * 3
    only_steps = parse({"release": {"weight": 0.0}})
    assert [p.kind for p in certify(only_steps, release_parts(only_steps)).workload] == ["poisson_gaussian"]


def test_fixed_noise_that_does_not_fit_is_refused():
    recipe = parse({"release": {"sigma": 1.0}})
    with pytest.raises(BudgetRefused, match="fixed noise"):
        certify(recipe, release_parts(recipe))
    both = parse({"release": {"sigma": 1.0}, "dpsgd": {"sigma": 1.0}})
    with pytest.raises(BudgetRefused, match="budget"):
        certify(both, release_parts(both))
