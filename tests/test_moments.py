"""The moment release and its analytic field, against dense Gaussian algebra, enumeration and Monte Carlo."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from torch import Tensor

from moment_oracles import OpenVault, at, keyed
from straightdp.errors import BadInput
from straightdp.flow.loss import squared_error
from straightdp.flow.path import velocity_from_z
from straightdp.flow.sampler import euler
from straightdp.moments import statistics
from straightdp.moments.basis import Basis, fit_basis
from straightdp.moments.covariance import denoise_pooled, per_class, project_psd
from straightdp.moments.distill import distill_batch
from straightdp.moments.field import MomentModel
from straightdp.moments.release import COVARIANCE, MEANS, TRACE, class_means, release_parts, run_release
from straightdp.nets.mmdit import MMDiT
from straightdp.recipe import Distill, Net, Privacy, Recipe, Release


def orthonormal(d: int, r: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(d, r, generator=generator, dtype=torch.float64))[0]


def model(Y=3, d=6, r=2, *, shared=False, floor=0.05, seed=0, spread=1.0) -> MomentModel:
    """A model in float64, so that algebra can be compared to the last digits."""
    generator = keyed(seed)
    tables = 1 if shared else Y
    mu = spread * torch.randn(Y, d, generator=generator, dtype=torch.float64)
    V = torch.stack([orthonormal(d, r, generator) for _ in range(tables)])
    lam = 0.1 + 2 * torch.rand(tables, r, generator=generator, dtype=torch.float64)
    prior = 0.1 + torch.rand(Y, generator=generator, dtype=torch.float64)
    return MomentModel(mu, V, lam, prior / prior.sum(), floor)


def dense(m: MomentModel, y: int) -> tuple[np.ndarray, np.ndarray]:
    """(mu_y, Sigma_y), d x d."""
    V, lam = m.V[y % len(m.V)].double().numpy(), m.lam[y % len(m.lam)].double().numpy()
    return m.mu[y].double().numpy(), V @ np.diag(lam) @ V.T + m.floor * np.eye(len(V))


def points(d: int, n=7, seed=5) -> Tensor:
    return torch.randn(n, d, generator=keyed(seed), dtype=torch.float64)


# Proposition 1


@pytest.mark.parametrize("t", [0.0, 1e-6, 0.2, 0.5, 0.9, 1 - 1e-6])
@pytest.mark.parametrize("shared", [False, True])
def test_posterior_mean_is_dense_gaussian_conditioning(t, shared):
    """From the joint covariance of (z, x_t), itself from the covariance of (z, xi)."""
    m, x = model(shared=shared), points(6)
    for y in range(3):
        mu, Sigma = dense(m, y)
        map_ = np.block([[np.eye(6), np.zeros((6, 6))], [t * np.eye(6), (1 - t) * np.eye(6)]])
        joint = map_ @ np.block([[Sigma, np.zeros((6, 6))], [np.zeros((6, 6)), np.eye(6)]]) @ map_.T
        gain = joint[:6, 6:] @ np.linalg.inv(joint[6:, 6:])
        expected = mu + (x.numpy() - t * mu) @ gain.T
        found = m.posterior_mean(x, at(t, 7), torch.full((7,), y))
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-8, atol=1e-8)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 8), st.integers(1, 8), st.floats(0, 0.99), st.floats(1e-4, 2))
def test_conditional_velocity_is_the_mean_of_z_minus_xi(seed, d, r, t, floor):
    """E[z - xi | x_t] by regressing v on x_t: Cov(v, x_t) = t Sigma - (1 - t) I. No detour over E[z | x_t]."""
    m, x = model(2, d, min(r, d), floor=floor, seed=seed), points(d, seed=seed)
    mu, Sigma = dense(m, 1)
    A = t**2 * Sigma + (1 - t) ** 2 * np.eye(d)
    expected = mu + (x.numpy() - t * mu) @ np.linalg.solve(A, t * Sigma - (1 - t) * np.eye(d))
    found = m.velocity(x, at(t, 7), torch.ones(7, dtype=torch.int64))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)


def dense_weights(m: MomentModel, x: Tensor, t: float) -> np.ndarray:
    logs = []
    for y in range(len(m.mu)):
        mu, Sigma = dense(m, y)
        A = t**2 * Sigma + (1 - t) ** 2 * np.eye(len(mu))
        log = multivariate_normal(t * mu, A).logpdf(x.double().numpy())
        logs.append(np.log(float(m.prior[y])) + np.atleast_1d(log))
    return np.exp(np.array(logs) - logsumexp(np.array(logs), axis=0)).T


@pytest.mark.parametrize("t", [0.0, 1e-6, 0.3, 0.8, 1 - 1e-6])
@pytest.mark.parametrize("shared", [False, True])
def test_mixture_velocity_is_dense_bayes(t, shared):
    m, x = model(4, 5, 2, shared=shared, spread=0.4), points(5)
    weights = dense_weights(m, x, t)
    np.testing.assert_allclose(m.responsibilities(x, at(t, 7)).numpy(), weights, rtol=1e-6, atol=1e-9)
    expected = np.zeros((7, 5))
    for y in range(4):
        mu, Sigma = dense(m, y)
        A = t**2 * Sigma + (1 - t) ** 2 * np.eye(5)
        expected += weights[:, y : y + 1] * (
            mu + (x.numpy() - t * mu) @ np.linalg.solve(A, t * Sigma - (1 - t) * np.eye(5))
        )
    np.testing.assert_allclose(m.mixture_velocity(x, at(t, 7)).numpy(), expected, rtol=1e-5, atol=1e-5)


def test_pictures_and_rows_have_the_same_field():
    m, x = model(3, 12, 4), points(12)
    t, y = torch.linspace(0, 0.9, 7, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    picture = x.reshape(7, 3, 2, 2)
    assert torch.equal(m.velocity(picture, t, y), m.velocity(x, t, y).reshape(7, 3, 2, 2))
    assert torch.equal(m.mixture_velocity(picture, t), m.mixture_velocity(x, t).reshape(7, 3, 2, 2))
    for i in range(7):  # each row at its own time, with its own class
        one = m.velocity(x[i : i + 1], t[i : i + 1], y[i : i + 1])
        torch.testing.assert_close(one, m.velocity(x, t, y)[i : i + 1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("t", [0.0, 1e-6, 0.5, 1 - 1e-6])
def test_responsibilities_in_single_precision(t):
    """What a run uses: float32, many dimensions."""
    m = model(10, 64, 16, seed=2, spread=0.15)
    single = MomentModel(m.mu.float(), m.V.float(), m.lam.float(), m.prior.float(), m.floor)
    z = m.sample(torch.arange(20) % 10, keyed(0))
    x = t * z + (1 - t) * points(64, 20)
    found = single.responsibilities(x.float(), at(t, 20, torch.float32))
    torch.testing.assert_close(found.sum(dim=1), torch.ones(20), rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.numpy(), dense_weights(m, x, t), atol=2e-3)


@pytest.mark.parametrize("t", [0.0, 1e-6, 0.4, 1 - 1e-6])
def test_a_thousand_classes(t):
    m, x = model(1000, 3, 2, shared=True, floor=0.2), points(3, 4)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-4)):
        typed = MomentModel(m.mu.to(dtype), m.V.to(dtype), m.lam.to(dtype), m.prior.to(dtype), m.floor)
        found = typed.responsibilities(x.to(dtype), at(t, 4, dtype))
        assert found.shape == (4, 1000)
        assert bool(torch.isfinite(found).all())
        np.testing.assert_allclose(found.sum(dim=1).numpy(), 1, atol=1e-5)
        np.testing.assert_allclose(found.numpy(), dense_weights(m, x, t), atol=tolerance)


@pytest.mark.parametrize("t", [0.0, 1e-6, 0.5, 1 - 1e-6])
@pytest.mark.parametrize("distance", [1e3, 1e8])
def test_classes_that_are_hugely_apart(t, distance):
    mu = torch.tensor([[0.0, 0.0], [distance, 0.0], [0.0, -distance]])
    m = MomentModel(mu, torch.eye(2)[None, :, :1], torch.ones(1, 1), torch.tensor([0.5, 0.3, 0.2]), 0.01)
    found = m.responsibilities(t * mu + 0.1, at(t, 3, torch.float32))
    assert bool(torch.isfinite(found).all())
    torch.testing.assert_close(found.sum(dim=1), torch.ones(3))
    if t >= 0.5:
        torch.testing.assert_close(found, torch.eye(3))
    if t == 0:
        torch.testing.assert_close(found, m.prior.expand(3, -1))
    assert bool(torch.isfinite(m.mixture_velocity(t * mu, at(t, 3, torch.float32))).all())


@pytest.mark.parametrize("t", [0.0, 1e-7])
def test_the_noise_end_is_the_class_mean_minus_x(t):
    m, x = model(), points(6)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    torch.testing.assert_close(m.velocity(x, at(t, 7), y), m.mu[y] - x, rtol=0, atol=1e-5)
    overall = (m.prior[:, None] * m.mu).sum(dim=0)
    torch.testing.assert_close(m.mixture_velocity(x, at(t, 7)), overall - x, rtol=0, atol=1e-5)


# Corollary 1

LAW_Z = np.array([[1.0, 0.0], [-0.6, 0.9], [0.2, -1.1], [0.5, 0.7]])
LAW_P = np.array([0.45, 0.3, 0.15, 0.1])


def law_moments(stretch=1.0) -> MomentModel:
    mu = LAW_P @ LAW_Z
    Sigma = stretch * ((LAW_Z - mu).T @ np.diag(LAW_P) @ (LAW_Z - mu))
    values, vectors = np.linalg.eigh(Sigma)
    floor = 1e-3
    return MomentModel(
        torch.from_numpy(mu)[None],
        torch.from_numpy(vectors)[None],
        torch.from_numpy(values - floor)[None],
        torch.ones(1, dtype=torch.float64),
        floor,
    )


def enumerated_mean(x: np.ndarray, t: float) -> np.ndarray:
    """E[z | x_t = x] of the four-point law: every point weighed by its likelihood."""
    found = []
    for row in x:
        off = [row - t * z for z in LAW_Z]
        weights = [p * math.exp(-(u @ u) / (2 * (1 - t) ** 2)) for u, p in zip(off, LAW_P, strict=True)]
        found.append(sum(w * z for w, z in zip(weights, LAW_Z, strict=True)) / sum(weights))
    return np.array(found)


def first_order_errors(stretch: float, quantity: str) -> list[float]:
    m, x = law_moments(stretch), points(2, 5)
    y = torch.zeros(5, dtype=torch.int64)
    errors = []
    for t in (4e-3, 2e-3, 1e-3, 5e-4):
        exact = torch.from_numpy(enumerated_mean(x.numpy(), t))
        if quantity == "mean":
            errors.append(float((m.posterior_mean(x, at(t, 5), y) - exact).norm()))
        else:
            errors.append(float((m.velocity(x, at(t, 5), y) - velocity_from_z(exact, x, at(t, 5))).norm()))
    return errors


@pytest.mark.parametrize("quantity", ["mean", "velocity"])
def test_the_leading_order_is_distribution_free(quantity):
    """A bounded law that is not Gaussian: halving t quarters the error. A wrong covariance only halves it."""
    right = first_order_errors(1.0, quantity)
    assert right[0] < 1e-3
    assert [a / b for a, b in itertools.pairwise(right)] == pytest.approx([4, 4, 4], rel=0.05)
    for stretch in (2 / 3, 1.5):
        wrong = first_order_errors(stretch, quantity)
        assert [a / b for a, b in itertools.pairwise(wrong)] == pytest.approx([2, 2, 2], rel=0.05)


def test_the_velocity_has_the_corollarys_first_order_term():
    m, x = law_moments(), points(2, 5)
    mu, Sigma = dense(m, 0)

    def error(t):
        expansion = (mu - x.numpy()) + t * (mu - x.numpy() + x.numpy() @ Sigma)
        return np.linalg.norm(m.velocity(x, at(t, 5), torch.zeros(5, dtype=torch.int64)).numpy() - expansion)

    assert error(2e-3) / error(1e-3) == pytest.approx(4, rel=0.05)


# the field transports noise to the release


def euler_image(m: MomentModel, y: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of Euler's result from N(0, I), exactly: the map is affine, so d + 1 points tell it."""
    d = m.mu.shape[1]
    start = torch.cat([torch.zeros(1, d, dtype=torch.float64), torch.eye(d, dtype=torch.float64)])
    label = torch.full((d + 1,), y)
    end = euler(lambda x, t: m.velocity(x, t, label), start, steps).numpy()
    columns = (end[1:] - end[0]).T
    return end[0], columns @ columns.T


def test_the_analytic_field_transports_noise_to_the_released_gaussian():
    m = model(2, 5, 3)
    for y in range(2):
        mu, Sigma = dense(m, y)
        errors = []
        for steps in (400, 800):
            mean, covariance = euler_image(m, y, steps)
            np.testing.assert_allclose(mean, mu, atol=1e-2)
            np.testing.assert_allclose(covariance, Sigma, atol=4e-2)
            errors.append(np.linalg.norm(covariance - Sigma))
        assert errors[0] / errors[1] == pytest.approx(2, rel=0.15)  # first order, and to the right place


def test_the_mixture_field_transports_noise_to_the_mixture():
    m = MomentModel(
        torch.tensor([[2.0, 0.0], [-1.0, 1.5]]),
        torch.eye(2)[None, :, :1],
        torch.tensor([[0.5]]),
        torch.tensor([0.3, 0.7]),
        0.1,
    )
    x = euler(m.mixture_velocity, torch.randn(8000, 2, generator=keyed(0)), 150)
    near_first = (x - m.mu[0]).norm(dim=1) < (x - m.mu[1]).norm(dim=1)
    assert float(near_first.float().mean()) == pytest.approx(0.3, abs=0.03)
    for chosen, y in ((near_first, 0), (~near_first, 1)):
        mu, Sigma = dense(m, y)
        np.testing.assert_allclose(x[chosen].mean(dim=0).numpy(), mu, atol=0.06)
        np.testing.assert_allclose(np.cov(x[chosen].numpy().T), Sigma, atol=0.08)


# draws


def covariance_fits(draws: Tensor, Sigma: np.ndarray) -> bool:
    """Every entry of the sample covariance within 5.5 of its own standard errors (Gaussian fourth moments)."""
    error = np.cov(draws.double().numpy().T) - Sigma
    scale = np.sqrt((Sigma**2 + np.outer(np.diag(Sigma), np.diag(Sigma))) / len(draws))
    return bool((np.abs(error) < 5.5 * scale).all())


def mean_fits(draws: Tensor, mu: np.ndarray, Sigma: np.ndarray) -> bool:
    error = np.abs(draws.double().mean(dim=0).numpy() - mu)
    return bool((error < 5.5 * np.sqrt(np.diag(Sigma) / len(draws))).all())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("t0", [None, 0.0, 0.4])
def test_draws_have_the_moments_they_should(shared, t0):
    """t0 None: z of the release. Else the tilted start. The same test rejects a scale off by half and a wrong mean."""
    m = model(2, 4, 2, shared=shared, floor=0.3)
    m = MomentModel(m.mu.float(), m.V.float(), m.lam.float(), m.prior.float(), m.floor)
    y = torch.arange(40_000) % 2
    draws = m.sample(y, keyed(1)) if t0 is None else m.tilted_start(y, t0, keyed(1))
    assert draws.shape == (40_000, 4)
    for label in range(2):
        mu, Sigma = dense(m, label)
        if t0 is not None:
            mu, Sigma = t0 * mu, t0**2 * Sigma + (1 - t0) ** 2 * np.eye(4)
        mine = draws[y == label]
        assert mean_fits(mine, mu, Sigma)
        assert covariance_fits(mine, Sigma)
        assert not covariance_fits(mine, 1.5 * Sigma)
        assert not covariance_fits(mine, 2 / 3 * Sigma)
        assert not mean_fits(mine, mu + 0.1, Sigma)
        assert abs(np.corrcoef(mine[:-1, 0], mine[1:, 0])[0, 1]) < 0.05  # rows are independent


def test_draws_are_keyed():
    m = model()
    y = torch.tensor([0, 1, 2])
    assert torch.equal(m.sample(y, keyed(3)), m.sample(y, keyed(3)))
    assert not torch.equal(m.sample(y, keyed(3)), m.sample(y, keyed(4)))


# building and keeping a model


@pytest.mark.parametrize("rank", [1, 3, 50])
def test_outside_the_rank_there_is_the_floor(rank):
    generator = keyed(0)
    basis = Basis(torch.zeros(9).double(), orthonormal(9, 5, generator).T, 1.0, 1.0, 1.0, 1.0)
    spectra = np.array([[3.0, 2.0, 1.0, 0.5, 0.004], [9.0, 0.3, 0.2, 0.05, 0.0]])
    turns = [orthonormal(5, 5, generator) for _ in range(2)]
    covariance = torch.stack([q @ torch.diag(torch.from_numpy(s)) @ q.T for q, s in zip(turns, spectra, strict=True)])
    means, counts = torch.randn(2, 5, generator=generator, dtype=torch.float64), torch.tensor([30.0, 10.0]).double()
    m = MomentModel.from_features(basis, means, covariance, counts, rank, floor=0.01)
    np.testing.assert_allclose(m.prior, [0.75, 0.25])
    np.testing.assert_allclose(m.mu, (means @ basis.P).numpy(), atol=1e-6)
    for y in range(2):
        kept = np.maximum(spectra[y][: min(rank, 5)], 0.01)
        expected = np.sort(np.concatenate([kept, np.full(9 - len(kept), 0.01)]))
        np.testing.assert_allclose(np.linalg.eigvalsh(dense(m, y)[1]), expected, atol=1e-5)
        # along the kept directions it is the matrix it was built from
        best = turns[y][:, 0].numpy() @ basis.P.numpy()
        np.testing.assert_allclose(dense(m, y)[1] @ best, spectra[y][0] * best, atol=1e-5)


def test_a_full_covariance_is_cut_to_its_rank_and_made_psd():
    basis = Basis(torch.ones(4).double(), torch.eye(4).double()[:2], 1.0, 1.0, 1.0, 1.0)
    q = orthonormal(4, 4, keyed(3))
    whole = q @ torch.diag(torch.tensor([-5.0, 0.2, 1.0, 4.0]).double()) @ q.T
    m = MomentModel.from_full(basis, torch.zeros(3, 2).double(), whole, torch.ones(3).double(), 2, 0.1)
    np.testing.assert_allclose(np.linalg.eigvalsh(dense(m, 2)[1]), [0.1, 0.1, 1.0, 4.0], atol=1e-5)
    np.testing.assert_allclose(m.mu, np.ones((3, 4)))


@pytest.mark.parametrize("floor", [1e-2, 0.1 + 0.2, 1e-300, 3.0])
@pytest.mark.parametrize("shared", [False, True])
def test_a_model_comes_back_from_disk_to_the_bit(tmp_path, floor, shared):
    m = model(shared=shared, floor=floor)
    m = MomentModel(m.mu.float(), m.V.float(), m.lam.float(), m.prior.float(), floor)
    m.save(tmp_path / "m.safetensors")
    again = MomentModel.load(tmp_path / "m.safetensors")
    assert again.floor == floor
    for name in ("mu", "V", "lam", "prior"):
        assert torch.equal(getattr(again, name), getattr(m, name))


def test_a_built_model_can_be_saved(tmp_path):
    """Slices and transposes of the algebra must not reach the file as strided views."""
    basis = Basis(torch.zeros(6).double(), torch.eye(6).double()[:4], 1.0, 1.0, 1.0, 1.0)
    for make, covariance in ((MomentModel.from_features, torch.eye(4)[None]), (MomentModel.from_full, torch.eye(6))):
        m = make(basis, torch.randn(2, 4).double(), covariance.double(), torch.ones(2).double(), 3, 0.01)
        m.save(tmp_path / "m.safetensors")
        assert torch.equal(MomentModel.load(tmp_path / "m.safetensors").V, m.V)


# the public basis


def public_set(n=60, d=8, seed=0):
    generator = keyed(seed)
    labels = torch.randint(3, (n,), generator=generator)
    z = (
        torch.randn(n, d, generator=generator) * torch.linspace(2, 0.1, d)
        + torch.randn(3, d, generator=generator)[labels]
    )
    return z, labels


def order_statistics(norms: list[float], level: float) -> tuple[float, float]:
    """The two neighbours between which a `level` quantile lies."""
    ranked = sorted(norms)
    below = math.floor(level * (len(ranked) - 1))
    return ranked[below], ranked[min(below + 1, len(ranked) - 1)]


def test_the_basis_is_orthonormal_and_the_principal_one():
    z, labels = public_set()
    basis = fit_basis(z, labels, Release(features=3))
    np.testing.assert_allclose(basis.P @ basis.P.T, np.eye(3), atol=1e-8)  # P is rounded to a fine grid
    centred = z.double().numpy() - z.double().numpy().mean(axis=0)
    best = np.linalg.svd(centred)[2][:3]  # another route to the same subspace
    np.testing.assert_allclose(basis.P.T @ basis.P, best.T @ best, atol=1e-8)
    np.testing.assert_allclose(basis.mean, z.double().numpy().mean(axis=0), atol=1e-12)
    variances = basis.features(z.double()).var(dim=0)
    assert bool((variances[:-1] >= variances[1:]).all())


@settings(deadline=None, max_examples=20)
@given(st.floats(0.01, 1), st.floats(0.01, 1), st.integers(0, 50))
def test_radii_are_the_quantiles_they_are_called(level, residual_level, seed):
    z, labels = public_set(seed=seed)
    section = Release(features=4, radius_quantile=level, residual_quantile=residual_level)
    basis = fit_basis(z.reshape(60, 2, 2, 2), labels, section)
    mean = np.mean(z.double().numpy(), axis=0)
    f = [basis.P.numpy() @ (row - mean) for row in z.double().numpy()]
    centres = {
        y: np.mean([u for u, label in zip(f, labels.tolist(), strict=True) if label == y], axis=0) for y in range(3)
    }
    residuals = [np.linalg.norm(u - centres[y]) for u, y in zip(f, labels.tolist(), strict=True)]
    for found, norms, at_level in (
        (basis.radius, [np.linalg.norm(u) for u in f], level),
        (basis.image_radius, [np.linalg.norm(row - mean) for row in z.double().numpy()], level),
        (basis.residual_radius, residuals, residual_level),
        (basis.widest_residual, residuals, 0.99),
    ):
        low, high = order_statistics(norms, at_level)
        assert low - 1e-9 <= found <= high + 1e-9


def test_features_and_lift_undo_each_other():
    """To within the grid on which records are read, 2^-16."""
    z, labels = public_set()
    basis, near = fit_basis(z, labels, Release(features=3)), 8**0.5 * 2.0**-16
    f = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(basis.features(basis.lift(f)), f, rtol=0, atol=near)
    once = basis.lift(basis.features(z.double()))
    torch.testing.assert_close(basis.lift(basis.features(once)), once, rtol=0, atol=near)
    assert float((once - z.double()).abs().max()) > 0.1  # a projection, not the identity
    whole = fit_basis(z, labels, Release(features=8))
    torch.testing.assert_close(whole.lift(whole.features(z.double())), z.double(), rtol=0, atol=near)


def test_features_are_the_slow_inner_products():
    z, labels = public_set()
    basis = fit_basis(z, labels, Release(features=4))
    slow = [
        [sum(p * (v - m) for p, v, m in zip(row, x, basis.mean, strict=True)) for row in basis.P] for x in z.double()
    ]
    np.testing.assert_allclose(basis.features(z.double()), slow, atol=8**0.5 * 2.0**-16)


@pytest.mark.parametrize("d", [4, 64, 784])
def test_a_records_features_do_not_depend_on_its_neighbours(d):
    """To the bit, in any batch and order, for records in [-1, 1]: or one record could move another's rounding."""
    generator = keyed(d)
    pixels = torch.randint(0, 256, (900, d), generator=generator).double() / 127.5 - 1
    pixels[:2] = torch.tensor([[1.0], [-1.0]])
    basis = fit_basis(pixels, torch.zeros(900, dtype=torch.int64), Release(features=4))
    together = basis.features(pixels)
    alone = torch.cat([basis.features(row[None]) for row in pixels[:40]])
    assert torch.equal(alone, together[:40])
    order = torch.randperm(900, generator=generator)
    for size in (7, 64, 333):
        parts = torch.cat([basis.features(pixels[rows]) for rows in order.split(size)])
        assert torch.equal(parts, together[order])
    padded = torch.cat([torch.zeros(1, d).double(), pixels])
    assert torch.equal(basis.features(padded)[1:], together)


def test_a_basis_that_cannot_be_is_refused():
    z, labels = public_set(n=8)
    for features in (8, 9):
        with pytest.raises(BadInput, match=r"release\.features"):
            fit_basis(z, labels, Release(features=features))
    z, labels = public_set(n=20)
    with pytest.raises(BadInput, match="8 values"):
        fit_basis(z, labels, Release(features=9))
    alike = fit_basis(torch.zeros(20, 4), torch.zeros(20, dtype=torch.int64), Release(features=2))
    assert min(alike.radius, alike.residual_radius, alike.widest_residual, alike.image_radius) > 0


# means from noisy sums

PLAIN = Basis(torch.zeros(3).double(), torch.eye(3).double()[:2], 5.0, 4.0, 8.0, 5.0)


def whitened(counts, sums) -> Tensor:
    """(n_y, S_y / 2R) as the mechanism gives it out."""
    return torch.cat([torch.tensor(counts).double()[:, None], torch.tensor(sums).double() / (2 * PLAIN.radius)], dim=1)


@pytest.mark.parametrize("shrink", [False, True])
def test_without_noise_the_class_means_are_exact(shrink):
    found = class_means(whitened([40, 100, 25], [[40, -80], [100, 0], [0, 75]]), PLAIN, Release(), 0.0, shrink=shrink)
    np.testing.assert_allclose(found.counts, [40, 100, 25])
    np.testing.assert_allclose(found.features, [[1, -2], [1, 0], [0, 3]], atol=1e-12)


@pytest.mark.parametrize("shrink", [False, True])
def test_a_small_class_takes_the_global_mean_and_no_count_is_below_one(shrink):
    noisy = whitened([60.0, 40.0, -7.0, 19.9], [[60, 0], [0, 80], [3, -3], [1000, 1000]])
    found = class_means(noisy, PLAIN, Release(min_count=20), 0.0, shrink=shrink)
    np.testing.assert_allclose(found.counts, [60, 40, 1, 19.9])
    overall = np.array([60 + 0 + 3 + 1000, 0 + 80 - 3 + 1000]) / (60 + 40 + 1 + 19.9)
    np.testing.assert_allclose(found.features, [[1, 0], [0, 2], overall, overall], atol=1e-12)


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("std", [0.0, 30.0])
def test_all_classes_small(shrink, std):
    noisy = whitened([3.0, -40.0, 0.0], [[3, 6], [1, 1], [1, 3]])
    found = class_means(noisy, PLAIN, Release(), std, shrink=shrink)
    np.testing.assert_allclose(found.counts, [3, 1, 1])
    np.testing.assert_allclose(found.features, [[1, 2]] * 3, atol=1e-12)


def test_shrinkage_brings_noisy_means_nearer_to_the_truth():
    """Classes apart along one feature only, with heavy noise: the other feature goes back to the global mean."""
    rng = np.random.default_rng(0)
    truth = np.stack([np.linspace(-4, 4, 10), np.zeros(10)], axis=1)
    worse = better = 0.0
    for _ in range(200):
        noise = 6.0 * rng.standard_normal((10, 3))
        noisy = whitened(np.full(10, 50.0), 50 * truth) + torch.from_numpy(noise)
        kept = [class_means(noisy, PLAIN, Release(min_count=1), 6.0, shrink=s).features.numpy() for s in (False, True)]
        worse += ((kept[0] - truth) ** 2)[:, 1].mean()
        better += ((kept[1] - truth) ** 2)[:, 1].mean()
        assert ((kept[1] - truth) ** 2)[:, 0].mean() < 4 * ((kept[0] - truth) ** 2)[:, 0].mean() + 0.5
    assert better < 0.5 * worse


# covariances from noisy sums


def symmetric(seed, p, n=1):
    a = torch.randn(n, p, p, generator=keyed(seed), dtype=torch.float64)
    return a + a.mT


@pytest.mark.parametrize("floor", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(6))
def test_project_psd_is_the_nearest_by_brute_force(seed, floor):
    """All 2 x 2 matrices with eigenvalues from `floor` up are L L^T + floor I: search over L."""
    asked = torch.randn(2, 2, generator=keyed(seed), dtype=torch.float64)
    mine = project_psd(asked, floor).numpy()
    assert np.linalg.eigvalsh(mine).min() >= floor - 1e-12

    def distance(l):
        L = np.array([[l[0], 0], [l[1], l[2]]])
        return ((L @ L.T + floor * np.eye(2) - asked.numpy()) ** 2).sum()

    rng = np.random.default_rng(seed)
    found = min(minimize(distance, rng.standard_normal(3), tol=1e-12).fun for _ in range(6))
    assert ((mine - asked.numpy()) ** 2).sum() == pytest.approx(found, abs=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 6), st.floats(0, 2))
def test_project_psd_is_idempotent_and_leaves_good_matrices_alone(seed, p, floor):
    once = project_psd(symmetric(seed, p, 3), floor)
    torch.testing.assert_close(project_psd(once, floor), once, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(once, once.mT, rtol=1e-9, atol=1e-9)
    good = symmetric(seed, p) @ symmetric(seed, p) + (floor + 0.1) * torch.eye(p, dtype=torch.float64)
    torch.testing.assert_close(project_psd(good, floor), good, rtol=1e-9, atol=1e-9)


def symmetric_noise(std: float, p: int, rng: np.random.Generator, n=1) -> np.ndarray:
    """As the mechanism adds it: `std` on the diagonal, std / sqrt 2 on each pair of entries off it."""
    upper = np.triu(rng.standard_normal((n, p, p)) * std / math.sqrt(2), k=1)
    diagonal = rng.standard_normal((n, p)) * std
    return upper + upper.transpose(0, 2, 1) + np.einsum("ni,ij->nij", diagonal, np.eye(p))


def test_the_noise_edge_is_where_noise_ends():
    rng, p, std = np.random.default_rng(0), 150, 0.7
    tops = [np.linalg.eigvalsh(symmetric_noise(std, p, rng)[0]).max() for _ in range(10)]
    noise = torch.from_numpy(symmetric_noise(std, p, rng)[0])
    # nothing but noise: all values are one value; at two thirds of the true deviation some would pass for signal
    assert len(denoise_pooled(noise, 1.03 * std, 1.0)[0].unique()) == 1
    assert len(denoise_pooled(noise, 2 / 3 * std, 1.0)[0].unique()) > 5
    # and the edge is no wider than it need be: a spike a little above the largest noise eigenvalue is seen
    spiked = noise.clone()
    spiked[0, 0] += 3 * max(tops)
    assert len(denoise_pooled(spiked, std, 1.0)[0].unique()) >= 2


def test_denoising_keeps_the_trace_of_what_is_below_the_edge():
    values = torch.tensor([9.0, 4.0, 0.3, 0.2, 0.1]).double()
    found, vectors = denoise_pooled(torch.diag(values), 0.1, 2.0)  # the edge is 0.316
    np.testing.assert_allclose(sorted(found.tolist()), [0.4, 0.4, 0.4, 8, 18], atol=1e-12)
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(5), atol=1e-12)
    sunk, _ = denoise_pooled(-torch.eye(3).double(), 0.1, 1.0)
    assert sunk.tolist() == [0, 0, 0]


def class_covariances(Y=4, p=5, seed=0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    roots = rng.standard_normal((Y, p, 2 * p)) / math.sqrt(2 * p)
    return roots @ roots.transpose(0, 2, 1) * rng.uniform(0.5, 3, (Y, 1, 1))


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_without_noise_every_class_gets_its_own_covariance(scale):
    truth, counts = class_covariances(), np.array([100.0, 300, 50, 20])
    found = per_class(torch.from_numpy(truth * counts[:, None, None]), torch.from_numpy(counts), 0.0, scale, 1e-6)
    np.testing.assert_allclose(found, scale * truth, atol=1e-8)


@pytest.mark.parametrize("std", [1.0, 30.0])
def test_classes_that_do_not_differ_beyond_the_noise_get_the_pooled_matrix(std):
    truth, counts = class_covariances(1)[0], np.full(12, 2000.0)
    rng = np.random.default_rng(1)
    wobble = 1 + 1e-5 * rng.standard_normal((12, 1, 1))
    found = per_class(torch.from_numpy(truth * wobble * 2000), torch.from_numpy(counts), std, 1.0, 1e-6).numpy()
    np.testing.assert_allclose(found, np.broadcast_to(found[0], found.shape), atol=1e-9)
    np.testing.assert_allclose(found[0], truth, atol=1e-3 if std == 1 else 0.06)  # the edge is 0.0005, or 0.014


def test_one_class_gets_the_pooled_matrix():
    truth = class_covariances(1)
    found = per_class(torch.from_numpy(truth * 100), torch.tensor([100.0]).double(), 0.1, 1.0, 1e-6).numpy()
    np.testing.assert_allclose(found, truth, atol=0.02)


def alike_classes(Y: int, p: int, n: float) -> tuple[np.ndarray, Tensor]:
    """Covariances of trace about 1 with a falling spectrum, each class's own by a fifth or so; n records each."""
    shape = np.diag(np.geomspace(1, 0.02, p) ** 0.5)
    shape = shape / np.sqrt(np.trace(shape @ shape))
    roots = np.random.default_rng(0).standard_normal((Y, p, 2 * p)) / math.sqrt(2 * p)
    return shape @ roots @ roots.transpose(0, 2, 1) @ shape, torch.full((Y,), n, dtype=torch.float64)


def squared_errors(truth: np.ndarray, counts: Tensor, std: float, rounds=5) -> tuple[float, float]:
    """Over fresh noise: of the estimate, and of the plain quotient moments / counts projected to PSD."""
    rng, n = np.random.default_rng(2), counts[:, None, None].numpy()
    mine = plain = 0.0
    for _ in range(rounds):
        noisy = torch.from_numpy(truth * n + symmetric_noise(std, truth.shape[1], rng, len(truth)))
        mine += ((per_class(noisy, counts, std, 1.0, 1e-4).numpy() - truth) ** 2).sum()
        plain += ((project_psd(noisy / counts[:, None, None]).numpy() - truth) ** 2).sum()
    return mine / rounds, plain / rounds


@pytest.mark.parametrize(("p", "n", "std"), [(32, 135.0, 1.0), (48, 6000.0, 10.0)])
def test_the_estimate_beats_both_extremes(p, n, std):
    """Where class differences and noise are of one size: better than each class alone and than the true average."""
    truth, counts = alike_classes(10, p, n)
    mine, alone = squared_errors(truth, counts, std)
    average = ((truth - truth.mean(axis=0)) ** 2).sum()
    assert mine < 0.85 * alone
    assert mine < 0.85 * average


@pytest.mark.parametrize("std", [0.3, 3.0, 30.0, 100.0])
def test_where_classes_differ_widely_little_is_lost(std):
    """The noise is small beside the differences, so there is nothing to win over the plain quotient."""
    truth, counts = class_covariances(8, 10), torch.full((8,), 200.0, dtype=torch.float64)
    mine, alone = squared_errors(truth, counts, std)
    assert mine < 1.05 * alone


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000),
    st.integers(1, 5),
    st.integers(1, 6),
    st.floats(0, 1e4),
    st.floats(1, 10),
    st.floats(1e-6, 1),
)
def test_what_comes_out_is_psd_and_finite_whatever_comes_in(seed, Y, p, std, scale, floor):
    moments = symmetric(seed, p, Y) * 10.0 ** (seed % 7 - 3)
    counts = 1 + 50 * torch.rand(Y, generator=keyed(seed), dtype=torch.float64)
    found = per_class(moments, counts, std, scale, floor)
    assert found.shape == (Y, p, p)
    largest = max(1.0, float(found.abs().max()))
    assert float(torch.linalg.eigvalsh(found).min()) >= floor - 1e-9 * largest


# the whole release, with a vault that adds no noise


def clusters(n=900, d=4, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.choice(3, size=n, p=[0.5, 0.3, 0.2])
    centres = rng.standard_normal((3, d))
    roots = rng.standard_normal((3, d, d)) * 0.4
    z = centres[y] + np.einsum("nij,nj->ni", roots[y], rng.standard_normal((n, d)))
    return torch.from_numpy(z), torch.from_numpy(y)


def wide_basis(residual_radius=30.0) -> Basis:
    turn = orthonormal(4, 4, keyed(9)).T.contiguous()
    return Basis(torch.full((4,), 0.2).double(), turn, 30.0, residual_radius, 30.0, 30.0)


def recipe_for(covariance: str, mode: str = "tight") -> Recipe:
    section = Release(features=4, covariance=covariance, rank=4, floor=1e-3, min_count=1)
    return Recipe(release=section, privacy=Privacy(mode=mode))


NO_NOISE = {MEANS: 0.0, COVARIANCE: 0.0, TRACE: 0.0}


@pytest.mark.parametrize(
    ("covariance", "mode", "asked"),
    [
        ("residual", "tight", [MEANS, COVARIANCE, TRACE]),
        ("shared", "tight", [MEANS, COVARIANCE]),
        ("shared", "paper", [MEANS, COVARIANCE]),
        ("residual", "paper", [MEANS, COVARIANCE]),
    ],
)
def test_a_release_without_noise_or_clipping_is_the_empirical_law(covariance, mode, asked):
    z, y = clusters()
    vault, recipe = OpenVault(z, y, 3), recipe_for(covariance, mode)
    m = run_release(recipe, wide_basis(), vault, NO_NOISE)
    assert vault.asked == asked == [part.id for part in release_parts(recipe)]
    groups = [z[y == k].numpy() for k in range(3)]
    own = [np.cov(g.T, bias=True) for g in groups]
    within = sum(len(g) * c for g, c in zip(groups, own, strict=True)) / len(z)
    np.testing.assert_allclose(m.prior, [len(g) / len(z) for g in groups], atol=1e-6)
    for k in range(3):
        mu, Sigma = dense(m, k)
        np.testing.assert_allclose(mu, groups[k].mean(axis=0), atol=1e-5)
        expected = own[k] if len(asked) == 3 else within
        np.testing.assert_allclose(Sigma, expected, atol=6e-3)  # records are rounded to a grid of 1/1,000


def test_the_trace_undoes_what_the_residual_clip_took():
    z, y = clusters()
    m = run_release(recipe_for("residual"), wide_basis(residual_radius=0.2), OpenVault(z, y, 3), NO_NOISE)
    distances = [float((z[y == k] - z[y == k].mean(dim=0)).square().sum(dim=1).mean()) for k in range(3)]
    true = sum(float(m.prior[k]) * distances[k] for k in range(3))
    found = sum(float(m.prior[k]) * np.trace(dense(m, k)[1]) for k in range(3))
    assert found == pytest.approx(true, rel=0.02)


def test_features_beyond_the_radius_are_clipped_record_by_record():
    """Proposition B.1's sums: every feature vector is shortened to R_feat before the sum, none is made longer."""
    z, y = clusters(200)
    z = torch.round(z * 2**16) / 2**16  # on the grid that records are read on
    basis = Basis(torch.zeros(4).double(), orthonormal(4, 3, keyed(1)).T, 0.8, 1.0, 1.0, 1.0)
    sums = np.zeros((3, 4))
    for row, label in zip(z.numpy(), y.tolist(), strict=True):
        f = basis.P.numpy() @ row
        sums[label] += [1, *(f * min(1.0, 0.8 / np.linalg.norm(f)) / 1.6)]
    statistic = statistics.class_moments(basis, 3)
    np.testing.assert_allclose(statistic.assemble(statistic.exact(z, y)), sums, atol=200 * statistic.grid * 2)


def test_what_a_release_declares():
    """Shares add up to the whole; the paper's constants are 2 and 2, exact ones sqrt(5/4) and 1."""
    for covariance, mode in (("residual", "tight"), ("shared", "tight"), ("shared", "paper")):
        parts = release_parts(recipe_for(covariance, mode))
        assert sum(part.part for part in parts) == pytest.approx(1)
        assert parts[0].part == pytest.approx(0.25)
        expected = [2.0, 2.0] if mode == "paper" else [math.sqrt(1.25), *([1.0] * (len(parts) - 1))]
        assert [part.sensitivity for part in parts] == pytest.approx(expected)
    assert release_parts(Recipe(release=Release(weight=0))) == ()
    assert len(release_parts(Recipe(release=Release(weight=0, sigma=3.0)))) == 3


# distillation

CAPTIONS = torch.tensor([[1, 2], [1, 3], [4, 1]])
NULL = torch.zeros(1, 2, dtype=torch.int64)


class AnalyticNet:
    """v for t <= tau is the release's own field; later it walks straight to one fixed picture."""

    def __init__(self, m: MomentModel, tau: float, picture: Tensor, null_by_class: bool = False):
        self.m, self.tau, self.picture, self.null_by_class = m, tau, picture, null_by_class
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, x, t, ids):
        self.seen.append((t, ids))
        out = []
        for i in range(len(x)):
            row, time = x[i : i + 1], t[i : i + 1]
            match = (ids[i] == CAPTIONS).all(dim=1).nonzero().flatten()
            if float(time) > self.tau:
                out.append(velocity_from_z(self.picture[None], row, time))
            elif len(match):
                out.append(self.m.velocity(row, time, match))
            elif self.null_by_class:
                out.append(self.m.velocity(row, time, torch.zeros(1, dtype=torch.int64)))
            else:
                out.append(self.m.mixture_velocity(row, time))
        return torch.cat(out)


def single(m: MomentModel) -> MomentModel:
    return MomentModel(m.mu.float(), m.V.float(), m.lam.float(), m.prior.float(), m.floor)


def distill_loss(net, m, public, captions, null, section, generator):
    """The loss that the distilling stage takes gradients of."""
    x, t, ids, target = distill_batch(m, public, captions, null, section, section.tau, generator)
    return squared_error(net(x, t, ids), target).mean()


@pytest.mark.parametrize(("replay", "p_uncond"), [(0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (0.5, 0.25)])
def test_a_net_that_is_the_analytic_field_has_no_loss(replay, p_uncond):
    """One public picture only, so that its straight field is known too and replay costs nothing either."""
    m, picture = single(model(3, 4, 2)), torch.tensor([[[0.3, -0.2], [0.9, 0.1]]])
    section = Distill(batch=64, tau=0.6, replay=replay, p_uncond=p_uncond)
    net = AnalyticNet(m, 0.6, picture)
    loss = distill_loss(net, m, picture.expand(5, 1, 2, 2), CAPTIONS, NULL, section, keyed(0))
    assert float(loss) == pytest.approx(0, abs=1e-6)
    if p_uncond and not replay:  # the null caption's target is the mixture's field, not a class's
        wrong = AnalyticNet(m, 0.6, picture, null_by_class=True)
        assert float(distill_loss(wrong, m, picture.expand(5, 1, 2, 2), CAPTIONS, NULL, section, keyed(0))) > 0.05


def test_a_release_that_moved_is_noticed():
    m, picture = single(model(3, 4, 2)), torch.zeros(1, 2, 2)
    moved = MomentModel(m.mu + 0.5, m.V, m.lam, m.prior, m.floor)
    section = Distill(batch=64, tau=0.5, replay=0.0)
    loss = distill_loss(
        AnalyticNet(moved, 0.5, picture), m, picture.expand(5, 1, 2, 2), CAPTIONS, NULL, section, keyed(0)
    )
    assert float(loss) > 0.05


def test_the_rows_of_a_batch():
    """How many of each kind, at which times, under which captions."""
    m, picture = single(model(3, 4, 2)), torch.zeros(1, 2, 2)
    section = Distill(batch=1000, tau=0.4, replay=0.3, p_uncond=0.2)
    net = AnalyticNet(m, 0.4, picture)
    distill_loss(net, m, picture.expand(5, 1, 2, 2), CAPTIONS, NULL, section, keyed(0))
    t, ids = net.seen[0]
    early, null = t <= 0.4, (ids == 0).all(dim=1)
    assert int(early.sum()) == 700
    assert int((early & null).sum()) == 140
    assert 100 < int((~early & null).sum()) < 200  # half of 300
    assert float(t[~early].mean()) == pytest.approx(0.7, abs=0.04)
    assert float(t[early].mean()) == pytest.approx(0.2, abs=0.03)
    for k in range(3):
        mine = (ids == CAPTIONS[k]).all(dim=1)
        share = float(m.prior[k])
        assert abs(int((early & mine).sum()) - 560 * share) < 5 * (560 * share * (1 - share)) ** 0.5
        assert 25 < int((~early & mine).sum()) < 75  # a third of the other half


def test_the_loss_of_a_real_net_is_finite_and_goes_down():
    torch.manual_seed(0)
    m, public = single(model(3, 16, 4, spread=0.5)), torch.randn(20, 1, 4, 4)
    section = Distill(batch=64)
    net = MMDiT(Net(width=16, depth=1, heads=2, patch=2, caption_width=8, caption_length=2, vocabulary=8), (1, 4, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    losses = []
    for step in range(60):
        loss = distill_loss(net, m, public, CAPTIONS, NULL, section, keyed(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.isfinite(losses).all()
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:5])


def test_a_batch_is_keyed_by_its_generator():
    m, public = single(model(3, 4, 2)), torch.randn(9, 1, 2, 2)
    net = AnalyticNet(m, 0.5, torch.zeros(1, 2, 2))
    first, again, other = (
        float(distill_loss(net, m, public, CAPTIONS, NULL, Distill(batch=32), keyed(s))) for s in (1, 1, 2)
    )
    assert first == again != other


def test_a_class_without_records_does_not_spoil_the_others():
    """Its count is clamped to 1, so its noise is huge: it takes the pooled matrix and is left out of the averages."""
    generator = torch.Generator().manual_seed(0)
    p, n, std = 8, 1000.0, 20.0
    truth = torch.stack([torch.diag(torch.linspace(1, 3, p, dtype=torch.float64) * (1 + y / 4)) for y in range(10)])
    noise = torch.randn(10, p, p, generator=generator, dtype=torch.float64) * std
    counts = torch.full((10,), n, dtype=torch.float64)
    sums = truth * n + (noise + noise.mT) / 2
    whole = per_class(sums[:9], counts[:9], std, 1.0, 1e-3, 20.0)
    counts[9] = 1.0
    sums[9] = (noise[9] + noise[9].mT) / 2
    spoilt = per_class(sums, counts, std, 1.0, 1e-3, 20.0)
    torch.testing.assert_close(spoilt[:9], whole, rtol=0, atol=0.15)
    assert float(spoilt[9].trace()) < 1.5 * float(truth[:9].mean(dim=0).trace())
