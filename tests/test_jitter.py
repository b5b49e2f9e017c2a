"""Pictures moved at random: against pixels looked up one by one, and how far they move."""

import math

import pytest
import torch

from straightdp.flow.jitter import SHIFT, SLANT, STRETCH, TURN, jitter
from straightdp.generator import Generator
from straightdp.moments.field import MomentModel
from straightdp.nets.mmdit import MMDiT
from straightdp.progress import quiet
from straightdp.recipe import Net, Sample, load
from test_generator import CAPTIONS, CLASSES, conditioning

SIDE = 12


def keyed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blob(n: int, side: int = 28) -> torch.Tensor:
    """A soft spot in the middle, on black."""
    u = torch.arange(side) - (side - 1) / 2
    spot = torch.exp(-(u[:, None].square() + u[None].square()) / 8)
    return (2 * spot - 1).expand(n, 1, side, side)


def centroids(images: torch.Tensor) -> torch.Tensor:
    """(n, 2): x and y of the light's centre, in pixels."""
    light, u = images[:, 0] + 1, torch.arange(images.shape[-1]).float()
    total = light.sum(dim=(1, 2))
    return torch.stack([(light.sum(dim=1) * u).sum(dim=1), (light.sum(dim=2) * u).sum(dim=1)], dim=1) / total[:, None]


def looked_up(image: torch.Tensor, draws: list[float]) -> torch.Tensor:
    """The affine map by hand: where each pixel comes from, and the four pixels around that place."""
    side = image.shape[-1]
    turn, slant = TURN * draws[0], SLANT * draws[1]
    wide, high = math.exp(STRETCH * draws[2]), math.exp(STRETCH * draws[3])
    found = torch.zeros(side, side)
    for i in range(side):
        for j in range(side):
            x, y = j - (side - 1) / 2, i - (side - 1) / 2
            u = math.cos(turn) * wide * x + (slant - math.sin(turn)) * high * y + SHIFT * side * draws[4]
            v = math.sin(turn) * wide * x + math.cos(turn) * high * y + SHIFT * side * draws[5]
            u, v = (min(max(w + (side - 1) / 2, 0.0), side - 1.0) for w in (u, v))
            a, b = int(v), int(u)
            for row, share_row in ((a, 1 - (v - a)), (min(a + 1, side - 1), v - a)):
                for column, share in ((b, 1 - (u - b)), (min(b + 1, side - 1), u - b)):
                    found[i, j] += share_row * share * image[row, column]
    return found


@pytest.mark.parametrize("strength", [0.5, 1.0, 3.0])
def test_each_picture_is_moved_as_pixels_looked_up_one_by_one(strength):
    images = torch.rand(4, 2, SIDE, SIDE, generator=keyed(0)) * 2 - 1
    moved = jitter(images, strength, keyed(1))
    draws = (strength * torch.randn(4, 6, generator=keyed(1))).tolist()
    for image, result, own in zip(images, moved, draws, strict=True):
        for channel in range(2):
            assert torch.allclose(result[channel], looked_up(image[channel], own), atol=1e-5)
    assert float(moved.abs().max()) <= 1


def test_strength_zero_changes_nothing_and_draws_nothing():
    images, generator = torch.rand(3, 1, SIDE, SIDE), keyed(2)
    before = generator.get_state()
    assert jitter(images, 0.0, generator) is images
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_a_spot_in_the_middle_is_shifted_by_as_much_as_is_said(strength):
    """Turning and slanting leave its place; its spread is the shift's, and not two thirds or half as much again."""
    places = centroids(jitter(blob(4000), strength, keyed(3))) - 13.5
    expected = strength * SHIFT * 28
    for spread in places.std(dim=0).tolist():
        assert 0.95 * expected < spread < 1.05 * expected
    assert float(places.mean(dim=0).abs().max()) < 0.06 * expected


def release(shape=(1, 28, 28)) -> Generator:
    """One sharp spot a class, and a network that is the zero field: what is drawn is where sampling began."""
    net = MMDiT(Net(width=16, depth=1, heads=2, patch=7, caption_width=8, caption_length=3, vocabulary=16), shape)
    mu = blob(3).flatten(1).contiguous()
    moments = MomentModel(mu, torch.zeros(1, mu.shape[1], 1), torch.zeros(1, 1), torch.ones(3) / 3, 1e-6)
    return Generator(net, conditioning(CLASSES, CAPTIONS), moments, Sample())


@pytest.mark.parametrize(("port", "t0"), [("release", 0.2), ("guide", 0.9)])
def test_what_a_release_draws_is_moved(port, t0):
    y = torch.arange(300) % 3
    still, moved = (
        release().draw(y, Sample(port=port, t0=t0, jitter=strength, guidance=0.0, batch=150), 5, quiet)
        for strength in (0.0, 1.0)
    )
    light = centroids((moved - moved.min()).clamp_min(0.6) - 1.6)  # of the spot, not of the noise that guide starts at
    assert float(light.std(dim=0).min()) > 0.5
    assert float(centroids((still - still.min()).clamp_min(0.6) - 1.6).std(dim=0).max()) < 0.2


def test_with_guide_the_noise_is_not_moved():
    """Started at t0 = 0 nothing of the release is left: what is drawn is noise, as large with as without."""
    y = torch.arange(30) % 3
    both = [
        release().draw(y, Sample(port="guide", t0=0.0, jitter=strength, guidance=0.0), 5, quiet) for strength in (0, 1)
    ]
    assert not torch.equal(*both), "other draws of the generator"
    assert abs(float(both[0].std() - both[1].std())) < 0.01, "interpolated noise would be smaller"


def test_a_rival_is_not_moved():
    with pytest.raises(Exception, match=r"set sample\.jitter=0"):
        load(None, ('run.method="dp-merf"', "sample.jitter=1"))
