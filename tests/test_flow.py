"""The straight path, Euler, guidance and the optimisation loop, against closed forms and plain loops."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from straightdp.errors import BadInput
from straightdp.flow import fit as fit_module
from straightdp.flow import path
from straightdp.flow.fit import fit, step_generator
from straightdp.flow.loss import squared_error
from straightdp.flow.sampler import euler, guided
from straightdp.progress import quiet

CPU = torch.device("cpu")
SHAPES = st.sampled_from([(3,), (2, 5), (4, 1, 3, 3), (1, 3, 2, 2)])


def draws(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    z, xi = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return z, xi, torch.rand(shape[0], generator=generator, dtype=torch.float64) * 0.999


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.integers(0, 10_000))
def test_every_conversion_comes_back(shape, seed):
    z, xi, t = draws(shape, seed)
    x, v = path.interpolate(z, xi, t), path.velocity(z, xi)
    torch.testing.assert_close(path.z_from_velocity(v, x, t), z, rtol=0, atol=1e-12)
    torch.testing.assert_close(path.xi_from_velocity(v, x, t), xi, rtol=0, atol=1e-12)
    torch.testing.assert_close(path.velocity_from_z(z, x, t), v, rtol=1e-9, atol=1e-9)
    again = path.interpolate(path.z_from_velocity(v, x, t), path.xi_from_velocity(v, x, t), t)
    torch.testing.assert_close(again, x, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(SHAPES, st.integers(0, 10_000))
def test_each_record_is_at_its_own_time(shape, seed):
    z, xi, t = draws(shape, seed)
    x = path.interpolate(z, xi, t).numpy()
    for i in range(shape[0]):
        np.testing.assert_allclose(x[i], (1 - t[i].item()) * xi[i].numpy() + t[i].item() * z[i].numpy(), atol=1e-14)


def test_the_ends_of_the_path_and_its_slope():
    z, xi, _ = draws((4, 1, 3, 3), 0)
    assert torch.equal(path.interpolate(z, xi, torch.zeros(4, dtype=torch.float64)), xi)  # t = 0 is the noise end
    assert torch.equal(path.interpolate(z, xi, torch.ones(4, dtype=torch.float64)), z)
    t, h = torch.full((4,), 0.3, dtype=torch.float64), 1e-3
    slope = (path.interpolate(z, xi, t + h) - path.interpolate(z, xi, t)) / h
    torch.testing.assert_close(slope, path.velocity(z, xi), rtol=1e-9, atol=1e-9)


def test_times_fill_their_interval_evenly():
    t = path.uniform_times(20_000, 0.2, 0.7, torch.Generator().manual_seed(0), CPU)
    assert float(t.min()) >= 0.2
    assert float(t.max()) <= 0.7
    shares = np.histogram(t.numpy(), bins=10, range=(0.2, 0.7))[0] / 20_000
    assert np.abs(shares - 0.1).max() < 5 * (0.09 / 20_000) ** 0.5


def test_squared_error_is_the_mean_over_a_record():
    a, b = torch.randn(5, 2, 3, 3), torch.randn(5, 2, 3, 3)
    slow = [sum((p - q) ** 2 for p, q in zip(u, v, strict=True)) / 18 for u, v in zip(rows(a), rows(b), strict=True)]
    torch.testing.assert_close(squared_error(a, b), torch.tensor(slow), rtol=1e-5, atol=1e-6)


def rows(x):
    return [row.flatten().tolist() for row in x]


# Euler


@pytest.mark.parametrize("steps", [1, 2, 7, 25])
@pytest.mark.parametrize("t0", [0.0, 0.2, 0.9])
def test_euler_is_exact_on_a_constant_field(steps, t0):
    x, c = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(euler(lambda *_: c, x, steps, t0), x + (1 - t0) * c, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.floats(0, 0.95), st.floats(-5, 5))
def test_euler_on_a_linear_field_is_its_known_power(steps, t0, a):
    x = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    expected = x * (1 + a * (1 - t0) / steps) ** steps
    torch.testing.assert_close(euler(lambda x, t: a * x, x, steps, t0), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("steps", "t0"), [(1, 0.0), (3, 0.0), (25, 0.2), (1000, 0.0), (7, 0.999)])
def test_euler_sees_the_left_ends_and_never_one(steps, t0):
    seen = []

    def field(x, t):
        assert t.shape == (len(x),)
        assert len(t.unique()) == 1
        seen.append(float(t[0]))
        return torch.zeros_like(x)

    euler(field, torch.zeros(2, 3), steps, t0)
    np.testing.assert_allclose(seen, np.linspace(t0, 1, steps + 1)[:-1], atol=1e-6)
    assert max(seen) < 1


@pytest.mark.parametrize("steps", [1, 5, 50])
def test_euler_on_a_field_of_time_alone_is_the_left_sum(steps):
    result = euler(lambda x, t: t[:, None].expand_as(x), torch.zeros(1, 1, dtype=torch.float64), steps)
    assert float(result) == pytest.approx(0.5 - 0.5 / steps, abs=1e-12)


@pytest.mark.parametrize("steps", [1, 4, 25])
@pytest.mark.parametrize("t0", [0.0, 0.4])
def test_a_point_target_is_reached_in_any_number_of_steps(steps, t0):
    """The straight field towards one z is followed without error, so even one step arrives."""
    z, x = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    arrived = euler(lambda x, t: path.velocity_from_z(z, x, t), x, steps, t0)
    torch.testing.assert_close(arrived, z, rtol=1e-9, atol=1e-9)


# guidance


class CountingNet:
    """A net whose output mixes x, t and the caption, and which keeps what it was asked."""

    def __init__(self):
        self.calls = []

    def __call__(self, x, t, captions):
        self.calls.append((len(x), captions.clone()))
        return x.sin() + t[:, None] + captions.float().sum(dim=1, keepdim=True) ** 2


def guided_case():
    captions = torch.tensor([[1, 2], [3, 1], [0, 4]])
    return captions, torch.zeros(1, 2, dtype=torch.int64), torch.randn(3, 5), torch.tensor([0.1, 0.5, 0.9])


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_weight_one_is_one_evaluation_with_the_captions_and_weight_zero_one_without(weight):
    net, (captions, null, x, t) = CountingNet(), guided_case()
    out = guided(net, captions, null, weight)(x, t)
    given = captions if weight else null.expand(3, -1)
    assert [n for n, _ in net.calls] == [3]
    assert torch.equal(net.calls[0][1], given)
    assert torch.equal(out, net(x, t, given))


@settings(deadline=None, max_examples=40)
@given(st.floats(0, 8))
def test_any_weight_is_the_affine_combination(weight):
    net, (captions, null, x, t) = CountingNet(), guided_case()
    out = guided(net, captions, null, weight)(x, t)
    with_caption, without = net(x, t, captions), net(x, t, null.expand(3, -1))
    torch.testing.assert_close(out, (1 - weight) * without + weight * with_caption, rtol=1e-4, atol=1e-4)


def test_guidance_moves_along_the_caption_only():
    net, (captions, null, x, t) = CountingNet(), guided_case()
    torch.testing.assert_close(guided(net, captions, null, 0.0)(x, t), net(x, t, null.expand(3, -1)))
    same = guided(net, null.expand(3, -1), null, 4.0)(x, t)
    torch.testing.assert_close(same, net(x, t, null.expand(3, -1)))


# the loop


def test_step_randomness_is_a_function_of_its_three_names():
    def first(*names):
        return torch.rand(4, generator=step_generator(*names, CPU)).tolist()

    assert first(0, "pretrain", 3) == first(0, "pretrain", 3)
    others = [first(*n) for n in [(0, "pretrain", 3), (1, "pretrain", 3), (0, "distill", 3), (0, "pretrain", 4)]]
    assert len({tuple(o) for o in others}) == 4
    # names that run into each other when pasted together stay apart
    assert first(1, "a", 11) != first(11, "a", 1)


def constant_slope(net):
    """With a gradient of 1 at every step Adam's bias-corrected step is exactly lr (but for its epsilon)."""

    def gradients(step):
        for p in net.parameters():
            p.grad = torch.ones_like(p)

    return gradients


def run(net, gradients, folder, *, steps, ema=0.9, every=5, lr=1e-2, track=quiet, identity="this work"):
    place = folder / "c.pt"
    fit(net, gradients, steps=steps, lr=lr, ema=ema, checkpoint=place, identity=identity, every=every, track=track)


@pytest.mark.parametrize("ema", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("steps", [0, 1, 2, 30])
def test_the_weights_left_are_the_average_of_the_iterates(tmp_path, ema, steps):
    net = nn.Linear(2, 1).double()
    start = net.weight.detach().clone()
    run(net, constant_slope(net), tmp_path, steps=steps, ema=ema)
    iterates = [0.0, *(-1e-2 * k for k in range(1, steps + 1))]
    # an iterate's weight: what it entered with, times the decay of every later step
    decay = [min(ema, (1 + k) / (10 + k)) for k in range(steps)]
    weights = [w * np.prod(decay[k:]) for k, w in enumerate([1.0, *(1 - d for d in decay)])]
    assert sum(weights) == pytest.approx(1)
    expected = start + sum(w * x for w, x in zip(weights, iterates, strict=True))
    torch.testing.assert_close(net.weight.detach(), expected, rtol=0, atol=1e-7)
    assert not list(tmp_path.glob("*.partial"))


def test_no_gradient_signal_leaves_the_weights_alone(tmp_path):
    """No weight decay: a zero gradient is no pull towards zero."""
    net = nn.Linear(3, 3)
    before = net.weight.detach().clone()

    def gradients(step):
        for p in net.parameters():
            p.grad = torch.zeros_like(p)

    run(net, gradients, tmp_path, steps=12, lr=1.0)
    torch.testing.assert_close(net.weight.detach(), before, rtol=0, atol=1e-7)


def test_frozen_parameters_stay_frozen(tmp_path):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    frozen, free = net[0].weight.detach().clone(), net[1].weight.detach().clone()

    def gradients(step):
        net(torch.ones(1, 2)).sum().backward()

    run(net, gradients, tmp_path, steps=3)
    assert torch.equal(net[0].weight, frozen)
    assert not torch.equal(net[1].weight, free)


class Crash(Exception):
    pass


def task(fail_at=()):
    """A small noisy regression; `gradients` raises at the steps named, half-way through the work."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    left = list(fail_at)

    def gradients(step):
        x = torch.randn(16, 4, generator=step_generator(5, "test", step, CPU))
        (net(x) - x.prod(dim=1, keepdim=True)).square().mean().backward()
        if left and step == left[0]:
            left.pop(0)
            raise Crash

    return net, gradients


def weights_of(net):
    return [p.detach().clone() for p in net.parameters()]


@pytest.fixture
def uninterrupted(tmp_path):
    net, gradients = task()
    (tmp_path / "whole").mkdir()
    run(net, gradients, tmp_path / "whole", steps=23)
    return weights_of(net)


@pytest.mark.parametrize("fail_at", [(0,), (4,), (5,), (11,), (22,), (3, 7, 7, 21)])
def test_a_resumed_fit_ends_with_the_same_bits(tmp_path, uninterrupted, fail_at):
    starts = []

    def track(steps, done, total):
        starts.append((done, total))
        return steps

    for place in fail_at:
        net, gradients = task((place,))  # a fresh process: initial weights, no optimiser state
        with pytest.raises(Crash):
            run(net, gradients, tmp_path, steps=23, track=track)
    net, gradients = task()
    run(net, gradients, tmp_path, steps=23, track=track)
    assert starts == [(done, 23) for done in (0, *(5 * (place // 5) for place in fail_at))]
    for mine, theirs in zip(weights_of(net), uninterrupted, strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_of_other_work_is_not_taken_up(tmp_path, uninterrupted):
    net, gradients = task((11,))
    with pytest.raises(Crash):
        run(net, gradients, tmp_path, steps=23, identity="on records that were taken out since", lr=0.5)
    net, gradients = task()
    run(net, gradients, tmp_path, steps=23)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(net), uninterrupted, strict=True))


def test_training_that_diverges_is_refused(tmp_path):
    net, gradients = task()
    with pytest.raises(BadInput, match=r"diverged: by step 5 .*; lower its lr"):
        run(net, gradients, tmp_path, steps=23, lr=1e37)
    assert not (tmp_path / "c.pt").exists()


def test_other_steps_give_other_bits(tmp_path, uninterrupted):
    """The comparison above can fail: one step more is seen."""
    net, gradients = task()
    run(net, gradients, tmp_path, steps=24)
    assert not all(torch.equal(a, b) for a, b in zip(weights_of(net), uninterrupted, strict=True))


def test_a_crash_while_a_checkpoint_is_written_costs_only_time(tmp_path, uninterrupted, monkeypatch):
    replace, calls = os.replace, []

    def dies_the_second_time(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise Crash
        replace(source, target)

    monkeypatch.setattr(fit_module.os, "replace", dies_the_second_time)
    net, gradients = task()
    with pytest.raises(Crash):
        run(net, gradients, tmp_path, steps=23)
    monkeypatch.undo()
    (tmp_path / "c.partial").write_bytes(b"half a file")
    net, gradients = task()
    run(net, gradients, tmp_path, steps=23)
    for mine, theirs in zip(weights_of(net), uninterrupted, strict=True):
        assert torch.equal(mine, theirs)


def test_a_finished_fit_run_again_says_the_same(tmp_path, uninterrupted):
    for _ in range(2):
        net, gradients = task()
        run(net, gradients, tmp_path, steps=23)
    for mine, theirs in zip(weights_of(net), uninterrupted, strict=True):
        assert torch.equal(mine, theirs)
