"""Time buckets: what a plan costs, what it declares, and that a bucket's steps do just what was declared for it."""

import json
import math
from collections import Counter
from decimal import Decimal, localcontext
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from conftest import PIN, TINY
from straightdp import pipeline, recipe
from straightdp.audits.replay import replay
from straightdp.data.records import Records
from straightdp.dpsgd import trainer
from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.dpsgd.planner import (
    BETAS,
    Candidate,
    best,
    candidates,
    describe,
    edges,
    profile,
    proxy,
    residuals,
    shaped,
)
from straightdp.dpsgd.trainer import Bucket, buckets, draw, record_losses
from straightdp.flow.path import TorchDraws
from straightdp.moments.field import MomentModel
from straightdp.moments.release import release_parts
from straightdp.privacy.accountant import Declaration, epsilon, rdp_epsilon
from straightdp.privacy.ledger import START, Ledger, seal
from straightdp.privacy.noise import Noise
from straightdp.privacy.vault import Captions, Vault
from straightdp.privacy.workload import Certificate, bucket_id, bucket_steps, certify, dpsgd_sigma, gradients
from straightdp.recipe import DpSgd, parse
from straightdp.team import ALONE
from test_clipping import SHAPE, random_net

DELTA = 1e-5
CPU = torch.device("cpu")
positive = st.floats(0.1, 10.0)
profiles = st.lists(positive, min_size=1, max_size=4)


# The shapes


@given(profiles, st.floats(0, 1))
def test_a_shape_has_geometric_mean_one_and_is_ordered_as_its_profile(values, beta):
    shape = shaped(values, beta)
    assert math.prod(shape) == pytest.approx(1, rel=1e-9)
    for a, c in zip(values, shape, strict=True):
        for b, d in zip(values, shape, strict=True):
            if a <= b:
                assert c <= d * (1 + 1e-12)


@given(profiles, st.floats(0, 1))
def test_a_shapes_ratios_are_the_profiles_to_the_power_beta(values, beta):
    shape = shaped(values, beta)
    for value, c in zip(values, shape, strict=True):
        assert c / shape[0] == pytest.approx((value / values[0]) ** beta, rel=1e-9)
    assert shaped(values, 0.0) == (1.0,) * len(values)
    assert shaped([7 * value for value in values], beta) == pytest.approx(shape)


@given(st.floats(0, 0.99), st.integers(1, 16))
def test_buckets_cover_the_times_without_a_gap_in_equal_parts(t_min, count):
    ends = edges(t_min, count)
    parts = buckets(t_min, (1.0,) * count)
    assert (ends[0], ends[-1], len(parts)) == (t_min, pytest.approx(1, abs=1e-15), count)
    assert [part.low for part in parts] == ends[:-1]
    assert [part.high for part in parts] == ends[1:]
    for part in parts:
        assert part.high - part.low == pytest.approx((1 - t_min) / count, abs=1e-12)


def test_every_bucket_and_step_of_its_own_comes_once_however_many_there_are():
    for steps in range(1, 60):
        for count in range(1, 17):
            seen = [(step % count, step // count) for step in range(steps)]
            turns = Counter(k for k, _ in seen)
            assert len(set(seen)) == steps
            assert sum(bucket_steps(steps, k, count) for k in range(count)) == steps
            for k in range(count):
                assert bucket_steps(steps, k, count) == turns[k]
                assert {step for j, step in seen if j == k} == set(range(turns[k]))


def isotropic(d: int, spread: float) -> MomentModel:
    """N(0, spread^2 I), as one class."""
    return MomentModel(torch.zeros(1, d), torch.zeros(1, d, 0), torch.zeros(1, 0), torch.ones(1), spread**2)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_the_profile_is_what_a_normal_distributions_posterior_says(spread):
    """z ~ N(0, s^2 I): the variance of z given x_t is s^2 (1 - t)^2 / ((1 - t)^2 + s^2 t^2) a coordinate."""
    ends = edges(0.2, 5)
    middles = [(a + b) / 2 for a, b in pairwise(ends)]
    expected = [math.sqrt(9 * spread**2 / ((1 - t) ** 2 + spread**2 * t**2)) for t in middles]
    assert profile(isotropic(9, spread), ends) == pytest.approx(expected, rel=1e-5)


def test_residuals_of_records_from_the_model_are_as_large_as_the_profile_says():
    """E|v - vbar|^2 = V(t) / (1 - t)^2 where the model is the truth; 256 draws of 100 dimensions know it to 3%."""
    d, spread, ends = 100, 0.5, edges(0.3, 4)
    generator = torch.Generator().manual_seed(0)
    z = spread * torch.randn(2000, d, generator=generator)
    found = residuals(isotropic(d, spread), z, torch.zeros(2000, dtype=torch.int64), ends, generator)
    for norms, (low, high) in zip(found, pairwise(ends), strict=True):
        power = quad(lambda t: d * spread**2 / ((1 - t) ** 2 + spread**2 * t**2), low, high)[0] / (high - low)
        assert float(norms.double().square().mean()) == pytest.approx(power, rel=0.06)


# The score


norm_lists = st.lists(st.lists(st.floats(0.01, 100.0), min_size=3, max_size=8), min_size=1, max_size=4)


@given(norm_lists, st.data())
def test_the_score_is_clipped_signal_over_noise_record_by_record(norms, data):
    shape = tuple(data.draw(st.lists(positive, min_size=len(norms), max_size=len(norms))))
    sigmas = data.draw(st.lists(positive, min_size=len(norms), max_size=len(norms)))
    found = proxy(shape, sigmas, [torch.tensor(r) for r in norms])
    everything = sorted(value for r in norms for value in r)
    reference = everything[(len(everything) - 1) // 2]
    total = 0.0
    for c, sigma, r in zip(shape, sigmas, norms, strict=True):
        signal = sum(min(value, c * reference) for value in r) / len(r)
        total += math.log(signal / (sigma * c * reference))
    assert found == pytest.approx(total / len(norms), abs=1e-4)
    scaled = [1e3 * torch.tensor(r) for r in norms]
    assert proxy(shape, sigmas, scaled) == pytest.approx(found, abs=1e-4)  # the network's units do not matter
    louder = [2 * sigma for sigma in sigmas]
    assert proxy(shape, louder, scaled) == pytest.approx(found - math.log(2), abs=1e-4)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_the_best_is_never_below_the_first_and_the_first_of_equals(scores):
    found = [Candidate(k / 4, (1.0,), (1.0,), 1.0, score) for k, score in enumerate(scores)]
    chosen = best(found)
    assert all(chosen.score >= other.score for other in found)
    assert chosen.score > max((other.score for other in found[: found.index(chosen)]), default=-math.inf)
    assert describe(found).splitlines()[1 + found.index(chosen)].endswith("<- chosen")
    assert describe(found).count("chosen") == 1


# What candidates cost


def some_recipe(**sections):
    privacy = {"epsilon": 1.0, "delta": DELTA, "interval": 1e-3} | sections.pop("privacy", {})
    return parse({"privacy": privacy} | sections)


RECIPES = {
    "tight": {},
    "paper": {"privacy": {"mode": "paper"}},
    "large budget": {"privacy": {"epsilon": 4.0}},
    "no release": {"release": {"weight": 0.0}},
    "no release, paper": {"privacy": {"mode": "paper"}, "release": {"weight": 0.0}},
    "fixed release": {"release": {"sigma": 9.0}},
    "fixed gradients": {"privacy": {"epsilon": 4.0}, "dpsgd": {"sigma": 400.0}},
    "both fixed": {"privacy": {"epsilon": 4.0}, "release": {"sigma": 9.0}, "dpsgd": {"sigma": 400.0}},
    "both fixed, paper": {
        "privacy": {"epsilon": 4.0, "mode": "paper"},
        "release": {"sigma": 9.0},
        "dpsgd": {"sigma": 400.0},
    },
}


def check_candidates(sections, values, norms):
    given_recipe = some_recipe(**sections)
    budget, section = given_recipe.privacy.epsilon, given_recipe.dpsgd
    parts = release_parts(given_recipe)
    found = candidates(given_recipe, parts, values, norms)
    assert [candidate.beta for candidate in found] == list(BETAS) == [0, 0.25, 0.5, 0.75, 1]
    assert found[0].shape == (1.0,) * len(values)
    assert len(set(found[0].sigmas)) == 1
    assert best(found).score >= found[0].score
    for candidate in found:
        assert candidate.epsilon <= budget
        assert candidate.shape == shaped(values, candidate.beta)
        noises = [c * sigma for c, sigma in zip(candidate.shape, candidate.sigmas, strict=True)]
        assert noises == pytest.approx([noises[0]] * len(noises))
        assert candidate.score == proxy(candidate.shape, candidate.sigmas, norms)
        if section.sigma is not None:
            assert noises[0] == pytest.approx(section.sigma)
        if not parts:  # its cost is that of its own noises, and of nothing else
            steps = [bucket_steps(section.steps, k, len(values)) for k in range(len(values))]
            own = [
                Declaration(str(k), "", "poisson_gaussian", 1.0, s, section.q, t)
                for k, (s, t) in enumerate(zip(candidate.sigmas, steps, strict=True))
            ]
            assert epsilon(own, DELTA, 1e-3) == pytest.approx(candidate.epsilon, abs=1e-9)
    return found


def of_full_batches(name: str, steps: int) -> dict:
    """At sampling rate 1 a step is a Gaussian mechanism, whose true cost has a closed form."""
    sections = RECIPES[name]
    return sections | {"dpsgd": {"q": 1.0, "steps": steps} | sections.get("dpsgd", {})}


def check_full_batches(name: str, values: list[float], more: int, seed: int) -> None:
    steps, generator = len(values) + more, torch.Generator().manual_seed(seed)
    norms = [4 * torch.rand(9, generator=generator) ** 3 + 0.01 for _ in values]
    for candidate in check_candidates(of_full_batches(name, steps), values, norms):
        squared = sum(bucket_steps(steps, k, len(values)) / sigma**2 for k, sigma in enumerate(candidate.sigmas))
        assert gaussian_delta(math.sqrt(squared), candidate.epsilon) <= DELTA * (1 + 1e-6)


@pytest.mark.parametrize("name", RECIPES)
@settings(max_examples=2)
@given(profiles, st.integers(0, 8), st.integers(0, 1000))
def test_every_candidate_fits_the_budget_and_the_best_is_never_below_uniform(name, values, more, seed):
    check_full_batches(name, values, more, seed)


@settings(max_examples=20)
@given(profiles, st.integers(0, 8), st.integers(0, 1000))
@example([0.1, 0.1, 0.1, 10.0], 8, 0)
@example([10.0, 10.0, 10.0, 0.1], 8, 0)
def test_no_profile_and_no_norms_make_the_best_candidate_worse_than_uniform(values, more, seed):
    check_full_batches("both fixed", values, more, seed)


def gaussian_delta(mu: float, eps: float) -> float:
    """The analytic Gaussian mechanism's delta at sensitivity over noise mu."""
    return norm.cdf(mu / 2 - eps / mu) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))


@pytest.mark.parametrize("fixed", [False, True])
def test_candidates_of_sampled_steps_fit_the_budget_and_do_not_waste_it(fixed):
    noise = {"sigma": 3.0} if fixed else {}
    budget = {"epsilon": 1.1} if fixed else {"epsilon": 0.3}
    sections = {"privacy": budget, "release": {"sigma": 20.0}, "dpsgd": {"q": 0.05, "steps": 101} | noise}
    generator = torch.Generator().manual_seed(3)
    found = check_candidates(sections, [1.0, 2.5], [torch.rand(20, generator=generator) + 0.1 for _ in range(2)])
    assert all(candidate.epsilon > 0.5 * budget["epsilon"] for candidate in found)


parts_of_workloads = st.lists(
    st.tuples(st.sampled_from([0.01, 0.05, 0.2]), st.floats(2.0, 10.0), st.integers(1, 200)), min_size=1, max_size=3
)


@settings(max_examples=8)
@given(parts_of_workloads, st.lists(st.floats(3.0, 30.0), max_size=2))
def test_renyi_divergences_bound_the_loss_distributions_epsilon(sampled, plain):
    workload = [Declaration(f"s{k}", "", "poisson_gaussian", 1.0, s, q, t) for k, (q, s, t) in enumerate(sampled)]
    workload += [Declaration(f"g{k}", "", "gaussian", 1.0, s) for k, s in enumerate(plain)]
    assert rdp_epsilon(workload, DELTA) >= epsilon(workload, DELTA, 1e-4) - 1e-6


@given(st.lists(st.floats(0.5, 30.0), min_size=1, max_size=5), st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_renyi_divergences_never_promise_more_than_gaussians_keep(sigmas, delta):
    workload = [Declaration(str(k), "", "gaussian", 1.0, sigma) for k, sigma in enumerate(sigmas)]
    mu = math.sqrt(sum(1 / sigma**2 for sigma in sigmas))
    assert gaussian_delta(mu, rdp_epsilon(workload, delta)) <= delta * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("tight", (1.0,)),
        ("tight", (0.4, 1.0, 2.5)),
        ("paper", (0.4, 2.5)),
        ("no release", (0.5, 1.0, 2.0)),
        ("fixed release", (2.0, 0.5)),
        ("fixed gradients", (2.0, 0.5)),
    ],
)
def test_a_quick_certificate_spends_no_more_than_an_exact_one_and_no_less_noise(name, shape):
    given_recipe = some_recipe(**of_full_batches(name, 7))
    parts = release_parts(given_recipe)
    quick, exact = (certify(given_recipe, parts, shape, quick=fast) for fast in (True, False))
    assert quick.epsilon <= exact.epsilon <= given_recipe.privacy.epsilon
    assert [part.id for part in quick.workload] == [part.id for part in exact.workload]
    for a, b in zip(quick.workload, exact.workload, strict=True):
        assert a.sigma >= b.sigma
    for certificate in (quick, exact):
        assert epsilon(certificate.workload, DELTA, 1e-3) == certificate.epsilon


def test_a_quick_certificate_of_sampled_steps_spends_no_more_than_an_exact_one():
    given_recipe = some_recipe(privacy={"epsilon": 0.4}, dpsgd={"q": 0.05, "steps": 60})
    parts = release_parts(given_recipe)
    quick, exact = (certify(given_recipe, parts, (0.5, 2.0), quick=fast) for fast in (True, False))
    assert 0.28 < quick.epsilon < exact.epsilon <= 0.4
    assert exact.epsilon > 0.999 * 0.4


# The common noise of a shape


@given(
    m=st.floats(1e-3, 20.0),
    share=st.floats(0.01, 1.0),
    q=st.floats(1e-4, 1.0),
    steps=st.integers(1, 5000),
    values=st.lists(positive, min_size=2, max_size=16),
)
def test_the_common_noise_solves_the_central_limits_equation_of_its_shape(m, share, q, steps, values):
    """sum_k T_k q^2 (exp(c_k^2 / sigma^2) - 1) = share m^2, evaluated in 60 decimal digits."""
    shape = shaped(values, 1.0)
    assume(steps >= len(shape))
    sigma = dpsgd_sigma(m, share, DpSgd(q=q, steps=steps), shape)
    with localcontext() as context:
        context.prec = 60
        terms = [
            Decimal(len(range(k, steps, len(shape)))) * Decimal(q) ** 2 * ((Decimal(c) / Decimal(sigma)) ** 2).exp()
            for k, c in enumerate(shape)
        ]
        total = sum(terms) - Decimal(steps) * Decimal(q) ** 2
        assert float(total / (Decimal(share) * Decimal(m) ** 2)) == pytest.approx(1, rel=1e-8)


@given(
    m=st.floats(1e-3, 20.0),
    share=st.floats(0.01, 1.0),
    q=st.floats(1e-4, 1.0),
    steps=st.integers(16, 5000),
    count=st.integers(1, 16),
    c=st.floats(0.1, 10.0),
)
def test_the_common_noise_of_equal_clips_is_the_closed_form(m, share, q, steps, count, c):
    section = DpSgd(q=q, steps=steps)
    closed = 1 / math.sqrt(math.log1p(share * m**2 / (steps * q**2)))
    assert dpsgd_sigma(m, share, section, (1.0,) * count) == pytest.approx(closed, rel=1e-12)
    assert dpsgd_sigma(m, share, section, (c,) * count) == pytest.approx(c * closed, rel=1e-12)
    nearly = (c,) * count + (c * (1 + 1e-9),)  # which is solved for: the same to that difference
    assert dpsgd_sigma(m, share, section, nearly) == pytest.approx(c * closed, rel=1e-8)


@pytest.mark.parametrize("count", [2, 3, 16])
@pytest.mark.parametrize("q", [0.02, 0.3])
def test_equal_buckets_compose_to_the_mechanism_of_one(count, q):
    """60 steps of one kind, whether they are declared as one mechanism, in equal parts or in unequal ones."""
    section = DpSgd(q=q, steps=60)
    one, many = (epsilon(gradients(section, 4.0, (1.0,) * k), DELTA, 1e-3) for k in (1, count))
    assert many == pytest.approx(one, abs=1e-6)


@pytest.mark.parametrize("name", ["tight", "both fixed"])
def test_a_certificate_of_equal_buckets_is_that_of_one(name):
    given_recipe = some_recipe(**of_full_batches(name, 9))
    one, many = (certify(given_recipe, release_parts(given_recipe), (1.0,) * k) for k in (1, 4))
    assert many.epsilon == pytest.approx(one.epsilon, abs=1e-6)
    assert sum(part.count for part in many.workload) == sum(part.count for part in one.workload)
    assert [part.sigma for part in many.workload[-4:]] == pytest.approx([one.workload[-1].sigma] * 4, rel=1e-6)


# A step of a bucket


NULL = torch.zeros(1, 3, dtype=torch.int64)


def drawn(z, bucket: Bucket, seed: int) -> tuple[torch.Tensor, ...]:
    captions = torch.arange(len(z)).remainder(5)[:, None].expand(-1, 3) + 1
    return draw(z, captions, NULL, DpSgd(draws=2), bucket, TorchDraws(torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("c", [0.2, 1.0, 2.7])
def test_a_bucket_sums_gradients_clipped_to_its_own_clip(c):
    """The slow way: each record's gradient of the plain loss, shortened to c C if it is longer, and added up."""
    net, low, high = random_net(), 0.4, 0.7
    z = (
        torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(1))
        * torch.logspace(-1, 1, 8)[:, None, None, None]
    )
    mask = torch.tensor([1.0, 1, 1, 0, 1, 1, 1, 1])
    losses = record_losses(net)(*drawn(z, Bucket(low, high), 5))
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)])
        for loss in losses
    ]
    lengths = [float(row.norm()) for row in rows]
    clip = float(np.median(lengths)) / c  # so that half of them are longer than c C
    expected = torch.zeros_like(rows[0])
    for row, length, real in zip(rows, lengths, mask.tolist(), strict=True):
        if real:
            expected += row * min(1.0, c * clip / length)
    engine = ClippingEngine(net, record_losses(net), clip)
    engine.preflight(drawn(torch.randn(3, *SHAPE), Bucket(low, high, c), 0))
    found = engine(drawn(z, Bucket(low, high, c), 5), mask).total * c
    assert float((found - expected).norm()) <= 2e-3 * float(expected.norm())  # the engine's margin
    for wrong in (c * c, 1 / c, 1.1 * c):
        if abs(wrong / c - 1) > 0.05:
            assert float((found * wrong / c - expected).norm()) > 0.05 * float(expected.norm())


N, SECTION, CLIP = 40, DpSgd(q=0.3, steps=5, draws=2), 0.7
PLAN = (0.5, 0.8, 2.5)


def final_gradients(folder, monkeypatch, sigma: float, records: int) -> list[torch.Tensor]:
    """What DP-SGD gives to the optimiser at each step, all at the same weights, under a pinned key."""
    folder.mkdir()
    workload = tuple(gradients(SECTION, sigma, PLAN))
    ledger = Ledger(folder / "t.jsonl")
    certificate = Certificate(workload, 1.0, DELTA, 1e-3)
    ledger.declare(certificate, budget=9, noise="pinned", mode="tight", n=N, recipe="", assumptions=[])
    rng = np.random.default_rng(0)
    private = Records(rng.integers(0, 256, (records, *SHAPE), dtype=np.uint8), np.arange(records) % 3, ("a", "b", "c"))
    vault = Vault(
        private,
        ledger,
        Noise(b"k" * 32, pinned=True, folder=folder / "noise"),
        n=N,
        diagnostics=folder / "diagnostics.jsonl",
        captions=Captions(lambda: torch.from_numpy(private.labels)[:, None].expand(-1, 3) + 1),
    )
    net, seen = random_net(), []

    def steps_without_moving(net, step_gradients, *, steps, **_):
        for step in range(steps):
            step_gradients(step)
            seen.append(torch.cat([p.grad.flatten() for p in net.parameters()]))

    monkeypatch.setattr(trainer, "fit", steps_without_moving)
    trainer.train(
        net,
        vault,
        NULL,
        SECTION,
        clip=CLIP,
        t_min=0.2,
        shape=PLAN,
        speed="plain",
        checkpoint=folder / "none",
        identity="this work",
        team=ALONE,
        track=None,
    )
    return seen


def agrees(values: torch.Tensor, std: float) -> bool:
    """Whether values may be independent normals of this deviation: their squares' sum to five deviations of its own."""
    n = len(values)
    z = (float((values.double() / std).square().sum()) - n) / math.sqrt(2 * n)
    return abs(z) < 5 and abs(float(values.double().mean())) < 5 * std / math.sqrt(n)


@pytest.mark.parametrize("records", [0, 30])
def test_a_bucket_adds_noise_of_its_own_multiplier_times_its_own_clip(tmp_path, monkeypatch, records):
    """Twice the multiplier under the same key: the same records, draws and noise, so the difference is the noise."""
    sigma = 1.5
    once = final_gradients(tmp_path / "once", monkeypatch, sigma, records)
    twice = final_gradients(tmp_path / "twice", monkeypatch, 2 * sigma, records)
    assert len(once) == len(twice) == SECTION.steps
    declared = {part.id: part.sigma for part in gradients(SECTION, sigma, PLAN)}
    for step, (a, b) in enumerate(zip(once, twice, strict=True)):
        k = step % len(PLAN)
        std = declared[bucket_id(k, len(PLAN))] * (PLAN[k] * CLIP) / (SECTION.q * N)
        assert agrees(b - a, std)
        clean = float((2 * a - b).double().norm())  # what the records say, without the noise
        assert clean <= records * PLAN[k] * CLIP / (SECTION.q * N) + 1e-4 * float(a.norm())
        assert records == 0 or clean > 1e-2 * PLAN[k] * CLIP
        for wrong in (2 / 3, 0.9, 1.1, 3 / 2):
            assert not agrees(wrong * (b - a), std)
    noises = [b - a for a, b in zip(once, twice, strict=True)]
    for k, one in enumerate(noises):  # and no two steps share it, neither within a bucket nor between two
        for other in noises[:k]:
            cosine = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
            assert abs(cosine) < 5 / math.sqrt(len(one))


class Bookkeeper:
    """A vault's outside: writes down what it was asked for, and adds nothing up."""

    def __init__(self, size: int):
        self.n, self.size, self.asked = 10, size, []

    def noisy_gradient(self, id, step, clipped_sum, *, clip, **_):
        self.asked.append((id, step))
        return torch.zeros(self.size)


@pytest.mark.parametrize(("steps", "count"), [(3, 1), (5, 4), (7, 3), (16, 16)])
def test_training_executes_each_bucket_as_often_as_it_is_declared(tmp_path, steps, count):
    net, section = random_net(), DpSgd(q=0.3, steps=steps)
    vault = Bookkeeper(sum(p.numel() for p in net.parameters()))
    trainer.train(
        net,
        vault,  # type: ignore[arg-type]
        NULL,
        section,
        clip=CLIP,
        t_min=0.0,
        shape=(1.0,) * count,
        speed="plain",
        checkpoint=tmp_path / "none",
        identity="this work",
        team=ALONE,
        track=lambda steps, *_: steps,
    )
    declared = {part.id: part.count for part in gradients(section, 1.0, (1.0,) * count)}
    assert vault.asked == [(bucket_id(step % count, count), step // count) for step in range(steps)]
    assert sorted(vault.asked) == sorted((id, step) for id, turns in declared.items() for step in range(turns))


# A run


STEPS, BUCKETS = 7, 4
SETTINGS = (
    "pretrain.steps=2",
    "distill.steps=2",
    "sample.n=20",
    "evaluate.probe_steps=5",
    f'privacy.pinned_key="{PIN}"',
    "dpsgd.plan=tha",
    f"dpsgd.steps={STEPS}",
    f"dpsgd.buckets={BUCKETS}",
    "dpsgd.q=0.1",
    "dpsgd.t_min=0.25",
)


def run_planned(place, sources, *more):
    place.mkdir(parents=True, exist_ok=True)
    path = place / "tiny.toml"
    path.write_text(TINY.format(**sources))
    return pipeline.run(recipe.load(path, (*SETTINGS, *more)), place / "run")


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def mechanisms(folder) -> list[dict]:
    return [entry["mechanism"] for entry in lines(folder.transcript) if entry["kind"] == "declare"]


@pytest.fixture(scope="module")
def planned(tiny_data, tmp_path_factory):
    """A run, and every batch that its clipping engine was given inside a step: of which mechanism, t, weights."""
    seen, inside = [], []
    execute, clipped = Vault.noisy_gradient, ClippingEngine.__call__

    def noisy_gradient(self, id, step, *others, **options):
        inside.append((id, step))
        try:
            return execute(self, id, step, *others, **options)
        finally:
            inside.pop()

    def call(self, batch, mask):
        if inside:
            _, _, t, _, weight = batch
            seen.append(SimpleNamespace(id=inside[-1][0], step=inside[-1][1], t=t.clone(), weight=weight.clone()))
        return clipped(self, batch, mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Vault, "noisy_gradient", noisy_gradient)
        patch.setattr(ClippingEngine, "__call__", call)
        folder = run_planned(tmp_path_factory.mktemp("planned"), tiny_data)
    return SimpleNamespace(folder=folder, seen=seen)


def test_a_planned_run_declares_a_mechanism_a_bucket_and_executes_each_as_often_as_declared(planned):
    entries = lines(planned.folder.transcript)
    declared = [part for part in mechanisms(planned.folder) if part["id"].startswith("dpsgd/")]
    assert [part["id"] for part in declared] == [f"dpsgd/gradients/{k}" for k in (1, 2, 3, 4)]
    assert [part["count"] for part in declared] == [2, 2, 2, 1]
    assert len({part["sigma"] for part in declared}) == BUCKETS
    executed = [(e["id"], e["step"]) for e in entries if e["kind"] == "execute" and e["id"].startswith("dpsgd/")]
    assert executed == [(f"dpsgd/gradients/{step % BUCKETS + 1}", step // BUCKETS) for step in range(STEPS)]
    for part in declared:
        assert sum(id == part["id"] for id, _ in executed) == part["count"] == entries[-1]["executed"][part["id"]]


def test_a_planned_runs_noises_times_its_clips_are_one_number_and_its_plan_is_the_best_of_five(planned):
    folder = planned.folder
    allocation = json.loads(folder.allocation.read_text())
    found = allocation["candidates"]
    assert [candidate["beta"] for candidate in found] == [0, 0.25, 0.5, 0.75, 1]
    chosen = max(found, key=lambda candidate: candidate["score"])
    assert allocation["shape"] == chosen["shape"] == json.loads(folder.plan.read_text())["shape"]
    assert chosen["score"] >= found[0]["score"]
    assert found[0]["shape"] == [1.0] * BUCKETS
    assert len(set(chosen["shape"])) == BUCKETS
    assert all(candidate["epsilon"] <= 5.0 for candidate in found)
    sigmas = [part["sigma"] for part in mechanisms(folder) if part["id"].startswith("dpsgd/")]
    noises = [sigma * c for sigma, c in zip(sigmas, allocation["shape"], strict=True)]
    assert noises == pytest.approx([noises[0]] * BUCKETS, rel=1e-12)


def test_replay_recomputes_what_a_planned_run_cost(planned):
    verdict = replay(planned.folder.release)
    assert verdict.holds, verdict.text
    parts = [
        Declaration(p["id"], p["what"], p["kind"], p["sensitivity"], p["sigma"], p["q"], p["count"])
        for p in mechanisms(planned.folder)
    ]
    assert verdict.epsilon == pytest.approx(epsilon(parts, DELTA, 1e-3), abs=1e-9)
    assert verdict.epsilon <= 5.0


def test_every_time_that_a_bucket_trains_on_lies_in_it_and_every_bucket_is_filled(planned):
    t_min = 0.25
    shape = json.loads(planned.folder.allocation.read_text())["shape"]
    assert len(planned.seen) >= STEPS
    assert {(batch.id, batch.step) for batch in planned.seen} == {
        (f"dpsgd/gradients/{step % BUCKETS + 1}", step // BUCKETS) for step in range(STEPS)
    }
    for k in range(BUCKETS):
        low, high = t_min + (1 - t_min) * k / BUCKETS, t_min + (1 - t_min) * (k + 1) / BUCKETS
        mine = [batch for batch in planned.seen if batch.id == f"dpsgd/gradients/{k + 1}"]
        t = torch.cat([batch.t.flatten() for batch in mine]).double()
        assert float(t.min()) >= low - 1e-7
        assert float(t.max()) <= high + 1e-7
        assert float(t.max() - t.min()) > 0.8 * (high - low)
        for batch in mine:
            assert batch.weight.tolist() == pytest.approx([1 / shape[k]] * len(batch.weight), rel=1e-6)


def forged(folder, place, change):
    """The transcript beside its files again, after a change and with every hash computed anew."""
    entries = lines(folder.transcript)
    for entry in entries:
        del entry["hash"]
    previous, data = START, b""
    for number, entry in enumerate(change(entries), start=1):
        line, previous = seal(entry | {"line": number, "previous": previous})
        data += line
    path = place / "transcript.jsonl"
    path.write_bytes(data)
    return replay(path)


def number(entries, kind, id=None, step=None) -> int:
    """The line of the first entry of a kind, mechanism and step."""
    for entry in entries:
        of = entry.get("mechanism", entry).get("id")
        if entry["kind"] == kind and id in (None, of) and step in (None, entry.get("step")):
            return entry["line"]
    raise AssertionError((kind, id, step))


def with_sigma(factor, k):
    def change(entries):
        part = entries[number(entries, "declare", f"dpsgd/gradients/{k}") - 1]["mechanism"]
        part["sigma"] *= factor
        part["noise_std"] *= factor
        return entries

    return change


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_planned_transcript_in_which_one_buckets_noise_was_changed_is_refused(planned, tmp_path, factor, k):
    verdict = forged(planned.folder, tmp_path, with_sigma(factor, k))
    assert not verdict.holds
    assert verdict.line == number(lines(planned.folder.transcript), "certificate")


@pytest.mark.parametrize("counted", [False, True], ids=["totals kept", "totals made to fit"])
@pytest.mark.parametrize("k", [1, 4])
def test_a_planned_transcript_without_one_execution_is_refused(planned, tmp_path, k, counted):
    def change(entries):
        del entries[number(entries, "execute", f"dpsgd/gradients/{k}") - 1]
        if counted:
            entries[-1]["executed"][f"dpsgd/gradients/{k}"] -= 1
        return entries

    verdict = forged(planned.folder, tmp_path, change)
    assert not verdict.holds
    assert verdict.line == len(lines(planned.folder.transcript)) - 1


@pytest.mark.parametrize("step", [0, 1, 2], ids=["repeated there", "taken there", "beyond there"])
@pytest.mark.parametrize("counted", [False, True], ids=["totals kept", "totals made to fit"])
def test_a_planned_transcript_in_which_an_execution_moved_to_another_bucket_is_refused(
    planned, tmp_path, step, counted
):
    """From bucket 1 to bucket 4, which has one step."""
    entries = lines(planned.folder.transcript)
    moved = number(entries, "execute", "dpsgd/gradients/1", 1)

    def change(entries):
        entries[moved - 1] |= {"id": "dpsgd/gradients/4", "step": step}
        if counted:
            entries[-1]["executed"]["dpsgd/gradients/1"] -= 1
            entries[-1]["executed"]["dpsgd/gradients/4"] += 1
        return entries

    verdict = forged(planned.folder, tmp_path, change)
    assert not verdict.holds
    assert verdict.line == moved


def test_a_planned_transcript_with_a_bucket_moved_out_of_the_known_ones_is_refused(planned, tmp_path):
    def change(entries):
        text = json.dumps(entries).replace("dpsgd/gradients/4", "dpsgd/gradients/17")
        return json.loads(text)

    verdict = forged(planned.folder, tmp_path, change)
    assert not verdict.holds
    assert verdict.line == number(lines(planned.folder.transcript), "declare", "dpsgd/gradients/4")


def test_resealing_a_planned_transcript_without_a_change_is_no_forgery(planned, tmp_path):
    assert forged(planned.folder, tmp_path, lambda entries: entries).holds


def test_what_is_declared_hangs_on_public_records_alone(planned, tiny_data, tmp_path):
    """As many private records, of noise: the same plan and mechanisms to the last digit. Other public ones: another."""
    rng = np.random.default_rng(5)
    images, labels = rng.integers(0, 256, (400, 8, 8), dtype=np.uint8), np.arange(400) % 10
    np.savez(tmp_path / "other.npz", images=images, labels=labels)
    other = run_planned(tmp_path / "a", tiny_data | {"private": tmp_path / "other.npz"})
    assert other.model.read_bytes() != planned.folder.model.read_bytes()
    assert mechanisms(other) == mechanisms(planned.folder)
    assert other.allocation.read_text() == planned.folder.allocation.read_text()
    with np.load(tiny_data["public"]) as public:
        np.savez(tmp_path / "public.npz", images=public["images"] // 2 + 64, labels=public["labels"])
    elsewhere = run_planned(tmp_path / "b", tiny_data | {"public": tmp_path / "public.npz"})
    assert mechanisms(elsewhere) != mechanisms(planned.folder)
