"""The U-Net: shapes, what its outputs hang on, exact clipping, and a whole run with it."""

import pytest
import torch

from straightdp.cli import main
from straightdp.compiled import in_bfloat16
from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.dpsgd.trainer import Bucket, draw, record_losses
from straightdp.errors import BadInput
from straightdp.flow.path import TorchDraws
from straightdp.generator import open_generator
from straightdp.nets.autoencoder import sides
from straightdp.nets.backbone import own_net
from straightdp.nets.unet import COARSEST, UNet
from straightdp.recipe import DpSgd, Net, load

SECTION = Net(kind="unet", width=8, depth=1, heads=2, caption_width=8, caption_length=3, vocabulary=16)


def moved(shape, section: Net = SECTION, seed: int = 0) -> UNet:
    """With no weight at zero, where it begins as no function of its inputs."""
    torch.manual_seed(seed)
    net = own_net(section, shape)
    assert isinstance(net, UNet)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return net


def inputs(shape, n: int = 3):
    generator = torch.Generator().manual_seed(1)
    x, t = torch.randn(n, *shape, generator=generator), torch.rand(n, generator=generator)
    return x, t, torch.randint(1, 16, (n, 3), generator=generator)


def test_a_side_is_halved_until_it_is_no_more_than_eight():
    assert {side: sides(side, COARSEST) for side in (4, 8, 9, 28, 32, 50)} == {
        4: [4],
        8: [8],
        9: [9, 5],
        28: [28, 14, 7],
        32: [32, 16, 8],
        50: [50, 25, 13, 7],
    }


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 9, 9), (1, 8, 8), (4, 4, 4), (2, 13, 13)])
@pytest.mark.parametrize("depth", [1, 2])
def test_velocities_have_the_records_shape_and_hang_on_everything(shape, depth):
    section = SECTION.model_copy(update={"depth": depth})
    x, t, captions = inputs(shape)
    assert torch.equal(own_net(section, shape)(x, t, captions), torch.zeros(3, *shape))  # at its start
    net = moved(shape, section)
    found = net(x, t, captions)
    assert found.shape == (3, *shape)
    for other in (net(x.flip(0), t, captions), net(x, 1 - t, captions), net(x, t, captions.flip(1))):
        assert not torch.allclose(found, other, atol=1e-4)
    alone = torch.cat([net(x[i : i + 1], t[i : i + 1], captions[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("clip", "half", "part"), [(100.0, False, 1e-4), (0.7, False, 1e-2), (0.7, True, 5e-2)])
def test_every_record_is_clipped_by_its_own_gradient(clip, half, part):
    """Against one backward pass a record, with several draws each; every parameter moves. Where it clips, the margin
    for the rounding of many positions takes a little."""
    shape, draws = (1, 12, 12), 2
    net, generator = moved(shape), torch.Generator().manual_seed(2)
    z, captions, null = torch.randn(4, *shape, generator=generator), torch.ones(4, 3).long(), torch.zeros(1, 3).long()
    batch = draw(z, captions, null, DpSgd(draws=draws), Bucket(0.2, 1.0), TorchDraws(generator))
    losses = record_losses(in_bfloat16(net) if half else net)
    engine = ClippingEngine(net, losses, clip)
    covered = engine.preflight(batch)
    assert {found.name for found in covered} == {name for name, _ in net.named_parameters()}
    found = engine(batch, torch.tensor([1.0, 1.0, 0.0, 1.0]))
    total = torch.zeros_like(found.total)
    for i in (0, 1, 3):
        one = torch.autograd.grad(losses(*(x[i : i + 1] for x in batch))[0], list(net.parameters()))
        flat = torch.cat([g.flatten() for g in one])
        assert all(float(g.norm()) > 0 for g in one)
        torch.testing.assert_close(found.norms[i], flat.norm(), rtol=2e-2 if half else 1e-4, atol=0)
        total += flat * min(1.0, clip / float(flat.norm()))
    assert float((found.total - total).norm() / total.norm()) < part
    assert float(found.total.norm()) <= float(total.norm()) * (1.01 if half else 1 + 1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("net.B0=4",), "net.B0 constrains the MM-DiT's streams"),
        (("net.post_hoc=true",), "net.post_hoc constrains"),
        (("net.width=12", "net.heads=2"), "multiple of 8"),
        (("net.kind=vgg",), "net.kind"),
    ],
)
def test_what_it_cannot_be_is_refused(settings, said):
    with pytest.raises(BadInput, match=said):
        load(None, ("net.kind=unet", *settings))


def test_a_recipe_without_it_is_the_recipe_that_it_was():
    """Half-done rows and runs are known by a recipe's digest."""
    assert load("demo").digest() == load("demo", ("net.kind=mmdit",)).digest() != load("demo", UNET).digest()
    assert "kind" not in Net().identity()
    assert SECTION.identity()["kind"] == "unet"


UNET = ("net.kind=unet", "net.width=8", "net.depth=1", "net.heads=2")


def test_a_whole_run_with_it_goes_from_data_to_a_release_that_is_drawn_from(tiny, tmp_path, capsys):
    short = ("pretrain.steps=20", "distill.steps=20", "dpsgd.steps=10", "sample.n=20", "evaluate.seeds=1")
    settings = [word for one in (*UNET, *short) for word in ("--set", one)]
    run, more = tmp_path / "run", tmp_path / "more"
    assert main(["run", str(tiny), "--out", str(run), *settings]) == 0
    assert main(["replay", str(run / "release")]) == 0
    generator = open_generator(run / "release", torch.device("cpu"))
    assert isinstance(generator.net, UNet)
    assert main(["sample", str(run / "release"), "--n", "12", "--out", str(more)]) == 0
    assert len(list((more / "images").glob("*.png"))) == 12
    capsys.readouterr()
    assert main(["plan", str(tiny), *settings]) == 0
    assert "dpsgd" in capsys.readouterr().out
