"""The public horizon against closed forms and slow loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from straightdp.moments.field import MomentModel
from straightdp.moments.horizon import EmpiricalField, bend, horizon, running_mean


def keyed(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=30)
@given(t=st.floats(0.0, 0.98), h=st.sampled_from([0.05, 0.3]), seed=st.integers(0, 50))
def test_the_empirical_posterior_is_bayes_rule_written_out(t, h, seed):
    g = keyed(seed)
    z, x = torch.randn(6, 3, generator=g, dtype=torch.float64), torch.randn(4, 3, generator=g, dtype=torch.float64)
    variance = (1 - t) ** 2 + (t * h) ** 2
    means = []
    for point in x:
        logs = torch.stack([-(point - t * c).square().sum() / (2 * variance) for c in z])
        w = (logs - logs.logsumexp(0)).exp()
        means.append(sum(wi * (c + t * h**2 / variance * (point - t * c)) for wi, c in zip(w, z, strict=True)))
    found = EmpiricalField(z, h).posterior(x, torch.full((4,), t, dtype=torch.float64))[1]
    torch.testing.assert_close(found, torch.stack(means), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("t", [0.1, 0.5, 0.9])
def test_the_slope_of_the_exact_field_bounds_its_jacobians_norm(t):
    """And is that norm, unless every direction shrinks: then it is as if one direction had no spread at all."""
    z = torch.randn(40, 3, generator=keyed(1), dtype=torch.float64)
    field, x = EmpiricalField(z, 0.2), torch.randn(5, 3, generator=keyed(2), dtype=torch.float64)
    at = torch.full((1,), t, dtype=torch.float64)
    for point in x:
        jacobian = torch.func.jacrev(lambda p: field.velocity(p[None], at)[0])(point)
        expected = float(torch.linalg.matrix_norm(jacobian, 2))
        still = abs(t * 0.2**2 / ((1 - t) ** 2 + (t * 0.2) ** 2) - 1) / (1 - t)
        assert float(field.lipschitz(point[None], at, iterations=400)) == pytest.approx(max(expected, still), rel=1e-4)


def test_running_mean_of_a_line_is_half_as_steep():
    t = torch.linspace(0, 1, 21)
    torch.testing.assert_close(running_mean(t, 1 - t), 1 - t / 2)


def test_the_bend_of_a_curve_that_is_flat_and_then_falls():
    t = torch.linspace(0, 1, 101)
    assert bend(t, torch.where(t < 0.3, torch.ones_like(t), 1 - (t - 0.3))) == pytest.approx(0.3, abs=0.011)


def gaussian_classes(spread: float, n: int = 400) -> tuple[MomentModel, torch.Tensor, torch.Tensor]:
    centres = torch.tensor([[2.0, 0, 0, 0], [-2.0, 0, 0, 0]])
    labels = torch.arange(n) % 2
    z = centres[labels] + spread * torch.randn(n, 4, generator=keyed(3))
    lam = torch.full((1, 1), 0.0)
    model = MomentModel(centres, torch.eye(4)[None, :, :1], lam, torch.tensor([0.5, 0.5]), spread**2)
    return model, z, labels


def test_fields_agree_near_the_noise_end_and_part_later():
    """Of records that are Gaussian classes: the moments are right, and only the single records' kernels are not."""
    model, z, labels = gaussian_classes(0.5)
    found = horizon(model, z, labels, keyed(), cap=0.35)
    early = found.times <= 0.2
    assert float(found.unconditional[early].min()) > 0.99
    assert float(found.worst_class[early].min()) > 0.99
    assert float(found.worst_class[-1]) < float(found.worst_class[0])
    assert found.tau == min(found.knee, 0.35)
    assert math.isfinite(found.drift)
    assert found.drift > 0


def test_the_worst_class_is_the_one_whose_mean_is_wrong():
    model, z, labels = gaussian_classes(0.5)
    wrong = MomentModel(model.mu * torch.tensor([[1.0], [-1.0]]), model.V, model.lam, model.prior, model.floor)
    good, bad = horizon(model, z, labels, keyed(), cap=0.35), horizon(wrong, z, labels, keyed(), cap=0.35)
    middle = int((good.times - 0.3).abs().argmin())
    assert float(bad.worst_class[middle]) < float(good.worst_class[middle]) - 0.05
    assert bad.tau < good.tau


def test_the_drift_bound_holds_along_the_flow():
    """Both flows from the same start up to tau; their distance stays below what Groenwall allows."""
    model, z, labels = gaussian_classes(0.5)
    found = horizon(model, z, labels, keyed(), cap=0.35)
    field = EmpiricalField(z)
    a = b = torch.randn(64, 4, generator=keyed(7))
    steps = 200
    for k in range(steps):
        t = torch.full((64,), k * found.tau / steps)
        a = a + found.tau / steps * model.mixture_velocity(a, t)
        b = b + found.tau / steps * field.velocity(b, t)
    assert float((a - b).norm(dim=1).max()) <= found.drift
