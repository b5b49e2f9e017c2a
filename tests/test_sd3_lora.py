"""Adapters on a small random SD3 transformer: trained by the clipping engine exactly, alone, and block by block."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from straightdp.dpsgd.backward import Written
from straightdp.dpsgd.clipping import MARGIN, ClippingEngine, gradient_norms
from straightdp.dpsgd.factors import Outer
from straightdp.dpsgd.trainer import Bucket, draw, record_losses
from straightdp.errors import BadInput
from straightdp.flow.path import TorchDraws
from straightdp.nets.mmdit import MMDiT
from straightdp.recipe import DpSgd, Net
from straightdp.sd3.lora import adapter_state, add_adapters, load_adapter_state

pytest.importorskip("peft")
diffusers = pytest.importorskip("diffusers")

SHAPE, PROMPTS, RANK = (4, 8, 8), 5, 4


class Small(nn.Module):
    """As SD3.5 medium is built: normalised queries and keys, and a second attention in the first block."""

    def __init__(self, layers: int = 2, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.transformer = diffusers.SD3Transformer2DModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            num_layers=layers,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            caption_projection_dim=32,
            pooled_projection_dim=20,
            pos_embed_max_size=8,
            qk_norm="rms_norm",
            dual_attention_layers=(0,),
        )
        self.register_buffer("embeddings", torch.randn(PROMPTS, 6, 24))
        self.register_buffer("pooled", torch.randn(PROMPTS, 20))
        self.to(dtype).eval()

    def forward(self, x: Tensor, t: Tensor, ids: Tensor) -> Tensor:
        text, pooled = self.embeddings[ids[:, 0]], self.pooled[ids[:, 0]]
        return -self.transformer(x.to(text.dtype), text, pooled, 1000 * (1 - t), return_dict=False)[0]

    @property
    def blocks(self) -> nn.ModuleList:
        return self.transformer.transformer_blocks


def adapted(layers: int = 2, dtype: torch.dtype = torch.float32, *, trained: bool = True) -> Small:
    net = Small(layers, dtype)
    add_adapters(net, RANK, seed=1)
    if trained:
        generator = torch.Generator().manual_seed(2)
        state = {name: torch.randn(x.shape, generator=generator) * 0.3 for name, x in adapter_state(net).items()}
        load_adapter_state(net, state)
    return net


def batch_of(n: int, draws: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    z, ids = torch.randn(n, *SHAPE, generator=generator) * scale, torch.arange(n)[:, None] % (PROMPTS - 1)
    null = torch.full((1, 1), PROMPTS - 1)
    return draw(z, ids, null, DpSgd(draws=draws), Bucket(0.1, 1.0), TorchDraws(generator))


def engine_for(net: Small, clip: float, draws: int = 2, *, blocks=()) -> ClippingEngine:
    engine = ClippingEngine(net, record_losses(net), clip, blocks=blocks)
    engine.preflight(batch_of(3, draws, seed=9))
    return engine


def record_gradients(net: Small, batch: tuple[Tensor, ...]) -> Tensor:
    """(records, values): one backward pass a record, in float64."""
    exact = copy.deepcopy(net).double()
    parameters = [p for p in exact.parameters() if p.requires_grad]
    rows = []
    for i in range(len(batch[0])):
        z, ids, t, xi, weight = (x[i : i + 1].double() if x.is_floating_point() else x[i : i + 1] for x in batch)
        k = t.shape[1]
        x = t[0, :, None, None, None] * z + (1 - t[0, :, None, None, None]) * xi[0]
        error = exact(x, t[0], ids[0]) - (z - xi[0])
        loss = weight[0] * error.square().sum() / (k * z.numel())
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    return torch.stack(rows)


def assert_near(mine: Tensor, theirs: Tensor, part: float = 1e-5) -> None:
    """To a part of the largest value."""
    torch.testing.assert_close(mine.double(), theirs.double(), rtol=0, atol=part * float(theirs.abs().max()))


# What is added


def test_adapters_change_nothing_at_the_start_and_hang_on_the_seed_alone():
    net, batch = Small(), batch_of(2, 1)
    x, t, ids = batch[0], batch[2][:, 0], batch[1][:, 0]
    before = net(x, t, ids)
    state = torch.get_rng_state()
    add_adapters(net, RANK, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(net(x, t, ids), before)
    torch.manual_seed(77)
    again, other = Small(), Small()
    add_adapters(again, RANK, seed=1)
    add_adapters(other, RANK, seed=2)
    mine, same, differs = (adapter_state(one) for one in (net, again, other))
    assert all(torch.equal(mine[name], same[name]) for name in mine)
    down = [name for name in mine if "lora_A" in name]
    assert 2 * len(down) == len(mine)
    assert not any(torch.equal(mine[name], differs[name]) for name in down)
    values = torch.cat([mine[name].flatten() for name in down]) * RANK  # standard normal
    assert abs(float(values.mean())) < 4 / math.sqrt(len(values))
    assert abs(float(values.var()) - 1) < 4 * math.sqrt(2 / len(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_attention_map_that_reaches_the_loss_has_an_adapter_and_only_they_are_trained(dtype):
    net = adapted(3, dtype)
    maps = {"to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
    expected = {f"{i}.attn.{name}" for i in range(3) for name in maps} - {"2.attn.to_add_out", "2.attn.add_q_proj"}
    start, ends = "transformer.transformer_blocks.", (".lora_A.weight", ".lora_B.weight")
    assert set(adapter_state(net)) == {f"{start}{name}{end}" for name in expected for end in ends}
    trained = {name.replace(".default", ""): p for name, p in net.named_parameters() if p.requires_grad}
    assert set(trained) == set(adapter_state(net))
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in net.parameters() if not p.requires_grad} == {dtype}


def test_the_last_blocks_caption_queries_are_heard_by_nobody():
    net, batch = Small(), batch_of(2, 1)
    before = net(batch[0], batch[2][:, 0], batch[1][:, 0])
    nn.init.normal_(net.blocks[-1].attn.add_q_proj.weight)
    assert torch.equal(net(batch[0], batch[2][:, 0], batch[1][:, 0]), before)
    nn.init.normal_(net.blocks[0].attn.add_q_proj.weight)
    assert not torch.equal(net(batch[0], batch[2][:, 0], batch[1][:, 0]), before)


def test_values_come_back_and_open_in_diffusers():
    net, batch = adapted(), batch_of(2, 1)
    inputs = batch[0], batch[2][:, 0], batch[1][:, 0]
    fresh = adapted(trained=False)
    assert not torch.equal(fresh(*inputs), net(*inputs))
    load_adapter_state(fresh, adapter_state(net))
    assert torch.equal(fresh(*inputs), net(*inputs))
    theirs = Small()
    theirs.transformer.load_lora_adapter(adapter_state(net), prefix="transformer")
    torch.testing.assert_close(theirs(*inputs), net(*inputs))


def test_values_of_another_network_are_refused_and_leave_this_one_as_it_is():
    net = adapted()
    before = adapter_state(net)
    name = list(before)[-1]
    less = {key: value + 1 for key, value in before.items() if key != name}
    for state in (less, {**before, "transformer.other": torch.zeros(1)}, {**before, name: before[name][:1]}, {}):
        with pytest.raises(BadInput, match=r"adapter.*: take the"):
            load_adapter_state(net, state)
    assert all(torch.equal(value, before[key]) for key, value in adapter_state(net).items())


# Trained by the clipping engine


@pytest.mark.parametrize("trained", [True, False])
def test_without_clip_and_noise_a_step_is_a_step_of_plain_sgd(trained):
    net, batch = adapted(trained=trained), batch_of(4, 2)
    plain = copy.deepcopy(net)
    engine = engine_for(net, 1e9)
    losses = record_losses(plain)(*batch)
    parameters = [p for p in plain.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(losses.sum(), parameters)
    total = engine(batch, torch.ones(4)).total
    for mine, theirs in zip(engine.split(total), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    record_losses(plain)(*batch).mean().backward()
    torch.optim.SGD(parameters, lr=0.5).step()
    with torch.no_grad():
        for p, gradient in zip(engine.parameters(), engine.split(total / 4), strict=True):
            p.sub_(gradient, alpha=0.5)
    for (name, mine), theirs in zip(adapter_state(net).items(), adapter_state(plain).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("draws", "clip"), [(1, 0.05), (3, 0.05), (3, 1e9)])
def test_norms_and_clipped_sums_are_those_of_a_loop_over_records(draws, clip, blocks):
    net, batch, mask = adapted(), batch_of(4, draws), torch.tensor([1.0, 1, 0, 1])
    engine = engine_for(net, clip, draws, blocks=net.blocks if blocks else ())
    exact = record_gradients(net, batch)
    norms = exact.norm(dim=1)
    assert float(norms.min()) > 0.05
    result = engine(batch, mask)
    torch.testing.assert_close(result.norms[mask > 0].double(), norms[mask > 0], rtol=1e-5, atol=0)
    raised = gradient_norms(list(engine._backward(batch, torch.ones(4))[1].values()))[1].double()
    assert bool((raised >= norms * (1 - 1e-6)).all())
    assert bool((raised <= norms * 1.001).all())
    assert_near(result.total, mask.double() * (clip * MARGIN / raised).clamp_max(1) @ exact)


def test_steps_from_the_start_leave_every_frozen_weight_as_it_was_to_the_bit():
    net = adapted(trained=False)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    engine = engine_for(net, 0.5)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    for step in range(2):
        total = engine(batch_of(4, 2, step), torch.ones(4)).total
        for p, gradient in zip(engine.parameters(), engine.split(total), strict=True):
            p.grad = gradient
        optimizer.step()
    moved = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(engine.trainable)


def test_preflight_covers_every_adapter():
    net = adapted(trained=False)
    coverage = ClippingEngine(net, record_losses(net), 1.0).preflight(batch_of(3, 2))
    assert {(one.name, one.kind) for one in coverage} == {(name, "linear") for name in _trainable(net)}


def _trainable(net: nn.Module) -> list[str]:
    return [name for name, p in net.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("blocks", [False, True])
def test_a_bfloat16_network_is_clipped_by_its_own_gradients(blocks):
    """Near those of the same weights in float64, and equal to what autograd makes of bfloat16."""
    net, batch = adapted(dtype=torch.bfloat16), batch_of(4, 2)
    engine = engine_for(net, 0.05, blocks=net.blocks if blocks else ())
    result = engine(batch, torch.ones(4))
    torch.testing.assert_close(result.norms.double(), record_gradients(net, batch).norm(dim=1), rtol=0.05, atol=0)
    losses = record_losses(net)(*batch)
    rows = [torch.autograd.grad(loss, engine.parameters(), retain_graph=True) for loss in losses]
    gradients = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    torch.testing.assert_close(result.norms, gradients.norm(dim=1), rtol=1e-2, atol=0)
    assert_near(result.total, (0.05 / gradients.norm(dim=1)) @ gradients, part=0.03)
    for i in range(4):
        assert float(engine(batch, torch.eye(4)[i]).total.double().norm()) <= 0.05


# Blocks that are computed again


def test_one_bad_record_harms_no_other_when_blocks_are_computed_again():
    net = adapted()
    engine, clean = engine_for(net, 0.05, blocks=net.blocks), batch_of(4, 2)
    spoilt = (clean[0].clone(), *clean[1:])
    spoilt[0][1] = float("nan")
    result = engine(spoilt, torch.ones(4))
    assert not torch.isfinite(result.norms[1])
    assert float(result.total.norm()) > 0.05
    assert torch.equal(result.total, engine(clean, torch.tensor([1.0, 0, 1, 1])).total)


def test_a_record_alone_is_not_longer_than_the_clip_when_blocks_are_computed_again():
    net = adapted()
    engine = engine_for(net, 0.01, blocks=net.blocks)
    for i, scale in enumerate([1e-4, 1.0, 1e2, 1e4]):
        total = engine(batch_of(4, 2, i, scale), torch.eye(4)[i]).total
        assert 0.98 * 0.01 <= float(total.double().norm()) <= 0.01


@pytest.mark.parametrize("half", [False, True])
def test_blocks_with_every_kind_of_map_give_what_they_give_at_once(half):
    """Our own network: biases, maps with one token and with many; under autocast, that must be entered again."""
    torch.manual_seed(0)
    net = MMDiT(Net(width=16, depth=3, heads=2, patch=2, caption_width=8, caption_length=1, vocabulary=8), (4, 16, 16))
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(0, 0.3)

    def network(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            return net(*inputs).float()

    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4, 4, 16, 16, generator=generator)
    batch = draw(
        z, torch.arange(4)[:, None], torch.full((1, 1), 7), DpSgd(draws=2), Bucket(0, 1), TorchDraws(generator)
    )
    results = []
    for blocks in ((), net.blocks):
        engine = ClippingEngine(net, record_losses(network), 1.0, blocks=blocks)
        engine.preflight(tuple(x[:3] for x in batch))
        results.append(engine(batch, torch.tensor([1.0, 1, 0, 1])))
        kept = {type(factor).__name__ for factor in engine._backward(batch, torch.ones(4))[1].values()}
        assert kept == ({"Outer", "Whole", "Written"} if blocks else {"Outer"})
    plain, again = results
    torch.testing.assert_close(again.norms, plain.norms, rtol=2e-3 if half else 1e-5, atol=0)
    assert_near(again.total, plain.total, part=5e-3 if half else 1e-4)  # the margin for rounding differs


@pytest.mark.parametrize("tokens", [300, 3000])
def test_a_gradient_written_out_has_its_norm_within_the_bound(tokens):
    torch.manual_seed(0)
    a, g = torch.randn(3, tokens, 6) * 1e3, torch.randn(3, tokens, 5)
    a[1, 1::2], g[1, 1::2] = a[1, ::2], -g[1, ::2] * (1 + 1e-4)  # tokens that nearly cancel
    a[2] = 0
    written, exact = Written.of(Outer(a, g, bias=False)), g.double().mT @ a.double()
    squared, error = written.norms()
    true = exact.square().sum(dim=(1, 2))
    assert bool(((squared.double() - true).abs() <= error.double()).all())
    assert float(error[0]) < 1e-6 * float(squared[0])
    weights = torch.tensor([0.5, 0.0, 2.0])
    mine = written.weighted(weights)[0].reshape(5, 6)
    torch.testing.assert_close(mine.double(), torch.einsum("n,npd->pd", weights.double(), exact), rtol=1e-6, atol=0)


def test_six_blocks_take_less_than_half_of_the_memory_when_they_are_computed_again():
    net, batch, mask = adapted(6), batch_of(8, 2), torch.ones(8)
    plain, again = (ClippingEngine(net, record_losses(net), 0.05, blocks=blocks) for blocks in ((), net.blocks))
    plain._checked = again._checked = plain._condition()
    assert_near(again(batch, mask).total, plain(batch, mask).total, part=1e-3)  # the margin for rounding differs
    assert peak(lambda: again(batch, mask)) < 0.5 * peak(lambda: plain(batch, mask))


def peak(function) -> int:
    """The most bytes that a call had allocated at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = torch.tensor([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).cumsum(dim=0)
    return int(held.max())


class Chain(nn.Module):
    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Hidden(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return torch.ops.aten.linear(input, self.weight, self.bias)


class Pair(nn.Module):
    def __init__(self, layer: nn.Module, last: nn.Module):
        super().__init__()
        self.layer, self.last = layer, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x))


shared = nn.Linear(6, 6)


@pytest.mark.parametrize(
    ("blocks", "name"),
    [
        ((nn.Linear(6, 6), Hidden(6, 6)), "blocks.1.weight"),
        ((shared, nn.Tanh(), shared), "blocks.0.weight is used in two"),
        ((nn.Linear(6, 6), Pair(nn.Linear(6, 6), nn.ReLU(inplace=True))), "blocks.1.layer.weight"),
        ((nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 6)), "other records"),
        ((Pair(nn.Linear(6, 6), nn.Flatten(0)), nn.Unflatten(0, (-1, 6)), nn.Softmax(dim=0)), "other records"),
    ],
    ids=["hidden", "shared", "in place", "batch norm", "mixed"],
)
def test_what_cannot_be_clipped_is_refused_inside_a_block_too(blocks, name):
    torch.manual_seed(0)
    net = Chain(*blocks)
    engine = ClippingEngine(net, lambda x: net(x).square().sum(dim=1), 1.0, blocks=net.blocks)
    with pytest.raises(BadInput, match=name):
        engine.preflight((torch.randn(4, 6),))
    assert all("forward" not in block.__dict__ for block in net.blocks)


def test_a_block_that_takes_an_activation_past_its_inputs_is_refused():
    """Its gradient with respect to that activation would be lost."""
    net = Chain(nn.Linear(6, 6), nn.Tanh())
    net.last = nn.Linear(6, 6)

    class Aside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * net.aside

    aside = Aside()

    def losses(x: Tensor) -> Tensor:
        net.aside = net(x)
        return aside(net.last(x)).square().sum(dim=1)

    engine = ClippingEngine(net, losses, 1.0, blocks=[aside])
    with pytest.raises(BadInput, match=r"blocks\.0\.weight"):
        engine.preflight((torch.randn(4, 6),))
