"""Runs that share a device: never two stages at once that fill it, and a dead run holds nobody up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from straightdp.errors import BadInput
from straightdp.turns import turn

STAGE = """
import sys, time
from pathlib import Path
from straightdp.folder import RunFolder
root, stage, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
folder = RunFolder(root)
(root / "private").mkdir(parents=True, exist_ok=True)
def work():
    print(time.monotonic(), flush=True)
    time.sleep(seconds)
    print(time.monotonic(), flush=True)
folder.stage(stage, "key", [], work)
"""


def begin(root, stage: str, seconds: float, turns) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k != "STRAIGHTDP_TURNS"}
    environment |= {"STRAIGHTDP_TURNS": str(turns)} if turns else {}
    words = [sys.executable, "-c", STAGE, str(root), stage, str(seconds)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


def spans(processes) -> list[tuple[float, float]]:
    return sorted(tuple(map(float, process.communicate(timeout=60)[0].split())) for process in processes)


def test_stages_that_fill_a_device_follow_each_other_and_waiting_is_not_their_time(tmp_path):
    names = ("train", "distill", "pretrain")
    found = spans([begin(tmp_path / name, name, 0.5, tmp_path / "turns") for name in names])
    assert all(one[1] <= two[0] for one, two in pairwise(found))
    for name in names:
        stamps = json.loads((tmp_path / name / "private/stages.json").read_text())
        assert stamps[name]["seconds"] == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize(("stage", "asked"), [("plan", True), ("evaluate", True), ("train", False)])
def test_other_stages_and_runs_that_were_not_asked_do_not_wait(tmp_path, stage, asked):
    turns = tmp_path / "turns" if asked else None
    holder = begin(tmp_path / "a", "train", 20, tmp_path / "turns")
    holder.stdout.readline()
    ((start, end),) = spans([begin(tmp_path / "b", stage, 0.1, turns)])
    assert end - start < 5
    assert holder.poll() is None
    holder.kill()


COMPILES = """
import sys, time
import torch
from straightdp.compiled import Compiled
from straightdp.turns import turn
class Slow(Compiled):
    def _prepare(self, inputs):
        print("compiles", flush=True)
        sys.stdin.readline()
        print("compiled", time.monotonic(), flush=True)
        return self._function
with turn("train") as mine:
    Slow(torch.sin, speed="compiled")(torch.zeros(3))
    print("runs", time.monotonic(), mine.waited, flush=True)
"""


def test_a_run_that_compiles_lets_others_have_the_device_and_then_waits_for_its_turn(tmp_path):
    environment = os.environ | {"STRAIGHTDP_TURNS": str(tmp_path / "turns")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    compiles = subprocess.Popen([sys.executable, "-c", COMPILES], env=environment, **pipes)
    assert compiles.stdout.readline() == "compiles\n"
    trains = begin(tmp_path / "b", "train", 1.5, tmp_path / "turns")
    start = float(trains.stdout.readline())
    words = compiles.communicate("go on\n", timeout=60)[0].split()
    compiled, runs, waited = float(words[1]), float(words[3]), float(words[4])
    end = float(trains.communicate(timeout=60)[0])
    assert start < compiled < end <= runs
    assert waited == pytest.approx(runs - compiled, abs=0.2)


SHARES = """
import sys, time
from pathlib import Path
import torch
from straightdp import cache
from straightdp.compiled import Compiled
from straightdp.turns import turn
out = Path(sys.argv[1])
class Slow(Compiled):
    def _prepare(self, inputs):
        print("compiles", flush=True)
        sys.stdin.readline()
        return self._function
def work():
    Slow(torch.sin, speed="compiled")(torch.zeros(3))
    out.write_bytes(b"trained")
print("begins", flush=True)
with turn("pretrain"):
    cache.shared("pretrain", "key", out, work)
"""


def test_a_run_that_waits_for_anothers_public_stage_does_not_keep_it_from_its_turn(tmp_path):
    """One compiles with its turn given up, and works on what the other waits for."""
    environment = os.environ | {"STRAIGHTDP_TURNS": str(tmp_path / "turns"), "STRAIGHTDP_CACHE": str(tmp_path / "kept")}
    (tmp_path / "kept").mkdir()
    outs = [tmp_path / "one", tmp_path / "two"]

    def begin_shared(out) -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", SHARES, str(out)], env=environment, **pipes)
        assert process.stdout.readline() == "begins\n"
        return process

    works = begin_shared(outs[0])
    assert works.stdout.readline() == "compiles\n"
    waits = begin_shared(outs[1])
    time.sleep(0.5)
    try:
        works.communicate("go on\n", timeout=20)
        waits.communicate(timeout=20)
    finally:
        works.kill()
        waits.kill()
    assert [out.read_bytes() for out in outs] == [b"trained"] * 2


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("STRAIGHTDP_TURNS", str(tmp_path / "missing" / "turns"))
    with pytest.raises(BadInput, match="STRAIGHTDP_TURNS"), turn("train"):
        pass


def test_a_run_that_is_killed_gives_its_turn_up(tmp_path):
    holder = begin(tmp_path / "a", "train", 60, tmp_path / "turns")
    holder.stdout.readline()
    waiting = begin(tmp_path / "b", "train", 0.1, tmp_path / "turns")
    time.sleep(1)
    assert waiting.poll() is None
    os.kill(holder.pid, signal.SIGKILL)
    assert len(spans([waiting])) == 1
