"""The audits: exact sums, loops, guessers of known strength, a network that memorises, and a folder of releases."""

import math
from fractions import Fraction
from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm
from torch import nn

from straightdp.audits import one_run
from straightdp.audits.canaries import APART, exposure, extracted, found_in, half_apart, make
from straightdp.audits.folder import replay_all, table
from straightdp.audits.membership import lira_offline, probes, residual_scores, roc
from straightdp.audits.one_run import audit, guesses, lower_bound, p_value
from straightdp.data.records import to_z
from straightdp.errors import BadInput
from straightdp.flow.loss import squared_error
from straightdp.flow.path import interpolate, velocity, velocity_from_z
from straightdp.flow.sampler import euler
from test_transcript import finished

SEEDS = st.integers(0, 10**6)
CPU = torch.device("cpu")


# The one-run bound


def exact_p(q: Fraction, m: int, r: int, v: int, delta: Fraction) -> Fraction:
    """The definition, term by term, in fractions."""

    def exactly(k: int) -> Fraction:
        return math.comb(r, k) * q**k * (1 - q) ** (r - k)

    averages = [sum(exactly(v - j) for j in range(1, i + 1)) / i for i in range(1, v + 1)]
    return sum((exactly(k) for k in range(v, r + 1)), Fraction(0)) + 2 * m * delta * max(averages, default=Fraction(0))


@st.composite
def counts(draw):
    m = draw(st.integers(1, 40))
    r = draw(st.integers(0, m))
    return m, r, draw(st.integers(0, r))


@settings(max_examples=150)
@given(counts(), st.integers(0, 60), st.sampled_from([0, 1, 10**-3, 10**-6]))
def test_p_is_the_exact_sum(found, odds, delta):
    """e^epsilon = 1 + odds / 3."""
    e = 1 + Fraction(odds, 3)
    expected = min(Fraction(1), exact_p(e / (1 + e), *found, Fraction(delta)))
    assert p_value(math.log(e), *found, delta) == pytest.approx(float(expected), rel=1e-10, abs=1e-300)


@settings(max_examples=60)
@given(counts(), st.sampled_from([0, 10**-4, 10**-2]), st.sampled_from([0.01, 0.05, 0.2]))
def test_the_bound_is_where_the_exact_sum_crosses_beta(found, delta, beta):
    def p(epsilon: float) -> Fraction:
        return exact_p(Fraction(1 / (1 + math.exp(-epsilon))), *found, Fraction(delta))

    bound = lower_bound(*found, delta, beta)
    assert p(bound + 1e-6) >= beta
    if bound > 0:
        assert p(bound - min(bound, 1e-6)) < beta


def test_the_check_value_needs_the_delta_term():
    assert lower_bound(1000, 100, 75, 1e-4) == pytest.approx(0.673, abs=5e-4)
    assert lower_bound(1000, 100, 75, 0.0) > 0.70


@settings(max_examples=40)
@given(counts(), st.floats(0, 1e-2))
def test_the_bound_rises_with_right_guesses_and_falls_with_canaries_and_delta(found, delta):
    m, r, v = found
    bound = lower_bound(m, r, v, delta)
    assert v == 0 or lower_bound(m, r, v - 1, delta) <= bound
    assert lower_bound(m + 5, r, v, delta) <= bound
    assert lower_bound(m, r, v, 2 * delta) <= bound


@settings(max_examples=40)
@given(st.integers(1, 400), st.data(), st.floats(-6, 0))
def test_p_crosses_every_beta_below_a_half_once(r, data, exponent):
    """Else the bisection could stop anywhere."""
    v = data.draw(st.integers(0, r))
    p = np.array([p_value(epsilon, 400, r, v, 10**exponent) for epsilon in np.linspace(0, 9, 60)])
    assert (np.diff(np.minimum(p, 0.5)) >= -1e-12).all()


def test_far_tails_keep_their_digits():
    """All of r right: p = q^r, so the bound is known; and 1 - q is far below the digits of q."""
    for r in (10, 1000, 10**5):
        q = 0.05 ** (1 / r)
        assert lower_bound(r, r, r, 0.0) == pytest.approx(math.log(q) - math.log(-math.expm1(math.log(0.05) / r)))
    assert p_value(30.0, 10**5, 10**5, 10**5 - 1, 0.0) == pytest.approx(1.0)
    assert p_value(0.0, 2000, 1000, 1000, 0.0) == pytest.approx(0.5**1000)


@pytest.fixture
def remembered(monkeypatch):
    """The bounds of simulations, each v computed once."""
    monkeypatch.setattr(one_run, "lower_bound", cache(lower_bound))


def test_coin_flips_are_believed_as_often_as_beta_says(remembered):
    rng = np.random.default_rng(0)
    n, m = 3000, 200
    raised = sum(audit(rng.random(m), rng.random(m) < 0.5, 0.5, 0.0).bound > 0 for _ in range(n))
    wrongly = max(tail for v in range(101) if (tail := float(binom.sf(v - 1, 100, 0.5))) < 0.05)
    assert raised / n == pytest.approx(wrongly, abs=4 * math.sqrt(wrongly / n))


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_randomised_response_is_bounded_below_and_well(remembered, epsilon):
    """Each canary's bit is told truly with probability q: exactly epsilon-DP, and nothing leaks more."""
    rng = np.random.default_rng(1)
    n, m, bounds = 600, 1200, []
    for _ in range(n):
        included = rng.random(m) < 0.5
        told = included ^ (rng.random(m) > 1 / (1 + math.exp(-epsilon)))
        bounds.append(audit(told.astype(float), included, 0.5, 1e-6).bound)
    bounds = np.array(bounds)
    assert np.mean(bounds > epsilon) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / n)
    assert np.mean(bounds > 2 / 3 * epsilon) > (0.5 if epsilon < 1 else 0.95)
    assert np.mean(bounds) < epsilon


def test_a_run_that_gives_some_canaries_away_whole_is_excused_by_delta():
    """It names each canary's bit with probability delta and says nothing else: (0, delta)-DP."""
    rng = np.random.default_rng(2)
    m, delta = 1000, 0.05
    included = rng.random(m) < 0.5
    scores = np.where(rng.random(m) < delta, np.where(included, 1.0, -1.0), 0.0)
    found = audit(scores, included, 0.02, delta)
    assert (found.r, found.v, found.accuracy) == (20, 20, 1.0)
    assert found.bound == 0
    assert audit(scores, included, 0.02, 0.0).bound > 1


def test_the_highest_are_guessed_in_and_the_lowest_out():
    included = np.array([True, False, True, True, False, False, True, False])
    scores = np.array([9.0, 8.0, 7.0, 0.0, 0.1, 0.2, -4.0, -np.inf])
    found = audit(scores, included, 0.5, 0.0)  # in: 9 and 8; out: -4 and -inf
    assert (found.m, found.r, found.v) == (8, 4, 2)
    assert audit(scores, included, 1.0, 0.0).v == 4  # in: 9, 8, 7 and 0.2
    assert audit(scores, included, 0.3, 0.0).v == 2


def test_equal_scores_say_nothing_even_if_the_rows_are_sorted():
    included = np.arange(1000) >= 500
    assert audit(np.zeros(1000), included, 1.0, 0.0).accuracy == pytest.approx(0.5, abs=0.06)


def test_the_number_of_guesses_is_known_beforehand():
    assert [guesses(200, fraction) for fraction in (0.5, 1.0, 0.01, 0.018)] == [100, 200, 2, 2]
    assert guesses(7, 1.0) == 6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: p_value(1.0, 10, 11, 5, 0.0), "v <= r <= m"),
        (lambda: p_value(1.0, 10, 5, 6, 0.0), "v <= r <= m"),
        (lambda: p_value(-1.0, 10, 5, 4, 0.0), "epsilon >= 0"),
        (lambda: p_value(1.0, 10, 5, 4, math.nan), "delta"),
        (lambda: lower_bound(10, 5, 4, 0.0, 0.0), "beta"),
        (lambda: guesses(10, 1.1), "fraction"),
        (lambda: guesses(10, 0.1), "none to guess on"),
        (lambda: audit(np.zeros(4), np.zeros(5, bool), 1.0, 0.0), "one bool a canary"),
        (lambda: audit(np.zeros(4), np.zeros(4), 1.0, 0.0), "one bool a canary"),
        (lambda: audit(np.array([0.0, np.nan]), np.zeros(2, bool), 1.0, 0.0), "not a number"),
        (lambda: roc(np.zeros(1), np.zeros(5)), "2 or more"),
        (lambda: roc(np.zeros(3), np.array([0.0, np.nan])), "each a number"),
        (lambda: lira_offline(np.zeros(3), np.zeros((1, 3))), "2 or more"),
        (lambda: lira_offline(np.zeros(3), np.zeros((4, 2))), r"\(S, 3\)"),
        (lambda: lira_offline(np.zeros(3), np.ones((4, 3))), "differ"),
        (lambda: make(1, (1, 4, 4), "cats", 0), "noise, stripes, checker"),  # type: ignore[arg-type]
        (lambda: exposure(np.zeros(3), np.zeros(0)), "one reference"),
        (lambda: half_apart(torch.zeros(2, 1, 2, 2)), "equal"),
    ],
)
def test_what_makes_no_sense_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# Membership


def coarse(seed: int, n: int, shift: float = 0.0) -> np.ndarray:
    """Scores with many ties."""
    return np.round(np.random.default_rng(seed).normal(shift, 1.0, n) * 4) / 4


@settings(max_examples=60)
@given(SEEDS, st.integers(2, 30), st.integers(2, 30), st.floats(-2, 2))
def test_auc_and_its_interval_are_those_of_all_pairs(seed, n, m, shift):
    members, others = coarse(seed, n, shift), coarse(seed + 1, m)
    wins = np.array([[(a > b) + (a == b) / 2 for b in others] for a in members])
    found = roc(members, others)
    assert found.auc == pytest.approx(wins.mean(), rel=1e-14)
    assume(wins.min() < wins.max())
    std = math.sqrt(wins.mean(axis=1).var(ddof=1) / n + wins.mean(axis=0).var(ddof=1) / m)
    expected = np.clip([wins.mean() - 1.959964 * std, wins.mean() + 1.959964 * std], 0, 1)
    assert found.interval == pytest.approx(expected, abs=1e-6)


def test_auc_is_the_same_on_any_rising_scale_and_turns_with_the_sides():
    members, others = coarse(0, 50, 0.5), coarse(1, 70)
    assert roc(np.exp(members), np.exp(others)) == roc(members, others)
    assert roc(others, members).auc == pytest.approx(1 - roc(members, others).auc)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    truth = float(norm.cdf(0.8 / math.sqrt(2)))
    intervals = [roc(rng.normal(0.8, 1, 60), rng.normal(0, 1, 80)).interval for _ in range(1000)]
    assert np.mean([low <= truth <= high for low, high in intervals]) == pytest.approx(0.95, abs=0.025)
    assert np.mean([low > 0.5 for low, _ in intervals]) > 0.95


def test_pairs_that_all_fall_one_way_leave_room_for_others():
    """At an AUC of `low`, k disjoint pairs fall the same way with probability 2.5 %."""
    rising = np.arange(40.0)
    low, high = roc(rising + 100, rising).interval
    assert (low**40, high) == (pytest.approx(0.025), 1.0)
    assert roc(rising, rising + 100).interval == (0.0, pytest.approx(1 - low))
    tied = roc(np.zeros(40), np.zeros(90))
    assert tied.auc == 0.5
    assert tied.interval[0] < 0.5 < tied.interval[1]


def best_rate(members: np.ndarray, others: np.ndarray, one_in: int) -> float:
    """Every threshold there is, by its definition."""
    thresholds = [*np.unique(np.concatenate([members, others])), np.inf]
    allowed = [t for t in thresholds if np.sum(others >= t) * one_in <= len(others)]
    return max(float(np.mean(members >= t)) for t in allowed)


@pytest.mark.parametrize("digits", [16, 1])
@pytest.mark.parametrize("m", [1000, 1999, 2900, 3000])
def test_true_positives_are_those_of_the_best_threshold(digits, m):
    rng = np.random.default_rng(m)
    members, others = (np.round(rng.normal(mean, 1, n), digits) for mean, n in ((1.5, 300), (0, m)))
    found = roc(members, others)
    assert found.tpr_at_01 == best_rate(members, others, 1000)
    assert found.tpr_at_1 == best_rate(members, others, 100)
    assert found.tpr_at_1 > found.tpr_at_01 > 0


def test_too_few_others_have_no_such_rate():
    members = np.ones(10)
    assert (roc(members, np.zeros(99)).tpr_at_1, roc(members, np.zeros(100)).tpr_at_1) == (None, 1.0)
    assert (roc(members, np.zeros(999)).tpr_at_01, roc(members, np.zeros(1000)).tpr_at_01) == (None, 1.0)
    assert roc(members, np.ones(100)).tpr_at_1 == 0.0


def test_probes_take_one_time_of_each_part_and_come_from_the_seed_alone():
    torch.manual_seed(1)
    one = probes(25, (2, 3, 4), 7, CPU)
    torch.manual_seed(2)
    same, other = probes(25, (2, 3, 4), 7, CPU), probes(25, (2, 3, 4), 8, CPU)
    assert torch.equal((one.t * 25).floor(), torch.arange(25.0))
    assert one.xi.shape == (25, 2, 3, 4)
    assert torch.equal(one.t, same.t)
    assert torch.equal(one.xi, same.xi)
    assert not torch.equal(one.t, other.t)
    assert not torch.equal(one.xi, other.xi)


@pytest.mark.parametrize("batch", [1, 4, 100])
def test_residual_scores_are_a_loop_over_records_and_draws(batch):
    generator = torch.Generator().manual_seed(0)
    z, captions = torch.randn(9, 1, 3, 3, generator=generator), torch.arange(18).reshape(9, 2)
    weight = torch.randn(9, 9, generator=generator, requires_grad=True)

    def network(x, t, c):
        return (x.flatten(1) @ weight).view_as(x) * (1 + t)[:, None, None, None] + c.sum(dim=1)[:, None, None, None]

    draws = probes(6, (1, 3, 3), 0, CPU)
    expected = []
    for i in range(9):
        total = 0.0
        for t, xi in zip(draws.t, draws.xi, strict=True):
            x = ((1 - t) * xi + t * z[i]).flatten()
            v = (x @ weight) * (1 + t) + captions[i].sum()
            total += ((v - (z[i] - xi).flatten()) ** 2).mean().item() / 6
        expected.append(-total)
    scores = residual_scores(network, z, captions, draws, batch)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


@pytest.mark.parametrize("shadows", [2, 8, 70])
def test_lira_is_a_loop_over_records(shadows):
    rng = np.random.default_rng(0)
    target, out = rng.normal(size=12), rng.normal(size=(shadows, 12)) * np.arange(1, 13)
    means = [sum(out[:, i]) / shadows for i in range(12)]
    own = [sum((out[:, i] - means[i]) ** 2) / (shadows - 1) for i in range(12)]
    variances = own if shadows >= 64 else [sum(own) / 12] * 12
    expected = [(target[i] - means[i]) / math.sqrt(variances[i]) for i in range(12)]
    np.testing.assert_allclose(lira_offline(target, out), expected, rtol=1e-12)


def test_lira_sees_members_that_the_score_alone_does_not():
    """Records are of very different difficulty; having been trained on adds a little."""
    rng = np.random.default_rng(0)
    difficulty, member = rng.normal(0, 10, 600), np.arange(600) < 300
    out = difficulty + rng.normal(0, 0.3, (8, 600))
    target = difficulty + member + rng.normal(0, 0.3, 600)
    assert roc(target[member], target[~member]).auc < 0.6
    scores = lira_offline(target, out)
    assert roc(scores[member], scores[~member]).auc > 0.95
    assert np.std(scores[~member]) == pytest.approx(math.sqrt(1 + 1 / 8), rel=0.15)


# Canaries


@pytest.mark.parametrize("kind", ["noise", "stripes", "checker"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 10)])
def test_canaries_are_apart_and_come_from_the_seed_alone(kind, shape):
    pictures = make(120, shape, kind, 3)
    assert pictures.shape == (120, *shape)
    assert pictures.dtype == np.uint8
    for a, b in combinations(pictures.astype(float) / 255, 2):
        assert ((a - b) ** 2).mean() >= APART - 1e-12
    np.testing.assert_array_equal(pictures, make(120, shape, kind, 3))
    assert (pictures != make(120, shape, kind, 4)).mean() > 0.3
    assert len(np.unique(pictures)) == (256 if kind == "noise" else 2)
    assert pictures.mean() == pytest.approx(127.5, abs=6)


def test_stripes_and_checks_are_patterns_and_noise_is_none():
    """How often a pixel equals its neighbour: noise almost never, waves often but not always."""

    def agreement(kind):
        x = make(200, (1, 28, 28), kind, 0).astype(int)
        return (abs(np.diff(x, axis=3)) < 8).mean()

    assert agreement("noise") < 0.1
    assert 0.55 < agreement("checker") < agreement("stripes") < 0.95


@pytest.mark.parametrize(("shape", "kind"), [((1, 1, 1), "noise"), ((1, 2, 2), "stripes")])
def test_more_canaries_than_there_is_room_for_are_refused(shape, kind):
    with pytest.raises(BadInput, match=r"only \d+ .* and 40 are wanted; ask for fewer"):
        make(40, shape, kind, 0)


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 20), st.integers(1, 40))
def test_exposure_is_the_rank_in_a_sorted_list(seed, n, references):
    scores, others = coarse(seed, n), coarse(seed + 1, references)
    found = exposure(scores, others)
    firsts = 0
    for score, value in zip(scores, found, strict=True):
        ranking = sorted([(-other, 0) for other in others] + [(-score, 1)])
        rank = 1 + ranking.index((-score, 1))
        assert value == pytest.approx(math.log2(references + 1) - math.log2(rank), abs=1e-12)
        firsts += rank == 1
    assert extracted(found, references + 1) == firsts
    assert found.min() >= 0
    assert found.max() <= math.log2(references + 1)


def test_canaries_that_nothing_was_learnt_of_have_the_exposure_of_a_uniform_rank():
    rng = np.random.default_rng(0)
    found = np.concatenate([exposure(rng.random(50), rng.random(255)) for _ in range(200)])
    uniform = 8 - np.log2(np.arange(1, 257))
    assert found.mean() == pytest.approx(uniform.mean(), abs=0.1)
    assert extracted(found, 256) / len(found) == pytest.approx(1 / 256, rel=0.6)
    assert (exposure(np.zeros(5), np.zeros(9)) == 0).all()


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 12), st.integers(2, 12))
def test_found_canaries_are_those_of_a_loop(seed, m, n):
    rng = np.random.default_rng(seed)
    canaries = torch.from_numpy(make(n, (1, 4, 4), "noise", seed)).double()
    closest = min(float((a - b).square().sum().sqrt()) for a, b in combinations(canaries, 2))
    threshold = half_apart(canaries)
    assert threshold == pytest.approx(closest / 2)
    copied = canaries[rng.integers(n, size=m)]
    samples = copied + torch.from_numpy(rng.normal(size=copied.shape)) * rng.uniform(0, threshold / 2, (m, 1, 1, 1))
    near = [[i for i, a in enumerate(canaries) if (a - b).square().sum().sqrt() < threshold] for b in samples]
    assert all(len(rows) <= 1 for rows in near)
    assert found_in(samples, canaries, threshold) == len({i for rows in near for i in rows})
    assert found_in(canaries, canaries, threshold) == n


def test_a_field_that_memorises_generates_its_canaries_and_no_others():
    """The best field for a few pictures, equation (2) with their posterior mean, ends in those pictures."""
    pictures = to_z(make(40, (1, 8, 8), "checker", 0))
    kept, threshold = pictures[:5], half_apart(pictures)

    def field(x, t):
        away = (x[:, None] - t[0] * kept).flatten(2).square().sum(dim=2) / (2 * (1 - t[0]) ** 2)
        return velocity_from_z(torch.einsum("nk,kchw->nchw", (-away).softmax(dim=1), kept), x, t)

    samples = euler(field, torch.randn(100, 1, 8, 8, generator=torch.Generator().manual_seed(0)), 20)
    assert found_in(samples, kept, threshold) == 5
    assert found_in(samples, pictures[5:], threshold) == 0
    grey = torch.zeros(1, 1, 8, 8)
    assert found_in(grey, pictures, threshold) == 0


class Velocity(nn.Module):
    """A small v_theta without captions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(65, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 64))

    def forward(self, x, t, captions):
        return self.layers(torch.cat([x.flatten(1), t[:, None]], dim=1)).view_as(x)


def test_a_network_that_memorised_is_caught_and_an_untrained_one_is_not():
    torch.manual_seed(0)
    pictures = make(264, (1, 8, 8), "noise", 0)
    z, captions = to_z(pictures), torch.zeros(264, 1, dtype=torch.long)
    included = np.random.default_rng(0).random(64) < 0.5
    network, draws = Velocity(), probes(16, (1, 8, 8), 5, CPU)

    def attack():
        scores = residual_scores(network, z, captions, draws)
        canaries, fresh = scores[:64], scores[64:]
        inside, outside = (exposure(canaries[rows], fresh) for rows in (included, ~included))
        return roc(canaries[included], fresh).auc, audit(canaries, included, 0.5, 1e-5).bound, inside, outside

    auc, bound, inside, _ = attack()
    assert auc == pytest.approx(0.5, abs=0.15)
    assert bound == 0
    assert inside.mean() == pytest.approx(1.44, abs=0.8)

    trained_on = z[:64][torch.from_numpy(included)]
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(150):
        part = trained_on[torch.randint(len(trained_on), (128,))]
        t, xi = torch.rand(128), torch.randn_like(part)
        optimizer.zero_grad()
        squared_error(network(interpolate(part, xi, t), t, captions), velocity(part, xi)).mean().backward()
        optimizer.step()

    auc, bound, inside, outside = attack()
    assert auc > 0.9
    assert bound > 1
    assert extracted(inside, 201) > 0.8 * included.sum()
    assert extracted(outside, 201) <= 2


# A folder of releases


def test_every_release_below_a_folder_is_replayed(tmp_path):
    for name in ("sound", "deep/er/pinned", "broken"):
        (tmp_path / name / "private").mkdir(parents=True)
        finished(tmp_path / name / "release", noise="pinned" if name.endswith("pinned") else "os")
        (tmp_path / name / "private" / "transcript.jsonl").write_text("not for replay")
    broken = tmp_path / "broken" / "release" / "transcript.jsonl"
    broken.write_bytes(broken.read_bytes().replace(b'"n":10', b'"n":11', 1))
    found = replay_all(tmp_path)
    places = [path.relative_to(tmp_path).as_posix() for path, _ in found]
    assert places == ["broken/release", "deep/er/pinned/release", "sound/release"]
    assert [(verdict.holds, verdict.releasable) for _, verdict in found] == [
        (False, False),
        (True, False),
        (True, True),
    ]

    head, *rows, last = table(tmp_path, found).splitlines()
    assert head.split() == ["release", "epsilon", "verdict"]
    assert [row.split()[0] for row in rows] == places
    assert "WRONG: transcript.jsonl line 1" in rows[0]
    assert "NOT RELEASABLE: line 1 says the noise key was pinned" in rows[1]
    assert rows[2].split()[1:] == [f"{found[2][1].epsilon:.6g}", "holds"]
    assert last == "1 of 3 hold and may be published."


def test_a_release_by_itself_is_a_folder_too(tmp_path):
    finished(tmp_path)
    assert [path for path, _ in replay_all(tmp_path)] == [tmp_path]


@pytest.mark.parametrize("name", ["empty", "missing", "only"])
def test_a_folder_without_a_release_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "only" / "private").mkdir(parents=True)
    (tmp_path / "only" / "private" / "transcript.jsonl").touch()
    with pytest.raises(BadInput, match=r"no release was found below .*; give a folder"):
        replay_all(tmp_path / name)
