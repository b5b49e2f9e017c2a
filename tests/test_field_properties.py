"""Proposition 1, Corollary 1 and the drift bound on random models: dense algebra, summation, Monte Carlo, loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moment_oracles import TIMES, at, keyed, seeds
from straightdp.moments import field
from straightdp.moments.field import MomentModel
from straightdp.moments.horizon import Horizon


def orthonormal(tables: int, d: int, r: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(tables, d, r, generator=generator, dtype=torch.float64))[0].contiguous()


def random_model(g: torch.Generator, Y: int, d: int, r: int, own_V: bool, own_lam: bool, spread=1.0) -> MomentModel:
    """In float64; `own`: one table a class."""
    mu = spread * torch.randn(Y, d, generator=g, dtype=torch.float64)
    V = orthonormal(Y if own_V else 1, d, r, g)
    lam = 0.05 + 2 * torch.rand(Y if own_lam else 1, r, generator=g, dtype=torch.float64)
    prior = 0.05 + torch.rand(Y, generator=g, dtype=torch.float64)
    return MomentModel(mu, V, lam, prior / prior.sum(), float(0.01 + torch.rand(1, generator=g)))


@st.composite
def models(draw) -> MomentModel:
    d = draw(st.integers(1, 6))
    Y, r = draw(st.integers(1, 5)), draw(st.integers(0, d))
    return random_model(keyed(draw(seeds)), Y, d, r, draw(st.booleans()), draw(st.booleans()))


def single(m: MomentModel) -> MomentModel:
    return MomentModel(m.mu.float(), m.V.float(), m.lam.float(), m.prior.float(), m.floor)


def dense(m: MomentModel, y: int) -> tuple[np.ndarray, np.ndarray]:
    """(mu_y, Sigma_y), d x d."""
    V, lam = m.V[y % len(m.V)].double().numpy(), m.lam[y % len(m.lam)].double().numpy()
    return m.mu[y].double().numpy(), (V * lam) @ V.T + m.floor * np.eye(len(V))


def points(d: int, n: int, seed: int) -> Tensor:
    return 2 * torch.randn(n, d, generator=keyed(seed), dtype=torch.float64)


# Proposition 1 against dense Gaussian conditioning


def conditioned(m: MomentModel, x: np.ndarray, t: float, y: int) -> tuple[np.ndarray, np.ndarray]:
    """E[v | x_t, y] and log N(x; t mu_y, A_t): the joint law of (z, xi) pushed to (v, x_t), and d x d inverses."""
    mu, Sigma = dense(m, y)
    eye = np.eye(len(mu))
    law = np.block([[Sigma, 0 * eye], [0 * eye, eye]])
    push = np.block([[eye, -eye], [t * eye, (1 - t) * eye]])
    joint, d = push @ law @ push.T, len(mu)
    A = joint[d:, d:]
    off = x - t * mu
    scaled = np.linalg.solve(A, off.T).T
    log = -0.5 * ((off * scaled).sum(axis=1) + np.linalg.slogdet(A)[1])
    return mu + scaled @ joint[d:, :d], log


@settings(max_examples=60)
@given(m=models(), t=st.sampled_from(TIMES), seed=seeds)
def test_both_forms_are_dense_gaussian_conditioning(m, t, seed):
    x = points(m.mu.shape[1], 4, seed)
    fields, logs = zip(*(conditioned(m, x.numpy(), t, y) for y in range(len(m.mu))), strict=True)
    for y, expected in enumerate(fields):
        np.testing.assert_allclose(m.velocity(x, at(t, 4), torch.full((4,), y)), expected, rtol=1e-8, atol=1e-8)
    weights = m.prior.numpy()[:, None] * np.exp(np.array(logs) - np.max(logs, axis=0))
    weights = (weights / weights.sum(axis=0)).T
    np.testing.assert_allclose(m.responsibilities(x, at(t, 4)), weights, rtol=1e-7, atol=1e-10)
    mixed = np.einsum("ny,ynd->nd", weights, np.array(fields))
    np.testing.assert_allclose(m.mixture_velocity(x, at(t, 4)), mixed, rtol=1e-7, atol=1e-7)


@given(m=models(), t=st.sampled_from([0.0, 1e-9]), seed=seeds)
def test_at_the_noise_end_the_targets_are_the_means(m, t, seed):
    x = points(m.mu.shape[1], 5, seed)
    y = torch.arange(5) % len(m.mu)
    torch.testing.assert_close(m.velocity(x, at(t, 5), y), m.mu[y] - x, rtol=0, atol=1e-6)
    overall = sum(p * mu for p, mu in zip(m.prior, m.mu, strict=True))
    torch.testing.assert_close(m.mixture_velocity(x, at(t, 5)), overall - x, rtol=0, atol=1e-6)


# against a loop over the classes


def looped(m: MomentModel, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """(w, E[z | x_t = x]) one class after another in float64, with x - t mu_y written out."""
    x, t = x.double(), t.double()[:, None]
    a0 = (1 - t).square() + t.square() * m.floor
    logs, means = [], []
    for y in range(len(m.mu)):
        mu, V, lam = m.mu[y].double(), m.V[y % len(m.V)].double(), m.lam[y % len(m.lam)].double()
        a = a0 + t.square() * lam
        u = x - t * mu
        along = u @ V
        quadratic = u.square().sum(dim=1) / a0[:, 0] + ((1 / a - 1 / a0) * along.square()).sum(dim=1)
        logs.append(m.prior[y].double().log() - 0.5 * (quadratic + (a / a0).log().sum(dim=1)))
        off, on = t * m.floor / a0, t * (lam + m.floor) / a
        means.append(mu + off * u + ((on - off) * along) @ V.T)
    weights = torch.stack(logs, dim=1).softmax(dim=1)
    return weights, torch.einsum("ny,ynd->nd", weights, torch.stack(means))


@settings(max_examples=40)
@given(
    Y=st.integers(1, 23), own_V=st.booleans(), own_lam=st.booleans(), block=st.sampled_from([1, 300, 2**22]), seed=seeds
)
def test_blocks_of_classes_give_what_a_loop_gives(Y, own_V, own_lam, block, seed):
    """Whatever the block's size, also where classes share directions but not their spread."""
    g = keyed(seed)
    m = random_model(g, Y, 8, 3, own_V, own_lam)
    x, t = torch.randn(6, 8, generator=g, dtype=torch.float64), torch.tensor([0.0, 0.1, 0.4, 0.7, 0.95, 1.0]).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field, "BLOCK", block)
        found = m.responsibilities(x, t), m.mixture_mean(x, t)
    for one, expected in zip(found, looped(m, x, t), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("t", [0.0, 0.3, 0.9, 1 - 1e-4])
@pytest.mark.parametrize(
    ("Y", "r", "own", "floor"), [(40, 16, True, 1e-2), (200, 16, False, 1e-2), (500, 0, False, 2.5e-3)]
)
def test_single_precision_keeps_five_digits_of_the_loop(Y, r, own, floor, t):
    """Pictures: |mu| about 16, classes so near to one another that several have weight even near t = 1."""
    g = keyed(Y)
    m = random_model(g, Y, 784, r, own, own, spread=0.02)
    m = single(MomentModel(m.mu + 2 * torch.rand(784, generator=g) - 1, m.V, m.lam, m.prior, floor))
    z, at_t = m.sample(torch.arange(16), g), at(t, 16, torch.float32)
    x = t * z + (1 - t) * torch.randn(16, 784, generator=g)
    weights, mean = looped(m, x, at_t)
    found = m.mixture_mean(x, at_t)
    assert found.dtype == m.responsibilities(x, at_t).dtype == torch.float32
    torch.testing.assert_close(m.responsibilities(x, at_t).double(), weights, rtol=1e-5, atol=1e-7)
    assert float(((found - mean).norm(dim=1) / mean.norm(dim=1)).max()) < 1e-5


# against Monte Carlo


@pytest.mark.parametrize("t", [0.3, 0.6])
def test_the_mixture_mean_is_what_weighted_draws_say_and_wrong_formulas_are_not(t):
    """E[z | x_t = x] as the mean of draws of z, each weighted by N(x; t z, (1 - t)^2 I)."""
    m, rng = random_model(keyed(4), 3, 2, 1, True, True, spread=1.5), np.random.default_rng(0)
    y = rng.choice(3, 200_000, p=m.prior.numpy())
    z = np.empty((len(y), 2))
    for k in range(3):
        mu, Sigma = dense(m, k)
        z[y == k] = rng.multivariate_normal(mu, Sigma, int((y == k).sum()))
    x = t * z[:6] + (1 - t) * rng.standard_normal((6, 2))

    def sigmas(found: Tensor) -> float:
        """The largest distance from the draws' mean, in its own standard errors."""
        worst = 0.0
        for point, claimed in zip(x, found.numpy(), strict=True):
            log = -((point - t * z) ** 2).sum(axis=1) / (2 * (1 - t) ** 2)
            w = np.exp(log - log.max())
            w /= w.sum()
            mean = w @ z
            error = np.sqrt((w**2) @ (z - mean) ** 2)
            worst = max(worst, float((np.abs(claimed - mean) / error).max()))
        return worst

    x_, t_ = torch.from_numpy(x), at(t, 6)
    assert sigmas(m.mixture_mean(x_, t_)) < 4.5
    conditional = torch.stack([m.posterior_mean(x_, t_, torch.full((6,), k)) for k in range(3)], dim=1)
    forgotten = torch.einsum("y,nyd->nd", m.prior, conditional)
    shared = MomentModel(m.mu, m.V[:1], m.lam[:1], m.prior, m.floor)
    for wrong in (forgotten, m.mixture_mean(x_, 1 - t_), shared.mixture_mean(x_, t_), conditional[:, 0]):
        assert sigmas(wrong) > 15


@settings(max_examples=40)
@given(m=models())
def test_the_posterior_trace_is_that_of_dense_matrices(m):
    times = [0.0, 1e-3, 0.3, 0.8, 1 - 1e-3, 1.0]
    expected = []
    for t in times:
        traces = []
        for y in range(len(m.mu)):
            Sigma = dense(m, y)[1]
            A = (1 - t) ** 2 * np.eye(len(Sigma)) + t**2 * Sigma
            traces.append(np.trace(Sigma - t**2 * Sigma @ np.linalg.solve(A, Sigma)))
        expected.append(m.prior.numpy() @ traces)
    np.testing.assert_allclose(
        m.posterior_trace(torch.tensor(times, dtype=torch.float64)), expected, rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("t", [0.2, 0.7])
def test_the_posterior_trace_is_the_error_that_the_best_guess_leaves(t):
    m, n = single(random_model(keyed(1), 3, 6, 2, True, True)), 40_000
    y = torch.multinomial(m.prior, n, replacement=True, generator=keyed(2))
    z = m.sample(y, keyed(3))
    x = t * z + (1 - t) * torch.randn(n, 6, generator=keyed(4))
    left = (z - m.posterior_mean(x, at(t, n, torch.float32), y)).square().sum(dim=1)
    found, error = float(m.posterior_trace(torch.tensor([t]))), float(left.std()) / n**0.5
    assert abs(found - float(left.mean())) < 4.5 * error
    assert abs(float(m.posterior_trace(torch.tensor([1 - t]))) - float(left.mean())) > 15 * error


def test_a_kernel_leaves_the_spread_of_one_kernel():
    kernels = MomentModel.kernels(torch.randn(50, 7, generator=keyed(0)), 0.3)
    torch.testing.assert_close(kernels.posterior_trace(torch.tensor([0.0, 1.0])), torch.tensor([7 * 0.09, 0.0]))


# Corollary 1


def atoms(seed: int, d: int, n: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """A random discrete law in the ball of radius 1.5: points (n, d) and their weights."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((n, d))
    z *= 1.5 * rng.uniform(0.3, 1, (n, 1)) / np.linalg.norm(z, axis=1, keepdims=True)
    return z, rng.dirichlet(np.ones(n) * 3)


def summed(z: np.ndarray, p: np.ndarray, x: np.ndarray, t: float) -> np.ndarray:
    """E[z | x_t = x] of the discrete law, exactly."""
    w = p * np.exp(-((x[:, None] - t * z) ** 2).sum(axis=2) / (2 * (1 - t) ** 2))
    return w @ z / w.sum(axis=1, keepdims=True)


def moments(z: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mu = p @ z
    return mu, (z - mu).T @ np.diag(p) @ (z - mu)


def order(error) -> float:
    """k of an error ~ t^k, from a line through its logarithm between t = 0.02 and 0.0025."""
    t = 0.02 / 2.0 ** np.arange(4)
    return float(np.polyfit(np.log(t), np.log([np.linalg.norm(error(float(k))) for k in t]), 1)[0])


@settings(max_examples=60)
@given(seed=seeds, d=st.integers(1, 5))
def test_for_any_bounded_law_the_first_order_expansion_is_off_by_t_squared(seed, d):
    z, p = atoms(seed, d)
    mu, Sigma = moments(z, p)
    x = np.random.default_rng(seed + 1).uniform(-1.5, 1.5, (8, d))

    def mean(t, scale=1.0):
        return summed(z, p, x, t) - (mu + t * scale * x @ Sigma)

    def velocity(t):
        return (summed(z, p, x, t) - x) / (1 - t) - ((mu - x) + t * (mu - x + x @ Sigma))

    assert order(mean) == pytest.approx(2, abs=0.3)
    assert order(velocity) == pytest.approx(2, abs=0.3)
    assert order(lambda t: mean(t, scale=2.0)) == pytest.approx(1, abs=0.3)  # the same fit sees a wrong covariance


@settings(max_examples=30)
@given(seed=seeds, d=st.integers(1, 4))
def test_the_shared_model_is_exact_to_first_order_where_covariances_match_it(seed, d):
    """Classes 0 and 1 are one law, moved; class 2 is wider. The shared covariance is that of the first two."""
    z, p = atoms(seed, d)
    laws = [z, z + 0.4, 1.5 * z]
    values, vectors = np.linalg.eigh(moments(z, p)[1])
    mu = torch.from_numpy(np.array([p @ law for law in laws]))
    m = MomentModel(mu, torch.from_numpy(vectors)[None], torch.from_numpy(values)[None], torch.full((3,), 1 / 3), 0.0)
    x = np.random.default_rng(seed + 1).uniform(-1.5, 1.5, (8, d))

    def error(y):
        def gap(t):
            exact = (summed(laws[y], p, x, t) - x) / (1 - t)
            return m.velocity(torch.from_numpy(x), at(t, 8), torch.full((8,), y)).numpy() - exact

        return gap

    assert min(order(error(0)), order(error(1))) > 1.7  # more for a law without a third moment
    assert order(error(2)) == pytest.approx(1, abs=0.3)


# Groenwall


def distance(A: np.ndarray, push, start: np.ndarray, tau: float, steps: int = 2000) -> float:
    """How far x' = A x + push(t) is from x' = A x at tau, by Euler from the same starts."""
    x, exact = start.copy(), start.copy()
    for k in range(steps):
        x = x + tau / steps * (x @ A.T + push(k * tau / steps))
        exact = exact + tau / steps * (exact @ A.T)
    return float(np.linalg.norm(x - exact, axis=1).max())


def bound(L: float, delta, tau: float) -> float:
    """The drift that a horizon with this slope and these gaps reports."""
    t = torch.linspace(0, 0.95, 400)
    return Horizon(t, t, t, torch.tensor([delta(float(s)) for s in t]), L, tau, tau).drift


@settings(max_examples=20)
@given(seed=seeds, d=st.integers(1, 4), tau=st.floats(0.1, 0.9))
def test_two_linear_flows_stay_within_the_drift_bound(seed, d, tau):
    """v* = A x has L = ||A||_2, and v_bar = A x + e(t) has delta(t) = |e(t)|, exactly."""
    rng = np.random.default_rng(seed)
    A, e, omega = rng.standard_normal((d, d)), rng.standard_normal(d), rng.uniform(0, 8)

    def push(t):
        return e * (1.5 + np.sin(omega * t))

    found = distance(A, push, rng.standard_normal((4, d)), tau, steps=400)
    assert found <= 1.001 * bound(float(np.linalg.norm(A, 2)), lambda t: float(np.linalg.norm(push(t))), tau)


def test_the_drift_bound_is_reached_and_is_of_the_stated_form():
    """Where the flow stretches along the error: (e^{L tau} - 1) / L delta. A smaller slope or gap is no bound."""
    L, tau, delta = 3.0, 0.73, 0.2
    found = distance(np.diag([L, 0.0]), lambda t: np.array([delta, 0.0]), np.ones((1, 2)), tau)
    assert found == pytest.approx(delta * np.expm1(L * tau) / L, rel=5e-3)
    assert bound(L, lambda t: delta, tau) == pytest.approx(delta * np.expm1(L * tau) / L, rel=1e-4)
    assert found > bound(0.95 * L, lambda t: delta, tau)
    assert found > bound(L, lambda t: 0.95 * delta, tau)


# a thousand classes in single precision


def crowd(d: int, own: bool, apart: bool) -> MomentModel:
    """1,000 classes of rank 4, with means of norm 30 or all at one place; class 7 has next to no weight."""
    g = keyed(d)
    mu = torch.randn(1000 if apart else 1, d, generator=g).expand(1000, -1)
    mu = 30 * mu / mu.norm(dim=1, keepdim=True)
    Q = orthonormal(1, d, 4, g).float()
    V = Q[0, torch.rand(1000, d, generator=g).argsort(dim=1)] if own else Q  # rows in another order stay orthonormal
    prior = 0.5 + torch.rand(1000, generator=g)
    prior[7] = 1e-30
    return MomentModel(mu, V, torch.rand(len(V), 4, generator=g), prior / prior.sum(), 1e-2)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("d", [64, 784])
def test_a_thousand_responsibilities_are_probabilities_at_every_time(d, own, apart):
    m, g = crowd(d, own, apart), keyed(1)
    y = torch.randint(1000, (256,), generator=g)
    xi = torch.randn(256, d, generator=g)
    for t in (0.0, 1e-7, 0.5, 1 - 1e-6, 1.0):
        x, times = t * m.mu[y] + (1 - t) * xi, at(t, 256, torch.float32)
        w = m.responsibilities(x, times)
        assert bool(torch.isfinite(w).all())
        assert bool((w >= 0).all())
        torch.testing.assert_close(w.sum(dim=1), torch.ones(256), rtol=0, atol=1e-5)
        if t == 0.0 or not (apart or own):  # nothing tells the classes apart
            torch.testing.assert_close(w, m.prior.expand(256, -1), rtol=1e-5, atol=1e-6)
        if t >= 0.5 and apart:
            torch.testing.assert_close(w[torch.arange(256), y], torch.ones(256), rtol=0, atol=1e-3)
        if t < 1:
            assert bool(torch.isfinite(m.mixture_velocity(x, times)).all())


def test_a_class_with_next_to_no_prior_is_still_found_where_only_it_can_be():
    m = crowd(64, own=False, apart=True)
    w = m.responsibilities(0.9 * m.mu[7:8], at(0.9, 1, torch.float32))
    assert float(w[0, 7]) == pytest.approx(1)
