"""What would break the promise, tried: stale checkpoints, noise on two sums, records that mix, forged transcripts."""

import json
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from conftest import PIN, TINY
from straightdp import pipeline, recipe
from straightdp.audits.replay import replay
from straightdp.cli import main
from straightdp.compiled import in_bfloat16
from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.dpsgd.trainer import Bucket, made_up, record_losses
from straightdp.errors import BadInput, BudgetRefused
from straightdp.files import file_hash
from straightdp.flow import fit
from straightdp.folder import RunFolder
from straightdp.generator import Generator
from straightdp.nets.autoencoder import Autoencoder
from straightdp.nets.captions import Tokenizer, split_words
from straightdp.nets.mmdit import MMDiT
from straightdp.privacy.accountant import Declaration, epsilon
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.mechanisms import clip_to_grid
from straightdp.privacy.noise import Noise
from straightdp.privacy.vault import Vault
from straightdp.privacy.workload import GRADIENTS, Certificate, bucket_id, bucket_steps
from straightdp.recipe import DpSgd, Net, parse
from straightdp.stages import gather, private

CPU = torch.device("cpu")
SHORT = (
    "pretrain.steps=2",
    "distill.steps=2",
    "dpsgd.steps=6",
    "dpsgd.q=0.05",
    "dpsgd.checkpoint_every=2",
    "net.depth=1",
    "net.patch=4",
    "sample.n=10",
    "sample.steps=2",
    "private.holdout=0",
    f'privacy.pinned_key="{PIN}"',
)
LATENT = ("latent.d=32", "latent.width=8", "latent.steps=60", "latent.batch=8", "net.patch=1")
ALONE = "DP-SGD alone"


class Stop(Exception):
    pass


def stops(*_, **__):
    raise Stop


def loaded(folder: Path, sources: dict, *more: str) -> recipe.Recipe:
    """The tiny recipe on these sources, shortened; with ALONE among the settings, without a release."""
    path = folder / "recipe.toml"
    text = TINY.format(**sources)
    if ALONE in more:
        text = text.replace("[release]\nsigma = 3.0", "[release]\nweight = 0.0")
    path.write_text(text)
    return recipe.load(path, (*SHORT, *(setting for setting in more if setting != ALONE)))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def executions(path: Path) -> list[tuple[str, int]]:
    return [(entry["id"], entry["step"]) for entry in lines(path) if entry["kind"] == "execute"]


@pytest.fixture(autouse=True)
def only_what_spends(monkeypatch):
    """No cache, and runs end when the transcript is closed: what follows from the release costs nothing."""
    monkeypatch.delenv("STRAIGHTDP_CACHE", raising=False)
    monkeypatch.setattr(pipeline, "_use", lambda inputs: None)


@pytest.fixture
def sources(tiny_data, tmp_path) -> dict[str, Path]:
    """The tiny sets, the public one as a copy that may be replaced."""
    public = tmp_path / "public.npz"
    public.write_bytes(tiny_data["public"].read_bytes())
    return tiny_data | {"public": public}


def change_public(path: Path, *, images=lambda x: x, labels=lambda y: y) -> None:
    with np.load(path) as held:
        arrays = {"images": images(held["images"]), "labels": labels(held["labels"])}
    np.savez(path, **arrays)


# A checkpoint belongs to the work it was made for


def stop_at_checkpoint(monkeypatch, stage: str):
    """The process ends just after the stage's first checkpoint is on disk."""
    save = fit._save

    def saved(path, *others):
        save(path, *others)
        if path.stem == stage:
            raise Stop

    monkeypatch.setattr(fit, "_save", saved)


def contents(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.iterdir() if path.suffix != ".lock"}


@pytest.mark.parametrize(
    ("stage", "space"),
    [("pretrain", ()), ("autoencode", LATENT), ("pretrain", LATENT)],
    ids=lambda x: x if isinstance(x, str) else ("codes" if x else "pixels"),
)
def test_a_checkpoint_of_another_public_set_is_not_taken_up_and_never_reaches_the_cache(
    stage, space, sources, tmp_path, monkeypatch
):
    """The cache then holds, byte for byte, what a run that only ever saw the new set makes."""
    rules = loaded(tmp_path, sources, *space, "pretrain.steps=60")
    with monkeypatch.context() as patch:
        stop_at_checkpoint(patch, stage)
        with pytest.raises(Stop):
            pipeline.run(rules, tmp_path / "run")
    assert (RunFolder(tmp_path / "run").checkpoints / f"{stage}.pt").exists()
    change_public(sources["public"], images=lambda x: 255 - x)
    monkeypatch.setattr(pipeline.prepare, "calibrate", stops)
    for cache, out, resume in (("cache", "run", True), ("honest", "calm", False)):
        monkeypatch.setenv("STRAIGHTDP_CACHE", str(tmp_path / cache))
        with pytest.raises(Stop):
            pipeline.run(rules, tmp_path / out, resume=resume)
    made = contents(tmp_path / "honest")
    assert sorted(name.partition("-")[0] for name in made) == (["autoencode", "pretrain"] if space else ["pretrain"])
    assert contents(tmp_path / "cache") == made


@pytest.mark.parametrize("steps", [pytest.param(2, id="some"), pytest.param(0, id="none")])
def test_a_distillation_begun_under_other_public_words_begins_again(steps, sources, tmp_path, monkeypatch):
    """Only the names of the public classes change: the release repeats itself, the captions' ids do not."""
    rules = loaded(tmp_path, sources, f"pretrain.steps={steps}", "distill.steps=60", "dpsgd.steps=0")
    with monkeypatch.context() as patch:
        stop_at_checkpoint(patch, "distill")
        with pytest.raises(Stop):
            pipeline.run(rules, tmp_path / "run")
    moments = file_hash(RunFolder(tmp_path / "run").moments)
    change_public(sources["public"], labels=lambda names: np.array([f"{name}x" for name in names]))
    found, calm = pipeline.run(rules, tmp_path / "run", resume=True), pipeline.run(rules, tmp_path / "calm")
    assert file_hash(found.moments) == file_hash(calm.moments) == moments
    assert file_hash(found.model) == file_hash(calm.model)


# One noise, one sum


@pytest.fixture
def hidden(monkeypatch):
    """For every noise that was drawn for a step, in any session, the noised sums that it came out in."""
    found, drawn = defaultdict(set), []
    normal, execute = Noise.normal, Vault.noisy_gradient

    def draw(self, *given):
        drawn.append(normal(self, *given))
        return drawn[-1]

    def noised(self, *given, **options):
        result = execute(self, *given, **options)
        found[drawn.pop().numpy().tobytes()].add(result.numpy().tobytes())
        return result

    monkeypatch.setattr(Noise, "normal", draw)
    monkeypatch.setattr(Vault, "noisy_gradient", noised)
    return found


def run_until_step(monkeypatch, rules, out: Path, n: int) -> RunFolder:
    """A run that ends after n steps of DP-SGD."""
    steps, execute = [], Vault.noisy_gradient

    def noised(self, *given, **options):
        if len(steps) == n:
            raise Stop
        steps.append(given[:2])
        return execute(self, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Vault, "noisy_gradient", noised)
        with pytest.raises(Stop):
            pipeline.run(rules, out)
    folder = RunFolder(out)
    assert sum(id.startswith(GRADIENTS) for id, _ in executions(folder.ledger)) == n
    return folder


def other_autoencoder(folder: RunFolder) -> None:
    """Weights that another machine might have found, in the place of those that the run has."""
    weights = load_file(folder.autoencoder)
    save_file({name: value * (1 + 1e-3) for name, value in weights.items()}, folder.autoencoder)


def stamp(folder: RunFolder, stage: str) -> None:
    """Make the run believe that what lies there is what the stage had made."""
    stamps = folder.read_stamps()
    stamps[stage]["outputs"] = {name: file_hash(folder.root / name) for name in stamps[stage]["outputs"]}
    folder.stamps.write_text(json.dumps(stamps))


def replaced_and_stamped(folder: RunFolder, monkeypatch) -> None:
    other_autoencoder(folder)
    stamp(folder, "autoencode")


def lost_and_trained_otherwise(folder: RunFolder, monkeypatch) -> None:
    folder.autoencoder.unlink()
    (folder.checkpoints / "autoencode.pt").unlink()
    loss = Autoencoder.loss
    monkeypatch.setattr(Autoencoder, "loss", lambda self, x, noise: loss(self, x, 3 * noise))


@pytest.mark.parametrize("spoil", [replaced_and_stamped, lost_and_trained_otherwise])
@pytest.mark.parametrize(
    "more", [("pretrain.steps=0", ALONE), (ALONE,), ()], ids=["not pretrained", "pretrained", "released"]
)
def test_a_step_on_other_codes_never_gets_noise_that_was_used(spoil, more, sources, tmp_path, monkeypatch, hidden):
    rules = loaded(tmp_path, sources, *LATENT, *more)
    folder = run_until_step(monkeypatch, rules, tmp_path / "run", 3)
    before, used = file_hash(folder.autoencoder), len(hidden)
    assert used == 3
    spoil(folder, monkeypatch)
    with pytest.raises(BudgetRefused):
        pipeline.run(rules, folder.root, resume=True)
    assert file_hash(folder.autoencoder) != before
    assert all(len(sums) == 1 for sums in hidden.values())
    assert not any(entry["kind"] == "totals" for entry in lines(folder.ledger))


def test_an_autoencoder_that_was_only_overwritten_is_made_again_and_the_run_ends_as_if_left_alone(
    sources, tmp_path, monkeypatch, hidden
):
    rules = loaded(tmp_path, sources, *LATENT)
    folder = run_until_step(monkeypatch, rules, tmp_path / "run", 3)
    other_autoencoder(folder)
    pipeline.run(rules, folder.root, resume=True)
    calm = pipeline.run(rules, tmp_path / "calm")
    for name in ("model.safetensors", "moments.safetensors", "transcript.jsonl"):
        assert file_hash(folder.release / name) == file_hash(calm.release / name), name
    assert len(hidden) == 6
    assert all(len(sums) == 1 for sums in hidden.values())


def test_all_that_hangs_on_an_autoencoder_is_made_again_where_nothing_was_spent_yet(sources, tmp_path, monkeypatch):
    rules, folder = loaded(tmp_path, sources, *LATENT), RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(private, "release", stops)
        with pytest.raises(Stop):
            pipeline.run(rules, folder.root)
    replaced_and_stamped(folder, monkeypatch)
    pipeline.run(rules, folder.root, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.prepare, "autoencode", lambda _, out: out.write_bytes(folder.autoencoder.read_bytes()))
        calm = pipeline.run(rules, tmp_path / "calm")
    made = [folder.checkpoints / f"{name}.safetensors" for name in ("pretrained", "distilled")]
    for path in (*made, folder.plan, folder.moments, folder.model):
        assert file_hash(path) == file_hash(calm.root / path.relative_to(folder.root)), path.name


def captioned(folder: Path, pictures: np.ndarray, words: tuple[str, ...]) -> Path:
    """An image folder in which each record has a text of two of the words."""
    folder.mkdir(exist_ok=True)
    rows = ["file_name,label,text"]
    for k, picture in enumerate(pictures):
        Image.fromarray(picture).save(folder / f"{k}.png")
        rows.append(f"{k}.png,{k % 2},{words[k % len(words)]} {words[(3 * k + 1) % len(words)]}")
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n")
    return folder


OWN_TEXTS = ("private.caption={text}", "public.caption={text}", "private.prompt=a picture of {label}")
SECRETS, KNOWN = ("fever", "rash", "cough", "pain"), ("cat", "dog", "rash")


@pytest.fixture
def texts(tmp_path) -> dict[str, Path]:
    pictures = np.random.default_rng(0).integers(0, 256, (140, 8, 8), dtype=np.uint8)
    return {
        "private": captioned(tmp_path / "private", pictures[:80], SECRETS),
        "public": captioned(tmp_path / "public", pictures[80:], KNOWN),
        "holdout": tmp_path,
    }


def test_a_step_under_other_ids_of_words_never_gets_noise_that_was_used(texts, tmp_path, monkeypatch, hidden):
    """No network was pretrained under the public texts, so its weights do not know that they changed."""
    rules = loaded(tmp_path, texts, *OWN_TEXTS, ALONE, "pretrain.steps=0")
    folder = run_until_step(monkeypatch, rules, tmp_path / "run", 3)
    table = texts["public"] / "metadata.csv"
    table.write_text(table.read_text().replace("cat", "aardvark").replace("rash", "yak"))
    with pytest.raises(BudgetRefused, match="another value"):
        pipeline.run(rules, folder.root, resume=True)
    assert len(hidden) == 3
    assert all(len(sums) == 1 for sums in hidden.values())


# What the noise was tied to is not forgotten


@pytest.mark.parametrize("plan", ["uniform", "tha"])
def test_a_binding_that_is_lost_after_a_step_is_refused_in_one_line(
    plan, sources, tmp_path, monkeypatch, capsys, hidden
):
    more = (f"dpsgd.plan={plan}", "dpsgd.buckets=2", "release.sigma=3", "dpsgd.sigma=3")
    rules = loaded(tmp_path, sources, *more)
    folder = run_until_step(monkeypatch, rules, tmp_path / "run", 3)
    bound = sorted((folder.private / "noise").glob("dpsgd-*.bound"))
    assert len(bound) == (1 if plan == "uniform" else 2)
    for path in bound:
        kept = path.read_bytes()
        path.unlink()
        with pytest.raises(BudgetRefused, match="is lost"):
            pipeline.run(rules, folder.root, resume=True)
        assert not path.exists()
        capsys.readouterr()
        assert main(["run", str(folder.recipe), "--out", str(folder.root), "--resume"]) == 3
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("straightdp:")]
        assert len(said) == 1
        assert path.name in said[0]
        path.write_bytes(kept)
    assert len(hidden) == 3
    pipeline.run(rules, folder.root, resume=True)
    assert len(hidden) == 6
    assert all(len(sums) == 1 for sums in hidden.values())


def test_a_binding_that_is_lost_before_its_first_step_is_simply_made(sources, tmp_path, monkeypatch, hidden):
    rules = loaded(tmp_path, sources, "dpsgd.plan=tha", "dpsgd.buckets=2")
    folder = run_until_step(monkeypatch, rules, tmp_path / "run", 1)
    first, second = sorted((folder.private / "noise").glob("dpsgd-*.bound"))
    before = first.read_bytes(), second.read_bytes()
    second.unlink()  # one step was executed, and it was the first bucket's
    pipeline.run(rules, folder.root, resume=True)
    assert (first.read_bytes(), second.read_bytes()) == before
    assert replay(folder.release).holds
    folder = run_until_step(monkeypatch, rules, tmp_path / "other", 0)
    for path in (folder.private / "noise").glob("dpsgd-*.bound"):
        path.unlink()
    pipeline.run(rules, folder.root, resume=True)
    assert replay(folder.release).holds
    assert all(len(sums) == 1 for sums in hidden.values())


# Captions are records too


@pytest.mark.parametrize("more", [("release.condition=pooled",), ("release.condition=class",), (ALONE,)], ids=" ".join)
def test_captions_of_private_records_are_read_only_once_an_execution_is_on_disk(more, texts, tmp_path, monkeypatch):
    rules, ledger = loaded(tmp_path, texts, *OWN_TEXTS, *more), RunFolder(tmp_path / "run").ledger
    read, encode, make = [], Tokenizer.encode, gather.featuriser

    def watched(name, of):
        def seen(*given):
            if any(word in SECRETS and word not in KNOWN for text in given[-1] for word in split_words(text)):
                read.append((name, executions(ledger)))
            return of(*given)

        return seen

    monkeypatch.setattr(Tokenizer, "encode", watched("ids", encode))
    monkeypatch.setattr(gather, "featuriser", lambda *given: watched("features", make(*given)))
    pipeline.run(rules, tmp_path / "run")
    assert {name for name, _ in read} == ({"ids", "features"} if "release.condition=pooled" in more else {"ids"})
    first = (GRADIENTS, 0) if ALONE in more else ("release/cross" if "pooled" in more[0] else "release/means", 0)
    for name, executed in read:
        assert executed, f"{name} of private captions were read before anything was spent"
        assert executed[0] == first


# Plans and captions are the recipe's


@pytest.mark.parametrize("more", [("dpsgd.plan=uniform",), ("dpsgd.plan=tha", "dpsgd.steps=0")], ids=" ".join)
def test_a_stray_allocation_changes_neither_what_is_declared_nor_the_plan(more, sources, tmp_path, monkeypatch):
    rules, folder = loaded(tmp_path, sources, *more), RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.prepare, "calibrate", stops)
        with pytest.raises(Stop):
            pipeline.run(rules, folder.root)
    folder.allocation.write_text(json.dumps({"shape": [3.0, 0.2]}))
    pipeline.run(rules, folder.root, resume=True)
    calm = pipeline.run(rules, tmp_path / "calm")
    assert calm.plan.exists() == folder.plan.exists() == bool(rules.dpsgd.steps)
    for path in (folder.transcript, folder.model, *([folder.plan] if rules.dpsgd.steps else ())):
        assert path.read_bytes() == (calm.root / path.relative_to(folder.root)).read_bytes(), path.name
    assert not calm.allocation.exists()


def test_the_order_of_slots_belongs_to_the_recipe(tmp_path):
    """It is the order of the captions, so a run is not resumed with another."""
    slots = {"size": ["small", "large"], "place": ["left", "right"]}
    tree = {"private": {"caption": "a {size} {label} {place}", "slots": slots}}
    other = {"private": tree["private"] | {"slots": dict(reversed(slots.items()))}}
    a, b = parse(tree), parse(other)
    assert a.private.slots == b.private.slots  # as dictionaries
    assert a.digest() != b.digest()
    folder = RunFolder(tmp_path / "run")
    folder.create(a, "fingerprint")
    folder.check(a, resume=True)
    with pytest.raises(BadInput, match="another recipe"):
        folder.check(b, resume=True)


# Preflight


class Ranked(torch.autograd.Function):
    """Losses as they are; in the backward pass all but the batch's largest count for a tenth."""

    @staticmethod
    def forward(ctx, losses):
        ctx.save_for_backward(losses)
        return losses.clone()

    @staticmethod
    def backward(ctx, g):
        (losses,) = ctx.saved_tensors
        return g * torch.where(losses >= losses.max(), 1.0, 0.1)


def ranked_by_function(net, features):
    return lambda x, ids: Ranked.apply(net(x).square().mean(dim=1))


def ranked_by_hook(net, features):
    def losses(x, ids):
        found = net(x).square().mean(dim=1)
        weight = torch.where(found >= found.max(), 1.0, 0.1).detach()
        if found.requires_grad:
            found.register_hook(lambda g: g * weight)
        return found

    return losses


def ranked_by_detaching(net, features):
    def losses(x, ids):
        found = net(x).square().mean(dim=1)
        value = found.detach()
        return value + torch.where(value >= value.max(), 1.0, 0.1) * (found - value)

    return losses


def normalised_backward(net, features):
    def losses(x, ids):
        y = net(x)
        if y.requires_grad:
            y.register_hook(lambda g: g / g.norm().clamp_min(1e-9))
        return y.square().mean(dim=1)

    return losses


def captions_of_others(net, features):
    return lambda x, ids: (net(x) * (1 + 0.05 * torch.tanh(3 * features[ids].mean()))).square().mean(dim=1)


def captions_of_others_in_half(net, features):
    def losses(x, ids):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = net(x).float()
        return (y * (1 + 0.05 * torch.tanh(3 * features[ids].mean()))).square().mean(dim=1)

    return losses


MIXING = (
    ranked_by_function,
    ranked_by_hook,
    ranked_by_detaching,
    normalised_backward,
    captions_of_others,
    captions_of_others_in_half,
)


@pytest.mark.parametrize("mixing", MIXING)
def test_preflight_refuses_records_that_matter_to_each_others_gradients(mixing):
    """Each would let one record move the sum by more than the clip, through the others' contributions."""
    torch.manual_seed(0)
    net, features = nn.Linear(8, 4), torch.randn(50)
    engine = ClippingEngine(net, mixing(net, features), 1.0)
    batch = torch.randn(3, 8), torch.tensor([3, 7, 11])
    with pytest.raises(BadInput, match=r"with the other records of its batch|cannot be told from the batch"):
        engine.preflight(batch)
    with pytest.raises(BadInput):
        engine(batch, torch.ones(3))


def test_preflight_refuses_a_network_that_minds_the_order_of_the_others_captions():
    """Alone, in a batch that happens to be sorted and in that batch turned round, every record's loss is its own."""
    torch.manual_seed(0)
    net = nn.Linear(8, 4)

    def losses(x, ids):
        rises = ids[1:] > ids[:-1]
        return net(x).square().mean(dim=1) * (1.0 if bool(rises.all()) or not bool(rises.any()) else 2.0)

    with pytest.raises(BadInput, match="with the other records of its batch"):
        ClippingEngine(net, losses, 1.0).preflight((torch.randn(3, 8), torch.tensor([3, 7, 11])))


VARIANTS = {
    "standard": {},
    "B0": {"B0": 4.0},
    "l0": {"l0": 1},
    "decoupled": {"decoupled": True},
    "s": {"s": 0.5},
    "all": {"B0": 4.0, "l0": 1, "decoupled": True, "s": 0.5},
}


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_projects_own_network_passes_preflight_whatever_its_weights(variant, half):
    section = Net(width=16, depth=2, heads=2, patch=4, caption_width=8, caption_length=4, **VARIANTS[variant])
    for spread in (None, 0.3, 1.0):
        torch.manual_seed(0)
        net = MMDiT(section, (1, 8, 8))
        if spread is not None:
            for parameter in net.parameters():
                nn.init.normal_(parameter, 0, spread)
        engine = ClippingEngine(net, record_losses(in_bfloat16(net) if half else net), 1.0)
        null = torch.zeros(1, 4, dtype=torch.int64)
        covered = engine.preflight(made_up(net, null, DpSgd(draws=2), Bucket(0.3, 1.0)))
        assert {part.name for part in covered} == {name for name, _ in net.named_parameters()}


# Replay


def steps_of(*parts: tuple[str, int], q: float = 0.02) -> list[Declaration]:
    return [Declaration(id, "", "poisson_gaussian", 1.0, 4.0, q, count) for id, count in parts]


def shared_out(steps: int, buckets: int) -> list[Declaration]:
    return steps_of(*((bucket_id(k, buckets), bucket_steps(steps, k, buckets)) for k in range(buckets)))


def verdict_on(folder: Path, workload: list[Declaration], clips: dict[str, float] | None = None, *others: str):
    """A transcript that is sound but for which mechanisms it holds: hashes, certificate, executions and files fit."""
    folder.mkdir(exist_ok=True)
    total = epsilon(workload, 1e-5, 1e-2)
    book = Ledger(folder / "transcript.jsonl")
    names = ("N", "class list", "image range", "public data")
    book.declare(
        Certificate(tuple(workload), total, 1e-5, 1e-2),
        budget=total + 1,
        noise="os",
        mode="tight",
        n=100,
        recipe="",
        assumptions=[{"name": name, "value": "", "source": ""} for name in names],
    )
    for part in workload:
        for step in range(part.count):
            clip = {} if part.q is None else {"clip": (clips or {}).get(part.id, 0.5)}
            book.spend(part.id, step, **clip)
    files = ["model.safetensors", "model.json", *others]
    files += ["moments.safetensors"] * any(part.id.startswith("release/") for part in workload)
    for name in files:
        (folder / name).write_bytes(name.encode())
    book.close({name: file_hash(folder / name) for name in files})
    return replay(folder), book.find("certificate")["line"]


@pytest.mark.parametrize(("steps", "buckets"), [(1, 1), (5, 1), (2, 2), (5, 2), (7, 4), (16, 16), (35, 16)])
def test_buckets_that_take_turns_hold(steps, buckets, tmp_path):
    verdict, _ = verdict_on(tmp_path, shared_out(steps, buckets))
    assert verdict.releasable, verdict.text


@pytest.mark.parametrize("name", ["moments.safetensors", "elected.safetensors", "embedding.safetensors"])
def test_what_no_mechanism_made_is_not_released(name, tmp_path):
    verdict, _ = verdict_on(tmp_path, shared_out(4, 2), None, name)
    assert not verdict.holds
    assert f"names {name}, but declares nothing that would make it" in verdict.text


@pytest.mark.parametrize("means", [Declaration("release/means", "", "gaussian", 1.25**0.5, 9.0), None])
@pytest.mark.parametrize("cross", [Declaration("release/cross", "", "gaussian", 2**0.5, 9.0), None])
def test_means_are_released_in_one_way(means, cross, tmp_path):
    workload = [part for part in (means, cross) if part] + shared_out(4, 2)
    verdict, line = verdict_on(tmp_path, workload)
    if means and cross:
        assert (verdict.holds, verdict.line) == (False, line)
        assert "two releases of the means" in verdict.text
    else:
        assert verdict.releasable, verdict.text


def rounds(*numbers: int, sensitivity: float = 17**0.5 / 4, without: str = "") -> list[Declaration]:
    """Class moments, but for what is left out, and rounds of their components."""
    moments = {"release/means": 1.25**0.5, "release/covariance": 1.0, "release/trace": 1.0}
    moments |= {f"release/components/{k}": sensitivity for k in numbers}
    return [Declaration(id, "", "gaussian", far, 19.0) for id, far in moments.items() if id != without]


@pytest.mark.parametrize("numbers", [(), (1,), (1, 2), tuple(range(1, 10))])
def test_rounds_of_components_hold_after_class_moments(numbers, tmp_path):
    verdict, _ = verdict_on(tmp_path, rounds(*numbers))
    assert verdict.releasable, verdict.text


@pytest.mark.parametrize(
    "workload",
    [
        rounds(2),
        rounds(1, 3),
        rounds(1, 2, without="release/means"),
        rounds(1, 2, without="release/covariance"),
        rounds(1, 2, without="release/trace"),
    ],
)
def test_rounds_of_components_that_start_from_nothing_are_refused(workload, tmp_path):
    verdict, line = verdict_on(tmp_path, workload)
    assert (verdict.holds, verdict.line) == (False, line), verdict.text
    assert "rounds of components" in verdict.text


@pytest.mark.parametrize("workload", [rounds(1, sensitivity=1.03), rounds(*range(1, 11)), rounds(0)])
def test_a_round_with_too_small_a_sensitivity_or_number_is_refused(workload, tmp_path):
    assert not verdict_on(tmp_path, workload)[0].holds


ONE, TWO, THREE = (f"{GRADIENTS}/{k}" for k in (1, 2, 3))
NO_TURNS = {
    "one for all beside the first of several": steps_of((GRADIENTS, 2), (ONE, 2)),
    "one for all beside the second of several": steps_of((GRADIENTS, 2), (TWO, 2)),
    "one for all beside two": steps_of((GRADIENTS, 2), (ONE, 2), (TWO, 2)),
    "the seventh alone": steps_of((f"{GRADIENTS}/7", 1)),
    "the first alone": steps_of((ONE, 3)),
    "the second missing": steps_of((ONE, 2), (THREE, 2)),
    "the first missing": steps_of((TWO, 2), (THREE, 2)),
    "five and one": steps_of((ONE, 5), (TWO, 1)),
    "one and five": steps_of((ONE, 1), (TWO, 5)),
    "the second a step ahead": steps_of((ONE, 2), (TWO, 3)),
    "the first two steps ahead": steps_of((ONE, 4), (TWO, 2)),
    "the third ahead of the second": steps_of((ONE, 3), (TWO, 2), (THREE, 3)),
    "another rate": steps_of((ONE, 2), q=0.02) + steps_of((TWO, 2), q=0.01),
    "another rate in the last of three": shared_out(6, 3)[:2] + steps_of((THREE, 2), q=0.5),
}


@pytest.mark.parametrize("name", NO_TURNS)
def test_buckets_that_do_not_share_out_one_dp_sgd_are_refused(name, tmp_path):
    verdict, line = verdict_on(tmp_path, NO_TURNS[name])
    assert (verdict.holds, verdict.line) == (False, line), verdict.text
    assert "time buckets" in verdict.text


@settings(max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_of_all_ways_to_count_buckets_only_turns_hold(tmp_path_factory, counts):
    ids = [bucket_id(k, len(counts)) for k in range(len(counts))]
    verdict, line = verdict_on(tmp_path_factory.mktemp("counts"), steps_of(*zip(ids, counts, strict=True)))
    turns = all(a >= b for a, b in pairwise(counts)) and counts[0] - counts[-1] <= 1
    assert verdict.holds == turns, verdict.text
    assert turns or verdict.line == line


@pytest.mark.parametrize("other", [0.499, 1000.0])
def test_buckets_with_different_clips_are_refused(other, tmp_path):
    verdict, line = verdict_on(tmp_path, shared_out(5, 2), {TWO: other})
    assert not verdict.holds
    assert verdict.line == line + 4  # after the three steps of the first
    assert "one clip holds for all steps" in verdict.text


# Long vectors


@pytest.mark.parametrize("bound", [1.0, 1.25**0.5])
@pytest.mark.parametrize("rows", [1, 3])
def test_no_vector_of_a_million_equal_numbers_is_longer_than_the_bound(rows, bound):
    """Exactly, in whole numbers, on a grid so fine that rounding onto it hides nothing."""
    width, grid = 10**6, 2.0**-50
    values = [0.1, 0.7, 1 / 3, *np.random.default_rng(0).uniform(0.05, 2.0, 24).tolist()]
    limit = (Fraction(bound) / Fraction(grid)) ** 2
    for k in range(0, len(values), rows):
        vectors = torch.tensor(values[k : k + rows], dtype=torch.float64)[:, None].expand(-1, width).contiguous()
        for found in clip_to_grid(vectors, bound, grid):
            assert bool((found == found[0]).all())
            squared = width * int(found[0]) ** 2
            assert squared <= limit
            assert squared >= limit * (1 - Fraction(1, 10**6))  # and hardly shorter


def test_no_vector_of_a_million_different_numbers_is_longer_than_the_bound():
    grid = 2.0**-50
    rng = np.random.default_rng(0)
    for sizes in (rng.uniform(0.9, 1.1, 10**6), rng.normal(size=10**6), np.geomspace(1e-9, 1e3, 10**6)):
        (found,) = clip_to_grid(torch.from_numpy(sizes[None]), 1.0, grid)
        squared = sum(value * value for value in found.tolist())
        assert Fraction(squared) * Fraction(grid) ** 2 <= 1


# Words


words = st.text("abcdefgh", min_size=1, max_size=3)


@given(st.lists(words, min_size=1, max_size=40), st.lists(words, max_size=40), st.integers(2, 40))
def test_a_tokenizer_keeps_no_more_words_than_have_an_id_of_their_own(first, further, vocabulary):
    """And every text has the ids that it would have if all were kept."""
    captions, texts = (" ".join(first),), tuple(further)
    found = Tokenizer.from_captions(captions, 6, vocabulary, texts=texts)
    assert len(found.words) <= vocabulary - 1
    every = (*sorted(set(first)), *sorted(set(further) - set(first)))
    assert found.words == every[: vocabulary - 1]
    whole = Tokenizer(every, 6, vocabulary)
    assert torch.equal(found.encode((*captions, *texts)), whole.encode((*captions, *texts)))


def test_a_released_models_words_are_no_more_than_its_vocabulary_allows(texts, tmp_path):
    """Many public words, few ids: those without an id of their own are not published."""
    table = texts["public"] / "metadata.csv"
    head, *rows = table.read_text().splitlines()
    table.write_text("\n".join([head, *(f"{row} rare{k}" for k, row in enumerate(rows))]) + "\n")
    rules = loaded(tmp_path, texts, *OWN_TEXTS, "net.vocabulary=12", "dpsgd.steps=0", "distill.steps=0")
    folder = pipeline.run(rules, tmp_path / "run")
    published = json.loads(folder.model_card.read_text())["words"]
    assert len(published) == 11
    assert {"a", "picture", "of", "0", "1"} <= set(published)
    text = ("a rash picture of rare59",)
    expected = pipeline.gather(rules, folder, CPU).conditioning.tokenizer.encode(text)
    assert torch.equal(Generator.load(folder.release, CPU).conditioning.tokenizer.encode(text), expected)
