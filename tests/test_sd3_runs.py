"""Whole runs on a frozen Stable Diffusion 3: what they spend, release and repeat, where a release opens, and what is
refused. The model is tiny and random, so nothing here is about pictures."""

import functools
import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from conftest import PIN
from sd3_tiny import SIZE, tiny_sd3
from straightdp.audits.replay import replay
from straightdp.cli import main
from straightdp.metrics import inception
from straightdp.moments.field import MomentModel
from straightdp.privacy.vault import Vault
from straightdp.recipe import Sd3
from straightdp.sd3.backbone import Sd3Backbone
from straightdp.stages import private, sample, sd3

if find_spec("diffusers") is None:
    pytest.skip("diffusers is not installed: pip install 'straightdp[sd3]'", allow_module_level=True)

CLASSES, BUDGET = ("blue", "green", "red"), 8.0
SHORT = (
    f"privacy.epsilon={BUDGET}",
    "privacy.interval=0.01",
    f"image.size={SIZE}",
    "sd3.tokens=12",
    "sd3.prior=4",
    "sd3.rank=2",
    "release.features=6",
    "release.rank=4",
    "sample.n=9",
    "sample.steps=2",
    "sample.t0=0.5",
    "evaluate.probe_steps=2",
)
TRAINED = (
    "dpsgd.steps=3",
    "dpsgd.q=0.2",
    "dpsgd.draws=1",
    "dpsgd.micro_batch=16",
    "dpsgd.lr=0.01",
    "dpsgd.checkpoint_every=1",
)
ROUTES = {
    "guide": (),
    "lora": TRAINED,
    "distill": (*TRAINED, "distill.steps=2", "distill.batch=4"),
    "evolve": ("rival.rounds=2", "rival.population=3", "rival.variations=1"),
}
BOTH = ("release.weight=0.3", "dpsgd.weight=0.7", "sample.port=guide")  # of lora: adapters and a tilted start
GIVEN = ("release.sigma=3", "dpsgd.sigma=1", "sample.port=guide")  # the same, with noise that is not searched for
PINNED = f'privacy.pinned_key="{PIN}"'
every_route = pytest.mark.parametrize("route", ROUTES)


class Eyes:
    """In the place of Inception: colours of blocks of 8 x 8 pixels, and zeros to fill its width."""

    name, digest, resize = "FD-stub", "5" * 64, "not at all"

    def on_device(self, z: torch.Tensor, size: int = 0) -> torch.Tensor:
        colours = torch.nn.functional.avg_pool2d(z, 8).flatten(1)
        return torch.nn.functional.pad(colours, (0, inception.WIDTH - colours.shape[1]))

    def __call__(self, z, track=None):
        return self.on_device(z)


@pytest.fixture(autouse=True, scope="module")
def surroundings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inception, "find", lambda device, root=None: Eyes())
        for name in ("STRAIGHTDP_SD3", "STRAIGHTDP_CACHE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The model, private records and held-out ones, a folder a class."""
    root = tmp_path_factory.mktemp("place")
    tiny_sd3(root / "tiny-sd3")
    rng = np.random.default_rng(0)
    for part, n in (("mine", 60), ("held-out", 12)):
        for k in range(n):
            blocks = rng.integers(0, 160, size=(4, 4, 3))
            blocks[:, :, 2 - k % 3] += 95
            folder = root / part / CLASSES[k % 3]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = blocks.repeat(8, axis=0).repeat(8, axis=1).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{k:02}.png")
    return root


def command(place: Path, route: str, out: Path, *settings: str, flags: tuple[str, ...] = ()) -> int:
    words = ["sd3", route, "--model", str(place / "tiny-sd3"), "--private", str(place / "mine"), "--out", str(out)]
    for setting in (*SHORT, f'private.holdout="{place / "held-out"}"', *ROUTES[route], *settings):
        words += ["--set", setting]
    return main([*words, *flags])


@pytest.fixture(scope="module")
def runs(place, tmp_path_factory):
    """runs(route, *settings): the folder of a finished run, made once. Only for looking at."""
    root = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(route: str, *settings: str, flags: tuple[str, ...] = (), again: int = 0) -> Path:
        out = root / str(len(list(root.iterdir())))
        assert command(place, route, out, *settings, flags=flags) == 0
        return out

    return run


def entries(release: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (release / "transcript.jsonl").read_text().splitlines())
    return [entry for entry in lines if entry["kind"] == kind]


def released(run: Path, *, pages: bool = False) -> dict[str, bytes]:
    """All that is published, by name; pages say how long stages took."""
    release = run / "release"
    files = {path.relative_to(release).as_posix(): path.read_bytes() for path in release.rglob("*") if path.is_file()}
    return files if pages else {name: data for name, data in files.items() if name != "report.html"}


def images(synthetic: Path) -> list[np.ndarray]:
    return [np.asarray(Image.open(path)).astype(int) for path in sorted((synthetic / "images").iterdir())]


def refused(capsys, code: int) -> str:
    """The one sentence of an exit with code 2; what libraries print while they load stands before it."""
    assert code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "straightdp:" in line]
    assert len(lines) == 1
    return lines[0]


# What a route spends


@pytest.mark.parametrize(
    ("route", "settings", "mechanisms"),
    [
        ("guide", (), {"release/mean": 1}),
        ("lora", (), {"dpsgd/gradients": 3}),
        ("distill", (), {"release/mean": 1, "dpsgd/gradients": 3}),
        ("evolve", (), {"rival/votes": 2}),
        ("lora", BOTH, {"release/mean": 1, "dpsgd/gradients": 3}),
    ],
)
def test_a_route_goes_from_end_to_end_within_its_budget(runs, route, settings, mechanisms, capsys):
    run = runs(route, *settings)
    verdict = replay(run / "release")
    assert verdict.holds
    assert verdict.releasable, verdict.text
    assert 0.99 * BUDGET < verdict.epsilon <= BUDGET
    declared = {entry["mechanism"]["id"]: entry["mechanism"] for entry in entries(run / "release", "declare")}
    assert {id: part["count"] for id, part in declared.items()} == mechanisms
    executed = [(entry["id"], entry["step"]) for entry in entries(run / "release", "execute")]
    assert sorted(executed) == sorted((id, step) for id, count in mechanisms.items() for step in range(count))
    assert all(part["sensitivity"] == 1.0 for part in declared.values())
    assert main(["replay", str(run)]) == 0
    assert "Recomputed epsilon" in capsys.readouterr().out
    assert len(images(run / "release/synthetic")) == 9
    scores = {score["name"] for score in json.loads((run / "private/evaluation.json").read_text())["scores"]}
    assert ("released moments alone" in scores) == ("release/mean" in mechanisms)
    assert "synthetic data" in scores


def test_a_budget_that_is_shared_leaves_either_part_more_noise(runs):
    def sigmas(run: Path) -> dict[str, float]:
        declared = (entry["mechanism"] for entry in entries(run / "release", "declare"))
        return {part["id"]: part["sigma"] for part in declared}

    both, mean, gradients = (sigmas(runs(*which)) for which in (("lora", *BOTH), ("guide",), ("lora",)))
    assert both["release/mean"] > 1.05 * mean["release/mean"]
    assert both["dpsgd/gradients"] > 1.01 * gradients["dpsgd/gradients"]


@every_route
def test_what_is_trained_is_what_the_route_trains(runs, route):
    """B is zero before any training; guidance trains nothing, and Private Evolution has pictures and no weights."""
    state = load_file(runs(route) / "release/model.safetensors")
    if route == "evolve":
        assert {name: value.shape for name, value in state.items()} == {"population": (3, 3, 3, SIZE, SIZE)}
        return
    moved = [bool(value.any()) for name, value in state.items() if ".lora_B." in name]
    assert len(moved) == len(state) / 2 > 0
    assert all(moved) if route != "guide" else not any(moved)


def test_trained_adapters_are_released_where_others_are_looked_at_after_the_training(runs):
    """The plateau for sample.t0 is found with the frozen model as it was."""
    run = runs("lora", *GIVEN, "sample.t0=plateau", PINNED)
    assert (run / "private/checkpoints/plateau.json").exists()
    found, expected = (one / "release/model.safetensors" for one in (run, runs("lora", *GIVEN, PINNED)))
    assert all(bool(value.any()) for value in load_file(expected).values())
    assert found.read_bytes() == expected.read_bytes()


def test_networks_of_one_backbone_share_what_is_frozen_and_nothing_else(place):
    section = Sd3(model=str(place / "tiny-sd3"), tokens=12, rank=2)
    backbone = Sd3Backbone(section, ("a cat",), SIZE, 0, torch.device("cpu"))
    one, other = (backbone.new_net(backbone.prior.shape, 0) for _ in range(2))
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert (mine is theirs) != mine.requires_grad
        assert torch.equal(mine, theirs)
    with torch.no_grad():
        for parameter in one.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    start = backbone.state(backbone.new_net(backbone.prior.shape, 0))
    assert all(torch.equal(start[name], value) for name, value in backbone.state(other).items())
    assert not any(torch.equal(start[name], value) for name, value in backbone.state(one).items())


# Repeating


@pytest.mark.parametrize("route", ["guide", "lora"])
def test_a_pinned_key_repeats_a_run_to_the_byte_and_nothing_else_does(runs, route):
    first, second = released(runs(route, PINNED)), released(runs(route, PINNED, again=1))
    assert first == second
    free = released(runs(route)), released(runs(route, again=1))
    moments = "moments.safetensors"
    assert (moments in first) == (route == "guide")
    made = [moments if route == "guide" else "model.safetensors", "synthetic/images/00000.png"]
    assert all(len({one[name] for one in (first, *free)}) == 3 for name in made)
    verdict = replay(runs(route, PINNED))
    assert verdict.holds
    assert not verdict.releasable


class Stopped(Exception):
    pass


def after(owner, name: str, calls: int):
    """`owner.name` does its work `calls` times, and then nothing comes back."""
    work, done = getattr(owner, name), []

    def watched(*given, **options):
        found = work(*given, **options)
        done.append(name)
        if len(done) == calls:
            raise Stopped
        return found

    return owner, name, watched


@pytest.mark.parametrize(
    "stop",
    [
        (Vault, "gaussian_sum", 1),
        (Vault, "noisy_gradient", 2),
        (private, "private_steps", 1),
        (sample, "run", 1),
    ],
    ids=lambda stop: f"{stop[1]} {stop[2]}",
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(runs, place, tmp_path, monkeypatch, stop):
    drawn, draw = [], sd3.draw_prior
    monkeypatch.setattr(sd3, "draw_prior", lambda *given: (drawn.append(1), draw(*given)))
    with monkeypatch.context() as patch:
        patch.setattr(*after(*stop))
        with pytest.raises(Stopped):
            command(place, "lora", tmp_path / "run", *GIVEN, PINNED)
    assert command(place, "lora", tmp_path / "run", *GIVEN, PINNED) == 2, "not without being told to go on"
    assert command(place, "lora", tmp_path / "run", *GIVEN, PINNED, flags=("--resume",)) == 0
    assert len(drawn) == 1
    assert released(tmp_path / "run") == released(runs("lora", *GIVEN, PINNED))


# Without noise


def prior_images(run: Path) -> torch.Tensor:
    return load_file(run / "private/checkpoints/prior.safetensors")["images"]


def codes(place: Path, pixels: torch.Tensor) -> np.ndarray:
    """By diffusers itself, (n, d)."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(place / "tiny-sd3", subfolder="vae").eval()
    with torch.no_grad():
        latent = vae.encode(pixels.float() / 127.5 - 1).latent_dist.mode()
    return ((latent - vae.config.shift_factor) * vae.config.scaling_factor).flatten(1).double().numpy()


def within(x: np.ndarray, radius: float) -> np.ndarray:
    return x * np.minimum(1, radius / np.linalg.norm(x, axis=1, keepdims=True))


def true_features(place: Path, run: Path) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Each class's clipped features, the public mean and P, from the private pictures and the prior's alone."""
    public = codes(place, prior_images(run))
    assert len(public) == 4 * len(CLASSES)
    radius = np.quantile(np.linalg.norm(public, axis=1), 0.99)
    public = within(public, radius)
    mean = public.mean(axis=0)
    P = np.linalg.svd(public - mean, full_matrices=False)[2][:6]
    clip, features = np.quantile(np.linalg.norm((public - mean) @ P.T, axis=1), 0.5), {}
    for name in CLASSES:
        pixels = np.stack([np.asarray(Image.open(path)) for path in sorted((place / "mine" / name).iterdir())])
        z = within(codes(place, torch.from_numpy(pixels).permute(0, 3, 1, 2)), radius)
        features[name] = within((z - mean) @ P.T, clip)
    return features, mean, P


def test_without_noise_the_mean_is_the_true_one_and_nothing_may_be_published(runs, place, capsys):
    run = runs("guide", flags=("--without-noise",))
    assert not (run / "release").exists()
    for given in (run / "private/not-private", run):
        assert main(["replay", str(given)]) == 1
        assert "NOT RELEASABLE" in capsys.readouterr().out
    features, mean, P = true_features(place, run)
    true = mean + np.concatenate(list(features.values())).mean(axis=0) @ P
    found = MomentModel.load(run / "private/not-private/moments.safetensors").mu.double().numpy()
    assert found.shape == (3, len(true))
    assert np.abs(found - true).max() < 1e-3 * np.linalg.norm(true - mean)
    noisy = MomentModel.load(runs("guide") / "release/moments.safetensors").mu.double().numpy()
    assert np.abs(noisy - true).max() > 1e-2 * np.linalg.norm(true - mean)
    assert np.array_equal(noisy, noisy[:1].repeat(3, axis=0)), "one mean for all"


def test_without_noise_every_class_has_its_own_mean(runs, place):
    """But that a feature in which classes differ by little is still taken for noise, and drawn to the mean of all."""
    settings = ("release.condition=class", "release.min_count=1", "privacy.epsilon=30")
    run = runs("guide", *settings, flags=("--without-noise",))
    assert not (run / "release").exists()
    declared = {entry["mechanism"]["id"] for entry in entries(run / "private/not-private", "declare")}
    assert declared == {"release/means"}
    features, mean, P = true_features(place, run)
    true = np.stack([features[name].mean(axis=0) for name in CLASSES])
    found = (MomentModel.load(run / "private/not-private/moments.safetensors").mu.double().numpy() - mean) @ P.T
    small = 1e-3 * np.linalg.norm(true.mean(axis=0))
    np.testing.assert_allclose(found.mean(axis=0), true.mean(axis=0), rtol=0, atol=small)
    found, true = found - found.mean(axis=0), true - true.mean(axis=0)
    kept = (found * true).sum(axis=0) / np.square(true).sum(axis=0)
    np.testing.assert_allclose(found, kept * true, rtol=0, atol=small)
    assert -1e-3 < kept.min() < kept.max() < 1.001
    assert kept.max() > 0.5


@pytest.mark.parametrize("route", ["lora", "evolve"])
def test_without_noise_the_other_routes_end_too_and_are_not_releasable(runs, route):
    run = runs(route, flags=("--without-noise",))
    assert not (run / "release").exists()
    verdict = replay(run / "private/not-private")
    assert verdict.holds
    assert not verdict.releasable


def test_a_folder_is_private_or_not_from_its_beginning(runs, place, tmp_path, capsys):
    for flags, other in ((), ("--without-noise",)), (("--without-noise",), ()):
        out = tmp_path / str(len(flags))
        shutil.copytree(runs("guide", flags=flags), out)
        assert "another --out" in refused(capsys, command(place, "guide", out, flags=("--resume", *other)))
        assert not list(out.rglob("release/*.safetensors") if flags else out.rglob("private/not-private/*.safetensors"))


# What is published


@every_route
def test_nothing_published_says_where_anything_lies_here(runs, place, route):
    here = (str(place), str(place.parent), str(runs(route)), str(Path.home()))
    for name, data in released(runs(route), pages=True).items():
        assert not [path for path in here if path.encode() in data], name
    assumed = {entry["name"]: entry["value"] for entry in entries(runs(route) / "release", "assumption")}
    assert assumed["frozen generator"].startswith("tiny-sd3,")


def draw(release: Path, out: Path, *settings: str, n: int = 9) -> list[np.ndarray]:
    words = ["sample", str(release), "--n", str(n), "--seed", "0", "--out", str(out)]
    assert main([*words, *(word for setting in settings for word in ("--set", setting))]) == 0
    return images(out)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """elsewhere(run): a copy of its release, opened from another folder. The model is not there by itself."""
    monkeypatch.chdir(tmp_path)

    def copied(run: Path) -> Path:
        return Path(shutil.copytree(run / "release", tmp_path / "release"))

    return copied


@pytest.mark.parametrize("route", ["guide", "lora"])
def test_a_release_draws_the_same_elsewhere_where_the_model_is_named(
    runs, place, elsewhere, tmp_path, monkeypatch, route
):
    release = elsewhere(runs(route))
    monkeypatch.setenv("STRAIGHTDP_SD3", str(shutil.copytree(place / "tiny-sd3", tmp_path / "under another name")))
    assert all(map(np.array_equal, draw(release, tmp_path / "drawn"), images(release / "synthetic")))
    more = draw(release, tmp_path / "other", n=4)
    assert [image.shape for image in more] == [(SIZE, SIZE, 3)] * 4


def test_a_release_does_not_open_without_its_model(runs, place, elsewhere, tmp_path, monkeypatch, capsys):
    release = elsewhere(runs("guide"))
    words = ["sample", str(release), "--n", "2", "--out", str(tmp_path / "drawn")]
    message = refused(capsys, main(words))
    assert "tiny-sd3 is no folder here" in message
    assert "STRAIGHTDP_SD3" in message
    monkeypatch.setenv("STRAIGHTDP_SD3", str(tmp_path / "nowhere"))
    assert "nowhere is no folder here" in refused(capsys, main(words))
    monkeypatch.setenv("STRAIGHTDP_SD3", str(tiny_sd3(tmp_path / "other", seed=1)))
    message = refused(capsys, main(words))
    assert "other weights" in message
    assert "STRAIGHTDP_SD3" in message
    assert not (tmp_path / "drawn").exists()


def test_evolved_pictures_need_no_model(runs, elsewhere, tmp_path):
    release = elsewhere(runs("evolve"))
    assert all(map(np.array_equal, draw(release, tmp_path / "drawn"), images(release / "synthetic")))


def test_tilts_are_controls_of_the_released_mean_which_matters_more_the_later_the_start(
    runs, place, elsewhere, tmp_path, monkeypatch
):
    monkeypatch.setenv("STRAIGHTDP_SD3", str(place / "tiny-sd3"))
    release, drawn = elsewhere(runs("guide")), {}
    for k, tilt in enumerate(("released", "zero", "random", "public")):
        drawn[tilt] = np.stack(draw(release, tmp_path / f"tilt {k}", f"sample.tilt={tilt}"))
    assert np.array_equal(drawn["released"], np.stack(images(release / "synthetic")))
    assert len({one.tobytes() for one in drawn.values()}) == 4
    gaps = []
    for t0 in (0.0, 0.1, 0.3, 0.6):
        one, other = (
            np.stack(draw(release, tmp_path / f"{tilt} {t0}", f"sample.tilt={tilt}", f"sample.t0={t0}"))
            for tilt in ("released", "zero")
        )
        gaps.append(np.abs(one - other).mean())
    assert gaps[0] == 0, "at t0 = 0 there is noise alone"
    assert gaps == sorted(set(gaps))


# Judging


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    narrow = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("models") / "tiny-clip"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = CLIPVisionConfig(**narrow, projection_dim=12, image_size=SIZE, patch_size=8)
        CLIPVisionModelWithProjection(config).save_pretrained(folder)
    return folder


def probes(run: Path) -> set[str]:
    return {score["probe"] for score in json.loads((run / "private/evaluation.json").read_text())["scores"]}


def test_a_linear_probe_is_named_after_its_encoder(runs, clip):
    assert probes(runs("guide")) == {"linear probe on Inception-V3 (slim)"}
    run = runs("guide", f'evaluate.clip="{clip}"', PINNED)
    assert probes(run) == {"linear probe on CLIP tiny-clip"}
    others = released(runs("guide", PINNED))
    assert released(run) == others, "how it is judged changes nothing that is published"
    assert str(clip).encode() not in b"".join(released(run, pages=True).values())


def test_a_finished_run_is_judged_again_with_a_clip_in_depth(runs, clip, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(runs("lora", *BOTH), run)
    before = released(run)
    assert main(["sd3", "evaluate", str(run), "--clip", str(clip), "--set", "evaluate.thorough=on"]) == 0
    assert "linear probe on CLIP tiny-clip" in capsys.readouterr().out
    assert probes(run) == {"linear probe on CLIP tiny-clip"}
    body = json.loads((run / "private/evaluation.json").read_text())
    names = {"synthetic data", "released moments alone", "public model only", "real private data"}
    assert {score["name"] for score in body["scores"]} == names
    assert all(0 <= score["mean"] <= 1 for score in body["scores"])
    assert names - {"real private data"} <= {row["name"] for row in body["quality"]["sets"]}
    assert released(run) == before
    assert replay(run).releasable


# What is refused


@pytest.mark.parametrize(
    ("route", "settings", "word"),
    [
        ("guide", ("sd3.model=",), "no frozen model was named"),
        ("guide", ("sd3.model={place}/mine",), "model_index.json"),
        ("guide", ("sd3.model={place}/nowhere",), "is not a folder"),
        ("guide", ("sd3.model={place}/another",), "StableDiffusionPipeline"),
        ("guide", ("image.channels=1",), "image.channels = 3"),
        ("guide", ("image.size=36",), "multiple of 8"),
        ("guide", ("public.data={place}/mine",), "public.data"),
        ("guide", ("latent.d=32",), "latent.d"),
        ("guide", ("release.condition=slots",), "release.condition"),
        ("guide", ("private.caption={text}",), "{text}"),
        ("guide", ("release.features=64",), "at most 11"),
        ("guide", ("evaluate.clip={place}/nowhere",), "nowhere"),
        ("guide", ("privacy.mode=paper", "release.covariance=shared"), "'public'"),
        ("lora", ("run.method=dp-merf",), "leave sd3.model out"),
        ("lora", ("sample.port=guide",), "release.weight"),
        ("guide", ("private.data=",), "--private"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence_and_nothing_is_written(
    place, tmp_path, capsys, route, settings, word
):
    another = place / "another"
    another.mkdir(exist_ok=True)
    (another / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    given = [setting.replace("{place}", str(place)) for setting in settings]
    assert word in refused(capsys, command(place, route, tmp_path / "run", *given))
    assert not (tmp_path / "run").exists()


def test_a_model_must_be_named(place, tmp_path, capsys):
    words = ["sd3", "lora", "--private", str(place / "mine"), "--out", str(tmp_path / "run")]
    assert "--model" in refused(capsys, main(words))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("route", ["guide", "lora"])
def test_an_audit_is_refused(place, tmp_path, capsys, route):
    words = ["audit", f"sd3-{route}", "--private", str(place / "mine"), "--out", str(tmp_path / "audit")]
    assert refused(capsys, main([*words, "--set", f'sd3.model="{place / "tiny-sd3"}"']))
    assert not (tmp_path / "audit").exists()
