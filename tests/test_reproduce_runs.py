"""Rows that really run: killed and gone on with, shared by tables, sampled from one model, failed, stopped."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import TINY
from straightdp.cli import main
from straightdp.files import file_hash
from straightdp.folder import RunFolder
from straightdp.reproduce import runner
from straightdp.reproduce.experiment import read
from straightdp.reproduce.grids import GAP, SIDE
from straightdp.reproduce.jobs import Job, jobs_of
from straightdp.reproduce.results import Results
from straightdp.reproduce.runner import Room, run_all

FIRST = """
title = "First"
settings = ["sample.n=40", "evaluate.probe_steps=5", "pretrain.steps=30", "distill.steps=20", "dpsgd.steps=20"]
[[panels]]
epsilons = [5]
figures = ["accuracy"]
plot = ["accuracy"]
grid = true
[[panels.rows]]
name = "trained"
recipe = "tiny.toml"
paper = { accuracy = ["0.5"] }
[[panels.rows]]
name = "guided"
recipe = "tiny.toml"
settings = ["sample.port=guide"]
"""
SECOND = """
title = "Second"
settings = ["sample.n=40", "evaluate.probe_steps=5", "pretrain.steps=30", "distill.steps=20", "dpsgd.steps=20"]
[[panels]]
figures = ["release", "p50", "tail"]
[[panels.rows]]
name = "the same run"
recipe = "tiny.toml"
epsilon = 5
"""


@pytest.fixture(scope="module")
def files(tiny_data, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("experiments")
    texts = {"tiny": TINY.format(**tiny_data), "first": FIRST, "second": SECOND}
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)
    return {name: folder / f"{name}.toml" for name in texts}


def alive(out: Path) -> list[str]:
    """Processes that were told to work below a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(process.read_text(errors="replace"))
    return [words for words in found if str(out) in words]


@pytest.mark.pipeline
def test_what_is_killed_goes_on_and_every_run_is_run_once(files, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    trained, guided = jobs_of(read(str(files["first"])))
    words = ["reproduce", str(files["first"]), str(files["second"]), "--out", str(out)]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.Popen([sys.executable, "-m", "straightdp", *words], stdout=subprocess.PIPE, env=surroundings)
    began = time.monotonic()
    while not (out / trained.name / "recipe.toml").exists():
        assert killed.poll() is None
        assert time.monotonic() - began < 120
        time.sleep(0.05)
    killed.send_signal(signal.SIGTERM)
    assert killed.wait(30) == 130
    assert alive(out) == []
    assert not (out / "private").exists()  # no result yet

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main([*words, "--rows", "trained"]) == 0
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.count("1 of 1 done") == 2
    runs = {path.name for path in out.iterdir() if path.is_dir()} - {"public", "private"}
    assert runs == {trained.name, guided.name}  # the second table's row is the first one's
    assert "train: done" in (out / f"{trained.name}.log").read_text()
    again = (out / f"{guided.name}.log").read_text()
    assert "train: unchanged, skipped" in again
    assert "sample: done" in again
    models = [out / name / "release/model.safetensors" for name in sorted(runs)]
    assert file_hash(models[0]) == file_hash(models[1])
    pictures = [out / name / "release/synthetic" for name in sorted(runs)]
    assert file_hash(pictures[0]) != file_hash(pictures[1])

    kept = json.loads((out / "private/first.json").read_text())
    assert kept.keys() == {trained.name, guided.name}
    assert (out / "private").stat().st_mode & 0o777 == 0o700
    body = kept[trained.name]
    assert body["recipe"] == "tiny.toml"
    evaluation = json.loads((out / trained.name / "private/evaluation.json").read_text())
    accuracy = {score["name"]: score["mean"] for score in evaluation["scores"]}
    assert body["accuracy"] == accuracy
    assert body["epsilon_replayed"] <= 5
    assert body["seconds"].keys() >= {"pretrain", "release", "distill", "train", "evaluate"}
    assert body["wall_seconds"] > 0
    assert Results(out / "private").find(trained) == body

    for name in ("first", "second"):
        assert {path.suffix for path in (out / "private").glob(f"{name}.*")} >= {".md", ".tex", ".html"}
    assert (out / "private/first.svg").read_text().count("<svg") == 1
    grid = np.asarray(Image.open(out / "private/first.png").convert("L"))
    for k, name in enumerate((trained.name, guided.name)):
        with open(out / name / "release/synthetic/metadata.csv", newline="") as table:
            nought = next(row["file_name"] for row in csv.DictReader(table) if row["label"] == "0")
        picture = np.asarray(Image.open(out / name / "release/synthetic" / nought))
        top = GAP + k * (SIDE + GAP)
        assert (grid[top : top + SIDE, GAP : GAP + SIDE] == picture.repeat(SIDE // 8, 0).repeat(SIDE // 8, 1)).all()
    mean, alone = accuracy["synthetic data"], accuracy["released moments alone"]
    assert f"| trained | {mean:.3f} (0.5; {mean - 0.5:+.3f}) |".replace("-", "−") in text.replace("-", "−")
    assert f"| the same run | 5 | {alone:.3f} |" in text

    before = {path: path.stat().st_mtime_ns for path in out.rglob("recipe.toml")}
    assert main(words) == 0
    assert "begins" not in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("recipe.toml")} == before


class Said(Job):
    """A job in whose place a few words of Python run."""

    def words(self, run: Path) -> list[str]:
        return [sys.executable, "-S", "-c", self.row.replace("RUN", repr(str(run)))]


def said(seed: int, text: str) -> Said:
    return Said("small", (f"run.seed={seed}",), experiment="stub", row=text)


@pytest.fixture
def gathered(monkeypatch):
    def gather(job: Job, run: Path, code: int):
        return {"recipe": job.recipe, "settings": list(job.settings)} if code == 0 else None

    monkeypatch.setattr(runner, "gather", gather)


def test_a_row_that_fails_is_named_and_stops_no_other(gathered, tmp_path, capsys):
    jobs = [said(0, "raise SystemExit('a reason')"), said(1, "pass"), said(2, "pass")]
    failed = run_all(jobs, tmp_path, Results(tmp_path / "private"), Room())
    assert failed == jobs[:1]
    results = Results(tmp_path / "private")
    assert [results.find(job) is not None for job in jobs] == [False, True, True]
    assert "exit 1: a reason" in capsys.readouterr().out


def test_in_time_what_runs_is_ended_and_what_waits_is_not_begun(gathered, tmp_path, capsys):
    endless = f"import time; open({str(tmp_path / 'began')!r}, 'w'); time.sleep(600)"
    began = time.monotonic()
    failed = run_all([said(0, endless), said(1, "pass")], tmp_path / "out", Results(tmp_path), Room(stop=1.5))
    assert time.monotonic() - began < 30
    assert failed == []
    assert (tmp_path / "began").exists()
    assert alive(tmp_path / "began") == []
    text = capsys.readouterr().out
    assert "stopped, can go on" in text
    assert "not begun: 1" in text


def test_as_many_run_at_once_as_there_is_room_for(gathered, tmp_path):
    """Each says when it was there."""
    text = "import time; t = time.time(); time.sleep(0.6); open(RUN + '.times', 'w').write(f'{t} {time.time()}')"
    jobs = [said(k, text) for k in range(5)]
    assert run_all(jobs, tmp_path, Results(tmp_path / "private"), Room(processes=2)) == []
    times = [[float(t) for t in (tmp_path / f"{job.name}.times").read_text().split()] for job in jobs]
    assert max(sum(other[0] <= start < other[1] for other in times) for start, _ in times) == 2


def test_jobs_of_one_model_wait_for_the_first_and_then_run_beside_each_other(gathered, tmp_path, monkeypatch):
    """Each leaves, long before it ends, what a run that has trained and sampled leaves; one copy was cut short."""
    text = (
        "import os, time; t = time.time(); os.makedirs(RUN, exist_ok=True); "
        "open(RUN + '/recipe.toml', 'w').write('KEY'); time.sleep(0.6); "
        "open(RUN + '.times', 'w').write(f'{t} {time.time()}')"
    )
    jobs = [Said("small", (f"sample.n={n}",), experiment="stub", row=text) for n in (5, 6, 7)]
    monkeypatch.setattr(RunFolder, "read_stamps", lambda folder: {"sample": "done"})
    jobs = [replace(job, row=text.replace("KEY", job.key)) for job in jobs]
    cut = tmp_path / f"{jobs[0].name}.partial"
    cut.mkdir()
    (cut / "recipe.toml").write_text(jobs[0].key)
    assert run_all(jobs, tmp_path, Results(tmp_path / "private"), Room(processes=3)) == []
    first, second, third = ([float(t) for t in (tmp_path / f"{job.name}.times").read_text().split()] for job in jobs)
    assert first[1] <= min(second[0], third[0])
    assert max(second[0], third[0]) < min(second[1], third[1])
