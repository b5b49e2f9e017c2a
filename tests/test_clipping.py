"""The clipping engine against a slow per-record loop, and its guarantee against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from straightdp.compiled import in_bfloat16
from straightdp.dpsgd import uses
from straightdp.dpsgd.clipping import MARGIN, ClippingEngine, gradient_norms
from straightdp.dpsgd.factors import Outer, Scatter, Whole, summed
from straightdp.dpsgd.trainer import Bucket, draw, record_losses
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


def batch_of(z: Tensor, draws: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    captions = torch.arange(len(z)).remainder(5)[:, None].expand(-1, 3) + 1
    null = torch.zeros(1, 3, dtype=torch.int64)
    return draw(z, captions, null, DpSgd(draws=draws), Bucket(0.2, 1.0), TorchDraws(generator))


def engine_for(net, clip: float, draws: int, *, half: bool = False) -> ClippingEngine:
    engine = ClippingEngine(net, record_losses(in_bfloat16(net) if half else net), clip)
    engine.preflight(batch_of(torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(9)), draws))
    return engine


def loop(net, losses, batch, clip: float, mask: Tensor, raised: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One backward pass a record, the obvious way; clipped by its own norm, or by the engine's raised one."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    values = losses(*batch)
    norms, total = [], torch.zeros(sum(p.numel() for p in parameters))
    for i in range(len(values)):
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(values[i], parameters, retain_graph=True)])
        norms.append(float(gradient.double().norm()))
        if mask[i]:
            divisor = norms[-1] if raised is None else float(raised[i]) / MARGIN
            total += min(1.0, clip / max(divisor, 1e-30)) * gradient
    return total, torch.tensor(norms)


@pytest.mark.parametrize("draws", [1, 4])
@pytest.mark.parametrize("clip", [0.01, 1.0, 1e6])
def test_equals_the_loop(draws, clip):
    net = random_net()
    batch = batch_of(torch.randn(5, *SHAPE), draws)
    mask = torch.tensor([1.0, 1, 0, 1, 1])
    engine = engine_for(net, clip, draws)
    _, raised = gradient_norms(list(engine._backward(batch, torch.ones(5))[1].values()))
    expected, norms = loop(net, engine.losses, batch, clip, mask, raised)
    result = engine(batch, mask)
    torch.testing.assert_close(result.norms[mask > 0], norms[mask > 0].float(), rtol=1e-5, atol=1e-6)
    assert bool((raised >= result.norms).all())
    assert bool((raised <= result.norms * 1.001)[mask > 0].all())  # what the margin costs
    torch.testing.assert_close(result.total, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert result.clip == clip


@pytest.mark.parametrize("draws", [1, 4])
def test_unclipped_sum_is_the_plain_gradient_to_1e_5(draws):
    net = random_net(1)
    batch = batch_of(torch.randn(6, *SHAPE), draws)
    engine = engine_for(net, 1e9, draws)
    plain = torch.autograd.grad(engine.losses(*batch).sum(), engine.parameters())
    for mine, theirs in zip(engine.split(engine(batch, torch.ones(6)).total), plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30, -1e30])
@pytest.mark.parametrize("draws", [1, 4])
def test_one_bad_record_harms_no_other(bad, draws):
    """It contributes zero (its squared norm is no float32); the others are as in a batch where it is masked out."""
    net, clean = random_net(), torch.randn(4, *SHAPE)
    spoilt = clean.clone()
    spoilt[1, 0, 2, 2] = bad
    engine = engine_for(net, 0.5, draws)
    result = engine(batch_of(spoilt, draws), torch.ones(4))
    without = engine(batch_of(clean, draws), torch.tensor([1.0, 0, 1, 1]))
    assert torch.isfinite(result.total).all()
    torch.testing.assert_close(result.total, without.total, rtol=1e-6, atol=1e-7)
    expected, _ = loop(net, engine.losses, batch_of(clean, draws), 0.5, torch.tensor([1.0, 0, 1, 1]))
    torch.testing.assert_close(result.total, expected, rtol=1e-3, atol=1e-5)


def test_a_bad_record_that_is_masked_out_changes_no_bit():
    net, clean = random_net(), torch.randn(4, *SHAPE)
    spoilt, mask = clean.clone(), torch.tensor([1.0, 0, 1, 1])
    spoilt[1] = float("nan")
    engine = engine_for(net, 0.5, 2)
    assert torch.equal(engine(batch_of(spoilt, 2), mask).total, engine(batch_of(clean, 2), mask).total)


def test_an_empty_batch_sums_to_exactly_zero():
    net = random_net()
    result = engine_for(net, 1.0, 2)(batch_of(torch.randn(3, *SHAPE), 2), torch.zeros(3))
    assert bool((result.total == 0).all())
    assert len(result.total) == sum(p.numel() for p in net.parameters())


# Contributions in float64


def gradients(factor) -> Tensor:
    """Each record's gradient in float64, (n, values), from what the backward pass left."""
    if isinstance(factor, Outer):
        a, g = factor.a.double(), factor.g.double()
        parts = [(g.mT @ a).flatten(1), g.sum(dim=1)][: 1 + factor.bias]
        return torch.cat(parts, dim=1).reshape(len(a) // factor.groups, -1)
    if isinstance(factor, Scatter):
        tables = torch.zeros(len(factor.g), factor.rows, factor.g.shape[2], dtype=torch.float64)
        for table, ids, g in zip(tables, factor.ids, factor.g.double(), strict=True):
            for k, row in zip(ids.tolist(), g, strict=True):
                if k >= 0:
                    table[k] += row
        return tables.flatten(1)
    return exact_sums.get(id(factor), factor.value.double()).flatten(1)


exact_sums: dict[int, Tensor] = {}


def contributions(engine, batch, mask=None) -> Tensor:
    """Each record's contribution to the sum, recomputed in float64 from the a and g and the factor that were used.

    Parameters that are summed over a record's rows before they are kept (`Whole`) are summed again, in float64.
    """
    seen = []
    collect = engine._collect

    def watched(factors, factor, **options):
        seen.append((list(factors.values()), factor.double()))
        return collect(factors, factor, **options)

    def summed_in_float64(values, n, shape):
        whole = summed(values, n, shape)
        exact_sums[id(whole)] = values.double().reshape(n, -1, *shape).sum(dim=1)
        return whole

    n = len(batch[0])
    engine._collect, uses.summed = watched, summed_in_float64
    exact_sums.clear()
    try:
        result = engine(batch, torch.ones(n) if mask is None else mask)
        ((factors, factor),) = seen
        assert torch.isfinite(result.total).all()
        alone = [torch.where(factor[:, None] > 0, gradients(f), 0.0) * factor[:, None] for f in factors]
    finally:
        del engine._collect
        uses.summed = summed
    return torch.cat(alone, dim=1).norm(dim=1)


def awkward_records(scale: float, seed: int, n: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, *SHAPE, generator=generator) * scale
    quarter = n // 4
    z[quarter : 2 * quarter] = z[:quarter]  # records that repeat
    z[2 * quarter : 3 * quarter, :, 2:] = -z[2 * quarter : 3 * quarter, :, :2] * (1 + 1e-6)  # patches that cancel
    return z


@settings(max_examples=25, deadline=None)
@given(
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 10_000),
    half=st.booleans(),
    clip=st.sampled_from([1e-4, 0.1, 10.0]),
)
def test_no_contribution_above_the_clip_in_float64(scale, seed, half, clip):
    engine = engine_for(random_net(seed % 7), clip, 4, half=half)
    found = contributions(engine, batch_of(awkward_records(scale, seed), 4, seed))
    assert float(found.max()) <= clip
    assert bool((found > 0).all())


@pytest.mark.parametrize("half", [False, True])
def test_no_contribution_of_1280_records_of_every_scale_is_above_the_clip_in_float64(half):
    """All but the smallest are clipped, and to no less than 98% of the clip: the margin is small."""
    clip, largest = 1e-2, []
    for seed, scale in enumerate([1e-6, 1e-4, 1e-2, 1.0, 10.0, 100.0, 1e3, 1e4]):
        engine = engine_for(random_net(seed), clip, 2, half=half)
        batch = batch_of(awkward_records(scale, seed, 80), 2, seed)
        types = {factor.g.dtype for factor in engine._backward(batch, torch.ones(80))[1].values()}
        assert types == {torch.bfloat16 if half else torch.float32}
        found = contributions(engine, batch)
        assert found.shape == (80,)
        assert float(found.max()) <= clip
        largest.append(float(found.max()))
    assert min(largest) >= 0.98 * clip


class Everything(nn.Module):
    """Every kind of factor in one net: outer (plain and grouped), scatter, whole (norms, bare parameters)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 8, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(1, 12, 8))
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=4)
        self.group = nn.GroupNorm(2, 8)
        self.gamma = nn.Parameter(torch.randn(8))
        self.out = nn.Linear(8, 4)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        x = self.norm(self.embed(ids) * scale[:, None, None] + self.positions)
        x = x + self.gamma * self.group(self.conv(x.mT)).mT
        return self.out(x)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    half=st.booleans(),
    clip=st.sampled_from([1e-5, 0.1, 10.0]),
    cancel=st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_no_kind_of_layer_contributes_above_the_clip_in_float64(seed, half, clip, cancel):
    """Gradients of a record's tokens that cancel to a part in 1e3, or wholly: sums are then mostly rounding."""
    torch.manual_seed(seed)
    net = Everything()
    network = in_bfloat16(net) if half else net
    engine = ClippingEngine(net, lambda ids, scale, w: 100 + (network(ids, scale) * w).sum(dim=(1, 2)), clip)
    engine.preflight((torch.randint(0, 6, (3, 12)), torch.rand(3), torch.randn(3, 12, 4)))
    scale = 10.0 ** torch.randint(-6, 5, (40,)).float()
    weight = torch.randn(40, 12, 4) * scale[:, None, None].flip(0)
    weight[:, 6:] = -weight[:, :6] + cancel * weight[:, 6:]
    ids = torch.randint(0, 6, (40, 12))
    ids[:10] = ids[:10, :1]  # one id twelve times
    assert float(contributions(engine, (ids, scale, weight)).max()) <= clip


def test_cancelling_tokens_do_not_slip_past_the_clip():
    """Tokens whose gradients nearly cancel: the ghost norm then is a small difference of large numbers."""
    torch.manual_seed(0)
    net = nn.Linear(64, 64, bias=False)
    first = torch.randn(50, 4, 64) * 1e3
    x = torch.cat([first, -first + 1e-3 * torch.randn_like(first)], dim=1)
    weight = torch.randn(50, 1, 64)
    engine = ClippingEngine(net, lambda x, w: (net(x) * w).sum(dim=(1, 2)), 1.0)
    engine.preflight((torch.randn(3, 8, 64), torch.randn(3, 1, 64)))
    (factor,) = engine._backward((x, weight), torch.ones(50))[1].values()
    assert factor.ghost
    assert float(contributions(engine, (x, weight)).max()) <= 1.0


@pytest.mark.parametrize(("a", "g"), [(2e18, 2.5e-23), (2.5e-23, 2e18), (1e15, 1e-22), (1e-30, 1e18)])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_values_whose_squares_vanish_do_not_slip_past_the_clip(a, g, tokens):
    """|g|^2 is zero in float32, but |a||g| is not small: a record may be large where its gradient is tiny."""
    net, clip = nn.Linear(8, 64, bias=False), 1e-8
    engine = ClippingEngine(net, lambda x, w: (net(x) * w).sum(dim=(1, 2)), clip)
    engine.preflight((torch.randn(3, tokens, 8), torch.randn(3, tokens, 64)))
    batch = torch.full((2, tokens, 8), a), torch.full((2, tokens, 64), g)
    assert float(contributions(engine, batch).max()) <= clip


def test_the_sum_of_one_record_is_not_longer_than_the_clip_as_it_stands():
    """No recomputation: the vector that the engine returns for a batch of which one record is real."""
    net = random_net(3)
    engine = engine_for(net, 0.05, 4)
    for i, scale in enumerate([1e-6, 1e-2, 1.0, 1e2, 1e4]):
        mask = torch.zeros(8)
        mask[i] = 1
        total = engine(batch_of(awkward_records(scale, i), 4, i), mask).total
        assert 0.98 * 0.05 <= float(total.double().norm()) <= 0.05


# The parts of a gradient


def cases():
    torch.manual_seed(0)
    yield Outer(torch.randn(3, 5, 40), torch.randn(3, 5, 50), bias=True)  # few tokens: ghost
    yield Outer(torch.randn(3, 90, 8), torch.randn(3, 90, 6), bias=True)  # many: direct
    yield Outer(torch.randn(3, 1, 8), torch.randn(3, 1, 6), bias=False)
    yield Outer(torch.randn(3 * 4, 7, 5), torch.randn(3 * 4, 7, 2), bias=True, groups=4)
    yield Scatter(torch.randint(-1, 4, (3, 20)), torch.randn(3, 20, 5), 4)
    yield summed(torch.randn(3 * 4, 6, 2, 5), 3, (2, 5))
    yield Outer(torch.randn(3, 2, 4), torch.randn(3, 2, 3), True).joined(
        Outer(torch.randn(3, 6, 4), torch.randn(3, 6, 3), True)
    )
    yield summed(torch.randn(3, 5), 3, (5,)).joined(summed(torch.randn(3, 7, 5), 3, (5,)))
    yield Scatter(torch.randint(0, 4, (3, 2)), torch.randn(3, 2, 5), 4).joined(
        Scatter(torch.randint(-1, 4, (3, 9)), torch.randn(3, 9, 5), 4)
    )


@pytest.mark.parametrize("factor", cases(), ids=lambda f: type(f).__name__)
def test_norms_and_weighted_sums_are_those_of_the_gradients_written_out(factor):
    if isinstance(factor, Outer) and factor.groups > 1:  # as (records, groups, values), bias after weight
        a, g = (x.double().unflatten(0, (3, 4)) for x in (factor.a, factor.g))
        exact = torch.cat([(g.mT @ a).flatten(1), g.sum(dim=2).flatten(1)], dim=1)
    else:
        exact = gradients(factor)
    squared, error = factor.norms()
    true = exact.square().sum(dim=1)
    assert bool(((squared.double() - true).abs() <= error.double()).all())
    assert bool((error < 1e-2 * squared).all())
    weights = torch.tensor([0.7, 0.0, 2.0])
    mine = torch.cat([part.flatten() for part in factor.weighted(weights)])
    torch.testing.assert_close(mine.double(), weights.double() @ exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", cases(), ids=lambda f: type(f).__name__)
def test_a_record_with_factor_zero_adds_exactly_zero_whatever_its_values(factor):
    weights = torch.tensor([0.7, 0.0, 2.0])
    before = factor.weighted(weights)
    for x in (getattr(factor, name, None) for name in ("a", "g", "value")):
        if x is not None:
            x[len(x) // 3 : 2 * len(x) // 3] = float("nan")
    for mine, theirs in zip(factor.weighted(weights), before, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_covers_the_rounding_of_sums_that_cancel(seed):
    """Tokens that cancel to nothing but rounding, in weight and bias together, and in the bias alone (a = 0)."""
    torch.manual_seed(seed)
    g = torch.randn(3, 60, 7) * 1e3
    g[:, 30:] = -g[:, :30].flip(1) * (1 + 1e-7)
    a = torch.randn(3, 60, 5)
    a[:, 30:] = a[:, :30].flip(1)
    ids = torch.randint(0, 4, (3, 30))
    same = torch.cat([ids, ids.flip(1)], dim=1)
    cases = [Outer(a, g, True), Outer(a[:, :, :1], g, False), Outer(0 * a, g, True), Scatter(same, g, 4)]
    for factor in cases:
        squared, error = factor.norms()
        assert bool((error > 0).all())
        exact = gradients(factor).square().sum(dim=1)
        assert bool(((squared.double() - exact).abs() <= error.double()).all())
    whole = summed(g, 3, (7,))
    squared, error = whole.norms()
    assert bool(((squared.double() - g.double().sum(dim=1).square().sum(dim=1)).abs() <= error.double()).all())


def test_both_norm_formulas_agree():
    torch.manual_seed(0)
    a, g = torch.randn(3, 5, 40), torch.randn(3, 5, 50)
    few = Outer(a, g, bias=False)
    assert few.ghost
    many = Outer(torch.cat([a] * 20, dim=1), torch.cat([g] * 20, dim=1), bias=False)  # 20 times the gradient
    assert not many.ghost
    torch.testing.assert_close(many.norms()[0] / 400, few.norms()[0], rtol=1e-5, atol=0)
    direct = (g.mT @ a).square().sum(dim=(1, 2))
    torch.testing.assert_close(few.norms()[0], direct, rtol=1e-5, atol=0)


def test_a_batch_of_equal_records_has_equal_norms_and_a_closed_form():
    """One linear map, squared loss: the gradient is 2 (W x + b - y) (x, 1)."""
    net = nn.Linear(3, 2)
    x, y = torch.tensor([[1.0, 2.0, 2.0]]).repeat(4, 1), torch.zeros(4, 2)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.copy_(torch.tensor([3.0, 4.0]))
    engine = ClippingEngine(net, lambda x, y: (net(x) - y).square().sum(dim=1), 1.0)
    engine.preflight((torch.randn(2, 3), torch.randn(2, 2)))
    result = engine((x, y), torch.ones(4))
    norm = 2 * 5 * math.sqrt(9 + 1)
    torch.testing.assert_close(result.norms, torch.full((4,), norm))
    weight, bias = engine.split(result.total)
    torch.testing.assert_close(bias, 4 * torch.tensor([6.0, 8.0]) / norm, rtol=2e-5, atol=0)
    torch.testing.assert_close(weight, bias[:, None] * x[0], rtol=1e-6, atol=0)


def test_the_callers_matmul_precision_is_left_as_it_was():
    net = nn.Linear(3, 2)
    engine = ClippingEngine(net, lambda x: net(x).sum(dim=1), 1.0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        engine.preflight((torch.randn(2, 3),))
        engine((torch.randn(2, 3),), torch.ones(2))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_engines_of_two_clips_are_one_graph():
    """Else every run, whose C is its own, compiles anew."""
    from torch.fx.experimental.proxy_tensor import make_fx

    batch, mask, codes = batch_of(torch.randn(3, *SHAPE), 2), torch.ones(3), []
    for clip in (0.1, 7.0):
        engine = engine_for(random_net(), clip, 2)
        engine._step.speed = "compiled"
        trace = make_fx(engine._clipped, tracing_mode="fake", _allow_non_fake_inputs=True)
        codes.append(trace(torch.tensor(clip), mask, *batch).code)
    assert codes[0] == codes[1]


def test_training_after_clipping_still_works():
    net = random_net()
    batch = batch_of(torch.randn(2, *SHAPE), 1)
    engine = engine_for(net, 1.0, 1)
    engine(batch, torch.ones(2))
    assert all(p.grad is None for p in net.parameters())
    engine.losses(*batch).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_whole_joined_bounds_the_cancellation_of_two_uses():
    """Two uses of one parameter that cancel: what is left is rounding, and the bound must know."""
    one = Whole(torch.full((1, 4), 1e4), torch.full((1,), 4e8), 1)
    other = Whole(torch.full((1, 4), -1e4), torch.full((1,), 4e8), 1)
    squared, error = one.joined(other).norms()
    assert float(squared) == 0
    assert float(error) >= 4 * (1e4 * 2.0**-24) ** 2


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_kept_from_their_norms_are_those_that_the_sum_finds_without(bias):
    """Many tokens, a small map: the sum takes what the norms have written out, a bad record adding nothing."""
    generator = torch.Generator().manual_seed(3)
    a, g = torch.randn(5, 40, 6, generator=generator), torch.randn(5, 40, 3, generator=generator)
    a[2, 7, 1] = float("nan")
    factor = torch.tensor([0.5, 1.0, 0.0, 0.25, 0.0])
    asked, unasked = Outer(a, g, bias), Outer(a, g, bias)
    assert asked.small
    assert not Outer(a[:, :2], g[:, :2], bias).small
    squared, error = asked.norms()
    expected = torch.einsum("n,ntp,ntd->pd", factor[[0, 1, 3]], g[[0, 1, 3]], a[[0, 1, 3]])
    for found in (asked.weighted(factor), unasked.weighted(factor)):
        assert len(found) == 1 + bias
        torch.testing.assert_close(found[0], expected)
        if bias:
            torch.testing.assert_close(found[1], torch.einsum("n,ntp->p", factor, g))
    exact = torch.einsum("ntp,ntd->npd", g.double(), a.double()).square().sum(dim=(1, 2))
    exact += g.double().sum(dim=1).square().sum(dim=1) * bias
    assert bool((((squared - exact).abs() <= error) | exact.isnan()).all())
