"""Several processes on one run: the same release as one process, spent and noised once; a dead one ends it cleanly."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from test_pipeline import ENVIRONMENT, PINNED, straightdp, transcript

SHORT = ("--set", "pretrain.steps=30", "--set", "distill.steps=30", "--set", "dpsgd.steps=60")
SHORT += ("--set", "evaluate.probe_steps=2", "--set", "privacy.delta=1e-5")


def team(*arguments, size: int = 2) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "-m",
            "straightdp", *map(str, arguments)]  # fmt: skip


def run_team(*arguments, size: int = 2) -> subprocess.CompletedProcess:
    return subprocess.run(team(*arguments, size=size), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def workers(launcher: int) -> list[int]:
    """Process ids of the launcher's children, in the order of their ranks."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = {}
    for child in map(int, children):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks.update({int(v[5:]): child for v in variables if v.startswith(b"RANK=")})
    return [ranks[k] for k in sorted(ranks)]


def same_weights(one: Path, other: Path, tolerance: float) -> None:
    a, b = (load_file(run / "release/model.safetensors") for run in (one, other))
    assert a.keys() == b.keys()
    for name in a:
        assert float((a[name] - b[name]).abs().max()) <= tolerance, name


@pytest.fixture(scope="module")
def alone(tiny_data, tmp_path_factory):
    """One process, left alone."""
    from conftest import TINY

    folder = tmp_path_factory.mktemp("alone")
    recipe = folder / "recipe.toml"
    recipe.write_text(TINY.format(**tiny_data))
    done = straightdp("run", recipe, "--out", folder / "run", *PINNED, *SHORT)
    assert done.returncode == 0, done.stderr
    return recipe, folder / "run"


@pytest.mark.pipeline
def test_two_processes_release_what_one_does(alone, tmp_path):
    recipe, one = alone
    done = run_team("run", recipe, "--out", tmp_path / "two", *PINNED, *SHORT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pretrain: done") == 1  # one process speaks
    same_weights(one, tmp_path / "two", 1e-5)
    assert [(e["kind"], e.get("id"), e.get("step")) for e in transcript(tmp_path / "two")] == [
        (e["kind"], e.get("id"), e.get("step")) for e in transcript(one)
    ]
    lines = [[json.loads(x) for x in (run / "private/diagnostics.jsonl").open()] for run in (one, tmp_path / "two")]
    assert [(e["step"], e["batch"]) for e in lines[0]] == [(e["step"], e["batch"]) for e in lines[1]]


@pytest.mark.pipeline
def test_a_dead_process_ends_the_run_and_one_process_resumes_it(alone, tmp_path):
    recipe, one = alone
    broken = tmp_path / "broken"
    launcher = subprocess.Popen(
        team("run", recipe, "--out", broken, *PINNED, *SHORT), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    ledger = broken / "private/transcript.jsonl"
    while not (ledger.exists() and ledger.read_text().count('"step":') >= 20):
        assert launcher.poll() is None, "the run ended before it was killed"
        time.sleep(0.01)
    os.kill(workers(launcher.pid)[1], signal.SIGKILL)
    _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode != 0
    assert 'Traceback (most recent call last):\n  File "' not in errors.split("torch/distributed", 1)[0]
    assert not (broken / "release/model.safetensors").exists()

    resumed = straightdp("run", recipe, "--out", broken, "--resume", *PINNED, *SHORT)
    assert resumed.returncode == 0, resumed.stderr
    same_weights(one, broken, 1e-5)
    executed = [(e["id"], e["step"]) for e in transcript(broken) if e["kind"] == "execute"]
    assert len(executed) == len(set(executed)) == 3 + 60


ERRS = """
import os, sys
from pathlib import Path
import torch
from straightdp.cli import main
checkpoint = Path(sys.argv[4]) / "private/checkpoints/dpsgd.pt"
def compile(graph, **_):
    def run(*inputs):
        scale = 100.0 if os.environ["RANK"] == "1" and checkpoint.exists() else 1.0
        return torch.utils._pytree.tree_map(lambda x: scale * x, graph(*inputs))
    return run
torch.compile = compile
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.pipeline
def test_nothing_is_kept_of_a_team_one_of_whose_compiled_steps_goes_wrong(alone, tmp_path):
    script, run = tmp_path / "errs.py", tmp_path / "run"
    script.write_text(ERRS)
    words = team("run", alone[0], "--out", run, *PINNED, *SHORT, "--set", "run.compile=on")
    words[words.index("-m", 4) : words.index("run")] = [str(script)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "may not be clipped" in done.stderr
    assert torch.load(run / "private/checkpoints/dpsgd.pt", weights_only=True)["step"] == 10
    assert not (run / "release/model.safetensors").exists()


@pytest.mark.pipeline
def test_a_team_on_bad_input_ends_with_its_sentence(tmp_path):
    done = run_team("run", "small", "--private", tmp_path / "none", "--public", "letters", "--out", tmp_path / "run")
    assert done.returncode != 0
    assert "straightdp: " in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.pipeline
def test_a_process_with_other_records_does_not_take_part(alone):
    """Files that change while the leader pretrains: a record could be taken twice."""
    import torch

    from straightdp import pipeline
    from straightdp.errors import BadInput
    from straightdp.folder import RunFolder
    from straightdp.recipe import load
    from straightdp.team import ALONE, Team

    _, run = alone
    folder, cpu = RunFolder(run), torch.device("cpu")
    recipe = load(folder.recipe)
    start = run / "private/checkpoints/distilled.safetensors"
    call = pipeline._call(pipeline.gather(recipe, folder, cpu, ALONE), start)

    class Follower(Team):
        def __init__(self, call):
            super().__init__(1, 2)
            self.call_ = call

        def told(self, value=None):
            return self.call_

    for key in ("records", "weights", "plan", "recipe"):
        with pytest.raises(BadInput, match="other records"):
            pipeline._follow(recipe, folder, cpu, Follower(call | {key: "another"}))
    assert pipeline._follow(recipe, folder, cpu, Follower(None)) is None
