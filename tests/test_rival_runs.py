"""Whole runs of the rival methods: what they spend and release, what kill -9 does to them, and what is refused.

As a script this file is a run that kills itself: one of DEATHS, and the command line's arguments.
"""

import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from decimal import Decimal, getcontext
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from conftest import PIN
from straightdp import pipeline, recipe
from straightdp.audits.replay import replay
from straightdp.cli import main
from straightdp.data.records import Records
from straightdp.errors import BudgetRefused
from straightdp.files import file_hash
from straightdp.metrics import inception
from straightdp.nets.rowwise import RowWise
from straightdp.privacy import mechanisms
from straightdp.privacy.accountant import Declaration
from straightdp.privacy.mechanisms import FactorSum, Relation, VoteSum
from straightdp.rivals import private_evolution
from straightdp.rivals.dp_hp import DpHp
from straightdp.rivals.dp_merf import DpMerf
from straightdp.rivals.dp_ntk import DpNtk
from straightdp.stages import rivals
from test_transcript import reseal
from test_vault import make_vault

CPU = torch.device("cpu")
BUDGET, DELTA, ROUNDS, POPULATION = 1.0, 1e-5, 10, 12
SMALL = (
    f"privacy.epsilon={BUDGET}",
    "privacy.interval=0.01",
    "net.depth=1",
    "sample.n=40",
    "sample.steps=4",
    "evaluate.probe_steps=5",
    "rival.features=20",
    "rival.order=3",
    "rival.pairs=10",
    "rival.pair_order=2",
    "rival.width=8",
    "rival.hidden=8",
    "rival.code=4",
    "rival.steps=110",
    "rival.batch=10",
    f"rival.rounds={ROUNDS}",
    f"rival.population={POPULATION}",
    "rival.variations=1",
)
NO_PUBLIC = ("public.data=", "release.weight=0", "pretrain.steps=0")
EMBEDDINGS = {"dp-merf": DpMerf, "dp-hp": DpHp, "dp-ntk": DpNtk}
METHODS = {
    **dict.fromkeys(EMBEDDINGS, ()),
    "private-evolution": ("pretrain.steps=3",),
    "from-scratch": (*NO_PUBLIC, "dpsgd.steps=6"),
}
PINNED = f"privacy.pinned_key={PIN}"
every_method = pytest.mark.parametrize("method", METHODS)


class Eyes:
    """In the place of Inception: twelve random features of 8 x 8 pixels."""

    name, digest, resize = "FD-stub", "5" * 64, "not at all"
    _W = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))

    def on_device(self, z, size=None):
        return torch.tanh(z.flatten(1) @ self._W / 4)

    def __call__(self, z, track=None):
        return self.on_device(z)


@pytest.fixture(autouse=True, scope="module")
def eyes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inception, "find", lambda device, root=None: Eyes())
        yield


def settings(method: str, *more: str) -> tuple[str, ...]:
    return (*SMALL, f"run.method={method}", *METHODS[method], *more)


def carry_out(book: Path, out: Path, method: str, *more: str, resume: bool = False) -> Path:
    pipeline.run(recipe.load(book, settings(method, *more)), out, resume=resume)
    return out


def command(book: Path, out: Path, *given: str) -> list[str]:
    return ["run", str(book), "--out", str(out), *(word for one in given for word in ("--set", one))]


@pytest.fixture(scope="module")
def runs(book, tmp_path_factory):
    """runs(method, *settings): the folder of a finished run, made once."""
    root = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(method: str, *more: str) -> Path:
        return carry_out(book, root / f"{method}{'-pinned' * (PINNED in more)}", method, *more)

    return run


def entries(run: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run / "private/transcript.jsonl").read_text().splitlines())
    return [entry for entry in lines if entry["kind"] == kind]


def only_mechanism(run: Path) -> dict:
    (declared,) = entries(run, "declare")
    return declared["mechanism"]


def executions(run: Path) -> list[int]:
    return [entry["step"] for entry in entries(run, "execute")]


def same_release(one: Path, other: Path) -> bool:
    """All that was released but the pages, to the byte."""
    names = {path.name for path in (one / "release").iterdir()} - {"report.html"}
    return all(file_hash(one / "release" / name) == file_hash(other / "release" / name) for name in names)


# What a run spends


def gaussian_delta(epsilon: float, sigma: float) -> float:
    """Of one Gaussian mechanism of sensitivity 1, exactly (Balle and Wang, 2018)."""

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    return below(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * below(-0.5 / sigma - epsilon * sigma)


@pytest.mark.parametrize(
    ("method", "count", "anchor"), [*((m, 1, 3.731) for m in EMBEDDINGS), ("private-evolution", ROUNDS, 11.8)]
)
def test_a_rival_spends_its_one_mechanism_with_the_noise_of_the_closed_form(runs, method, count, anchor):
    run = runs(method)
    declared, id = only_mechanism(run), "rival/votes" if method == "private-evolution" else "rival/embedding"
    found = {key: declared[key] for key in ("id", "kind", "sensitivity", "q", "count")}
    assert found == {"id": id, "kind": "gaussian", "sensitivity": 1.0, "q": None, "count": count}
    assert declared["sigma"] == declared["noise_std"] == pytest.approx(anchor, rel=5e-4)
    together = declared["sigma"] / math.sqrt(count)  # so many votes are one mechanism of less noise
    assert gaussian_delta(BUDGET, together) <= DELTA < gaussian_delta(BUDGET, together * 0.999)
    assert executions(run) == list(range(count))
    assumed = {entry["name"] for entry in entries(run, "assumption")}
    assert ("image features" in assumed) == (method == "private-evolution")


def test_from_scratch_spends_on_gradients_alone(runs):
    declared = only_mechanism(runs("from-scratch"))
    found = {key: declared[key] for key in ("id", "kind", "sensitivity", "q", "count")}
    assert found == {"id": "dpsgd/gradients", "kind": "poisson_gaussian", "sensitivity": 1.0, "q": 0.05, "count": 6}
    assert executions(runs("from-scratch")) == list(range(6))
    assumed = {entry["name"]: entry["value"] for entry in entries(runs("from-scratch"), "assumption")}
    assert assumed["public data"] == "0 records"


@every_method
def test_replay_recomputes_an_epsilon_within_the_budget(runs, method, capsys):
    run = runs(method)
    verdict = replay(run / "release")
    assert verdict.holds
    assert verdict.releasable, verdict.text
    assert BUDGET * 0.999 < verdict.epsilon <= BUDGET
    assert verdict.epsilon == pytest.approx(entries(run, "totals")[0]["epsilon"], rel=1e-9)
    if method != "from-scratch":
        declared = only_mechanism(run)
        assert gaussian_delta(verdict.epsilon, declared["sigma"] / math.sqrt(declared["count"])) <= DELTA
    assert main(["replay", str(run)]) == 0
    assert "Recomputed epsilon" in capsys.readouterr().out


# What it releases


@every_method
def test_a_release_is_complete_and_holds_no_secret(runs, method):
    release = runs(method) / "release"
    names = {"transcript.jsonl", "model.safetensors", "model.json", "synthetic", "README.md", "model_card.md"}
    names |= {"croissant.json", "report.html"} | ({"embedding.safetensors"} if method in EMBEDDINGS else set())
    assert {path.name for path in release.iterdir()} == names
    rows = (release / "synthetic/metadata.csv").read_text().splitlines()
    assert rows[0] == "file_name,label,text"
    assert len(rows) == 1 + 40 == 1 + len(list((release / "synthetic/images").iterdir()))
    if method in EMBEDDINGS:
        assert load_file(release / "embedding.safetensors")["sums"].shape[0] == 10
        assert "embedding.safetensors" in (release / "report.html").read_text()
    published = b"".join(path.read_bytes() for path in release.rglob("*") if path.is_file())
    key = (runs(method) / "private/noise.key").read_bytes()
    for secret in (key, key.hex().encode(), b"private.npz", (runs(method) / "private/fingerprint").read_bytes()):
        assert secret not in published


@every_method
def test_more_is_drawn_from_the_release_alone_and_again_by_the_same_seed(runs, method, tmp_path):
    release = shutil.copytree(runs(method) / "release", tmp_path / "elsewhere")
    for name in set(os.listdir(release)) - {"model.safetensors", "model.json"}:
        shutil.rmtree(release / name) if name == "synthetic" else (release / name).unlink()
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        words = ["sample", str(release), "--n", "150", "--seed", str(seed), "--out", str(tmp_path / name)]
        assert main(words) == 0
    assert file_hash(tmp_path / "a") == file_hash(tmp_path / "b")
    assert (file_hash(tmp_path / "a") == file_hash(tmp_path / "c")) == (method == "private-evolution")
    rows = [row.split(",") for row in (tmp_path / "a/metadata.csv").read_text().splitlines()[1:]]
    assert [label for _, label, _ in rows] == [str(k) for k in range(10) for _ in range(15)]
    pictures = np.stack([np.asarray(Image.open(tmp_path / "a" / name)) for name, _, _ in rows]).reshape(10, 15, 8, 8)
    if method == "private-evolution":  # its population, in order, from the first again
        population = load_file(release / "model.safetensors")["population"][:, :, 0].numpy()
        assert population.shape[:2] == (10, POPULATION)
        np.testing.assert_array_equal(pictures, population[:, np.arange(15) % POPULATION])
    else:
        assert len({picture.tobytes() for picture in pictures.reshape(150, 64)}) > 75


@every_method
def test_a_run_is_judged_again_and_spends_nothing_on_it(runs, book, method, tmp_path, capsys):
    run = shutil.copytree(runs(method), tmp_path / "run")
    before = (run / "release/transcript.jsonl").read_bytes()
    assert main(["evaluate", str(run), "--set", "evaluate.thorough=on", "--set", "evaluate.probe_steps=3"]) == 0
    said = capsys.readouterr().out
    assert "accuracy of synthetic data (LeNet)" in said
    assert "FD-stub of synthetic data" in said
    assert ("public model only" in said) == (method == "private-evolution")  # the only one with a public model
    body = json.loads((run / "private/evaluation.json").read_text())
    assert 0 <= body["scores"][0]["mean"] <= 1
    assert main(["evaluate", str(run / "release"), "--set", "evaluate.probe_steps=3"]) == 0
    assert "synthetic images: 40 in 10 classes, 4 to 4 a class" in capsys.readouterr().out
    assert main([*command(book, run, *settings(method)), "--resume"]) == 0
    assert (run / "release/transcript.jsonl").read_bytes() == before
    assert main(command(book, run, *settings(method))) == 2
    assert "already spent" in capsys.readouterr().err


@every_method
def test_pages_and_cards_show_the_mechanism(runs, method):
    run = runs(method)
    declared = only_mechanism(run)
    sigma = f"{declared['sigma']:.4g}"
    for name in ("report.html", "release/report.html", "release/README.md", "release/model_card.md"):
        rows = re.split(r"\n\| |<tr>", (run / name).read_text())
        (row,) = (row for row in rows if declared["id"] in row and declared["what"] in row)
        assert sigma in row, name
    assert "Not for publication" not in (run / "release/report.html").read_text()


# Again, and after a death


@every_method
def test_a_pinned_key_gives_the_same_release_to_the_byte_and_the_systems_key_another(runs, book, method, tmp_path):
    pinned = runs(method, PINNED)
    assert same_release(pinned, carry_out(book, tmp_path / "again", method, PINNED))
    for name in ("model.safetensors", *(["embedding.safetensors"] if method in EMBEDDINGS else [])):
        assert file_hash(runs(method) / "release" / name) != file_hash(pinned / "release" / name)
    assert "pinned" in replay(pinned).text
    assert not replay(pinned).releasable


def watch(replace, owner, name: str, at: int | None = None, end=None) -> list[tuple]:
    """The arguments of every call of `owner.name`, which does not come back from the one numbered `at`."""
    real, calls = getattr(owner, name), []

    def watched(*given):
        calls.append(given)
        if len(calls) == at:
            end()
        return real(*given)

    replace(owner, name, watched)
    return calls


def interrupt():
    raise KeyboardInterrupt


def stopped(moment: tuple, book: Path, out: Path, method: str, *more: str) -> list[tuple]:
    """A run that stops in the call that `moment` says: (owner, name, which)."""
    with pytest.MonkeyPatch.context() as patch:
        calls = watch(patch.setattr, *moment, interrupt)
        with pytest.raises(KeyboardInterrupt):
            carry_out(book, out, method, *more)
    return calls


def killed(moment: str, book: Path, out: Path, method: str) -> None:
    words = [sys.executable, __file__, moment, *command(book, out, *settings(method, PINNED))]
    done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.pipeline
def test_kill_9_during_matching_changes_nothing(runs, book, tmp_path, monkeypatch):
    """104 of 110 steps were done and 100 of them kept: the last 10 are done again, and nothing is spent."""
    killed("matching", book, tmp_path / "run", "dp-merf")
    assert executions(tmp_path / "run") == [0]
    assert not (tmp_path / "run/release/model.safetensors").exists()
    steps = watch(monkeypatch.setattr, DpMerf, "class_sums")
    read = watch(monkeypatch.setattr, mechanisms.RowSum, "exact")
    resumed = carry_out(book, tmp_path / "run", "dp-merf", PINNED, resume=True)
    assert (len(steps), len(read)) == (10, 0)
    assert executions(resumed) == [0]
    assert same_release(runs("dp-merf", PINNED), resumed)


@pytest.mark.parametrize("method", ["dp-hp", "dp-ntk"])
def test_a_stop_during_matching_changes_nothing(runs, book, method, tmp_path, monkeypatch):
    whole = runs(method, PINNED)
    stopped((EMBEDDINGS[method], "class_sums", 77), book, tmp_path / "run", method, PINNED)
    steps = watch(monkeypatch.setattr, EMBEDDINGS[method], "class_sums")
    assert same_release(whole, carry_out(book, tmp_path / "run", method, PINNED, resume=True))
    assert len(steps) == 60
    assert executions(tmp_path / "run") == [0]


@pytest.mark.parametrize("method", EMBEDDINGS)
def test_a_sum_that_was_lost_comes_again_under_the_same_noise(book, method, tmp_path):
    """Noise of the operating system: between the sum and its file the run dies; the second sum is the first one."""
    ((lost, _),) = stopped((rivals, "save_file", 1), book, tmp_path / "run", method)
    assert executions(tmp_path / "run") == [0]
    carry_out(book, tmp_path / "run", method, resume=True)
    assert torch.equal(load_file(tmp_path / "run/release/embedding.safetensors")["sums"], lost["sums"])
    assert executions(tmp_path / "run") == [0]
    assert replay(tmp_path / "run").releasable


def test_noise_that_hid_one_embedding_hides_no_other(book, tiny_data, tmp_path, capsys):
    """A run that died after it had spent is resumed with other public records, and so with other features."""
    public = shutil.copy(tiny_data["public"], tmp_path / "public.npz")
    stopped((mechanisms.RowSum, "exact", 1), book, tmp_path / "run", "dp-merf", f"public.data={public}")
    before = (tmp_path / "run/private/transcript.jsonl").read_bytes()
    assert b'"execute"' in before
    with np.load(public) as arrays:
        images, labels = arrays["images"] // 2, arrays["labels"]
    np.savez(public, images=images, labels=labels)
    again = command(book, tmp_path / "run", *settings("dp-merf", f"public.data={public}"))
    assert main([*again, "--resume"]) == 3
    assert "another value" in capsys.readouterr().err
    assert (tmp_path / "run/private/transcript.jsonl").read_bytes() == before


@pytest.mark.pipeline
def test_kill_9_between_rounds_changes_nothing(runs, book, tmp_path):
    killed("evolution", book, tmp_path / "run", "private-evolution")
    assert executions(tmp_path / "run") == [0, 1, 2, 3]
    resumed = carry_out(book, tmp_path / "run", "private-evolution", PINNED, resume=True)
    assert executions(resumed) == list(range(ROUNDS))
    assert same_release(runs("private-evolution", PINNED), resumed)


def test_a_stop_within_a_vote_changes_nothing(runs, book, tmp_path):
    """The third one was entered and not counted yet."""
    stopped((mechanisms.VoteSum, "exact", 3), book, tmp_path / "run", "private-evolution", PINNED)
    assert executions(tmp_path / "run") == [0, 1, 2]
    resumed = carry_out(book, tmp_path / "run", "private-evolution", PINNED, resume=True)
    assert executions(resumed) == list(range(ROUNDS))
    assert same_release(runs("private-evolution", PINNED), resumed)


def test_an_evolution_is_not_resumed_with_another_prior(book, tmp_path, capsys):
    """How candidates are drawn is part of the recipe that the budget was declared for."""
    stopped((mechanisms.VoteSum, "exact", 3), book, tmp_path / "run", "private-evolution", PINNED)
    again = command(book, tmp_path / "run", *settings("private-evolution", PINNED, "sample.steps=5"))
    assert "another recipe" in refusal([*again, "--resume"], capsys)


# Transcripts that were tampered with


def part(lines: list[dict]) -> dict:
    return next(entry["mechanism"] for entry in lines if entry["kind"] == "declare")


def beside(id: str, kind: str, sensitivity: float, q: float | None):
    """A further mechanism, of noise enough to cost nothing."""

    def change(lines: list[dict]) -> list[dict]:
        other = {"id": id, "what": "", "kind": kind, "sensitivity": sensitivity, "sigma": 1e4, "q": q, "count": 1}
        at = next(k for k, entry in enumerate(lines) if entry["kind"] == "certificate")
        declared = {"kind": "declare", "mechanism": other | {"noise_std": sensitivity * 1e4}}
        done = {"kind": "execute", "id": id, "step": 0} | ({"clip": 1.0} if q else {})
        lines[-1]["executed"][id] = 1
        return [*lines[:at], declared, *lines[at:-1], done, lines[-1]]

    return change


def half_the_sensitivity(lines):
    part(lines).update(sensitivity=0.5, noise_std=part(lines)["sigma"] / 2)
    return lines


def sampled(lines):
    part(lines).update(kind="poisson_gaussian", q=0.01)
    return lines


def less_noise(lines):
    part(lines).update(sigma=part(lines)["sigma"] / 2, noise_std=part(lines)["noise_std"] / 2)
    return lines


def one_execution_less(lines):
    return [*lines[:-2], lines[-1]]


def one_execution_twice(lines):
    return [*lines[:-1], lines[-2], lines[-1]]


def embedding_not_named(lines):
    lines[-1]["files"].pop("embedding.safetensors", None)
    return lines


BESIDE_GRADIENTS = beside("dpsgd/gradients", "poisson_gaussian", 1.0, 0.01)
FORGERIES = [
    *((method, BESIDE_GRADIENTS, "beside another") for method in ("dp-merf", "private-evolution")),
    ("dp-merf", beside("release/trace", "gaussian", 1.0, None), "beside another"),
    ("dp-merf", beside("rival/votes", "gaussian", 1.0, None), "beside another"),
    *((method, half_the_sensitivity, "sensitivity 0.5, below 1") for method in ("dp-merf", "private-evolution")),
    ("dp-merf", sampled, "it is gaussian"),
    ("private-evolution", less_noise, "the declarations give"),
    ("private-evolution", one_execution_less, "counts other executions"),
    ("private-evolution", one_execution_twice, "a second time"),
    ("dp-merf", embedding_not_named, "does not name embedding.safetensors"),
]


@pytest.mark.parametrize(("method", "forgery", "word"), FORGERIES)
def test_a_forged_transcript_is_found_out(runs, method, forgery, word, tmp_path, capsys):
    release = shutil.copytree(runs(method) / "release", tmp_path / "release")
    reseal(release / "transcript.jsonl", lambda lines: lines)
    assert replay(release).releasable
    reseal(release / "transcript.jsonl", forgery)
    verdict = replay(release)
    assert not verdict.holds
    assert word in verdict.text
    assert main(["replay", str(release)]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_an_embedding_that_is_missing_changed_or_out_of_place_is_found_out(runs, tmp_path):
    release = shutil.copytree(runs("dp-merf") / "release", tmp_path / "release")
    file = release / "embedding.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "another embedding.safetensors" in replay(release).text
    assert not replay(release).holds
    file.unlink()
    assert "embedding.safetensors is missing" in replay(release).text
    assert not replay(release).releasable
    file.write_bytes(content)
    assert replay(release).releasable
    stray = shutil.copytree(runs("private-evolution") / "release", tmp_path / "stray")
    shutil.copy(file, stray)
    assert "does not name the embedding.safetensors" in replay(stray).text
    assert not replay(stray).holds


# What is refused

SLOTS = ('private.slots={size=["big","small"]}', "private.caption=the {size} digit {label}")
REFUSALS = [
    *((method, ("latent.d=4",), "latent.d") for method in METHODS if method != "from-scratch"),
    *((method, SLOTS, "private.slots") for method in METHODS if method != "from-scratch"),
    ("from-scratch", ("public.data=letters",), "public.data"),
    ("from-scratch", ("pretrain.steps=1",), "pretrain.steps = 0"),
    ("from-scratch", ("release.weight=0.1",), "release.weight = 0"),
    ("from-scratch", ("latent.d=4",), "latent.d"),
    ("dp-merf", ("public.data=",), "public data"),
    ("dp-merf", ("rival.features=1",), "rival.features"),
    ("private-evolution", ("rival.rounds=0",), "rival.rounds"),
    ("private-evolution", ("rival.times=[0.4, 1.0]",), "rival.times"),
    ("dp-merf", ("sample.port=guide", "sample.t0=plateau"), "sample.port"),
    ("from-scratch", ("release.sigma=3",), "release.sigma"),
]


def refusal(words: list[str], capsys) -> str:
    capsys.readouterr()
    assert main(words) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("straightdp: ")
    assert "\n" not in said
    return said


@pytest.mark.parametrize(("method", "changes", "word"), REFUSALS)
def test_what_a_method_cannot_do_is_one_sentence_and_leaves_nothing(book, method, changes, word, tmp_path, capsys):
    assert word in refusal(command(book, tmp_path / "out", *settings(method, *changes)), capsys)
    assert not (tmp_path / "out").exists()


def test_from_scratch_needs_the_size_of_images(book, tmp_path, capsys):
    sizeless = tmp_path / "sizeless.toml"
    sizeless.write_text(book.read_text().replace("size = 8\n", ""))
    said = refusal(command(sizeless, tmp_path / "out", *settings("from-scratch")), capsys)
    assert "set image.size" in said
    assert not (tmp_path / "out").exists()


def test_without_inception_no_vote_is_taken(book, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inception, "find", lambda device, root=None: None)
    said = refusal(command(book, tmp_path / "out", *settings("private-evolution")), capsys)
    assert "straightdp data get inception" in said
    assert not (tmp_path / "out").exists()


def test_weights_of_another_method_are_a_damaged_release(runs, tmp_path, capsys):
    for method, other in (("dp-merf", "private-evolution"), ("private-evolution", "dp-merf")):
        release = shutil.copytree(runs(method) / "release", tmp_path / method)
        shutil.copy(runs(other) / "release/model.safetensors", release)
        said = refusal(["sample", str(release), "--n", "5", "--out", str(tmp_path / "out")], capsys)
        assert "is damaged" in said


def test_a_setting_of_another_method_stops_no_rival(book, tmp_path):
    assert carry_out(book, tmp_path / "run", "dp-ntk", "release.features=500").exists()


@every_method
def test_a_plan_shows_the_mechanism_that_a_run_declares(runs, book, method, capsys):
    declared, words = only_mechanism(runs(method)), command(book, Path("none"), *settings(method))
    assert main(["plan", words[1], *words[4:]]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if re.match(r"(rival|release|dpsgd)/", line))
    assert row.split()[:3] == [declared["id"], "1", f"{declared['sigma']:.4g}"]


# Votes


def voters(n: int, seed: int = 0) -> Records:
    """Of classes a and c; b has none."""
    rng = np.random.default_rng(seed)
    return Records(rng.integers(0, 256, (n, 1, 8, 8), dtype=np.uint8), rng.choice([0, 2], n), ("a", "b", "c"))


def without(records: Records, k: int) -> Records:
    return Records(np.delete(records.x, k, axis=0), np.delete(records.labels, k), records.classes)


CANDIDATES = torch.rand(3, 6, 12, generator=torch.Generator().manual_seed(1)) * 2 - 1
VOTES = (Declaration("votes", "", "gaussian", 1.0, 2.0, count=2),)


def counted(folder: Path, records: Records, see=None) -> np.ndarray:
    """The votes without their noise: what an empty set gets under the same key is the noise alone."""
    see = see or Eyes().on_device
    folder.mkdir(exist_ok=True)
    noisy, noise = (
        make_vault(folder / name, some, workload=VOTES).vote_histogram("votes", 0, see, CANDIDATES)
        for name, some in (("some", records), ("none", voters(0)))
    )
    assert noise.std() > 1
    return noisy - noise


def nearest(records: Records, k: int) -> tuple[int, int]:
    """The class and place that record k votes for."""
    y, feature = int(records.labels[k]), Eyes().on_device(records.z()[k : k + 1])[0].double()
    far = [float((feature - candidate.double()).square().sum()) for candidate in CANDIDATES[y]]
    assert sorted(far)[1] - min(far) > 1e-4, "too near a tie to tell"
    return y, far.index(min(far))


def test_each_record_has_one_vote_for_the_nearest_candidate_of_its_class(tmp_path):
    records = voters(45)
    loop = np.zeros((3, 6))
    for k in range(45):
        loop[nearest(records, k)] += 1
    found = counted(tmp_path, records)
    np.testing.assert_array_equal(found, loop)
    assert not found[1].any(), "a class without records has noise alone"
    assert (found[[0, 2]] > 0).sum() >= 6


def by_place(z):
    """Features that a row has from its place in the batch too."""
    return Eyes().on_device(z) + 3 * torch.arange(len(z))[:, None]


@pytest.mark.parametrize("see", [Eyes().on_device, by_place])
def test_a_record_that_leaves_takes_its_own_vote_and_no_other(see, tmp_path):
    """Even where the feature map is not as careful as it should be."""
    records = voters(5, seed=2)
    every = counted(tmp_path / "all", records, see)
    for k in range(5):
        moved = every - counted(tmp_path / str(k), without(records, k), see)
        assert np.argwhere(moved).tolist() == [list(nearest(records, k))]
        assert moved.sum() == 1


def test_records_are_seen_once_and_after_the_vote_was_entered(tmp_path):
    seen = []

    def see(z):
        seen.append((tmp_path / "vault/t.jsonl").read_text().count('"execute"'))
        return Eyes().on_device(z)

    vault = make_vault(tmp_path / "vault", voters(45), workload=VOTES)
    vault.vote_histogram("votes", 0, see, CANDIDATES)
    assert set(seen) == {1}
    calls = len(seen)
    vault.vote_histogram("votes", 1, see, CANDIDATES.flip(1))
    assert len(seen) == calls
    for step, word in ((2, "beyond the 2 declared"), (-1, "beyond"), (1, "has run already")):
        with pytest.raises(BudgetRefused, match=word):
            vault.vote_histogram("votes", step, see, CANDIDATES)
    with pytest.raises(BudgetRefused, match="not declared"):
        vault.vote_histogram("others", 0, see, CANDIDATES)
    assert len(seen) == calls


def test_a_vote_that_is_out_of_range_does_not_count():
    places, y = torch.tensor([0, 3, -1, 4, 2**40, 3, 1]), torch.tensor([0, 0, 1, 0, 1, 2, 2])
    votes = VoteSum(lambda z, y: places, 4, 3)
    found = votes.assemble(votes.exact(torch.zeros(7, 1), y))
    assert found.tolist() == [[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 1]]
    assert votes.sensitivity(Relation.ADD_OR_REMOVE_ONE) == 1
    assert votes.sensitivity(Relation.REPLACE_ONE) == math.sqrt(2)
    assert not votes.exact(torch.zeros(0, 1), y[:0])["votes"].any()


# Rows one at a time

ROWS = torch.randn(37, 1, 8, 8, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("also", [lambda rows: 0, lambda rows: len(rows)])
def test_a_rows_result_is_its_own_to_the_bit(also):
    """Also of a function that looks at how many rows it got."""
    wise = RowWise(lambda rows: Eyes().on_device(rows) + also(rows), (1, 8, 8), CPU, slots=16)
    whole = wise(ROWS)
    assert (whole.shape, whole.dtype) == ((37, 12), torch.float32)
    torch.testing.assert_close(whole, Eyes().on_device(ROWS) + also(ROWS[:16]))
    for k in range(37):
        assert torch.equal(wise(ROWS[k : k + 1])[0], whole[k])
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    assert torch.equal(wise(ROWS[order]), whole[order])


def test_where_places_differ_rows_go_one_by_one():
    sizes = []

    def function(rows):
        sizes.append(len(rows))
        return rows.flatten(1) + torch.arange(len(rows))[:, None]

    wise = RowWise(function, (1, 8, 8), CPU, slots=16)
    sizes.clear()
    assert torch.equal(wise(ROWS), ROWS.flatten(1))
    assert sizes == [1] * 37


@pytest.mark.parametrize("step", [0, 1])
def test_no_rows_have_no_results(step):
    wise = RowWise(lambda rows: rows.flatten(1)[:, :5] + step * torch.arange(len(rows))[:, None], (1, 8, 8), CPU)
    assert wise(ROWS[:0]).shape == (0, 5)


# Sums of products


def factor_sum(factors: list[tuple[list[float], ...]], bound: float = 1.0, blocks: int = 1) -> FactorSum:
    """Of records that are no more than their number among `factors`."""
    tensors = [torch.tensor(column, dtype=torch.float64) for column in zip(*factors, strict=True)]
    p, q, r = (tensor.shape[1] for tensor in tensors)
    return FactorSum(lambda z, y: tuple(t[z[:, 0].long()] for t in tensors), p, q, r, bound=bound, blocks=blocks)


def units(statistic: FactorSum, rows: list[int], y: list[int]) -> list[list[int]]:
    """The exact sum in grid units, by block."""
    found = statistic.exact(torch.tensor(rows, dtype=torch.float64)[:, None], torch.tensor(y))["rows"]
    return [[int(value) for value in row] for row in found.reshape(statistic.blocks, -1)]


def clipped_in_fractions(left, right, rest, bound: float) -> list[Fraction]:
    """[left right^T, rest], brought to length `bound` if it is longer, over the grid of bound 2^-30."""
    getcontext().prec = 60
    whole = [Fraction(a) * Fraction(b) for a in left for b in right] + [Fraction(c) for c in rest]
    squared = sum(value**2 for value in whole)
    length = Fraction((Decimal(squared.numerator) / Decimal(squared.denominator)).sqrt())
    scale = min(Fraction(1), Fraction(bound) / length) if length else Fraction(1)
    return [value * scale * 2**30 / Fraction(bound) for value in whole]


def some_factors(n: int, seed: int) -> list[tuple[list[float], ...]]:
    """Of all lengths from far within the bound to far beyond it."""
    rng = np.random.default_rng(seed)
    return [tuple((rng.normal(size=k) * 10.0 ** rng.uniform(-3, 3)).tolist() for k in (3, 4, 2)) for _ in range(n)]


@pytest.mark.parametrize("bound", [1.0, 0.3])
def test_factors_are_multiplied_clipped_and_rounded_toward_zero(bound):
    factors = some_factors(60, seed=0)
    for k, one in enumerate(factors):
        (found,) = units(factor_sum(factors, bound), [k], [0])
        for value, ideal, lost in zip(
            found, clipped_in_fractions(*one, bound), [2**16 + 1] * 12 + [2] * 2, strict=True
        ):
            assert value * ideal >= 0
            assert -1e-3 < abs(ideal) - abs(value) < lost  # a factor loses less than 2^-15, the rest 2^-30


def test_sums_of_factors_are_those_of_a_loop_in_whole_numbers(monkeypatch):
    monkeypatch.setattr(mechanisms, "CHUNK", 7)
    factors, y = some_factors(40, seed=1), np.random.default_rng(1).choice([0, 2], 40).tolist()
    statistic = factor_sum(factors, blocks=3)
    loop = [[0] * 14 for _ in range(3)]
    for k in range(40):
        (alone,) = units(factor_sum(factors), [k], [0])
        loop[y[k]] = [a + b for a, b in zip(loop[y[k]], alone, strict=True)]
    assert units(statistic, list(range(40)), y) == loop
    assert not any(loop[1])
    assert units(statistic, [], []) == [[0] * 14] * 3
    assembled = statistic.assemble(statistic.exact(torch.arange(40.0)[:, None], torch.tensor(y)))
    assert assembled.tolist() == [[value * 2.0**-30 for value in row] for row in loop]


NOT_FINITE = (math.nan, math.inf, -math.inf)


def test_no_factors_are_longer_than_the_bound_in_whole_numbers():
    """Oversize ones come close to it; what is no number, or too large to square, adds nothing at all."""
    rng, longest = np.random.default_rng(2), 0
    scales = (0.0, 1e-300, 1e-30, 1e-3, 1.0, 1e3, 1e30, 1e150)
    factors = [tuple((rng.normal(size=k) * rng.choice(scales)).tolist() for k in (3, 4, 2)) for _ in range(200)]
    factors.append(([1e162, 0.0, 0.0], [2.3e-162, 1.5e-162, 1.5e-162, 1.5e-162], [0.0, 0.0]))  # squares near no number
    for k in range(201):
        (found,) = units(factor_sum(factors), [k], [0])
        squared = sum(value**2 for value in found)
        assert squared <= 2**60
        longest = max(longest, squared)
    assert longest > 0.999 * 2**60
    sound = ([0.5, 0.1, 0.0], [1.0, 2.0, 3.0, 4.0], [0.1, 0.2])
    spoilt = [([*sound[0]], [*sound[1]], [*sound[2]]) for _ in range(12)]
    for k, bad in enumerate((*NOT_FINITE, 1e200)):
        for place in range(3):
            spoilt[3 * k + place][place][1] = bad
    for k in range(12):
        assert units(factor_sum(spoilt), [k], [0]) == [[0] * 14]
    assert units(factor_sum([*spoilt, sound]), list(range(13)), [0] * 13) == units(factor_sum([sound]), [0], [0])


DEATHS = {"matching": (DpMerf, "class_sums", 105), "evolution": (private_evolution, "resample", 4)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    inception.find = lambda device, root=None: Eyes()
    watch(setattr, *DEATHS[sys.argv[1]], lambda: os.kill(os.getpid(), signal.SIGKILL))
    sys.exit(main(sys.argv[2:]))
