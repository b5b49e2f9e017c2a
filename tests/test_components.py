"""Several Gaussians a class: the field against dense mixtures and weighted draws, the release against slow loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import chisquare, multivariate_normal
from torch import Tensor

from conftest import PIN, TINY
from moment_oracles import TIMES, OpenVault, at, keyed, seeds
from straightdp import pipeline, recipe
from straightdp.audits.noise_check import noise_ratios
from straightdp.audits.replay import replay
from straightdp.folder import RunFolder
from straightdp.generator import Generator
from straightdp.moments import components, field, statistics
from straightdp.moments.basis import Basis, exact_bits, on_grid
from straightdp.moments.distill import distill_batch
from straightdp.moments.field import MomentModel
from straightdp.moments.release import COVARIANCE, MEANS, TRACE, release_parts, round_id, run_release
from straightdp.privacy.ledger import Ledger
from straightdp.recipe import Distill, parse
from straightdp.report.plan import describe_plan
from straightdp.stages.gather import certificate_of


def random_model(g: torch.Generator, Y: int, k: int, d: int, r: int, *, shared: bool = False) -> MomentModel:
    """In float64."""
    centres = 1.5 * torch.randn(Y, k, d, generator=g, dtype=torch.float64)
    tables = 1 if shared else Y
    V = torch.linalg.qr(torch.randn(tables, d, r, generator=g, dtype=torch.float64))[0].contiguous()
    lam = 0.05 + 2 * torch.rand(tables, r, generator=g, dtype=torch.float64)
    prior = 0.05 + torch.rand(Y, generator=g, dtype=torch.float64)
    weights = 0.05 + torch.rand(Y, k, generator=g, dtype=torch.float64)
    weights = weights / weights.sum(dim=1, keepdim=True)
    mu = torch.einsum("yk,ykd->yd", weights, centres)
    floor = float(0.01 + torch.rand(1, generator=g))
    return MomentModel(mu, V, lam, prior / prior.sum(), floor, None, centres, weights)


@st.composite
def models(draw) -> MomentModel:
    d = draw(st.integers(1, 5))
    Y, k, r = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(0, d))
    return random_model(keyed(draw(seeds)), Y, k, d, r, shared=draw(st.booleans()))


def covariance(m: MomentModel, y: int) -> np.ndarray:
    V, lam = m.V[y % len(m.V)].numpy(), m.lam[y % len(m.lam)].numpy()
    return (V * lam) @ V.T + m.floor * np.eye(len(V))


def dense(m: MomentModel, x: np.ndarray, t: float) -> tuple[np.ndarray, np.ndarray]:
    """E[v | x_t, y, j] and log P(x_t, y, j) of every Gaussian, (Y, k, n, d) and (Y, k, n), by d x d inverses."""
    eye = np.eye(x.shape[1])
    fields, logs = [], []
    for y in range(len(m.mu)):
        Sigma = covariance(m, y)
        A = t**2 * Sigma + (1 - t) ** 2 * eye
        for j in range(m.centres.shape[1]):
            c = m.centres[y, j].numpy()
            fields.append(c + (x - t * c) @ np.linalg.solve(A, t * Sigma - (1 - t) * eye))
            log = np.atleast_1d(multivariate_normal(t * c, A).logpdf(x))
            logs.append(log + np.log(float(m.prior[y]) * float(m.weights[y, j])))
    shape = m.centres.shape[:2]
    return np.array(fields).reshape(*shape, *x.shape), np.array(logs).reshape(*shape, len(x))


# The field


@settings(max_examples=60)
@given(m=models(), t=st.sampled_from(TIMES), seed=seeds)
def test_the_fields_are_those_of_dense_mixtures(m, t, seed):
    x = 2 * torch.randn(4, m.mu.shape[1], generator=keyed(seed), dtype=torch.float64)
    fields, logs = dense(m, x.numpy(), t)
    for y in range(len(m.mu)):
        weights = np.exp(logs[y] - logsumexp(logs[y], axis=0))
        expected = np.einsum("kn,knd->nd", weights, fields[y])
        np.testing.assert_allclose(m.velocity(x, at(t, 4), torch.full((4,), y)), expected, rtol=1e-6, atol=1e-6)
    joint = np.exp(logs - logsumexp(logs, axis=(0, 1)))
    np.testing.assert_allclose(m.responsibilities(x, at(t, 4)), joint.sum(axis=1).T, rtol=1e-6, atol=1e-9)
    mixed = np.einsum("ykn,yknd->nd", joint, fields)
    np.testing.assert_allclose(m.mixture_velocity(x, at(t, 4)), mixed, rtol=1e-6, atol=1e-6)


@settings(max_examples=30)
@given(m=models(), seed=seeds, block=st.sampled_from([1, 60, 2**22]))
def test_rows_of_many_classes_and_times_are_each_their_own(m, seed, block):
    """Whatever the block of classes, and whoever else is in the batch."""
    g = keyed(seed)
    x = torch.randn(9, m.mu.shape[1], generator=g, dtype=torch.float64)
    t, y = torch.rand(9, generator=g, dtype=torch.float64), torch.randint(len(m.mu), (9,), generator=g)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field, "BLOCK", block)
        found = m.posterior_mean(x, t, y), m.mixture_mean(x, t)
    for i in range(9):
        one = slice(i, i + 1)
        torch.testing.assert_close(found[0][one], m.posterior_mean(x[one], t[one], y[one]), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[1][one], m.mixture_mean(x[one], t[one]), rtol=1e-9, atol=1e-9)


@given(m=models(), seed=seeds)
def test_at_the_noise_end_a_class_is_its_mean(m, seed):
    x = torch.randn(5, m.mu.shape[1], generator=keyed(seed), dtype=torch.float64)
    y = torch.arange(5) % len(m.mu)
    torch.testing.assert_close(m.velocity(x, at(0.0, 5), y), m.mu[y] - x, rtol=0, atol=1e-9)


@given(m=models(), seed=seeds)
def test_components_in_one_place_are_one_gaussian(m, seed):
    g = keyed(seed)
    one = replace(m, centres=None, weights=None)
    many = replace(m, centres=m.mu[:, None].expand_as(m.centres).contiguous())
    x, t = torch.randn(6, m.mu.shape[1], generator=g, dtype=torch.float64), torch.rand(6, generator=g).double()
    y = torch.arange(6) % len(m.mu)
    for f in (lambda m: m.velocity(x, t, y), lambda m: m.mixture_velocity(x, t), lambda m: m.responsibilities(x, t)):
        torch.testing.assert_close(f(many), f(one), rtol=1e-7, atol=1e-7)


def test_a_class_is_what_weighted_draws_say_and_one_gaussian_of_its_moments_is_not():
    """E[z | x_t = x, y] as the mean of draws of z, each weighted by N(x; t z, (1 - t)^2 I)."""
    m, t, n = random_model(keyed(4), 2, 3, 2, 1), 0.6, 200_000
    z = m.sample(torch.ones(n, dtype=torch.int64), keyed(0)).numpy()
    x = t * z[:6] + (1 - t) * np.random.default_rng(0).standard_normal((6, 2))

    def sigmas(found: Tensor) -> float:
        worst = 0.0
        for point, claimed in zip(x, found.numpy(), strict=True):
            log = -((point - t * z) ** 2).sum(axis=1) / (2 * (1 - t) ** 2)
            w = np.exp(log - log.max())
            w /= w.sum()
            mean = w @ z
            error = np.sqrt((w**2) @ (z - mean) ** 2)
            worst = max(worst, float((np.abs(claimed - mean) / error).max()))
        return worst

    x_, t_, y = torch.from_numpy(x), at(t, 6), torch.ones(6, dtype=torch.int64)
    assert sigmas(m.posterior_mean(x_, t_, y)) < 4.5
    values, V = np.linalg.eigh(np.cov(z.T))
    flat = MomentModel(m.mu, torch.from_numpy(V)[None], torch.from_numpy(values)[None], m.prior, 1e-9)
    even = replace(m, weights=torch.full_like(m.weights, 1 / 3))
    for wrong in (flat, even, replace(m, centres=None, weights=None)):
        assert sigmas(wrong.posterior_mean(x_, t_, y)) > 15


@pytest.mark.parametrize("t", [0.0, 1e-6, 0.5, 1 - 1e-6])
@pytest.mark.parametrize("far", [1.0, 1e3])
def test_single_precision_is_finite_and_near(t, far):
    """Pictures: 784 numbers, eight components; also far from all of them."""
    g = keyed(1)
    m = random_model(g, 3, 8, 784, 16)
    m = replace(m, centres=0.1 * m.centres, mu=0.1 * m.mu, floor=1e-2)
    single = replace(m, **{k: v.float() for k, v in m._tensors().items()})
    y = torch.arange(12) % 3
    x = far * (t * m.sample(y, g) + (1 - t) * torch.randn(12, 784, generator=g))
    found = single.posterior_mean(x.float(), at(t, 12, torch.float32), y)
    exact = m.posterior_mean(x, at(t, 12), y)
    assert found.dtype == torch.float32
    assert float(((found - exact).norm(dim=1) / exact.norm(dim=1)).max()) < 1e-4
    assert bool(torch.isfinite(single.mixture_mean(x.float(), at(t, 12, torch.float32))).all())


def test_draws_are_of_the_class_and_its_shares():
    m = random_model(keyed(3), 2, 4, 3, 2)
    apart = replace(m, centres=m.centres + 40 * torch.arange(4)[:, None], mu=m.mu)
    z = apart.sample(torch.tensor([1, 0]).repeat(20_000), keyed(0))
    for y, rows in ((1, z[0::2]), (0, z[1::2])):
        place = torch.cdist(rows, apart.centres[y]).argmin(dim=1)
        counts = torch.bincount(place, minlength=4).numpy()
        shares = m.weights[y].numpy()
        assert chisquare(counts, shares * len(rows)).pvalue > 1e-4
        assert chisquare(counts, shares[::-1] * len(rows)).pvalue < 1e-9
        for j in range(4):
            mine = rows[place == j]
            np.testing.assert_allclose(mine.mean(dim=0), apart.centres[y, j], atol=6 * math.sqrt(4 / len(mine)))
            np.testing.assert_allclose(np.cov(mine.T.numpy()), covariance(m, y), atol=0.25)
    start = apart.tilted_start(torch.ones(20_000, dtype=torch.int64), 0.5, keyed(1))
    assert torch.allclose(start.mean(dim=0), 0.5 * torch.einsum("k,kd->d", m.weights[1], apart.centres[1]), atol=0.7)
    assert apart.sample(torch.zeros(0, dtype=torch.int64), keyed(0)).shape == (0, 3)


def test_captions_of_a_class_share_its_components(tmp_path):
    m = replace(random_model(keyed(3), 3, 2, 4, 2), public=torch.ones(4).double())
    m.save(tmp_path / "m")
    under = MomentModel.load(tmp_path / "m").under((2, 0, 2)).to(torch.device("cpu"))
    assert torch.equal(under.centres, m.centres[[2, 0, 2]])
    assert torch.equal(under.weights, m.weights[[2, 0, 2]])
    assert torch.equal(under.V, m.V[[2, 0, 2]])
    torch.testing.assert_close(under.prior, m.prior[[2, 0, 2]] / torch.tensor([2, 1, 2]))
    x, t = torch.randn(5, 4, generator=keyed(0)).double(), torch.rand(5, generator=keyed(1)).double()
    assert torch.equal(under.velocity(x, t, torch.zeros(5).long()), m.velocity(x, t, torch.full((5,), 2)))
    every = m.under((0, 1, 2, 2))
    torch.testing.assert_close(every.mixture_velocity(x, t), m.mixture_velocity(x, t), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tilt", ["zero", "random", "public"])
def test_components_move_with_the_mean_of_their_class(tilt):
    m = replace(random_model(keyed(3), 3, 2, 4, 2), public=torch.ones(4).double())
    tilted = m.tilted(tilt, 7)
    torch.testing.assert_close(torch.einsum("yk,ykd->yd", m.weights, tilted.centres), tilted.mu)
    torch.testing.assert_close(tilted.centres - tilted.mu[:, None], m.centres - m.mu[:, None])
    assert float((tilted.mu - m.mu).norm(dim=1).min()) > 0.1


def test_the_posterior_trace_is_refused():
    with pytest.raises(ValueError, match="hangs on x"):
        random_model(keyed(0), 2, 2, 3, 1).posterior_trace(torch.tensor([0.5]))


def test_distillation_aims_at_the_mixtures():
    m = random_model(keyed(0), 3, 4, 4, 2)
    m = replace(m, **{k: v.float() for k, v in m._tensors().items()})
    captions = torch.tensor([[1], [2], [3]])
    section = Distill(batch=60, replay=0.0, p_uncond=0.5)
    x, t, ids, target = distill_batch(
        m, torch.zeros(2, 1, 2, 2), captions, torch.zeros(1, 1).long(), section, 0.6, keyed(1)
    )
    assert sorted(ids[:, 0].unique().tolist()) == [0, 1, 2, 3]
    for row, time, id, aim in zip(x.flatten(1).double(), t, ids[:, 0].tolist(), target.flatten(1), strict=True):
        fields, logs = dense(
            replace(m, **{k: v.double() for k, v in m._tensors().items()}), row[None].numpy(), float(time)
        )
        if id:
            fields, logs = fields[id - 1 : id], logs[id - 1 : id]
        weights = np.exp(logs - logsumexp(logs))
        np.testing.assert_allclose(aim, np.einsum("ykn,yknd->d", weights, fields), atol=1e-3)


# What is summed


D, P, Y, K = 12, 5, 3, 4


def make_basis(radius: float = 0.7) -> Basis:
    g = keyed(0)
    q, _ = torch.linalg.qr(torch.randn(D, D, generator=g, dtype=torch.float64))
    return Basis(torch.randn(D, generator=g).double() * 0.1, on_grid(q[:P], exact_bits(D)), 1.3, radius, 2.0, 1.9)


BASIS = make_basis()
CENTRES = torch.randn(Y, K, P, generator=keyed(5), dtype=torch.float64)


def test_sums_equal_a_slow_loop():
    g = keyed(2)
    z, y = torch.randn(60, D, generator=g), torch.randint(Y, (60,), generator=g)
    statistic = statistics.component_sums(BASIS, CENTRES)
    expected = np.zeros((Y, K, 1 + P))
    for row, label in zip(z.double(), y.tolist(), strict=True):
        f = BASIS.P @ (row - BASIS.mean)
        place = min(range(K), key=lambda j: float((f - CENTRES[label, j]).norm()))
        r = f - CENTRES[label, place]
        expected[label, place] += [0.25, *(r * min(1.0, 0.7 / float(r.norm())) / 0.7)]
    found = statistic.assemble(statistic.exact(z, y)).reshape(Y, K, 1 + P)
    np.testing.assert_allclose(found, expected, atol=2e-3)  # records are read on a grid
    assert (found[..., 0] > 0).sum() > 8


def test_a_records_place_does_not_depend_on_its_batch():
    """To the bit, also half way between two centres: else removing one record could move others."""
    g = keyed(3)
    centres = torch.randn(2, 6, P, generator=g, dtype=torch.float64)
    z = torch.randn(300, D, generator=g)
    z[:100] = (BASIS.mean + centres[0, :2].mean(dim=0) @ BASIS.P).float()  # as near to both as rounding allows
    y, vectors = torch.zeros(300).long(), statistics.component_sums(BASIS, centres).vectors
    whole = vectors(z.double(), y)
    for n in (1, 2, 7, 64, 299):
        assert torch.equal(vectors(z[:n].double(), y[:n]), whole[:n])
        assert torch.equal(vectors(z[-n:].double(), y[-n:]), whole[-n:])


# What is made of the sums


def test_a_round_without_noise_is_lloyds():
    g = keyed(2)
    z, y = torch.randn(200, D, generator=g), torch.randint(Y, (200,), generator=g)
    basis = make_basis(radius=1e3)
    statistic = statistics.component_sums(basis, CENTRES)
    noisy = torch.from_numpy(statistic.assemble(statistic.exact(z, y))).reshape(Y, K, 1 + P)
    centres, weights, off = components.moved(CENTRES, noisy, 1e3, 0.0)
    assert not off.any()
    f = basis.features(z.double())
    for c in range(Y):
        place = torch.cdist(f[y == c], CENTRES[c]).argmin(dim=1)
        counts = torch.bincount(place, minlength=K).clamp_min(1)
        torch.testing.assert_close(weights[c], counts / counts.sum().double(), rtol=1e-5, atol=1e-5)
        for j in range(K):
            mine = f[y == c][place == j]
            expected = mine.mean(dim=0) if len(mine) else CENTRES[c, j]
            torch.testing.assert_close(centres[c, j], expected, rtol=0, atol=1e-3)


def test_noise_alone_moves_no_centre_far_and_shrinkage_helps():
    """Steps of known size under noise of known size: kept ones are nearer to the truth than all or nothing."""
    g, std, radius = keyed(0), 5.0, 2.0
    start = torch.zeros(10, 8, 60, dtype=torch.float64)
    noise = std * torch.randn(10, 8, 61, generator=g, dtype=torch.float64)
    centres, weights, _ = components.moved(start, noise, radius, std)
    assert float(centres.norm(dim=2).max()) < 0.5 * radius
    assert torch.isfinite(weights).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(10).double())
    counts = torch.tensor([30.0, 60.0, 150.0, 300.0, 300.0, 300.0, 600.0, 600.0]).double()
    truth = 0.05 * torch.randn(10, 8, 60, generator=g, dtype=torch.float64)
    exact = torch.cat([counts[None, :, None].expand(10, -1, -1) / 4, truth * counts[:, None] / radius], dim=2)
    found, _, off = components.moved(start, exact + noise, radius, std)
    plain = (exact + noise)[..., 1:] * radius / counts[:, None]
    error = (found - truth).square().mean()
    assert error < 0.5 * (plain - truth).square().mean()
    assert error < 0.9 * truth.square().mean()
    assert float(off.mean()) == pytest.approx(float(error), rel=0.15), "it knows how far it is off"


def test_the_mixture_keeps_the_released_second_moment_but_for_what_centres_are_off_by():
    g = keyed(1)
    root = torch.randn(Y, P, P, generator=g, dtype=torch.float64)
    total, means = root @ root.mT + 0.5 * torch.eye(P), torch.randn(Y, P, generator=g, dtype=torch.float64)
    centres = means[:, None] + 0.2 * torch.randn(Y, K, P, generator=g, dtype=torch.float64)
    weights = torch.full((Y, K), 1 / K, dtype=torch.float64)
    left = components.within(total, means, centres, weights, torch.zeros_like(centres), 1e-3)
    for c in range(Y):
        between = sum(torch.outer(v, v) / K for v in centres[c] - means[c])
        torch.testing.assert_close(left[c] + between, total[c], rtol=1e-9, atol=1e-9)
    off = components.within(total, means, centres, weights, torch.full_like(centres, 0.3), 1e-3)
    torch.testing.assert_close(off - left, 0.3 * torch.eye(P).double().expand(Y, -1, -1), rtol=1e-9, atol=1e-9)
    wide = components.within(total, means, means[:, None] + 30 * (centres - means[:, None]), weights, 0 * centres, 1e-3)
    assert float(torch.linalg.eigvalsh(wide).min()) == pytest.approx(1e-3)


def test_first_centres_are_spread_as_the_gaussian_is_and_the_same_each_time():
    total = torch.diag(torch.tensor([100.0, 1e-4, 1e-4])).double()[None]
    means = torch.tensor([[5.0, 1.0, 2.0]]).double()
    centres = components.split(means, total, 4)
    assert torch.equal(centres, components.split(means, total, 4))
    along = (centres[0, :, 0] - 5).sort().values
    np.testing.assert_allclose(along, [-15.1, -4.5, 4.5, 15.1], atol=1.5)  # the best four points for N(0, 100)
    np.testing.assert_allclose(centres[0, :, 1:], [[1, 2]] * 4, atol=0.02)


# The release


def test_a_release_finds_the_groups_within_classes():
    """Two classes of two groups each, far apart, without noise: centres, shares and spread are the groups'."""
    g, n = keyed(0), 3000
    groups = 6 * torch.randn(2, 2, 4, generator=g)
    shares = torch.tensor([[0.6, 0.4], [0.3, 0.7]])
    y = torch.arange(n) % 2
    place = torch.multinomial(shares[y], 1, generator=g)[:, 0]
    z = groups[y, place] + 0.3 * torch.randn(n, 4, generator=g)
    basis = Basis(torch.zeros(4).double(), torch.eye(4).double(), 90.0, 90.0, 90.0, 90.0)
    section = {"features": 4, "rank": 4, "floor": 1e-3, "components": 2, "rounds": 3}
    rules = parse({"release": section})
    vault, stds = OpenVault(z, y, 2), {part.id: 0.0 for part in release_parts(rules)}
    m = run_release(rules, basis, vault, stds)
    assert vault.asked == [MEANS, COVARIANCE, TRACE, *(round_id(k) for k in range(1, 4))]
    for c in range(2):
        apart = torch.cdist(groups[c], m.centres[c])
        assert float(apart.min(dim=1).values.max()) < 0.1
        assert sorted(apart.argmin(dim=1).tolist()) == [0, 1]
        counts = torch.bincount(place[y == c], minlength=2) / int((y == c).sum())
        torch.testing.assert_close(m.weights[c][apart.argmin(dim=1)], counts, rtol=0, atol=2e-3)
        spread = torch.diag_embed(m.lam[c]) + 1e-3 * torch.eye(4)
        np.testing.assert_allclose(m.V[c] @ spread @ m.V[c].T, 0.09 * np.eye(4), atol=0.06)


@pytest.mark.parametrize(("epsilon", "many"), [(0.3, 7), (1, 24), (3, 64)])
def test_as_many_as_the_declared_noise_lets_be_told_apart(epsilon, many):
    """Of MNIST's size. With its share of the records each is off by 0.36 of the radius at most; one more is not."""
    rules = parse(
        {
            "privacy": {"epsilon": epsilon, "n": 60000},
            "release": {"features": 128, "components": "auto"},
            "dpsgd": {"steps": 0},
            "distill": {"steps": 0},
        }
    )
    std = next(one for one in certificate_of(rules).workload if one.id == round_id(1)).to_json()["noise_std"]
    assert components.as_many(std, 6000, 128, 20.0) == many
    off = [std * math.sqrt(128) / (6000 / k) for k in (many, many + 1)]  # of the residuals' radius
    assert off[0] <= 0.36
    assert off[1] > 0.36 or many == 64


@given(std=st.floats(0, 1e4), records=st.floats(1, 1e6), p=st.integers(1, 512), least=st.floats(1, 100))
def test_the_number_of_components_stays_within_its_bounds(std, records, p, least):
    found = components.as_many(std, records, p, least)
    assert 2 <= found <= components.MOST
    assert found == 2 or found * least <= records * (1 + 1e-9)
    assert components.as_many(2 * std, records, p, least) <= found <= components.as_many(std, 2 * records, p, least)


def test_a_release_takes_as_many_components_as_its_noise_allows():
    g = keyed(0)
    y = torch.arange(1000) % 2
    z = torch.randn(1000, 4, generator=g)
    basis = Basis(torch.zeros(4).double(), torch.eye(4).double(), 9.0, 9.0, 9.0, 9.0)
    rules = parse({"release": {"features": 4, "rank": 4, "components": "auto", "rounds": 1}})
    for std, many in ((0.0, 25), (10.0, 9), (1e6, 2)):  # 500 records a class: 500 / 20; 0.36 x 500 / (10 x 2)
        vault, stds = OpenVault(z, y, 2), {part.id: std for part in release_parts(rules)}
        assert run_release(rules, basis, vault, stds).centres.shape == (2, many, 4)
    assert run_release(rules, basis, vault, stds, many=3).centres.shape == (2, 3, 4), "as was declared"


def test_rounds_are_declared_one_by_one_and_shares_add_up():
    plain = {part.id: part for part in release_parts(parse({}))}
    parts = {part.id: part for part in release_parts(parse({"release": {"components": 8, "rounds": 3}}))}
    assert list(parts) == [MEANS, COVARIANCE, TRACE, *(f"release/components/{k}" for k in (1, 2, 3))]
    assert sum(part.part for part in parts.values()) == pytest.approx(1)
    for k in (1, 2, 3):
        assert parts[round_id(k)].part == pytest.approx(0.47 / 3)
        assert parts[round_id(k)].sensitivity == pytest.approx(math.sqrt(17 / 16))
    for id, part in plain.items():
        assert parts[id].part == pytest.approx(0.53 * part.part)
        assert parts[id].sensitivity == part.sensitivity
    assert release_parts(parse({"release": {"rounds": 3, "components_share": 0.2}})) == tuple(plain.values())


SETTINGS = (
    "pretrain.steps=4",
    "distill.steps=4",
    "dpsgd.steps=3",
    "release.components=2",
    "sample.n=20",
    "sample.steps=2",
    "evaluate.probe_steps=2",
    f'privacy.pinned_key="{PIN}"',
)


@pytest.fixture
def rules(tiny_data, tmp_path) -> recipe.Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(TINY.format(**tiny_data))
    return recipe.load(path, SETTINGS)


def test_a_run_with_components_replays_and_draws_at_every_port(rules, tmp_path):
    assert "release/components/2" in describe_plan(rules)
    pipeline.run(rules, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    verdict = replay(folder.release)
    assert verdict.holds, verdict.text
    executed = Ledger(folder.ledger, reads=True).find("totals")["executed"]
    assert {id: n for id, n in executed.items() if "components" in id} == {round_id(1): 1, round_id(2): 1}
    ratios = noise_ratios(folder)
    assert set(executed) == set(ratios)
    assert all(0.8 < ratios[round_id(k)][0] < 1.25 for k in (1, 2))  # 180 draws each
    generator = Generator.load(folder.release, torch.device("cpu"))
    assert generator.moments.centres.shape == (10, 2, 64)
    for port in ("weights", "guide", "release"):
        section = rules.sample.model_copy(update={"port": port})
        images = generator.draw(generator.prompts(20, torch.device("cpu")), section, 0, lambda steps, *_: steps)
        assert images.shape == (20, 1, 8, 8)
        assert bool(torch.isfinite(images).all())
    assert "release/components/1" in (folder.release / "report.html").read_text()


def test_a_run_that_stops_between_rounds_goes_on_to_the_same_release(rules, tmp_path, monkeypatch):
    """No round runs on other sums than its noise was drawn for, and none is paid for twice; also where centres that are
    computed again differ in their last bits, as they do by another number of threads."""
    monkeypatch.setattr(pipeline, "_use", lambda inputs: None)
    rules = rules.model_copy(update={"release": rules.release.model_copy(update={"components": "auto"})})
    pipeline.run(rules, tmp_path / "calm")
    moved, split, calls = components.moved, components.split, []

    def stops(*given):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return moved(*given)

    with monkeypatch.context() as patch:
        patch.setattr(components, "moved", stops)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(rules, tmp_path / "stopped")
    monkeypatch.setattr(components, "split", lambda *given: split(*given) * (1 + 1e-9))
    pipeline.run(rules, tmp_path / "stopped", resume=True)
    for name in ("transcript.jsonl", "moments.safetensors"):
        one, other = ((tmp_path / run / "release" / name).read_bytes() for run in ("calm", "stopped"))
        assert one == other
