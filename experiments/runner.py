"""Run many recipes side by side on one machine and gather what each measured.

A job is a recipe and settings. Each runs in a process of its own, with its own pinned noise key (an experiment, not a
release); public stages are shared. What is done is written down at once, so that a sitting that is cut loses little.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    name: str
    recipe: str
    settings: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return hashlib.sha256(f"experiment {self.name}".encode()).hexdigest()


def run_all(jobs: list[Job], work: Path, results: Path, *, parallel: int, seconds: float) -> dict[str, dict]:
    """Start jobs while there is time, `parallel` at once, and return every result there is, old ones included."""
    work.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict] = json.loads(results.read_text()) if results.exists() else {}
    waiting = [job for job in jobs if job.name not in found]
    running: dict[subprocess.Popen, tuple[Job, float]] = {}
    start = time.monotonic()
    while waiting or running:
        while waiting and len(running) < parallel and time.monotonic() - start < seconds:
            job = waiting.pop(0)
            running[_start(job, work)] = (job, time.monotonic())
        if not running:
            break
        time.sleep(0.5)
        for process in [p for p in running if p.poll() is not None]:
            job, began = running.pop(process)
            if process.returncode:
                print(f"{job.name}: exit {process.returncode}, see {work / job.name}.log", flush=True)
                print("".join((work / f"{job.name}.log").read_text().splitlines(True)[-5:]), flush=True)
                continue
            found[job.name] = gather(job, work / job.name) | {"wall_seconds": round(time.monotonic() - began, 1)}
            results.write_text(json.dumps(found, indent=1))
            line = {k: round(v, 3) for k, v in found[job.name]["accuracy"].items()}
            print(f"{time.monotonic() - start:6.0f} s  {job.name}: {line}", flush=True)
    return found


def _start(job: Job, work: Path) -> subprocess.Popen:
    settings = (*job.settings, f'privacy.pinned_key="{job.key}"')
    command = [sys.executable, "-m", "straightdp", "run", str(ROOT / job.recipe), "--out", str(work / job.name)]
    command += [word for setting in settings for word in ("--set", setting)]
    if (work / job.name / "recipe.toml").exists():
        command.append("--resume")
    environment = os.environ | {"STRAIGHTDP_CACHE": str(work / "public")}
    with open(work / f"{job.name}.log", "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def gather(job: Job, run: Path) -> dict:
    """Everything worth keeping of a finished run, with epsilon recomputed from its transcript."""
    from straightdp.audits.replay import replay
    from straightdp.stages.public import load_number

    private = run / "private"
    evaluation = json.loads((private / "evaluation.json").read_text())
    scores = [score for score in evaluation["scores"] if score["probe"] == "LeNet"]
    stamps = json.loads((private / "stages.json").read_text())
    body = {
        "recipe": job.recipe,
        "settings": list(job.settings),
        "commit": os.environ.get("STRAIGHTDP_COMMIT", "unknown"),
        "device": device(),
        "accuracy": {s["name"]: s["mean"] for s in scores},
        "epsilon_replayed": replay(run / "release").epsilon,
        "seconds": {name: round(stamp["seconds"], 1) for name, stamp in stamps.items()},
    }
    body |= {name: evaluation[name] for name in ("quality", "label_aware") if name in evaluation}
    stronger = {s["name"]: s["mean"] for s in evaluation["scores"] if s["probe"] != "LeNet"}
    body |= {"accuracy of the residual net": stronger} if stronger else {}
    if (calibration := private / "checkpoints/calibration.safetensors").exists():
        body["pretrain_loss"] = load_number(calibration, "pretrain_loss")
    if (plan := private / "checkpoints/plan.json").exists():
        body["plan"] = json.loads(plan.read_text())
    if (private / "diagnostics.jsonl").exists():
        rows = [json.loads(line) for line in (private / "diagnostics.jsonl").read_text().splitlines()]
        keys = ("q50", "q90", "clip_fraction")
        body["gradient_norms"] = {k: sorted(row[k] for row in rows)[len(rows) // 2] for k in keys}  # medians over steps
    for name in ("horizon", "allocation", "plateau"):
        if (file := private / f"checkpoints/{name}.json").exists():
            body[name] = json.loads(file.read_text())
    return body


def device() -> str:
    import platform

    import torch

    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{kind}, torch {torch.__version__}, Python {platform.python_version()}"
