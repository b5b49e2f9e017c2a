"""A compiled step gives the values of the plain one, follows the weights, and steps aside where it cannot compile, or
is wrong compiled."""

import shutil
import warnings

import pytest
import torch
from torch import Tensor, nn

from straightdp import compiled
from straightdp.cli import main
from straightdp.compiled import Compiled, arithmetic, half, halves, in_bfloat16
from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.errors import BadInput
from straightdp.files import file_hash
from straightdp.privacy.vault import Vault

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "c++", "clang++")), reason="no C++ compiler was found"
)


class Small(nn.Module):
    """A few of each: linear map, embedding, norm, bare parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.norm = nn.LayerNorm(6)
        self.gain = nn.Parameter(torch.rand(1, 1, 6))
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.norm(x + self.embed(y)[:, None]) * self.gain))


def batch_of(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, 6, generator=generator), torch.randint(0, 5, (n,), generator=generator)


@pytest.fixture(scope="module")
def engines() -> tuple[ClippingEngine, ClippingEngine]:
    """(plain, compiled) over the same net."""
    torch.manual_seed(0)
    net = Small()

    def losses(x, y):
        return net(x, y).square().sum(dim=(1, 2))

    pair = ClippingEngine(net, losses, 0.5), ClippingEngine(net, losses, 0.5, speed="compiled")
    for engine in pair:
        engine.preflight(batch_of(3))
    return pair


def assert_same(engines, batch, mask) -> Tensor:
    plain, compiled = (engine(batch, mask) for engine in engines)
    assert compiled.clip == plain.clip
    torch.testing.assert_close(compiled.norms, plain.norms, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(compiled.total, plain.total, rtol=1e-6, atol=1e-6 * float(plain.total.abs().max()))
    return plain.total.clone()


@needs_compiler
def test_a_compiled_engine_equals_the_plain_one_and_follows_its_weights(engines):
    """Also for other records and masks of the same shapes, for other weights, and for other shapes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "not compiled")  # else the plain step would be compared with itself
        first = assert_same(engines, batch_of(4), torch.ones(4))
        other = assert_same(engines, batch_of(4, seed=1), torch.tensor([1.0, 0, 1, 1]))
        assert not torch.allclose(first, other)
        with torch.no_grad():
            for p in engines[0].parameters():
                p.mul_(1.5).add_(0.1)
        moved = assert_same(engines, batch_of(4), torch.ones(4))
        assert not torch.allclose(first, moved, rtol=1e-2)
        assert len(engines[1]._step._ready) == 1
        assert_same(engines, batch_of(6), torch.ones(6))
        assert len(engines[1]._step._ready) == 2


@needs_compiler
def test_a_spoilt_record_harms_no_other_when_compiled(engines):
    x, y = batch_of(4, seed=2)
    x[1, 0, 0] = float("nan")
    plain, compiled = (engine((x, y), torch.ones(4)) for engine in engines)
    assert torch.isfinite(compiled.total).all()
    torch.testing.assert_close(compiled.total, plain.total, rtol=1e-6, atol=1e-6)
    without = engines[1]((x, y), torch.tensor([1.0, 0, 1, 1])).total
    torch.testing.assert_close(without, plain.total, rtol=1e-6, atol=1e-6)


@needs_compiler
def test_an_empty_batch_sums_to_exactly_zero_when_compiled(engines):
    assert bool((engines[1](batch_of(4), torch.zeros(4)).total == 0).all())


def test_what_is_refused_is_refused_when_compiled_too():
    """Preflight sees one shape; the traced step for another shape makes the same checks."""
    net = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})

    def losses(x):
        return (net["a"](x) + (net["b"](x) if len(x) == 3 else 0)).square().sum(dim=1)

    engine = ClippingEngine(net, losses, 1.0, speed="compiled")
    engine._checked = engine._condition()
    with pytest.raises(BadInput, match=r"b\.weight"):
        engine((torch.randn(4, 6),), torch.ones(4))


class Compiler:
    """In torch.compile's place, without a compiler to wait for: the traced graphs themselves, until it `errs`. Keeps
    them, and what they are given."""

    def __init__(self, monkeypatch):
        self.errs, self.graphs, self.given, self.options = False, [], [], {}
        monkeypatch.setattr(torch, "compile", self._compile)

    def _compile(self, graph, *, options, **_):
        self.options = options
        self.graphs.append(graph)
        return lambda *inputs: self._run(graph, inputs)

    def _run(self, graph, inputs):
        self.given.append([x.clone() for x in inputs])
        outputs = graph(*inputs)
        return torch.utils._pytree.tree_map(lambda x: 1.5 * x, outputs) if self.errs else outputs


@pytest.fixture
def compiler(monkeypatch) -> Compiler:
    return Compiler(monkeypatch)


def test_a_pass_that_is_known_to_lose_gradients_is_off(compiler):
    Compiled(lambda x: 2 * x, speed="compiled")(torch.ones(3))
    assert compiler.options["triton.mix_order_reduction"] is False


def test_each_set_of_shapes_and_types_is_traced_once(compiler):
    runs = []

    def twice(x):
        runs.append(x.shape)
        return 2 * x

    step = Compiled(twice, speed="compiled")
    for x in (torch.ones(3), torch.ones(4), torch.ones(3), torch.ones(3).double(), torch.ones(4), torch.ones(3, 1)):
        torch.testing.assert_close(step(x), 2 * x, rtol=0, atol=0)
    assert len(compiler.graphs) == 4
    assert runs == [shape for shape in [(3,), (4,), (3,), (3, 1)] for _ in ("traced", "checked")]


def test_the_traced_graph_reads_parameters_at_every_call(compiler):
    weight = nn.Parameter(torch.ones(3))

    def gradient(x):
        return torch.autograd.grad((weight.square() * x).sum(), [weight])[0]

    step = Compiled(gradient, speed="compiled")
    x = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(step(x), 2 * x)
    with torch.no_grad():
        weight.mul_(5)
    torch.testing.assert_close(step(x), 10 * x)
    assert len(compiler.graphs) == 1


def test_disabled_it_is_the_function_itself(monkeypatch):
    def compile(*_, **__):
        raise AssertionError("compiled although disabled")

    monkeypatch.setattr(torch, "compile", compile)
    given = []

    def function(*inputs):
        given.append(inputs)
        return "what the function returns"

    x = torch.ones(3)
    for speed in ("plain", "captured"):  # on a CPU nothing can be captured
        assert Compiled(function, speed=speed)(x, x) == "what the function returns"
    assert len(given) == 2
    assert all(one is x for inputs in given for one in inputs)


@pytest.mark.parametrize("message", ["no compiler here\nand much more", ""])
@pytest.mark.parametrize("when", ["at the first run", "at once"])
def test_where_it_cannot_compile_the_function_itself_runs_with_a_warning(monkeypatch, when, message):
    def fail(*_):
        raise RuntimeError(message)

    def compile(*_, **__):
        return fail() if when == "at once" else fail

    monkeypatch.setattr(torch, "compile", compile)
    step = Compiled(lambda x: 2 * x, speed="compiled")
    with pytest.warns(UserWarning, match="not compiled, so slower") as caught:
        assert torch.equal(step(torch.ones(3)), torch.full((3,), 2.0))
    assert "\n" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert torch.equal(step(torch.ones(3)), torch.full((3,), 2.0))


def test_an_engine_that_cannot_be_compiled_gives_the_plain_sum(monkeypatch):
    def fail(*_):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    torch.manual_seed(0)
    net = Small()
    sums = []
    for speed in ("plain", "compiled"):
        engine = ClippingEngine(net, lambda x, y: net(x, y).square().sum(dim=(1, 2)), 0.5, speed=speed)
        engine.preflight(batch_of(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sums.append(engine(batch_of(4), torch.ones(4)).total)
    assert torch.equal(sums[0], sums[1])


def test_what_is_wrong_when_compiled_runs_plainly_with_a_warning(compiler):
    compiler.errs = True
    step = Compiled(lambda x: (2 * x, -x), speed="compiled")
    with pytest.warns(UserWarning, match=r"wrong when compiled \(off by 0\.5 of its length\)"):
        one, two = step(torch.ones(3))
    assert torch.equal(one, torch.full((3,), 2.0))
    assert torch.equal(two, -torch.ones(3))
    assert step.off() == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_when_compiled_runs_plainly(monkeypatch, value):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda x: x * value)
    with pytest.warns(UserWarning, match="wrong when compiled"):
        assert torch.equal(Compiled(lambda x: 2 * x, speed="compiled")(torch.ones(3)), torch.full((3,), 2.0))


def test_what_goes_wrong_later_is_seen(compiler):
    weight = torch.ones(3)
    step = Compiled(lambda x: weight * x, speed="compiled")
    step(torch.ones(3))
    assert step.off() < 1e-6
    weight.mul_(7)
    assert step.off() < 1e-6
    compiler.errs = True
    assert step.off() == pytest.approx(0.5)


def test_nothing_of_an_input_is_seen_until_the_step_is_compiled_and_checked(compiler):
    plain = []

    def function(x, ids):
        plain.append(x)
        return x * ids

    x, ids = torch.full((3,), 5.0), torch.tensor([1, 2, 3])
    assert torch.equal(Compiled(function, speed="compiled")(x, ids), x * ids)
    *before, last = compiler.given
    assert torch.equal(last[0], x)
    for values, numbers in before:
        assert float(values.max()) < 1.0
        assert not numbers.any()
    assert all(float(values.max()) < 1.0 for values in plain[1:])  # the first is traced, and has no values
    assert len(before) == 1


def test_an_engine_is_checked_on_some_records_and_refuses_to_go_on_when_it_errs(compiler):
    torch.manual_seed(0)
    net = Small()
    sizes = []

    def losses(x, y):
        sizes.append(len(x))
        return net(x, y).square().sum(dim=(1, 2))

    engine = ClippingEngine(net, losses, 0.5, speed="compiled")
    engine.preflight(batch_of(3))
    sizes.clear()
    engine(batch_of(300), torch.ones(300))
    assert sizes == [300, 34]  # traced; every ninth is compared with the plain step
    _, mask, _, ids = compiler.given[0]
    assert torch.equal(mask.nonzero().flatten(), torch.arange(0, 300, 9))
    assert torch.equal(ids, batch_of(3)[1].repeat(100))  # preflight's: a network may do nothing with an id of 0
    engine.vouch()
    compiler.errs = True
    with pytest.raises(BadInput, match=r"has gone wrong.*may not be clipped.*run\.compile=off"):
        engine.vouch()


def test_a_sum_that_is_wrong_is_seen_beside_norms_that_are_long_and_right(monkeypatch):
    torch.manual_seed(0)
    net = Small()

    def losses(x, y):
        return 1e4 * net(x, y).square().sum(dim=(1, 2))

    def compile(graph, **_):
        def run(*inputs):
            total, norms = graph(*inputs)
            return 1.2 * total, norms

        return run

    monkeypatch.setattr(torch, "compile", compile)
    engine = ClippingEngine(net, losses, 0.5, speed="compiled")
    engine.preflight(batch_of(3))
    with pytest.warns(UserWarning, match=r"wrong when compiled \(off by 0\.2 "):
        engine(batch_of(20), torch.ones(20))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_a_mask_of_any_type_will_do(compiler, dtype):
    net = Small()
    engine = ClippingEngine(net, lambda x, y: net(x, y).square().sum(dim=(1, 2)), 0.5, speed="compiled")
    engine.preflight(batch_of(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(batch_of(20), torch.ones(20, dtype=dtype))


def test_weights_that_are_not_finite_are_no_fault_of_the_compiler(compiler):
    net = Small()
    engine = ClippingEngine(net, lambda x, y: net(x, y).square().sum(dim=(1, 2)), 0.5, speed="compiled")
    engine.preflight(batch_of(3))
    engine(batch_of(20), torch.ones(20))
    with torch.no_grad():
        net.layer.weight.fill_(float("nan"))
    engine.vouch()


def test_a_run_whose_compiled_step_goes_wrong_keeps_none_of_its_sums(tiny, tmp_path, compiler, monkeypatch, capsys):
    """It stops before the next checkpoint, and goes on from the last one to what a run without the fault gives."""
    short = ("pretrain.steps=20", "distill.steps=20", "dpsgd.steps=30", "evaluate.thorough=off", "evaluate.seeds=1")
    settings = [word for one in (*short, f'privacy.pinned_key="{"aa" * 32}"') for word in ("--set", one)]
    assert main(["run", str(tiny), "--out", str(tmp_path / "calm"), *settings]) == 0

    run, on = tmp_path / "run", ("--set", "run.compile=on")
    checkpoint = run / "private/checkpoints/dpsgd.pt"
    monkeypatch.setattr(Compiler, "errs", property(lambda _: checkpoint.exists(), lambda *_: None), raising=False)
    assert main(["run", str(tiny), "--out", str(run), *settings, *on]) == 2
    assert "may not be clipped" in capsys.readouterr().err
    assert torch.load(checkpoint, weights_only=True)["step"] == 10
    assert not (run / "release/model.safetensors").exists()
    assert main(["run", str(tiny), "--out", str(run), *settings, "--resume", "--set", "run.compile=off"]) == 0
    for name in ("model.safetensors", "moments.safetensors"):
        one, two = (file_hash(folder / "release" / name) for folder in (run, tmp_path / "calm"))
        assert one == two, name


CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["float32", "bfloat16"])
def halved(request, monkeypatch) -> bool:
    """Whether the processor has bfloat16's products."""
    monkeypatch.setattr(compiled, "_processor_halves", lambda: request.param)
    return request.param


def test_a_network_runs_in_bfloat16_where_the_processor_multiplies_it(halved):
    """Rounded to bfloat16's 8 bits or not at all; what comes back is float32 either way."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(32, 64)
    with torch.no_grad():
        found, exact, rounded = half(layer)(x), layer(x), in_bfloat16(layer)(x)
    assert found.dtype == torch.float32
    off = float((found - exact).norm() / exact.norm())
    assert 2**-11 < off < 2**-7 if halved else off == 0
    assert torch.equal(found, rounded) == halved
    assert (halves(CPU), arithmetic(CPU)) == (halved, "cpu in bfloat16" if halved else "cpu")
    assert halves("cuda")
    assert arithmetic("cuda") == "cuda"


def test_attention_in_bfloat16_on_a_processor_is_that_of_float32_but_for_rounding():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 8, requires_grad=True) for _ in range(3))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    found = in_bfloat16(lambda *parts: torch.nn.functional.scaled_dot_product_attention(*parts))(q, k, v)
    for one, two in zip(
        (found, *torch.autograd.grad(found.square().sum(), (q, k, v))),
        (wanted, *torch.autograd.grad(wanted.square().sum(), (q, k, v))),
        strict=True,
    ):
        assert float((one - two).detach().norm() / two.detach().norm()) < 0.02


SHORT = ("pretrain.steps=20", "distill.steps=20", "dpsgd.steps=20", "evaluate.seeds=1", "sample.n=20")
SHORTENED = [word for one in (*SHORT, f'privacy.pinned_key="{"aa" * 32}"') for word in ("--set", one)]


def test_a_run_in_bfloat16_repeats_itself_and_is_not_the_run_in_float32(tiny, tmp_path, monkeypatch):
    def weights(name: str, halved: bool) -> str:
        monkeypatch.setattr(compiled, "_processor_halves", lambda: halved)
        assert main(["run", str(tiny), "--out", str(tmp_path / name), *SHORTENED]) == 0
        assert main(["replay", str(tmp_path / name / "release")]) == 1  # pinned, and sound but for that
        return file_hash(tmp_path / name / "release/model.safetensors")

    assert weights("one", True) == weights("two", True) != weights("plain", False)


def test_bfloat16_can_be_turned_off(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert not halves("cpu")  # as all tests have it
    monkeypatch.setenv("STRAIGHTDP_BFLOAT16", "no")
    with pytest.raises(BadInput, match="set it to on or off"):
        halves("cpu")
    monkeypatch.delenv("STRAIGHTDP_BFLOAT16")
    assert halves("cpu")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    assert not halves("cpu")


def test_noise_that_hid_a_sum_of_float32_hides_none_of_bfloat16(tiny, tmp_path, monkeypatch, capsys):
    """Taken up on another processor, a run would give the same step another sum under the same noise."""
    run, drawn = tmp_path / "run", Vault.noisy_gradient

    def stops(self, id, step, *rest, **named):
        if step == 15:
            raise KeyboardInterrupt
        return drawn(self, id, step, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Vault, "noisy_gradient", stops)
        assert main(["run", str(tiny), "--out", str(run), *SHORTENED]) == 130
    again = ["run", str(tiny), "--out", str(run), "--resume", *SHORTENED]
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "_processor_halves", lambda: True)
        assert main(again) == 3
    assert "STRAIGHTDP_BFLOAT16" in capsys.readouterr().err
    assert main(again) == 0
