"""Other people's models: clipped as a loop over records would, or refused by name before a sum is returned."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from straightdp.dpsgd.clipping import MARGIN, ClippingEngine, gradient_norms
from straightdp.errors import BadInput

N = 4


class Net(nn.Module):
    """`parts` as attributes, `f(self, *inputs)` as the forward pass."""

    def __init__(self, f, **parts):
        super().__init__()
        self.f = f
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.f(self, *inputs)


def squares(net):
    """A loss a record that no parameter is at the optimum of: sum of (output - 1)^2, one coefficient an output."""

    def losses(*batch):
        out = net(*batch).flatten(1)
        return ((out - 1).square() * torch.linspace(0.5, 1.5, out.shape[1])).sum(dim=1)

    return losses


def loop(engine, batch) -> Tensor:
    """One backward pass of autograd a record: (n, values)."""
    rows = []
    for i in range(len(batch[0])):
        grads = torch.autograd.grad(engine.losses(*batch)[i], engine.parameters())
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).double()


def check(net, *batch, losses=None, clip=0.5) -> ClippingEngine:
    """Norms to 1e-4, and the clipped sum at the engine's own raised norm to 1e-4, of a batch with one masked record."""
    engine = ClippingEngine(net, losses or squares(net), clip)
    before = [p.detach().clone() for p in net.parameters()]
    covered = engine.preflight(batch)
    assert [(c.name, c.shape) for c in covered] == [
        (name, tuple(p.shape)) for name, p in net.named_parameters() if p.requires_grad
    ]
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    gradients, mask = loop(engine, batch), torch.ones(len(batch[0]))
    mask[1] = 0
    result = engine(batch, mask)
    norms = gradients.norm(dim=1)
    assert float(norms.min()) > 1e-3  # there is something to clip
    torch.testing.assert_close(result.norms[mask > 0].double(), norms[mask > 0], rtol=1e-4, atol=0)
    raised = gradient_norms(list(engine._backward(batch, torch.ones(len(mask)))[1].values()))[1].double()
    assert bool((raised >= norms).all())
    assert bool((raised <= 1.001 * norms).all())
    expected = mask.double() * (clip * MARGIN / raised).clamp_max(1) @ gradients
    assert float((result.total.double() - expected).norm()) <= 1e-4 * float(expected.norm())
    for mine, theirs in zip(engine.split(result.total), engine.split(expected.float()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * float(theirs.norm()) + 1e-6)
    return engine


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_an_mlp():
    check(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)), torch.randn(N, 6))


@pytest.mark.parametrize("clip", [1e-3, 1e4])
def test_an_mlp_with_every_or_no_record_clipped(clip):
    check(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(N, 6), clip=clip)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Conv2d(2, 4, 3, padding="same", dilation=2),
        nn.Conv2d(2, 4, (2, 3), padding="same", bias=False),
        nn.Conv2d(2, 4, 3, padding="valid", dilation=(1, 2)),
        nn.Conv2d(2, 4, 3, stride=(1, 2), padding=(0, 2), groups=2),
        nn.Conv2d(2, 2, 5, groups=2, padding=2, bias=False),
        nn.Conv2d(2, 6, 3, groups=2, padding=1, padding_mode="circular"),
        nn.Conv2d(2, 4, 1),
        nn.Conv2d(2, 4, 8),
        nn.Conv2d(2, 4, 4, stride=4),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_a_convolution_in_two_dimensions(conv):
    check(nn.Sequential(nn.Identity(), conv, nn.GELU()), torch.randn(N, 2, 8, 8))


def test_convolutions_in_one_and_three_dimensions():
    one = nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv1d(4, 4, 3, padding="same", groups=4)
    )
    check(one, torch.randn(N, 2, 9))
    three = nn.Sequential(nn.Conv3d(2, 4, (1, 2, 3), padding=(0, 1, 1), stride=(1, 2, 1), groups=2), nn.Tanh())
    check(three, torch.randn(N, 2, 3, 4, 5))


def test_a_small_cnn_with_group_norm_and_a_residual():
    net = Net(
        lambda self, x: self.head(F.gelu(self.last(h := self.first(x)) + h).mean(dim=(2, 3))),
        first=nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU()),
        last=nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8)),
        head=nn.Linear(8, 5),
    )
    losses = nn.CrossEntropyLoss(reduction="none")
    check(net, torch.randn(N, 1, 8, 8), torch.arange(N), losses=lambda x, y: losses(net(x), y))


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.LayerNorm(6), (6,)),
        (nn.LayerNorm(6), (5, 6)),
        (nn.LayerNorm((5, 6)), (5, 6)),
        (nn.LayerNorm((5, 6)), (3, 5, 6)),
        (nn.LayerNorm(6, bias=False), (5, 6)),
        (nn.RMSNorm(6), (5, 6)),
        (nn.RMSNorm((5, 6)), (2, 5, 6)),
        (nn.GroupNorm(2, 6), (6,)),
        (nn.GroupNorm(3, 6), (6, 5)),
        (nn.GroupNorm(1, 6), (6, 4, 3)),
    ],
    ids=str,
)
def test_the_gain_and_bias_of_a_norm(norm, shape):
    with torch.no_grad():
        for p in norm.parameters():
            p.normal_()
    net = nn.Sequential(nn.Unflatten(1, shape), norm, nn.Tanh(), nn.Flatten(), nn.Linear(math.prod(shape), 3))
    check(net, torch.randn(N, math.prod(shape)))


def test_a_norm_of_which_the_gain_is_frozen():
    norm = nn.LayerNorm(6)
    norm.weight.requires_grad_(False)
    check(nn.Sequential(nn.Linear(6, 6), norm, nn.Tanh()), torch.randn(N, 6))


@pytest.mark.parametrize("padding", [None, 0, -1])
def test_an_embedding_with_repeated_ids(padding):
    net = Net(
        lambda self, ids: self.out(self.embed(ids).cumsum(dim=1).tanh()),
        embed=nn.Embedding(5, 6, padding_idx=padding),
        out=nn.Linear(6, 2),
    )
    ids = torch.tensor([[1, 1, 1, 1], [0, 0, 2, 4], [4, 4, 4, 2], [1, 2, 3, 0]])
    engine = check(net, ids)
    if padding is not None:
        table = engine.split(engine((ids,), torch.ones(N)).total)[0]
        assert bool((table[padding] == 0).all())


def test_an_embedding_of_one_id_a_record():
    net = Net(lambda self, x, y: self.net(x) + self.embed(y), net=nn.Linear(3, 6), embed=nn.Embedding(5, 6))
    check(net, torch.randn(N, 3), torch.tensor([0, 3, 3, 1]))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VitBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, 2)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))
        self.gamma1, self.gamma2 = nn.Parameter(torch.full((width,), 0.1)), nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma1 * self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x)) * self.gamma2


class Vit(nn.Module):
    """Class token and positions with a leading 1, layer scale without."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.blocks = nn.Sequential(VitBlock(width), VitBlock(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def test_a_small_vit():
    check(Vit(), torch.randn(N, 1, 8, 8))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, p: x * p,
        lambda x, p: p * x,
        lambda x, p: x + p,
        lambda x, p: p + x,
        lambda x, p: x - p,
        lambda x, p: p - x,
        lambda x, p: x / p,
        lambda x, p: p / x.exp(),
        lambda x, p: torch.add(x, p, alpha=3),
        lambda x, p: torch.sub(p, x, alpha=2),
        lambda x, p: x * p + p,
    ],
)
@pytest.mark.parametrize("shape", [(3,), (1, 3), (5, 3), (1, 5, 3), (1, 1, 3), (5, 1), (1, 1, 1)])
def test_a_bare_parameter_broadcast_over_the_batch(use, shape):
    parts = {"layer": nn.Linear(6, 3), "p": nn.Parameter(torch.rand(shape) + 1)}
    check(Net(lambda self, x: use(self.layer(x), self.p).atan(), **parts), torch.randn(N, 5, 6))


def test_a_bare_parameter_without_dimensions():
    net = Net(lambda self, x: self.layer(x) * self.p, layer=nn.Linear(6, 3), p=nn.Parameter(torch.tensor(2.0)))
    check(net, torch.randn(N, 6))


class Lora(nn.Module):
    """A frozen linear map and a low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


def test_a_hand_written_lora_gives_gradients_to_the_adapters_alone():
    net = nn.Sequential(Lora(nn.Linear(6, 8), 2), nn.GELU(), Lora(nn.Linear(8, 3), 2))
    engine = ClippingEngine(net, squares(net), 1.0)
    assert {c.name for c in engine.preflight((torch.randn(N, 5, 6),))} == {
        "0.a.weight", "0.b.weight", "2.a.weight", "2.b.weight",
    }  # fmt: skip
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.b.weight.normal_()
    check(net, torch.randn(N, 5, 6))


def test_lora_at_its_start_where_one_factor_is_zero():
    """B = 0: A's gradient is zero, B's is not; the check of preflight is at moved weights, so it sees A too."""
    net = nn.Sequential(Lora(nn.Linear(6, 3), 2))
    engine, x = ClippingEngine(net, squares(net), 1e6), torch.randn(N, 6)
    engine.preflight((x,))
    a, b = engine.split(engine((x,), torch.ones(N)).total)
    expected = torch.autograd.grad(engine.losses(x).sum(), engine.parameters())
    assert bool((a == 0).all())
    torch.testing.assert_close(b, expected[1], rtol=1e-4, atol=1e-5)


def test_a_lora_of_the_peft_library_gives_gradients_to_the_adapters_alone():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["qkv", "proj", "head"], lora_dropout=0.0, init_lora_weights=False)
    net = peft.get_peft_model(Vit(), config)
    adapters = {name for name, p in net.named_parameters() if p.requires_grad}
    assert adapters
    assert all("lora_" in name for name in adapters)
    engine = check(net, torch.randn(N, 1, 8, 8))
    assert set(engine.trainable) == adapters


def test_a_layer_used_twice_in_one_pass():
    layer, norm = nn.Linear(6, 6), nn.LayerNorm(6)
    check(nn.Sequential(layer, norm, nn.Tanh(), layer, norm, nn.Tanh(), layer), torch.randn(N, 6))


def test_a_layer_used_on_different_numbers_of_tokens():
    net = Net(
        lambda self, x: self.layer(x).tanh().mean(dim=1) + self.layer(x[:, 0]) + self.conv(x).mean(dim=2),
        layer=nn.Linear(6, 6),
        conv=nn.Conv1d(5, 6, 3),
    )
    check(net, torch.randn(N, 5, 6))


def test_an_embedding_and_a_bare_parameter_used_twice():
    net = Net(
        lambda self, a, b: (self.embed(a).sum(dim=1) * self.p + self.embed(b)).tanh() * self.p,
        embed=nn.Embedding(5, 6),
        p=nn.Parameter(torch.rand(6)),
    )
    check(net, torch.randint(0, 5, (N, 3)), torch.randint(0, 5, (N,)))


def test_linear_maps_that_share_one_weight():
    first, second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    second.weight = first.weight
    engine = check(nn.Sequential(first, nn.Tanh(), second), torch.randn(N, 3, 6))
    assert list(engine.trainable) == ["0.weight"]


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(6, 6), (6,)), (nn.Linear(6, 6), (3, 6)), (nn.Conv1d(6, 6, 3, groups=2), (6, 7))],
    ids=str,
)
def test_a_layer_of_which_one_half_is_frozen(layer, shape, frozen):
    layer.requires_grad_(True)
    getattr(layer, frozen).requires_grad_(False)
    engine = check(nn.Sequential(nn.Identity(), layer, nn.Tanh()), torch.randn(N, *shape))
    assert list(engine.trainable) == ["1.bias" if frozen == "weight" else "1.weight"]


def test_a_frozen_batch_norm_that_only_applies_its_statistics():
    norm = nn.BatchNorm1d(8).eval().requires_grad_(False)
    norm.running_mean.normal_()
    check(nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3)), torch.randn(N, 6))


def test_several_rows_a_record():
    """Three views of a record, side by side: one example."""
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))

    def losses(x):
        views = torch.stack([x, 2 * x, x.cos()], dim=1).flatten(0, 1)
        return net(views).square().sum(dim=1).reshape(len(x), 3).mean(dim=1)

    check(net, torch.randn(N, 6), losses=losses)


def test_a_net_in_double_precision():
    check(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double(), torch.randn(N, 6).double())


# What is refused


def refusal(net, *batch, losses=None) -> str:
    """Preflight's one sentence; weights are left as they were, and no sum is returned afterwards either."""
    engine = ClippingEngine(net, losses or squares(net), 1.0)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(BadInput) as caught:
        engine.preflight(batch)
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    with pytest.raises(BadInput):
        engine(batch, torch.ones(len(batch[0])))
    assert "\n" not in str(caught.value)
    return str(caught.value)


CURES = "|".join(
    (
        "freeze it",
        "use layer or group",
        "let the batch come first",
        "the batch must come first",
        "turn them off",
        "turn its statistics off",
        "give it another",
        "the variant that",
    )
)


def assert_says(message: str, name: str) -> None:
    assert re.search(rf"\b{re.escape(name)}\b", message), message
    assert re.search(CURES, message), message


def between(layer, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(width, 3))


@pytest.mark.parametrize(
    ("net", "name"),
    [
        (between(nn.BatchNorm1d(8)), "1.weight"),
        (between(nn.BatchNorm1d(8).eval()), "1.weight"),
        (between(nn.PReLU(8)), "1.weight"),
        (between(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))), "1.parametrizations.weight.original1"),
    ],
    ids=["batch norm", "batch norm at rest", "prelu", "weight norm"],
)
def test_layers_that_cannot_be_split_are_refused_by_name(net, name):
    assert_says(refusal(net, torch.randn(N, 6)), name)


@pytest.mark.parametrize("track", [True, False])
def test_a_batch_norm_without_parameters_is_refused_because_it_mixes_records(track):
    norm = nn.BatchNorm2d(3, affine=False, track_running_stats=track)
    message = refusal(nn.Sequential(nn.Conv2d(1, 3, 3), norm), torch.randn(N, 1, 6, 6))
    assert "other records" in message
    assert "group normalisation" in message


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-3])
def test_records_that_mix_a_little_are_refused_too(size):
    """The mean of the batch at the input: every record's gradient moves with every other record."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    message = refusal(net, torch.randn(N, 6), losses=lambda x: net(x + size * x.mean(dim=0)).square().sum(dim=1))
    assert "records" in message or "one record" in message


def test_a_batch_norm_over_single_values_is_refused_in_words_too():
    """torch itself refuses to normalise one row; what comes out is still our own sentence."""
    assert "normalisation" in refusal(between(nn.BatchNorm1d(8, affine=False)), torch.randn(N, 6))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_refused_by_name(layer):
    net = Net(lambda self, x: self.cell(x)[0], cell=layer(6, 3, batch_first=True))
    assert_says(refusal(net, torch.randn(N, 5, 6)), "cell.weight_ih_l0")


def test_torchs_own_attention_is_refused_by_name():
    net = Net(lambda self, x: self.attend(x, x, x)[0], attend=nn.MultiheadAttention(6, 2, batch_first=True))
    assert_says(refusal(net, torch.randn(N, 5, 6)), "attend.in_proj_weight")
    encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    assert_says(refusal(encoder, torch.randn(N, 5, 6)), "self_attn.in_proj_weight")


@pytest.mark.parametrize(("layer", "space"), [(nn.ConvTranspose1d, (8,)), (nn.ConvTranspose2d, (8, 8))])
def test_transposed_convolutions_are_refused_by_name(layer, space):
    assert_says(refusal(nn.Sequential(layer(2, 3, 3)), torch.randn(N, 2, *space)), "0.weight")


@pytest.mark.parametrize("bias", [True, False])
def test_an_embedding_tied_to_the_output_is_refused_by_name(bias):
    net = Net(lambda self, ids: self.out(self.embed(ids)), embed=nn.Embedding(5, 6), out=nn.Linear(6, 5, bias=bias))
    net.out.weight = net.embed.weight
    message = refusal(net, torch.randint(0, 5, (N, 3)))
    assert_says(message, "embed.weight")
    assert "untie it" in message


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_an_embedding_that_looks_across_records_is_refused_by_name(option):
    net = Net(lambda self, ids: self.out(self.embed(ids)), embed=nn.Embedding(5, 6, **option), out=nn.Linear(6, 5))
    assert_says(refusal(net, torch.randint(0, 5, (N, 3))), "embed.weight")


def test_an_embedding_bag_is_refused_by_name():
    net = Net(lambda self, ids: self.bag(ids), bag=nn.EmbeddingBag(5, 6))
    assert_says(refusal(net, torch.randint(0, 5, (N, 3))), "bag.weight")


@pytest.mark.parametrize(
    ("net", "name"),
    [
        (nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), "0.weight"),
        (nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), nn.ReLU(inplace=True), nn.Flatten()), "0.weight"),
        (nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), "1.weight"),
        (nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 3)), "1.weight"),
        (nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.SiLU(inplace=True), nn.Linear(8, 3)), "1.weight"),
    ],
    ids=["first layer", "a view of it", "second layer", "layer norm", "group norm"],
)
def test_an_in_place_activation_on_a_layers_output_is_refused_by_name(net, name):
    """The gradient would be read before the activation: for a ReLU, of rows that it cut off."""
    message = refusal(net, torch.randn(N, 6))
    assert_says(message, name)
    assert "in place" in message


def test_a_layers_input_changed_in_place_afterwards_gives_no_sum():
    """The input that the engine keeps would change with it; autograd itself refuses such a net."""

    def forward(self, x):
        x = x.clone()
        y = self.layer(x)
        return y + x.mul_(2)

    net = Net(forward, layer=nn.Linear(6, 6))
    engine = ClippingEngine(net, squares(net), 1.0)
    with pytest.raises((BadInput, RuntimeError)):
        engine.preflight((torch.randn(N, 6),))
    with pytest.raises(BadInput, match="preflight"):
        engine((torch.randn(N, 6),), torch.ones(N))


def test_a_parameter_that_is_not_used_is_refused_by_name():
    net = Net(lambda self, x: self.layer(x), layer=nn.Linear(6, 3), idle=nn.Linear(2, 2))
    assert_says(refusal(net, torch.randn(N, 6)), "idle.weight")


def test_a_parameter_that_does_not_reach_the_loss_is_refused_by_name():
    net = Net(lambda self, x: (self.lost(x), self.layer(x))[1], layer=nn.Linear(6, 3), lost=nn.Linear(6, 2))
    assert_says(refusal(net, torch.randn(N, 6)), "lost.weight")


def test_a_loss_that_reaches_no_parameter_is_refused():
    net = nn.Linear(6, 3)
    assert_says(refusal(net, torch.randn(N, 6), losses=lambda x: net(x).detach().sum(dim=1)), "weight")


@pytest.mark.parametrize("tokens", [N, 2 * N, N - 1])
def test_a_sequence_first_batch_is_refused_even_where_its_shape_fits(tokens):
    """(tokens, records, width): rows of the first dimension are taken for records. With tokens = n no shape tells."""
    net = Net(
        lambda self, x: self.b(self.a(x.transpose(0, 1)).relu()).transpose(0, 1), a=nn.Linear(6, 8), b=nn.Linear(8, 3)
    )
    message = refusal(net, torch.randn(N, tokens, 6))
    assert_says(message, "a.weight")
    assert "batch" in message


@pytest.mark.parametrize("tokens", [N, 2 * N])
@pytest.mark.parametrize(
    ("part", "name"),
    [
        (nn.LayerNorm(6), "part.weight"),
        (nn.Parameter(torch.rand(6)), "part"),
        (nn.Conv1d(6, 6, 1), "part.weight"),
    ],
    ids=["norm", "bare", "convolution"],
)
def test_any_layer_on_a_sequence_first_batch_is_refused(tokens, part, name):
    def forward(self, x):
        x = x.transpose(0, 1)
        if isinstance(part, nn.Conv1d):
            x = self.part(x.mT).mT
        else:
            x = x * self.part if isinstance(part, nn.Parameter) else self.part(x)
        return x.transpose(0, 1).tanh()

    assert_says(refusal(Net(forward, part=part), torch.randn(N, tokens, 6)), name)


def test_views_that_are_not_record_major_are_refused_by_name():
    """All first views, then all second views: row i + n is record i's, not record (i + n) // 2's."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def losses(x):
        return net(torch.cat([x, 2 * x])).square().sum(dim=1).reshape(2, len(x)).mean(dim=0)

    assert_says(refusal(net, torch.randn(N, 6), losses=losses), "0.weight")


@pytest.mark.parametrize("rows", [N, 3 * N, 5])
@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
def test_rows_that_all_records_share_are_refused_however_little_they_matter(rows, size):
    """As in a net of relative positions: one bias a pair of tokens, for all records. What is small on a public batch
    need not stay small."""
    net = Net(
        lambda self, x: self.layer(x) + size * self.bias(self.table).mean(dim=0),
        layer=nn.Linear(6, 3),
        bias=nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)),
        table=torch.randn(rows, 2),
    )
    assert_says(refusal(net, torch.randn(N, 6)), "bias.0.weight")


@pytest.mark.parametrize("rows", [N, 2 * N, 5])
def test_an_embedding_of_positions_that_all_records_share_is_refused_by_name(rows):
    net = Net(
        lambda self, x: self.layer(x) + self.positions(torch.arange(rows)),
        layer=nn.Linear(6, 3),
        positions=nn.Embedding(rows, 3),
    )
    assert_says(refusal(net, torch.randn(N, rows, 6)), "positions.weight")


@pytest.mark.parametrize(
    "use",
    [
        lambda x, p: x * (1 + p),
        lambda x, p: x * p.exp(),
        lambda x, p: x @ torch.diag(p),
        lambda x, p: x * p.unsqueeze(0),
        lambda x, p: x.add_(p),
        lambda x, p: x * p.mT if p.dim() > 1 else x * p[None],
        lambda x, p: torch.cat([x, p.repeat(len(x), 1)], dim=1),
    ],
)
def test_a_bare_parameter_that_does_not_meet_the_batch_first_is_refused_by_name(use):
    net = Net(lambda self, x: use(self.layer(x), self.gain), layer=nn.Linear(6, 3), gain=nn.Parameter(torch.rand(3)))
    assert_says(refusal(net, torch.randn(N, 6)), "gain")


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(dim=0)


HIDDEN_WAYS = [
    lambda x, layer: torch.ops.aten.linear(x, layer.weight),
    lambda x, layer: torch.ops.aten.mul.Tensor(x, layer.weight[0]),
    lambda x, layer: Scaled.apply(x, layer.weight.T[:, 0]),
    lambda x, layer: x @ layer.weight.T,
    lambda x, layer: torch.func.functional_call(layer, {"weight": layer.weight * 2}, x),
]


@pytest.mark.parametrize("way", HIDDEN_WAYS)
@pytest.mark.parametrize("also", [True, False])
def test_a_parameter_that_reaches_the_loss_unseen_is_refused_by_name(way, also):
    """By a dispatcher operator, an autograd function or a view; whether or not it also has a use that is seen."""
    net = Net(
        lambda self, x: way(x, self.layer) + self.other(x) + (self.layer(x) if also else 0),
        layer=nn.Linear(6, 6, bias=also),
        other=nn.Linear(6, 6),
    )
    assert_says(refusal(net, torch.randn(N, 6)), "layer.weight")


def test_an_autograd_function_on_a_whole_parameter_is_refused_by_name():
    net = Net(
        lambda self, x: Scaled.apply(self.layer(x), self.gain), layer=nn.Linear(6, 3), gain=nn.Parameter(torch.rand(3))
    )
    assert_says(refusal(net, torch.randn(N, 6)), "gain")


def test_a_net_that_computes_again_in_the_backward_pass_is_refused_by_name():
    """Activation checkpointing runs the layer where the engine does not see it."""
    from torch.utils.checkpoint import checkpoint

    net = Net(
        lambda self, x: self.head(checkpoint(self.body, x, use_reentrant=False)),
        body=nn.Sequential(nn.Linear(N, N), nn.Tanh()),
        head=nn.Linear(N, 2),
    )
    assert_says(refusal(net, torch.randn(N, N)), "body.0.weight")


def test_the_engine_does_nothing_before_preflight():
    net = nn.Linear(6, 3)
    with pytest.raises(BadInput, match=r"preflight.*public or made-up"):
        ClippingEngine(net, squares(net), 1.0)((torch.randn(N, 6),), torch.ones(N))


@pytest.mark.parametrize(
    "losses",
    [lambda out: out, lambda out: out.sum(), lambda out: out.sum(dim=0), lambda out: out.sum(dim=1, keepdim=True)],
)
def test_a_loss_of_the_wrong_shape_is_refused(losses):
    net = nn.Linear(6, 3)
    assert "one loss for each of 4 records" in refusal(net, torch.randn(N, 6), losses=lambda x: losses(net(x)))


def test_a_loss_that_is_averaged_over_the_batch_is_refused():
    net = nn.Linear(6, 3)
    message = refusal(net, torch.randn(N, 6), losses=lambda x: net(x).square().sum(dim=1) / len(x))
    assert "other records" in message


def test_preflight_with_one_record_is_refused():
    assert "two records" in refusal(nn.Linear(6, 3), torch.randn(1, 6))


def test_a_net_without_trainable_parameters_is_refused():
    net = nn.Linear(6, 3).requires_grad_(False)
    with pytest.raises(BadInput, match="no trainable parameter"):
        ClippingEngine(net, squares(net), 1.0)


def test_a_net_whose_use_changes_after_preflight_is_still_refused():
    """A layer that only some batches use."""
    net = Net(lambda self, x: self.a(x) + (self.b(x) if len(x) > 3 else 0), a=nn.Linear(6, 3), b=nn.Linear(6, 3))
    engine = ClippingEngine(net, lambda x: net(x).square().sum(dim=1), 1.0)
    engine._checked = engine._condition()
    with pytest.raises(BadInput, match=r"b\.weight"):
        engine((torch.randn(3, 6),), torch.ones(3))


# what a hostile network may try


def test_equal_values_do_not_round_past_the_clip():
    """A long sum of equal squares rounds the same way every time; the direct norm of a wide layer is such a sum."""
    net = nn.Linear(1024, 1024, bias=False)
    engine = ClippingEngine(net, lambda x, w: (net(x) * w).sum(dim=(1, 2)), 1.0)
    engine.preflight((torch.randn(2, 2, 1024), torch.randn(2, 2, 1024)))
    total = engine((torch.full((2, 520, 1024), 0.1), torch.full((2, 520, 1024), 0.7)), torch.tensor([1.0, 0.0])).total
    assert 0.99 < float(total.double().norm()) <= 1.0


@pytest.mark.parametrize("tokens", [1, 4, 64])
def test_a_callers_autocast_reaches_the_network_alone(tokens):
    net = nn.Linear(32, 32)
    engine = ClippingEngine(net, lambda x, w: (net(x).float() * w).sum(dim=(1, 2)), 1.0)
    batch = torch.randn(50, tokens, 32), torch.randn(50, tokens, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine.preflight(tuple(x[:3] for x in batch))
        for i in range(50):
            only = torch.zeros(50)
            only[i] = 1
            assert float(engine(batch, only).total.double().norm()) <= 1.0


def test_the_clip_is_fixed_and_positive():
    net = nn.Linear(3, 2)
    engine = ClippingEngine(net, lambda x: net(x).square().sum(dim=1), 1.0)
    with pytest.raises(AttributeError):
        engine.clip = 0.1  # type: ignore[misc]
    for clip in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BadInput, match="clip"):
            ClippingEngine(net, lambda x: net(x).square().sum(dim=1), clip)


def test_a_forward_pass_that_writes_down_records_is_refused():
    parts = {"conv": nn.Conv2d(1, 4, 3), "norm": nn.InstanceNorm2d(4, track_running_stats=True)}
    net = Net(lambda self, x: self.norm(self.conv(x)).flatten(1), **parts)
    assert_says(refusal(net, torch.randn(N, 1, 6, 6)), "norm.running_mean")


def test_a_changed_mode_or_parameter_is_refused():
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3)).eval()
    engine = ClippingEngine(net, lambda x: net(x).square().sum(dim=1), 1.0)
    engine.preflight((torch.randn(N, 6),))
    engine((torch.randn(N, 6),), torch.ones(N))
    net.train()
    with pytest.raises(BadInput, match="changed since preflight"):
        engine((torch.randn(N, 6),), torch.ones(N))
    net.eval()
    net[2].weight = nn.Parameter(torch.randn(3, 8))
    with pytest.raises(BadInput, match="changed since preflight"):
        engine((torch.randn(N, 6),), torch.ones(N))


@pytest.mark.parametrize("part", [1e-2, 3e-4, 1e-6])
def test_mixing_is_refused_however_little(part):
    net = Net(lambda self, x: self.b((h := self.a(x)) + part * h.sum(dim=0)), a=nn.Linear(6, 5), b=nn.Linear(5, 3))
    refusal(net, torch.randn(N, 6))


def test_mixing_that_begins_with_large_values_is_refused():
    layer = nn.Linear(6, 3)
    net = Net(lambda self, x: self.layer(x / x.abs().amax().clamp_min(10)), layer=layer)
    refusal(net, torch.randn(N, 6))


def test_rows_of_classes_are_not_rows_of_records():
    """A table of one row a class, with as many classes as records and record i of class i: right by accident."""
    net = Net(lambda self, y: self.layer(torch.eye(N))[y], layer=nn.Linear(N, 3))
    refusal(net, torch.arange(N))


def test_a_parameter_that_the_batch_does_not_move_is_not_called_covered():
    net = Net(
        lambda self, x: self.a(x) + self.b(x.clamp_min(100) - 100), a=nn.Linear(6, 3), b=nn.Linear(6, 3, bias=False)
    )
    assert_says(refusal(net, torch.randn(N, 6)), "b.weight")


def test_a_norm_shared_by_many_layers_keeps_a_useful_bound():
    norm = nn.LayerNorm(6)

    def forward(self, x):
        for _ in range(24):
            x = x + 0.1 * self.norm(x)
        return x

    net = Net(forward, norm=norm)
    engine = ClippingEngine(net, lambda x: net(x).square().sum(dim=1), 1e-3)
    engine.preflight((torch.randn(3, 6),))
    only = torch.tensor([1.0, 0.0, 0.0])
    assert float(engine((torch.randn(3, 6),), only).total.norm()) > 0.99e-3
