"""The estimates against the models: parameters and FLOPs exactly, memory as it is allocated, passes as they are run."""

import gc
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from straightdp.errors import BadInput
from straightdp.flow.sampler import euler, guided
from straightdp.nets.spaces import Pixels
from straightdp.recipe import DpSgd, Recipe, Sd3, load
from straightdp.reproduce.experiment import read
from straightdp.rivals.private_evolution import FlowPrior, evolve
from straightdp.sd3 import estimates
from straightdp.sd3.estimates import Settings, Transformer, estimate, table

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

SMALL = Transformer(layers=3, heads=2, head=32, text=40, pooled=24, channels=4, patch=2, positions=9)
NARROW = Transformer(layers=1, heads=3, head=8, text=16, pooled=12, channels=3, patch=4, positions=8)
WIDE = Transformer(layers=4, heads=4, head=64, text=32, pooled=16, channels=4, patch=2, positions=16)
SIZE, TEXT = 16, 24  # of WIDE's code, and its text: 64 and 24 tokens


def parameters(net) -> int:
    return sum(p.numel() for p in net.parameters())


def built(t: Transformer):
    return diffusers.SD3Transformer2DModel(
        sample_size=t.positions * t.patch,
        patch_size=t.patch,
        in_channels=t.channels,
        out_channels=t.channels,
        num_layers=t.layers,
        attention_head_dim=t.head,
        num_attention_heads=t.heads,
        joint_attention_dim=t.text,
        caption_projection_dim=t.width,
        pooled_projection_dim=t.pooled,
        pos_embed_max_size=t.positions,
    )


def sd3_vae():
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("t", [Transformer(), SMALL, NARROW], ids=["SD3-medium", "small", "one block"])
def test_parameters_and_flops_are_those_of_diffusers(t):
    with torch.device("meta"):
        net = built(t)
        assert t.parameters() == parameters(net)
        assert t.weights() == parameters(net) + sum(b.numel() for b in net.buffers())
        for side, text in ((8, 5), (16, 154)):
            inputs = {
                "hidden_states": torch.zeros(1, t.channels, side, side),
                "encoder_hidden_states": torch.zeros(1, text, t.text),
                "pooled_projections": torch.zeros(1, t.pooled),
                "timestep": torch.zeros(1),
            }
            with torch.no_grad():
                assert t.flops((side // t.patch) ** 2, text)[0] == counted(lambda inputs=inputs: net(**inputs))
    if t == Transformer():
        assert t.parameters() == 2_028_328_000


def test_the_other_parts_are_as_large_and_as_slow_as_they_are():
    clip, t5 = transformers.CLIPTextModelWithProjection, transformers.T5EncoderModel
    common = {"vocab_size": 49408, "max_position_embeddings": 77}
    large = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    giant = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
    xxl = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 32128}
    with torch.device("meta"), torch.no_grad():
        sizes = {
            "CLIP-L": parameters(clip(transformers.CLIPTextConfig(**common, **large, projection_dim=768))),
            "CLIP-G": parameters(clip(transformers.CLIPTextConfig(**common, **giant, projection_dim=1280))),
            "T5-XXL": parameters(t5(transformers.T5Config(**xxl, feed_forward_proj="gated-gelu"))),
        }
        assert sizes == estimates.TEXT_ENCODERS
        vae = sd3_vae()
        assert parameters(vae) == estimates.VAE
        for size in (64, 512):
            attention = size**4 // 2
            decoding = counted(lambda size=size: vae.decode(torch.zeros(1, 16, size // 8, size // 8)))
            encoding = counted(lambda size=size: vae.encode(torch.zeros(1, 3, size, size)))
            assert decoding == estimates.DECODE * size**2 + attention
            assert encoding == estimates.ENCODE * size**2 + attention


def adapted(t: Transformer, rank: int, size: int = SIZE, text: int = TEXT):
    """A network of ours with adapters that are not at their start, where half of them have no gradient."""
    pytest.importorskip("peft")
    from straightdp.sd3.loading import Prior, PromptTable
    from straightdp.sd3.lora import add_adapters
    from straightdp.sd3.velocity import Velocity

    torch.manual_seed(0)
    shape = (t.channels, size, size)
    table = PromptTable(torch.randn(5, text, t.text), torch.randn(5, t.pooled))
    net = Velocity(Prior(built(t), None, "", "", shape, shape), table).eval()
    add_adapters(net, rank, seed=0)
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn_like(p))
    return net


def batch_of(t: Transformer, rows: int):
    return torch.randn(rows, t.channels, SIZE, SIZE), torch.rand(rows), torch.zeros(rows, 1, dtype=torch.int64)


def test_adapters_are_counted_and_cost_nearly_nothing_backward():
    net = adapted(WIDE, rank=3)
    assert WIDE.adapters(3) == sum(p.numel() for p in net.parameters() if p.requires_grad)
    net = net.to("meta")
    x, t, ids = (value.to("meta") for value in batch_of(WIDE, 1))
    forward, backward = WIDE.flops((SIZE // 2) ** 2, TEXT)
    both = counted(lambda: net(x, t, ids).sum().backward())
    assert both == pytest.approx(forward + backward, rel=0.06)


def peak(run) -> int:
    """The most bytes that `run` had allocated at once beside what was there."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


LIKE_WIDE = Settings(net=WIDE, size=8 * SIZE, text_tokens=TEXT, dtype="float32", rank=4)


def test_a_forward_pass_holds_what_is_estimated():
    net, (x, t, ids) = adapted(WIDE, 4), batch_of(WIDE, 6)
    with torch.no_grad():
        assert peak(lambda: net(x, t, ids)) == pytest.approx(estimates.FORWARD["float32"] * 6 * LIKE_WIDE.row, rel=0.1)


def test_a_pass_saves_for_its_backward_pass_what_is_estimated():
    def saved(layers: int) -> int:
        net = adapted(replace(WIDE, layers=layers), 4)
        own = {value.untyped_storage().data_ptr() for value in [*net.parameters(), *net.buffers()]}
        seen = {}  # tensors stay alive in it, so that no address is used twice

        def pack(value):
            storage = value.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = (storage.nbytes(), value)
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            net(*batch_of(WIDE, 6))
        return sum(size for size, _ in seen.values())

    assert saved(4) - saved(3) == pytest.approx(estimates.SAVED["float32"] * 6 * LIKE_WIDE.row, rel=0.05)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_clipped_step_holds_what_is_estimated(checkpoint):
    from straightdp.dpsgd.clipping import ClippingEngine
    from straightdp.dpsgd.trainer import Bucket, draw, record_losses
    from straightdp.flow.path import TorchDraws

    net, draws = adapted(WIDE, 4), TorchDraws(torch.Generator().manual_seed(0))
    z, ids = batch_of(WIDE, 4)[::2]
    batch = draw(z, ids, torch.full((1, 1), 4), DpSgd(draws=2), Bucket(0.0, 1.0), draws)
    blocks = net.transformer.transformer_blocks if checkpoint else ()
    engine = ClippingEngine(net, record_losses(net), 1.0, blocks=blocks)
    engine.preflight(tuple(x[:2] for x in batch))
    found = peak(lambda: engine(batch, torch.ones(4)))
    optimizer = WIDE.adapters(4) * estimates.COPIES  # not in this step
    expected = LIKE_WIDE.step_bytes(8, records=4, checkpoint=checkpoint) - optimizer
    assert found == pytest.approx(expected, rel=0.15)


def test_decoding_holds_what_is_estimated():
    vae = sd3_vae()
    with torch.no_grad():
        found = peak(lambda: vae.decode(torch.zeros(1, 16, 16, 16)))
    assert found == pytest.approx(estimates.DECODE_BYTES * 128**2, rel=0.1)


class Counter:
    """A network that counts the rows it is asked for."""

    def __init__(self):
        self.rows = 0

    def __call__(self, x, t, ids):
        self.rows += len(x)
        return torch.zeros_like(x)


@pytest.mark.parametrize("guidance", [0.0, 1.0, 5.0])
def test_passes_are_as_many_as_the_sampler_and_private_evolution_make(guidance):
    settings = {"classes": 3, "per_class": 4, "sample_steps": 9, "guidance": guidance}
    votes = {"rounds": 5, "times": (0.1, 0.7), "variations": 2}
    net, captions, null = Counter(), torch.zeros(12, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64)
    euler(guided(net, captions, null, guidance), torch.zeros(12, 1, 2, 2), 9)
    assert estimate(["zero-shot"], **settings)[0].forward_passes == net.rows

    net, space = Counter(), Pixels((1, 2, 2))
    device = torch.device("cpu")
    prior = FlowPrior(net, captions[:3], space, guidance=(null, guidance), steps=9, batch=5, device=device)
    evolve(
        prior,
        lambda images: images.flatten(1),
        lambda step, candidates: torch.ones(3, 4),
        classes=3,
        population=4,
        **votes,
        sigma=0.1,
        seed=0,
        device=device,
    )
    assert estimate(["Private Evolution"], **settings, **votes)[0].forward_passes == net.rows


def by_name(**settings) -> dict:
    return {e.row: e for e in estimate(**settings)}


def test_rows_cost_what_they_do_more_than_others():
    rows = by_name()
    assert list(rows) == [row.name for _, row in read("table3").rows()]
    drawn = 102 * 20 * 28 * 2
    public = drawn // 2
    trained = 500 * 0.02 * 2040 * 4
    assert rows["zero-shot"].forward_passes == drawn
    assert rows["moment guidance"].forward_passes == drawn + public
    assert rows["uniform DP-SGD, ε = 2"].forward_passes == drawn + public + 2 * trained
    assert rows["non-private LoRA"].forward_passes == drawn + public + 2 * trained
    assert rows["distillation + DP-SGD"].forward_passes == drawn + public + 2 * trained + 1000 * 8
    again = by_name(checkpoint=False)
    row = "uniform DP-SGD, ε = 10"
    assert again[row].forward_passes == drawn + public + trained
    assert again[row].gpu_gib > rows[row].gpu_gib
    assert again[row].hours < rows[row].hours
    assert again["moment guidance"] == rows["moment guidance"]


def test_hours_are_flops_over_the_rate_and_bytes_follow_the_dtype():
    slow, fast = (estimate(["moment guidance"], tflops=rate)[0] for rate in (100.0, 300.0))
    assert slow.hours == pytest.approx(3 * fast.hours)
    images = 102 * (20 + 10)
    tera = images * 28 * 2 * 1.802637213696 + 6 * images * 2.514971787264 + 6 * (1020 + 2040) * 1.117563912192
    assert fast.hours == pytest.approx(tera / 300 / 3600)
    gib = 2.0**30
    encoders = 123_650_304 + 694_659_840 + 4_762_310_656
    assert fast.gpu_gib == pytest.approx(encoders * 2 / gib + 1)
    wide = estimate(["moment guidance"], dtype="float32")[0].gpu_gib
    assert wide == pytest.approx(encoders * 4 / gib + 1)
    without = estimate(["moment guidance"], t5=False)[0].gpu_gib
    weights = (2_028_328_000 + 192**2 * 1536 + 103 * (154 * 4096 + 2048)) * 2 + 83_819_683 * 4
    assert without == pytest.approx((weights + 4 * 512**2 * 4 * 1024) / gib + 1)


def test_the_defaults_are_those_of_the_recipes():
    def recipe(name: str) -> Recipe:
        return load(f"sd3-{name}", ("sd3.model=x",))

    mine, frozen = Settings(), Sd3()
    for name in ("guide", "lora", "distill", "evolve"):
        its = recipe(name)
        found = (its.image.size, its.sample.n, its.sample.steps, its.sample.guidance, its.sample.batch)
        assert found == (mine.size, mine.classes * mine.per_class, mine.sample_steps, mine.guidance, mine.batch)
    for name in ("lora", "distill"):
        its = recipe(name).dpsgd
        assert (its.steps, its.q, its.draws, its.micro_batch) == (mine.steps, mine.q, mine.draws, mine.micro_batch)
    its = recipe("distill").distill
    assert (its.steps, its.batch) == (mine.distill_steps, mine.distill_batch)
    its = recipe("evolve").rival
    found = (its.rounds, its.population, its.variations, its.times)
    assert found == (mine.rounds, mine.per_class, mine.variations, mine.times)
    found = (frozen.prior, frozen.rank, 77 + frozen.tokens, frozen.t5, frozen.dtype, frozen.checkpoint)
    assert found == (mine.prior, mine.rank, mine.text_tokens, mine.t5, mine.dtype, mine.checkpoint)


def test_the_table_has_a_line_a_row_and_unknown_rows_are_refused():
    lines = table(estimate(["zero-shot", "moment guidance"])).splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["row", "---", "zero-shot", "moment guidance"]
    assert lines[2].split("|")[4].strip() == "114,240"
    assert len({line.count("|") for line in lines}) == 1
    with pytest.raises(BadInput, match="'zero'; its rows are zero-shot, "):
        estimate(["zero"])
