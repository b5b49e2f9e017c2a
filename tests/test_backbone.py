"""The constraints of section 3.3: exact zeros, an exact decomposition, and bounds that hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.dpsgd.trainer import record_losses
from straightdp.nets.constraints import cap, spectral_bound, within
from straightdp.nets.mmdit import MMDiT
from straightdp.recipe import Net, parse

SHAPE = (1, 8, 8)
FULL = {"B0": 3.0, "l0": 1, "decoupled": True, "s": 1.0}


def section(**changes) -> Net:
    small = {"width": 16, "depth": 3, "heads": 2, "patch": 4, "caption_width": 8, "caption_length": 3, "vocabulary": 9}
    return Net(**small, **changes)


def awake(seed: int = 0, **changes) -> MMDiT:
    torch.manual_seed(seed)
    net = MMDiT(section(**changes), SHAPE)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(0, 0.4)
    return net


def streams(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(2, 4, 16), torch.randn(2, 3, 16), torch.randn(2, 3, 16), torch.randn(2, 16)


@given(radius=st.floats(1e-3, 1e3), size=st.floats(1e-6, 1e6), seed=st.integers(0, 1000))
def test_a_token_is_projected_onto_the_ball(radius, size, seed):
    x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(seed)) * size
    y = within(x, radius)
    assert float(y.double().norm(dim=-1).max()) <= radius * (1 + 1e-6)
    inside = x.double().norm(dim=-1) <= radius * (1 - 1e-6)
    assert torch.equal(y[inside], x[inside])
    torch.testing.assert_close(torch.cosine_similarity(x, y, dim=-1), torch.ones(2, 5))


def test_a_zero_token_stays_zero_and_has_a_gradient():
    x = torch.zeros(1, 1, 4, requires_grad=True)
    within(x, 1.0).sum().backward()
    assert torch.equal(x.grad, torch.ones(1, 1, 4))


@settings(max_examples=60)
@given(rows=st.integers(1, 60), columns=st.integers(1, 60), scale=st.floats(1e-6, 1e6), seed=st.integers(0, 1000))
def test_the_spectral_bound_is_one_and_is_close(rows, columns, scale, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    largest = float(torch.linalg.matrix_norm(weight.double(), 2))
    assert largest <= float(spectral_bound(weight)) <= 1.1 * largest


def test_the_spectral_bound_of_equal_singular_values_and_of_nothing():
    assert 1.0 <= float(spectral_bound(torch.eye(200))) <= 1.1
    assert float(spectral_bound(torch.zeros(5, 3))) < 1e-9
    assert float(cap(torch.zeros(5, 3), 1.0)) == 1.0
    assert float(cap(torch.eye(4) * 0.5, 1.0)) == 1.0


def test_no_caption_reaches_an_image_before_the_last_blocks():
    """An architectural zero: not a small number."""
    net = awake(l0=1)
    h, e, other, condition = streams()
    for block in net.blocks[:-1]:
        h1, e1 = block(h, e, condition)
        h2, _ = block(h, other, condition)
        assert torch.equal(h1, h2)
        assert torch.equal(e1, block(torch.randn_like(h), e, condition)[1])  # nor an image a caption
    assert not torch.equal(net.blocks[-1](h, e, condition)[0], net.blocks[-1](h, other, condition)[0])


def test_without_late_injection_every_block_injects():
    net = awake()
    h, e, other, condition = streams()
    assert all(not torch.equal(block(h, e, condition)[0], block(h, other, condition)[0]) for block in net.blocks)


@pytest.mark.parametrize("changes", [{"decoupled": True}, FULL])
def test_a_decoupled_block_is_f_plus_g_exactly(changes):
    """F from the image stream alone, G from one cross attention, both written out here."""
    net = awake(**changes)
    block, s = net.blocks[-1], net.section.s
    h, e, other, condition = streams()

    def attend(q, k, v):
        q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in (q, k, v))
        q, k = (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + torch.finfo(x.dtype).eps) for x in (q, k))
        return ((q @ k.mT / 8**0.5).softmax(dim=-1) @ v).transpose(1, 2).flatten(2)

    (q, k, v), parts = block.image.project(h, condition)
    own = block.image.update(h, attend(q, k, v), parts)
    for caption in (e, other):
        (*_, ek, ev), _ = block.caption.project(caption, condition, s)
        inflow = block.image.out(attend(q, ek, ev)) * parts[2].unsqueeze(1)
        torch.testing.assert_close(block(h, caption, condition, s)[0], own + inflow, rtol=1e-5, atol=1e-5)


def test_streams_stay_within_b0_between_blocks():
    net, seen = awake(B0=2.0), []
    for block in net.blocks[1:]:
        block.register_forward_pre_hook(lambda _, args: seen.extend(args[:2]))
    net(torch.randn(3, *SHAPE), torch.rand(3), torch.randint(0, 9, (3, 3)))
    assert len(seen) == 4
    assert all(float(x.detach().norm(dim=-1).max()) <= 2.0 * (1 + 1e-6) for x in seen)


def test_a_post_hoc_net_pretrains_without_constraints_and_its_weights_go_on_with_them():
    net = awake(**FULL, post_hoc=True)
    free = MMDiT(net.section.while_pretraining, SHAPE)
    assert free.section == awake().section
    free.load_state_dict(net.state_dict())
    inputs = torch.randn(3, *SHAPE), torch.rand(3), torch.randint(0, 9, (3, 3))
    assert not torch.allclose(net(*inputs), free(*inputs))
    kept = section(**FULL)
    assert kept.while_pretraining == kept


@pytest.mark.parametrize("changes", [{"B0": 2.0}, {"l0": 1}, {"decoupled": True}, {"s": 0.5}, FULL, FULL | {"l0": 2}])
def test_the_engine_clips_a_constrained_net_exactly(changes):
    net = awake(**changes)
    losses = record_losses(net)
    captions, t = torch.randint(1, 9, (4, 2, 3)), torch.rand(4, 2)
    batch = torch.randn(4, *SHAPE), captions, t, torch.randn(4, 2, *SHAPE), torch.rand(4) + 0.5
    engine = ClippingEngine(net, losses, 1e9)
    assert len(engine.preflight(batch)) == len(list(net.parameters()))
    gradient = torch.autograd.grad(losses(*batch).sum(), engine.parameters())
    total = torch.cat([g.flatten() for g in gradient])
    torch.testing.assert_close(
        engine(batch, torch.ones(4)).total, total, rtol=1e-4, atol=1e-5 * float(total.abs().max())
    )


@pytest.mark.parametrize(
    ("net", "why"),
    [({"l0": 7}, "l0 = 7"), ({"B0": -1.0}, "B0"), ({"l0": 0}, "l0")],
)
def test_constraints_that_cannot_be_are_refused(net, why):
    from straightdp.errors import BadInput

    with pytest.raises(BadInput, match=why):
        parse({"net": net})
