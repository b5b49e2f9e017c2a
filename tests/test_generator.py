"""Drawing from a release, the synthetic set on disk, and the probe that is trained on it."""

import csv
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from straightdp.data import synthetic
from straightdp.data.records import to_pixels, to_z
from straightdp.errors import BadInput
from straightdp.generator import Conditioning, Generator
from straightdp.metrics.probe import fit_probe
from straightdp.moments.field import MomentModel
from straightdp.nets.captions import Tokenizer
from straightdp.nets.mmdit import MMDiT
from straightdp.progress import quiet
from straightdp.recipe import Evaluate, Net, Sample

CPU = torch.device("cpu")
SECTION = Net(width=16, depth=2, heads=2, patch=2, caption_width=8, caption_length=3, vocabulary=16)
CLASSES = ("cat", "dog", "eel")
CAPTIONS = ("a cat", "a dog", "an eel")
SHAPE = (1, 2, 2)


def conditioning(classes=CLASSES, captions=CAPTIONS) -> Conditioning:
    return Conditioning(classes, captions, Tokenizer.from_captions(captions, 3, 16))


def moments(prior=(0.5, 0.3, 0.2), floor=0.01) -> MomentModel:
    mu = torch.tensor([[0.5, 0.5, -0.5, 0.0], [-0.5, 0.2, 0.3, 0.4], [0.0, -0.6, 0.6, -0.2]])[: len(prior)]
    return MomentModel(mu, torch.eye(4)[None, :, :1].contiguous(), torch.full((1, 1), 0.02), torch.tensor(prior), floor)


def zero_net() -> MMDiT:
    """A new net is the zero field: what is drawn is where sampling began."""
    return MMDiT(SECTION, SHAPE)


class StraightNet:
    """Walks straight to one known picture a caption (and to another without one), so Euler arrives exactly."""

    shape = SHAPE
    nowhere = torch.full(SHAPE, 0.1)

    def __init__(self, conditions: Conditioning, targets: torch.Tensor):
        self.ids, self.targets = conditions.ids(CPU), targets
        self.times: list[float] = []

    def __call__(self, x, t, ids):
        self.times.append(float(t[0]))
        ends = [
            self.targets[int((self.ids == row).all(dim=1).nonzero())] if bool((row > 0).any()) else self.nowhere
            for row in ids
        ]
        return (torch.stack(ends) - x) / (1 - t)[:, None, None, None]


TARGETS = torch.tensor([0.2, 0.3, 0.25])[:, None, None, None] * torch.tensor([[[[1.0, -1.0], [0.5, 2.0]]]])


# labels


@settings(deadline=None, max_examples=120)
@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=40), st.integers(1, 5000))
def test_labels_follow_the_prior_to_within_one(weights, n):
    prior = torch.tensor(weights) / sum(weights)
    names = tuple(f"c{k}" for k in range(len(weights)))
    holder = Conditioning(names, names, Tokenizer.from_captions(names, 3, 64))
    model = MomentModel(torch.zeros(len(weights), 1), torch.ones(1, 1, 1), torch.ones(1, 1), prior, 0.1)
    y = Generator(zero_net(), holder, model, Sample()).prompts(n, CPU)
    counts = np.bincount(y.numpy(), minlength=len(weights))
    assert len(counts) == len(weights)
    assert counts.sum() == len(y) == n
    exact = prior.double().numpy() / prior.double().numpy().sum() * n
    assert (np.abs(counts - exact) < 1 + 1e-6).all()
    # the largest remainders were the ones rounded up
    up, down = exact[counts > exact + 1e-9] % 1, exact[counts < exact - 1e-9] % 1
    if len(up) and len(down):
        assert up.min() >= down.max() - 1e-6
    assert bool((y[:-1] <= y[1:]).all())


def test_labels_without_a_release_are_equal_in_number():
    y = Generator(zero_net(), conditioning(), None, Sample()).prompts(10, CPU)
    assert sorted(np.bincount(y.numpy()).tolist()) == [3, 3, 4]


# draws


@pytest.mark.parametrize("port", ["weights", "guide", "release"])
def test_a_draw_is_a_function_of_its_seed(port):
    torch.manual_seed(0)
    net = zero_net()
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(0, 0.2)
    generator, section = Generator(net, conditioning(), moments(), Sample()), Sample(port=port, steps=3, batch=4)
    y = torch.tensor([0, 0, 1, 1, 2, 2, 2, 0, 1, 1])
    first = generator.draw(y, section, 7, quiet)
    torch.manual_seed(99)  # the global state plays no part
    torch.rand(10)
    assert torch.equal(generator.draw(y, section, 7, quiet), first)
    assert not torch.equal(generator.draw(y, section, 8, quiet), first)
    assert first.shape == (10, *SHAPE)
    assert float(first.abs().max()) <= 1
    assert not torch.equal(first[:4], first[4:8])  # batches do not repeat each other
    assert not first.requires_grad


@pytest.mark.parametrize("batch", [1, 3, 100])
@pytest.mark.parametrize("guidance", [0.0, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("port", ["weights", "guide"])
def test_every_row_meets_the_caption_of_its_label(port, guidance, batch):
    """Guidance w leads to nowhere + w (target - nowhere), clamped to [-1, 1], whatever the start."""
    conditions = conditioning()
    net = StraightNet(conditions, TARGETS)
    y = torch.tensor([2, 0, 1, 1, 0, 2, 2])
    section = Sample(steps=4, guidance=guidance, batch=batch, port=port, t0=0.3)
    found = Generator(net, conditions, moments(), section).draw(y, section, 0, quiet)
    expected = (StraightNet.nowhere + guidance * (TARGETS[y] - StraightNet.nowhere)).clamp(-1, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    start = 0.3 if port == "guide" else 0.0
    expected_times = [start + k * (1 - start) / 4 for k in range(4)] * len(range(0, 7, batch))
    np.testing.assert_allclose(net.times, expected_times, atol=1e-6)


def test_the_weights_port_begins_at_standard_noise():
    generator, section = Generator(zero_net(), conditioning(), None, Sample()), Sample(steps=2, batch=1000)
    z = generator.draw(torch.zeros(5000, dtype=torch.int64), section, 0, quiet)
    inside = (z.abs() < 1).double().mean()
    assert float(inside) == pytest.approx(0.6827, abs=0.01)  # a standard normal within one deviation
    assert float((z[z.abs() < 1] > 0).double().mean()) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("port", "t0"), [("release", 0.2), ("guide", 0.0), ("guide", 0.6)])
def test_the_other_ports_begin_where_the_release_says(port, t0):
    m, n = moments(), 20_000
    y = torch.arange(n) % 3
    section = Sample(port=port, t0=t0, steps=2, batch=4096)
    z = Generator(zero_net(), conditioning(), m, section).draw(y, section, 1, quiet).flatten(1)
    part = 1.0 if port == "release" else t0
    for k in range(3):
        # medians and signs survive the clamp to [-1, 1]
        np.testing.assert_allclose(z[y == k].median(dim=0).values, part * m.mu[k], atol=0.05)
    variance = 0.01 if port == "release" else t0**2 * 0.01 + (1 - t0) ** 2
    offset = (z[:, 1] - part * m.mu[y][:, 1]).abs().median()
    assert float(offset) == pytest.approx(0.6745 * variance**0.5, rel=0.06)


def test_ports_that_need_moments_are_refused_without_them():
    generator = Generator(zero_net(), conditioning(), None, Sample())
    for port in ("guide", "release"):
        with pytest.raises(BadInput, match="needs released moments"):
            generator.draw(torch.tensor([0]), Sample(port=port), 0, quiet)


def test_no_labels_no_records():
    generator = Generator(zero_net(), conditioning(), None, Sample())
    assert generator.draw(torch.zeros(0, dtype=torch.int64), Sample(), 0, quiet).shape == (0, *SHAPE)


# the released files


def random_generator(with_moments=True) -> Generator:
    torch.manual_seed(3)
    net = zero_net()
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(0, 0.2)
    return Generator(net, conditioning(), moments() if with_moments else None, Sample(n=12, steps=3, guidance=2.0))


@pytest.mark.parametrize("with_moments", [True, False])
def test_a_generator_comes_back_from_its_release(tmp_path, with_moments):
    one = random_generator(with_moments)
    one.save(tmp_path / "model.safetensors", tmp_path / "model.json")
    if with_moments:
        one.moments.save(tmp_path / "moments.safetensors")
    two = Generator.load(tmp_path, CPU)
    assert two.conditioning == one.conditioning
    assert two.sample == one.sample
    assert (two.moments is None) != with_moments
    y = one.prompts(12, CPU)
    assert torch.equal(y, two.prompts(12, CPU))
    assert torch.equal(one.draw(y, one.sample, 5, quiet), two.draw(y, two.sample, 5, quiet))


def test_names_outside_ascii_come_back(tmp_path):
    one = random_generator()
    names = ("größe", "日本", 'quo"te')
    one.conditioning = Conditioning(names, names, Tokenizer.from_captions(names, 3, 16))
    one.save(tmp_path / "model.safetensors", tmp_path / "model.json")
    assert Generator.load(tmp_path, CPU).conditioning == one.conditioning


def test_what_is_no_release_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(BadInput, match=r"not a release: model\.json is missing"):
        Generator.load(tmp_path, CPU)
    one = random_generator()
    one.save(tmp_path / "model.safetensors", tmp_path / "model.json")
    card = json.loads((tmp_path / "model.json").read_text())
    weights = (tmp_path / "model.safetensors").read_bytes()
    for text in ("{", "{}", json.dumps({**card, "net": {**card["net"], "width": 32}})):
        (tmp_path / "model.json").write_text(text)
        with pytest.raises(BadInput, match="damaged"):
            Generator.load(tmp_path, CPU)
    (tmp_path / "model.json").write_text(json.dumps(card))
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(BadInput, match="damaged"):
        Generator.load(tmp_path, CPU)


# the synthetic set


def test_pixels_and_values_undo_each_other():
    every = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    z = to_z(every)
    assert float(z.min()) == -1
    assert float(z.max()) == 1
    assert np.array_equal(to_pixels(z), every)
    assert to_pixels(torch.tensor([[-9.0, 9.0]])).tolist() == [[0, 255]]


def pictures(n, shape, seed=0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return to_z(rng.integers(0, 256, size=(n, *shape), dtype=np.uint8))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 5, 5)])
def test_a_set_comes_back_as_it_was_written(tmp_path, shape):
    """Class names in an order of their own, one of them without a picture; more pictures than one digit counts."""
    classes = ("b", "10", "a, b", "2", 'c "quoted"', "größe")
    captions = tuple(f"a picture, of {name}\nindeed" for name in classes)
    z = pictures(120, shape)
    y = torch.tensor([0, 1, 2, 4, 5])[torch.arange(120) % 5]
    synthetic.write(tmp_path / "set", z, y, classes, captions)
    found, labels = synthetic.read(tmp_path / "set", shape, classes)
    assert torch.equal(found, z)
    assert torch.equal(labels, y)
    with open(tmp_path / "set" / "metadata.csv", newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [row["text"] for row in table] == [captions[k] for k in y]
    assert {row["file_name"] for row in table} == {f"images/{p.name}" for p in (tmp_path / "set/images").iterdir()}
    picture = np.asarray(Image.open(tmp_path / "set" / table[7]["file_name"]))  # any image reader sees the same
    assert np.array_equal(picture.reshape(*shape[1:], -1).transpose(2, 0, 1), to_pixels(z[7:8])[0])


def test_points_go_to_a_table(tmp_path):
    z = torch.tensor([[0.125, -1.0], [0.333333333, 1.0]]).reshape(2, 2, 1, 1)
    synthetic.write(tmp_path / "set", z, torch.tensor([1, 0]), ("left", "right"), ("to the left", "to the right"))
    with open(tmp_path / "set" / "points.csv", newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [row["label"] for row in table] == ["right", "left"]
    assert [row["text"] for row in table] == ["to the right", "to the left"]
    found = [[float(row["z0"]), float(row["z1"])] for row in table]
    np.testing.assert_allclose(found, z.flatten(1), atol=1e-6)


def written(folder):
    return synthetic.read(folder, (1, 8, 8), ("a", "b"))


def test_a_rewrite_leaves_nothing_of_the_old_set(tmp_path):
    names = ("a", "b")
    synthetic.write(tmp_path / "set", pictures(30, (1, 8, 8)), torch.arange(30) % 2, names, names)
    fresh = pictures(4, (1, 8, 8), seed=1)
    synthetic.write(tmp_path / "set", fresh, torch.tensor([1, 1, 0, 1]), names, names)
    assert torch.equal(written(tmp_path / "set")[0], fresh)
    assert len(list((tmp_path / "set" / "images").iterdir())) == 4
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


class Crash(Exception):
    pass


@pytest.mark.parametrize("fails_at", [0, 5])
def test_a_crash_leaves_the_old_set_whole_and_the_next_write_works(tmp_path, monkeypatch, fails_at):
    names, folder = ("a", "b"), tmp_path / "set"
    old = pictures(6, (1, 8, 8))
    synthetic.write(folder, old, torch.arange(6) % 2, names, names)
    save, calls = Image.Image.save, []

    def dies(self, *args, **options):
        if len(calls) == fails_at:
            raise Crash
        calls.append(args)
        return save(self, *args, **options)

    monkeypatch.setattr(Image.Image, "save", dies)
    fresh = pictures(9, (1, 8, 8), seed=1)
    with pytest.raises(Crash):
        synthetic.write(folder, fresh, torch.arange(9) % 2, names, names)
    assert torch.equal(written(folder)[0], old)
    monkeypatch.undo()
    synthetic.write(folder, fresh, torch.arange(9) % 2, names, names)
    assert torch.equal(written(folder)[0], fresh)
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_a_first_write_that_crashes_leaves_no_set(tmp_path, monkeypatch):
    def dies(*_):
        raise Crash

    monkeypatch.setattr(synthetic, "_write_table", dies)
    with pytest.raises(Crash):
        synthetic.write(tmp_path / "set", pictures(3, (1, 8, 8)), torch.zeros(3, dtype=torch.int64), ("a",), ("a",))
    assert not (tmp_path / "set").exists()


# the probe


def shaded(n, seed=0):
    """Three classes told apart by where a bright bar stands."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    z = 0.3 * torch.randn(n, 1, 8, 8, generator=generator) - 0.5
    for k in range(3):
        z[y == k, :, :, 2 * k + 1] += 1.0
    return z, y


PROBE = Evaluate(probe_steps=80, probe_batch=48)


def test_the_probe_learns_what_is_plain_to_see_and_nothing_else():
    z, y = shaded(300)
    predict = fit_probe(z, y, 3, PROBE, 0, CPU)
    fresh, truth = shaded(300, seed=1)
    assert float((predict(fresh) == truth).double().mean()) > 0.97
    shuffled = y[torch.randperm(300, generator=torch.Generator().manual_seed(0))]
    blind = fit_probe(z, shuffled, 3, PROBE, 0, CPU)
    assert float((blind(fresh) == truth).double().mean()) < 0.7


def test_the_probe_is_keyed_by_its_seed_and_leaves_the_global_state_alone():
    z, y = shaded(60)
    fresh = torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(4))
    section = Evaluate(probe_steps=30, probe_batch=32)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first = fit_probe(z, y, 3, section, 0, CPU)(fresh)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(fit_probe(z, y, 3, section, 0, CPU)(fresh), first)
    assert not torch.equal(fit_probe(z, y, 3, section, 1, CPU)(fresh), first)


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_a_release_that_lacks_a_file_is_refused_by_its_name(tmp_path, name):
    for other in {"model.json", "model.safetensors"} - {name}:
        (tmp_path / other).write_text("{}")
    with pytest.raises(BadInput, match=name):
        Generator.load(tmp_path, torch.device("cpu"))
