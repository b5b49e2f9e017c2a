"""Whole runs in real processes: what they leave behind, and what kill -9 does to them."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from conftest import PIN
from straightdp.files import file_hash

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
PINNED = ("--set", f'privacy.pinned_key="{PIN}"')


def command(*arguments) -> list[str]:
    return [sys.executable, "-m", "straightdp", *map(str, arguments)]


def straightdp(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def transcript(run) -> list[dict]:
    return [json.loads(line) for line in (run / "release" / "transcript.jsonl").read_text().splitlines()]


def traces(run) -> tuple:
    """What a run has left on disk so far: it changes with every checkpoint, stage and transcript line."""
    private = run / "private"
    files = [
        *private.glob("checkpoints/*"),
        *private.glob("noise/*"),
        private / "transcript.jsonl",
        private / "stages.json",
    ]
    return tuple((str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.exists())


def kill_after(process, run, changes: int, delay: float) -> None:
    """kill -9 once the traces have changed so often, and a moment later."""
    before = traces(run)
    while changes > 0 and process.poll() is None:
        time.sleep(0.002)
        try:
            now = traces(run)
        except FileNotFoundError:  # renamed between being listed and being looked at
            continue
        changes, before = changes - (now != before), now
    time.sleep(delay)
    assert process.poll() is None, "the run ended before it was killed: give it more to do"
    process.send_signal(signal.SIGKILL)
    process.wait()


def stages_done(run) -> str:
    """How far a run has come: its finished stages and executed mechanisms."""
    stamps, ledger = run / "private/stages.json", run / "private/transcript.jsonl"
    executed = ledger.read_text().count('"execute"') if ledger.exists() else 0
    return f"{len(json.loads(stamps.read_text())) if stamps.exists() else 0} stages, {executed} executions"


@pytest.mark.pipeline
def test_twenty_kills_change_nothing(tiny, tmp_path):
    """kill -9 at random moments, then --resume: bit-equal to a run that was left alone with the same key."""
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    longer = ("--set", "pretrain.steps=300", "--set", "distill.steps=300", "--set", "dpsgd.steps=500")
    done = straightdp("run", tiny, "--out", calm, *PINNED, *longer)
    assert done.returncode == 0, done.stderr

    rng, reached = random.Random(0), []
    arguments = command("run", tiny, "--out", killed, "--resume", *PINNED, *longer)
    for _ in range(20):
        process = subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        kill_after(process, killed, rng.choice([0, 1, 2, 3, 5, 10, 25, 50]), rng.uniform(0.0, 0.1))
        reached.append(stages_done(killed))
    assert len(set(reached)) >= 6, reached  # the kills fell into several stages
    last = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert last.returncode == 0, last.stderr

    for name in ("model.safetensors", "moments.safetensors", "synthetic"):
        assert file_hash(killed / "release" / name) == file_hash(calm / "release" / name), name
    executed = [(e["id"], e["step"]) for e in transcript(killed) if e["kind"] == "execute"]
    assert len(executed) == len(set(executed)) == 3 + 500
    assert (killed / "release/transcript.jsonl").read_bytes() == (calm / "release/transcript.jsonl").read_bytes()
    verdict = straightdp("replay", killed)
    assert verdict.returncode == 1
    assert "NOT RELEASABLE" in verdict.stdout
    assert verdict.stdout.splitlines()[0] == straightdp("replay", calm).stdout.splitlines()[0]


@pytest.fixture(scope="module")
def finished(tiny_data, tmp_path_factory):
    """A real run: noise from the operating system, killed once on its way."""
    from conftest import TINY

    folder = tmp_path_factory.mktemp("run")
    recipe = folder / "recipe.toml"
    recipe.write_text(TINY.format(**tiny_data))
    options = ("--set", "dpsgd.steps=40", "--set", "pretrain.steps=40", "--set", "distill.steps=40")
    process = subprocess.Popen(
        command("run", recipe, "--out", folder / "run", *options), env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (folder / "run/private/checkpoints/dpsgd.pt").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    result = straightdp("run", recipe, "--out", folder / "run", "--resume", *options)
    assert result.returncode == 0, result.stderr
    return folder / "run", recipe, options


@pytest.mark.pipeline
def test_a_real_run_is_releasable_and_complete(finished):
    run, _, _ = finished
    verdict = straightdp("replay", run / "release")
    assert verdict.returncode == 0, verdict.stdout
    names = {path.name for path in (run / "release").iterdir()}
    assert names == {
        "transcript.jsonl",
        "moments.safetensors",
        "model.safetensors",
        "model.json",
        "synthetic",
        "README.md",
        "model_card.md",
        "croissant.json",
        "report.html",
    }
    rows = (run / "release/synthetic/metadata.csv").read_text().splitlines()
    assert rows[0] == "file_name,label,text"
    assert len(rows) == 61


@pytest.mark.pipeline
def test_nothing_secret_is_in_the_release(finished):
    """Neither the key, nor the held-out accuracy, nor a realised batch size or norm, nor the data's path."""
    run, _, _ = finished
    published = b"".join(p.read_bytes() for p in sorted((run / "release").rglob("*")) if p.is_file())
    key = (run / "private/noise.key").read_bytes()
    assert key not in published
    assert key.hex().encode() not in published
    assert b"private.npz" not in published
    assert (run / "private/fingerprint").read_bytes() not in published
    for line in (run / "private/diagnostics.jsonl").read_text().splitlines():
        assert str(json.loads(line)["q50"]).encode() not in published
    page = (run / "release/report.html").read_text()
    assert "Not for publication" not in page
    assert "released moments alone" not in page
    assert "released moments alone" in (run / "report.html").read_text()


@pytest.mark.pipeline
def test_a_spent_budget_and_another_recipe_are_refused(finished):
    run, recipe, options = finished
    before = file_hash(run)
    spent = straightdp("run", recipe, "--out", run, *options)
    other = straightdp("run", recipe, "--out", run, "--resume", *options, "--set", "dpsgd.lr=0.5")
    for result, word in ((spent, "already spent"), (other, "another recipe")):
        assert result.returncode == 2
        assert word in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert file_hash(run) == before


@pytest.mark.pipeline
def test_an_edited_recipe_a_moved_release_and_a_lost_private_folder_give_nothing_back(finished, tmp_path):
    """The ways a user might, in good faith, reuse a folder."""
    run = finished[0]
    import shutil

    def attempt(name, spoil):
        copy = tmp_path / name
        shutil.copytree(run, copy)
        spoil(copy)
        return copy, straightdp("run", copy / "recipe.toml", "--out", copy, "--resume")

    def edit(copy):
        text = (copy / "recipe.toml").read_text()
        (copy / "recipe.toml").write_text(text.replace("radius_quantile = 0.5", "radius_quantile = 0.9"))

    def move_release(copy):
        (copy / "release").rename(copy.parent / "published")

    _, result = attempt("edited", edit)
    assert (result.returncode, "another recipe" in result.stderr) == (2, True), result.stderr
    _, result = attempt("moved", move_release)
    assert result.returncode == 3, result.stderr
    assert "closed" in result.stderr
    _, result = attempt("lost", lambda copy: shutil.rmtree(copy / "private"))
    assert (result.returncode, "was lost" in result.stderr) == (2, True), result.stderr


@pytest.mark.pipeline
def test_resuming_a_finished_run_spends_nothing_and_may_resample(finished):
    run, recipe, options = finished
    before = (run / "release/transcript.jsonl").read_bytes()
    result = straightdp("run", recipe, "--out", run, "--resume", *options, "--set", "sample.n=30")
    assert result.returncode == 0, result.stderr
    assert (run / "release/transcript.jsonl").read_bytes() == before
    assert len(list((run / "release/synthetic/images").iterdir())) == 30
    back = straightdp("run", recipe, "--out", run, "--resume", *options)
    assert back.returncode == 0


@pytest.mark.pipeline
def test_other_private_records_are_refused_on_resume(finished, tiny_data):
    run, recipe, options = finished
    import numpy as np

    original = tiny_data["private"].read_bytes()
    try:
        with np.load(tiny_data["private"]) as arrays:
            images, labels = arrays["images"].copy(), arrays["labels"]
        images[0, 0, 0] ^= 255
        np.savez(tiny_data["private"], images=images, labels=labels)
        result = straightdp("run", recipe, "--out", run, "--resume", *options)
    finally:
        tiny_data["private"].write_bytes(original)
    assert result.returncode == 2
    assert "not those" in result.stderr


@pytest.mark.pipeline
def test_sample_evaluate_and_report_again(finished, tmp_path):
    run, _, _ = finished
    out = tmp_path / "more"
    assert straightdp("sample", run / "release", "--n", 25, "--out", out).returncode == 0
    assert len(list((out / "images").glob("*.png"))) == 25
    again = straightdp("sample", run / "release", "--n", 25, "--out", out)
    assert again.returncode == 2
    assert straightdp("sample", tmp_path, "--n", 5, "--out", tmp_path / "x").returncode == 2
    guided = straightdp("sample", run / "release", "--n", 5, "--out", tmp_path / "g", "--set", "sample.port=guide")
    assert guided.returncode == 0, guided.stderr
    for name in ("evaluate", "report"):
        result = straightdp(name, run)
        assert result.returncode == 0, result.stderr
    assert straightdp("evaluate", tmp_path).returncode == 2


@pytest.mark.pipeline
def test_two_processes_cannot_spend_in_one_folder(finished):
    run, recipe, options = finished
    with open(run / "private/lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = straightdp("run", recipe, "--out", run, "--resume", *options)
    assert result.returncode == 2
    assert "another process" in result.stderr
