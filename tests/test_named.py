"""What drawn pictures are called: by the caption they were asked for, or by classifiers of the release's own draws."""

import csv
from pathlib import Path

import pytest
import torch

import straightdp.generator
import straightdp.progress
from straightdp.cli import main
from straightdp.errors import BadInput
from straightdp.generator import Conditioning, Generator, synthesise
from straightdp.moments.field import MomentModel
from straightdp.nets.mmdit import MMDiT
from straightdp.recipe import Net, Sample, load
from test_generator import CAPTIONS, CLASSES, CPU, conditioning

LESSONS = 150  # of a classifier that finds names: these pictures are easy to tell apart
SECTION = Net(width=16, depth=1, heads=2, patch=4, caption_width=8, caption_length=3, vocabulary=16)
FOUND = Sample(labels="found", jitter=0.3)


@pytest.fixture(autouse=True)
def few_lessons(monkeypatch):
    monkeypatch.setattr(straightdp.generator, "LESSONS", LESSONS)


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


def test_looking_for_names_says_how_far_it_is(monkeypatch, capsys):
    """Where pictures are decoded it takes minutes."""
    monkeypatch.setattr(straightdp.progress, "LINE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(straightdp.generator, "LESSONS", 2)
    synthesise(release(), 3, FOUND.model_copy(update={"steps": 1}), 0, CPU, speed="plain")
    assert "names: 5/5" in capsys.readouterr().err


def test_classifiers_are_asked_together(monkeypatch):
    """What they say is added up, and the likeliest caption is taken: of the first picture one that most of them, and
    the first and the last, would not take by themselves."""
    opinions = torch.tensor([[[0.5, 0.4, 0.1], [0.2, 0.3, 0.5]], [[0.1, 0.6, 0.3], [0.3, 0.3, 0.4]]])
    seeds: list[int] = []

    def fit(make, batch, steps, seed, device):
        seeds.append(seed)
        own = opinions[int(len(seeds) % 3 == 2)]
        return lambda images: own

    monkeypatch.setattr(straightdp.generator, "fit_shares", fit)
    monkeypatch.setattr(straightdp.generator, "NAMERS", 3)
    found = release().named(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64), FOUND, 3)
    assert found.tolist() == [1, 2]
    assert len(set(seeds)) == 3
    release().named(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64), FOUND, 4)
    assert len(set(seeds)) == 6, "another seed has none of the same classifiers"


@pytest.mark.parametrize(
    ("side", "moments", "reason"), [(4, True, "at least 8 x 8"), (8, False, "needs released moments")]
)
def test_without_moments_or_pixels_enough_nothing_is_drawn(side, moments, reason, monkeypatch):
    monkeypatch.setattr(Generator, "draw", None)
    with pytest.raises(BadInput, match=reason):
        synthesise(release(side, moments), 1, FOUND, 0, CPU, speed="plain")
    with pytest.raises(BadInput, match=reason):
        release(side, moments).named(torch.zeros(1, 1, side, side), torch.zeros(1, dtype=torch.int64), FOUND, 0)


def test_captions_that_share_a_class_are_not_told_apart():
    generator = release()
    generator.conditioning = Conditioning(CLASSES[:2], CAPTIONS, generator.conditioning.tokenizer, (0, 0, 1))
    with pytest.raises(BadInput, match="one caption a class"):
        generator.check(FOUND)


def test_a_control_is_named_by_its_own_means():
    """Without means a class is what it varies in, and nothing here varies: names are no better than chance."""
    shown = torch.arange(300) % 3
    images = bars()[shown].reshape(-1, 1, 8, 8)
    found = release().named(images, shown, FOUND.model_copy(update={"tilt": "zero"}), 3)
    assert float((found == shown).float().mean()) < 0.6


@pytest.mark.parametrize(
    "settings",
    [
        ('run.method="dp-merf"', "sample.labels=found"),
        ("release.weight=0", "sample.labels=found"),
        ("release.condition=global", "sample.labels=found"),
        ('private.caption="{text}"', "release.condition=pooled", "sample.labels=found"),
        ('sd3.model="some/model"', "image.channels=3", "image.size=64", "sample.labels=found"),
    ],
)
def test_a_recipe_without_moments_of_pictures_is_refused(settings):
    with pytest.raises(BadInput, match=r"sample\.labels"):
        load(None, settings)


def test_pictures_that_are_too_small_are_refused_before_anything_is_spent(tiny, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["run", str(tiny), "--out", str(out), "--set", "sample.labels=found", "--set", "image.size=6"]
    assert main(words) == 2
    assert "at least 8 x 8 pixels" in capsys.readouterr().err
    assert not out.exists()


def listed(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metadata.csv", newline="") as table:
        return list(csv.DictReader(table))


@pytest.mark.pipeline
def test_a_release_is_drawn_from_under_either_name(tiny, tmp_path):
    """The pictures are the same, their files too; only what some are called differs."""
    run, rows = tmp_path / "run", {}
    words = ["run", str(tiny), "--out", str(run), "--set", "sample.port=guide", "--set", "sample.t0=0.1"]
    assert main([*words, "--set", "sample.labels=found"]) == 0
    for labels in ("asked", "found"):
        words = ["sample", str(run / "release"), "--n", "60", "--seed", "0", "--out", str(tmp_path / labels)]
        words += ["--set", f"sample.labels={labels}"]
        assert main(words) == 0
        rows[labels] = listed(tmp_path / labels)
    names = [row["file_name"] for row in rows["asked"]]
    assert names == [row["file_name"] for row in rows["found"]]
    assert all((tmp_path / "asked" / k).read_bytes() == (tmp_path / "found" / k).read_bytes() for k in names)
    assert [row["label"] for row in rows["asked"]] != [row["label"] for row in rows["found"]]
    assert listed(run / "release" / "synthetic") == rows["found"], "the same seed"
