"""What drawn pictures are called: by the caption they were asked for, or by a classifier of the release's own draws."""

import csv

import pytest
import torch

from straightdp.cli import main
from straightdp.errors import BadInput
from straightdp.generator import Generator
from straightdp.metrics.probe import fit_on_batches, fit_probe
from straightdp.moments.field import MomentModel
from straightdp.nets.mmdit import MMDiT
from straightdp.recipe import Evaluate, Net, Sample, load
from test_generator import CAPTIONS, CLASSES, CPU, conditioning

SECTION = Net(width=16, depth=1, heads=2, patch=4, caption_width=8, caption_length=3, vocabulary=16)
FOUND = Sample(labels="found", jitter=0.3)


def bars(side: int = 8) -> torch.Tensor:
    """A picture a class, (3, d): light above, below or on the left."""
    z = torch.full((3, 1, side, side), -0.8)
    z[0, :, : side // 2], z[1, :, side // 2 :], z[2, :, :, : side // 2] = 0.8, 0.8, 0.8
    return z.flatten(1)


def release(side: int = 8, moments: bool = True) -> Generator:
    mu = bars(side)
    model = MomentModel(mu, torch.zeros(1, mu.shape[1], 1), torch.zeros(1, 1), torch.tensor([0.5, 0.3, 0.2]), 0.05)
    net = MMDiT(SECTION, (1, side, side))
    return Generator(net, conditioning(CLASSES, CAPTIONS), model if moments else None, Sample())


def test_a_picture_is_called_what_it_shows_whatever_was_asked_for():
    shown = torch.arange(300) % 3
    asked = (shown + torch.randint(3, (300,), generator=torch.Generator().manual_seed(0))) % 3
    noise = 0.2 * torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    images = (bars()[shown] + noise).reshape(-1, 1, 8, 8).clamp(-1, 1)
    generator = release()
    found = generator.named(images, asked, FOUND, 3)
    assert float((asked == shown).float().mean()) < 0.5
    assert float((found == shown).float().mean()) > 0.98
    assert torch.equal(found, generator.named(images, asked, FOUND, 3)), "the same seed, the same names"
    assert generator.named(images, asked, Sample(), 3) is asked
    assert len(generator.named(images[:0], asked[:0], FOUND, 3)) == 0


def test_pictures_made_as_they_are_asked_for_teach_what_a_heap_of_them_does():
    z, y = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(2)), torch.arange(40) % 3
    section, fresh = Evaluate(probe_steps=20, probe_batch=16), torch.rand(200, 1, 8, 8)

    def batch(generator):
        rows = torch.randint(40, (16,), generator=generator)
        return z[rows], y[rows]

    heap = fit_probe(z, y, 3, section, 5, CPU)(fresh)
    assert torch.equal(fit_on_batches(batch, (1, 8, 8), 3, section, 5, CPU)(fresh), heap)


@pytest.mark.parametrize(
    ("side", "moments", "reason"), [(4, True, "at least 8 x 8"), (8, False, "needs released moments")]
)
def test_without_moments_or_pixels_enough_it_is_refused(side, moments, reason):
    with pytest.raises(BadInput, match=reason):
        release(side, moments).named(torch.zeros(1, 1, side, side), torch.zeros(1, dtype=torch.int64), FOUND, 0)


@pytest.mark.parametrize(
    "settings",
    [
        ('run.method="dp-merf"', "sample.labels=found"),
        ("release.weight=0", "sample.labels=found"),
        ('sd3.model="some/model"', "image.channels=3", "image.size=64", "sample.labels=found"),
    ],
)
def test_a_recipe_without_moments_of_pictures_is_refused(settings):
    with pytest.raises(BadInput, match=r"sample\.labels"):
        load(None, settings)


@pytest.mark.pipeline
def test_a_release_is_drawn_from_under_either_name(tiny, tmp_path):
    """The pictures are the same, their files too; only what some are called differs."""
    run, rows = tmp_path / "run", {}
    assert main(["run", str(tiny), "--out", str(run), "--set", "sample.labels=found"]) == 0
    for labels in ("asked", "found"):
        words = ["sample", str(run / "release"), "--n", "60", "--out", str(tmp_path / labels)]
        words += ["--set", f"sample.labels={labels}", "--set", "sample.port=guide", "--set", "sample.t0=0.1"]
        assert main(words) == 0
        with open(tmp_path / labels / "metadata.csv", newline="") as table:
            rows[labels] = list(csv.DictReader(table))
    names = [row["file_name"] for row in rows["asked"]]
    assert names == [row["file_name"] for row in rows["found"]]
    assert all((tmp_path / "asked" / k).read_bytes() == (tmp_path / "found" / k).read_bytes() for k in names)
    assert [row["label"] for row in rows["asked"]] != [row["label"] for row in rows["found"]]
    assert {row["label"] for row in rows["found"]} <= {str(k) for k in range(10)}
