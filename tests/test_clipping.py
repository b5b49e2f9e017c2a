"""The clipping engine against a slow per-record loop, and its guarantee against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from straightdp.dpsgd import clipping
from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.dpsgd.trainer import record_losses
from straightdp.errors import BadInput
from straightdp.flow.path import TorchDraws
from straightdp.nets.mmdit import MMDiT
from straightdp.recipe import DpSgd, Net

NET = Net(width=16, depth=2, heads=2, patch=2, caption_width=8, caption_length=3, vocabulary=16)
SHAPE = (1, 4, 4)


def random_net(seed: int = 0) -> MMDiT:
    torch.manual_seed(seed)
    net = MMDiT(NET, SHAPE)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(0, 0.3)
    return net


def losses_of(net, z, draws, seed=0):
    generator = torch.Generator().manual_seed(seed)
    captions = torch.arange(len(z)).remainder(5)[:, None].expand(-1, 3) + 1
    null = torch.zeros(1, 3, dtype=torch.int64)
    return record_losses(net, z, captions, null, DpSgd(draws=draws), 0.2, TorchDraws(generator))


def loop(net, losses, n, clip, mask, raised=None):
    """One backward pass a record, the obvious way; clipped by its own norm, or by the engine's raised one."""
    parameters = list(net.parameters())
    engine_order = ClippingEngine(net, clip).parameters()
    values = losses()
    norms, total = [], [torch.zeros_like(p) for p in engine_order]
    for i in range(n):
        grads = torch.autograd.grad(values[i], parameters, retain_graph=True)
        by_id = {id(p): g for p, g in zip(parameters, grads, strict=True)}
        ordered = [by_id[id(p)] for p in engine_order]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in ordered))
        norms.append(norm)
        if mask[i]:
            divisor = norm if raised is None else float(raised[i]) / clipping.MARGIN
            factor = min(1.0, clip / max(divisor, 1e-30))
            total = [t + factor * g for t, g in zip(total, ordered, strict=True)]
    return total, torch.tensor(norms)


@pytest.mark.parametrize("draws", [1, 4])
@pytest.mark.parametrize("clip", [0.01, 1.0, 1e6])
def test_equals_the_loop(draws, clip):
    net, z = random_net(), torch.randn(5, *SHAPE)
    losses = losses_of(net, z, draws)
    mask = torch.tensor([1.0, 1, 0, 1, 1])
    engine = ClippingEngine(net, clip)
    _, raised = engine._norms(engine._backward(losses, torch.ones(5))[0], 0.0)
    expected, norms = loop(net, losses, 5, clip, mask, raised)
    result = engine.clipped_sum(losses, mask)
    torch.testing.assert_close(result.norms[mask > 0], norms[mask > 0].float(), rtol=1e-5, atol=1e-6)
    assert bool((raised >= result.norms).all())
    assert bool((raised <= result.norms * 1.001)[mask > 0].all())  # what the margin costs
    scale = max(float(e.abs().max()) for e in expected)
    for mine, theirs in zip(result.sums, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("draws", [1, 4])
def test_unclipped_sum_is_the_plain_gradient_to_1e_5(draws):
    net, z = random_net(1), torch.randn(6, *SHAPE)
    losses = losses_of(net, z, draws)
    engine = ClippingEngine(net, clip=1e9)
    plain = torch.autograd.grad(losses().sum(), engine.parameters())
    for mine, theirs in zip(engine.clipped_sum(losses, torch.ones(6)).sums, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30, -1e30])
@pytest.mark.parametrize("draws", [1, 4])
def test_one_bad_record_harms_no_other(bad, draws):
    """It contributes zero (its squared norm is no float32); the others are as in a batch where it is masked out."""
    net, clean = random_net(), torch.randn(4, *SHAPE)
    spoilt = clean.clone()
    spoilt[1, 0, 2, 2] = bad
    result = ClippingEngine(net, 0.5).clipped_sum(losses_of(net, spoilt, draws), torch.ones(4))
    expected, _ = loop(net, losses_of(net, clean, draws), 4, 0.5, torch.tensor([1.0, 0, 1, 1]))
    for mine, theirs in zip(result.sums, expected, strict=True):
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_an_empty_batch_sums_to_zero():
    net, z = random_net(), torch.randn(3, *SHAPE)
    result = ClippingEngine(net, 1.0).clipped_sum(losses_of(net, z, 2), torch.zeros(3))
    assert all(bool((s == 0).all()) for s in result.sums)


def contributions(engine, losses, n):
    """Each record's own clipped sum, as the engine forms it, recomputed in float64 from the a and g that it used."""
    kept, half = engine._backward(losses, torch.ones(n))
    _, bound = engine._norms(kept, clipping.TF32 if half else 0.0)
    factor = (engine.clip * clipping.MARGIN / bound.clamp_min(1e-30)).clamp_max(1.0)
    squared = torch.zeros(n, dtype=torch.float64)
    for name in engine.layers:
        a, g = kept[name]
        scaled = g * factor[:, None, None]
        if half:  # the worst a TF32 product may do to the scaled values: away from zero by a whole unit
            scaled = scaled * (1 + clipping.TF32 * torch.sign(torch.randn_like(scaled)))
        squared += (scaled.double().mT @ a.double()).square().sum(dim=(1, 2))
        squared += scaled.double().sum(dim=1).square().sum(dim=1)
    return squared.sqrt()


@settings(max_examples=25, deadline=None)
@given(
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 10_000),
    half=st.booleans(),
    clip=st.sampled_from([1e-4, 0.1, 10.0]),
)
def test_no_contribution_above_the_clip_in_float64(scale, seed, half, clip):
    net = random_net(seed % 7)
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(8, *SHAPE, generator=generator) * scale
    z[4:] = z[:4]  # records whose tokens repeat
    plain = losses_of(net, z, 4, seed)

    def losses():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            return plain()

    assert float(contributions(ClippingEngine(net, clip), losses, 8).max()) <= clip


def test_cancelling_tokens_do_not_slip_past_the_clip():
    """Tokens whose gradients nearly cancel: the ghost norm then is a small difference of large numbers."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    net = nn.Sequential(layer)
    half = torch.randn(50, 4, 64) * 1e3
    x = torch.cat([half, -half + 1e-3 * torch.randn_like(half)], dim=1)
    weight = torch.randn(50, 1, 64)

    def losses():
        return (net(x) * weight).sum(dim=(1, 2))

    engine = ClippingEngine(net, 1.0)
    assert float(contributions_without_bias(engine, losses, 50).max()) <= 1.0


def contributions_without_bias(engine, losses, n):
    kept, _ = engine._backward(losses, torch.ones(n))
    _, bound = engine._norms(kept, 0.0)
    factor = (engine.clip * clipping.MARGIN / bound).clamp_max(1.0)
    ((a, g),) = kept.values()
    return ((g * factor[:, None, None]).double().mT @ a.double()).square().sum(dim=(1, 2)).sqrt()


def test_both_norm_formulas_agree():
    torch.manual_seed(0)
    a, g = torch.randn(3, 5, 40), torch.randn(3, 5, 50)
    ghost, size, _ = clipping.squared_norm(a, g)
    direct = (g.mT @ a).square().sum(dim=(1, 2))
    torch.testing.assert_close(ghost, direct, rtol=1e-5, atol=0)
    assert (size >= ghost).all()


class WithBareParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))


def test_an_uncovered_parameter_is_refused_by_name():
    with pytest.raises(BadInput, match="scale"):
        ClippingEngine(WithBareParameter(), 1.0)
    with pytest.raises(BadInput, match=r"1\.weight"):
        ClippingEngine(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), 1.0)


def test_a_layer_without_gradient_is_refused_by_name():
    net = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    engine = ClippingEngine(net, 1.0)
    with pytest.raises(BadInput, match="idle"):
        engine.clipped_sum(lambda: net["used"](torch.ones(3, 1, 2)).sum(dim=(1, 2)), torch.ones(3))


def test_a_layer_run_twice_is_refused_by_name():
    layer = nn.Linear(2, 2)
    net = nn.Sequential(layer)
    with pytest.raises(BadInput, match="0 ran twice"):
        ClippingEngine(net, 1.0).clipped_sum(lambda: net(net(torch.ones(3, 1, 2))).sum(dim=(1, 2)), torch.ones(3))


def test_training_after_clipping_still_works():
    net, z = random_net(), torch.randn(2, *SHAPE)
    losses = losses_of(net, z, 1)
    ClippingEngine(net, 1.0).clipped_sum(losses, torch.ones(2))
    losses().sum().backward()
    assert all(p.grad is not None for p in net.parameters())
