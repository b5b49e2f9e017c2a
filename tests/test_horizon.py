"""The public horizon against closed forms and slow loops."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from straightdp.moments.field import MomentModel
from straightdp.moments.horizon import BANDWIDTH, Horizon, bend, horizon, lipschitz, running_mean


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
    found = MomentModel.kernels(z, h).mixture_mean(x, torch.full((4,), t, dtype=torch.float64))
    torch.testing.assert_close(found, torch.stack(means), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("t", [0.1, 0.5, 0.9])
def test_the_slope_of_the_exact_field_bounds_its_jacobians_norm(t):
    """And is that norm, unless every direction shrinks: then it is as if one direction had no spread at all."""
    z = torch.randn(40, 3, generator=keyed(1), dtype=torch.float64)
    field, x = MomentModel.kernels(z, 0.2), torch.randn(5, 3, generator=keyed(2), dtype=torch.float64)
    at = torch.full((1,), t, dtype=torch.float64)
    for point in x:
        jacobian = torch.func.jacrev(lambda p: field.mixture_velocity(p[None], at)[0])(point)
        expected = float(torch.linalg.matrix_norm(jacobian, 2))
        still = abs(t * 0.2**2 / ((1 - t) ** 2 + (t * 0.2) ** 2) - 1) / (1 - t)
        assert float(lipschitz(field, point[None], at, iterations=400)) == pytest.approx(max(expected, still), rel=1e-4)


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
    field = MomentModel.kernels(z, BANDWIDTH)
    a = b = torch.randn(64, 4, generator=keyed(7))
    steps = 200
    for k in range(steps):
        t = torch.full((64,), k * found.tau / steps)
        a = a + found.tau / steps * model.mixture_velocity(a, t)
        b = b + found.tau / steps * field.mixture_velocity(b, t)
    assert float((a - b).norm(dim=1).max()) <= found.drift


def slow_cosines(model: MomentModel, z: np.ndarray, labels: np.ndarray, t: float, n: int) -> tuple[np.ndarray, ...]:
    """Cosines of the moment field and the records' own at n points drawn here, all records and each point's class."""
    rng = np.random.default_rng(int(1000 * t))

    def toward(x, centres, weights, variance):
        """v by equation (2) for a mixture of N(centre, variance I)."""
        a = (1 - t) ** 2 + t**2 * variance
        log = np.array(
            [math.log(w) - ((x - t * c) ** 2).sum() / (2 * a) for c, w in zip(centres, weights, strict=True)]
        )
        share = np.exp(log - log.max()) / np.exp(log - log.max()).sum()
        ends = [c + t * variance / a * (x - t * c) for c in centres]
        return (sum(s * e for s, e in zip(share, ends, strict=True)) - x) / (1 - t)

    def cosine(a, b):
        return a @ b / math.sqrt((a @ a) * (b @ b))

    mixed, own, classes = [], [], []
    mu, floor = model.mu.double().numpy(), model.floor
    for row in rng.integers(len(z), size=n):
        x, y = t * z[row] + (1 - t) * rng.standard_normal(z.shape[1]), labels[row]
        same = z[labels == y]
        exact = toward(x, z, np.full(len(z), 1 / len(z)), BANDWIDTH**2)
        mixed.append(cosine(exact, toward(x, mu, model.prior.numpy(), floor)))
        exact = toward(x, same, np.full(len(same), 1 / len(same)), BANDWIDTH**2)
        own.append(cosine(exact, toward(x, mu[[y]], [1.0], floor)))
        classes.append(y)
    return np.array(mixed), np.array(own), np.array(classes)


@pytest.mark.parametrize("index", [8, 24, 36])
def test_the_curves_are_what_a_slow_loop_over_other_points_finds(index):
    """Within 5 standard errors of the two samples of points."""
    model, z, labels = gaussian_classes(0.5, n=60)
    wrong = MomentModel(model.mu * torch.tensor([[1.0], [0.3]]), model.V, model.lam, model.prior, model.floor)
    found = horizon(wrong, z, labels, keyed(), cap=0.35, n=4000)
    mixed, own, y = slow_cosines(wrong, z.double().numpy(), labels.numpy(), float(found.times[index]), 400)

    def near(value, sample):
        return abs(float(value) - sample.mean()) < 5 * sample.std() * (1 / len(sample) + 1 / 2000) ** 0.5 + 1e-6

    worst = min((own[y == k] for k in range(2)), key=np.mean)
    assert near(found.unconditional[index], mixed)
    assert near(found.worst_class[index], worst)
    assert not near(found.worst_class[index], own[y == 0])


@pytest.mark.parametrize("tau", [0.35, 0.36, 0.374])
def test_the_drift_runs_to_tau_itself_also_between_two_times(tau):
    """Gap and slope constant: delta (e^{L tau} - 1) / L, but for the trapezoids."""
    times = torch.linspace(0.0, 0.95, 39)
    found = Horizon(times, times, times, torch.full((39,), 0.7), 2.0, tau, tau)
    assert found.drift == pytest.approx(0.7 * math.expm1(2.0 * tau) / 2.0, rel=1e-3)


def test_a_late_gap_is_stretched_for_less_time_than_an_early_one():
    """delta = s: (e^{L tau} - 1 - L tau) / L^2."""
    times = torch.linspace(0.0, 0.95, 39)
    found = Horizon(times, times, times, times, 2.0, 0.36, 0.36)
    assert found.drift == pytest.approx((math.expm1(0.72) - 0.72) / 4, rel=1e-2)


def test_the_slope_is_the_largest_up_to_tau_itself():
    """All records at one place: the slope is |own - 1| / (1 - t), which grows with t; tau lies between two times."""
    z, y = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    found = horizon(MomentModel.kernels(z[:1], BANDWIDTH), z, y, keyed(), cap=0.04, n=8)
    own = 0.04 * BANDWIDTH**2 / (0.96**2 + (0.04 * BANDWIDTH) ** 2)
    assert found.tau == 0.04
    assert found.lipschitz == pytest.approx((1 - own) / 0.96, rel=1e-5)


def test_the_curves_of_a_horizon_can_be_stored():
    model, z, labels = gaussian_classes(0.5, n=40)
    found = horizon(model, z, labels, keyed(), cap=0.35, n=32)
    again = json.loads(json.dumps(found.curves()))
    assert list(again) == ["times", "unconditional", "worst_class", "discrepancy"]
    for name, values in again.items():
        assert torch.equal(torch.tensor(values), getattr(found, name))
