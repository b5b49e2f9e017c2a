"""Run many recipes side by side on one machine and gather what each measured.

A job is a recipe and settings. Each runs in a process of its own, a run with its own pinned noise key (an experiment,
not a release); public stages are shared. What is done is written down at once, and what is stopped goes on next time,
so that a sitting that is cut loses little.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    """`table` is the results' file that it belongs to. A `light` one leaves room on a GPU for others beside it."""

    table: str
    name: str
    recipe: str
    settings: tuple[str, ...] = ()
    light: bool = False
    audit: bool = False

    @property
    def key(self) -> str:
        return hashlib.sha256(f"experiment {self.name}".encode()).hexdigest()


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every script that runs jobs takes."""
    parser.add_argument("--work", type=Path, default=Path("runs/experiments"), help="the runs' folders")
    parser.add_argument("--results", type=Path, default=Path("experiments/results"), help="folder of the JSON files")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--heavy", type=int, default=1, help="jobs at once that fill a GPU")
    parser.add_argument("--light", type=int, default=2, help="jobs at once, beside those, that do not")
    parser.add_argument("--stop", type=float, default=1e9, help="after so many seconds, end what runs: it can go on")
    parser.add_argument("--print", action="store_true", help="only show what is there")


def measured(jobs: list[Job], options: argparse.Namespace) -> dict[str, dict]:
    """Every result there is of the jobs' tables, after the missing ones were run unless `--print` was given."""
    if not options.print:
        run_all(jobs, options)
    found: dict[str, dict] = {}
    for table in dict.fromkeys(job.table for job in jobs):
        found |= read(options.results, table)
    return found


def read(results: Path, table: str) -> dict[str, dict]:
    path = results / f"{table}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def run_all(jobs: list[Job], options: argparse.Namespace) -> None:
    """The jobs without a result, in their order, as many at once as there is room for."""
    options.work.mkdir(parents=True, exist_ok=True)
    options.results.mkdir(parents=True, exist_ok=True)
    tables = {job.table: read(options.results, job.table) for job in jobs}
    waiting = [job for job in jobs if job.name not in tables[job.table]]
    running: dict[subprocess.Popen, tuple[Job, float]] = {}
    room = {False: options.heavy, True: options.light}
    start = time.monotonic()
    while (waiting or running) and time.monotonic() - start < options.stop:
        for job in list(waiting):
            if sum(other.light == job.light for other, _ in running.values()) < room[job.light]:
                waiting.remove(job)
                running[_start(job, options)] = (job, time.monotonic())
        time.sleep(0.5)
        for process in [p for p in running if p.poll() is not None]:
            job, began = running.pop(process)
            body = _gathered(job, options.work, process.returncode)
            if body is None:
                continue
            tables[job.table][job.name] = body | {"wall_seconds": round(time.monotonic() - began, 1)}
            (options.results / f"{job.table}.json").write_text(json.dumps(tables[job.table], indent=1))
            print(f"{time.monotonic() - start:6.0f} s  {job.name}: {_line(body)}", flush=True)
    for process, (job, _) in running.items():
        os.killpg(process.pid, signal.SIGKILL)
        print(f"stopped: {job.name}: {_last_line(options.work / f'{job.name}.log')}", flush=True)
    print("".join(f"waiting: {job.name}\n" for job in waiting), end="", flush=True)


def _start(job: Job, options: argparse.Namespace) -> subprocess.Popen:
    out, settings = options.work / job.name, [*job.settings, *options.settings]
    command = [sys.executable, "-m", "straightdp", "audit" if job.audit else "run", str(ROOT / job.recipe)]
    command += ["--out", str(out)]
    if not job.audit:
        settings.append(f'privacy.pinned_key="{job.key}"')
        command += ["--resume"] if (out / "recipe.toml").exists() else []
    command += [word for setting in settings for word in ("--set", setting)]
    environment = os.environ | {"STRAIGHTDP_CACHE": str(options.work / "public")}
    with open(options.work / f"{job.name}.log", "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def _gathered(job: Job, work: Path, code: int) -> dict | None:
    """What a job measured; None for one that failed. An audit that ends with 1 has found something."""
    kept = work / job.name / "private" / ("audit.json" if job.audit else "evaluation.json")
    if code not in ((0, 1) if job.audit else (0,)) or not kept.exists():
        log = work / f"{job.name}.log"
        print(f"{job.name}: exit {code}, see {log}\n{''.join(log.read_text().splitlines(True)[-5:])}", flush=True)
        return None
    about = {
        "recipe": job.recipe,
        "settings": list(job.settings),
        "commit": os.environ.get("STRAIGHTDP_COMMIT", "unknown"),
        "device": device(),
    }
    return about | ({"exit": code} | json.loads(kept.read_text()) if job.audit else gather(work / job.name))


def gather(run: Path) -> dict:
    """Everything worth keeping of a finished run, with epsilon recomputed from its transcript."""
    from straightdp.audits.replay import replay
    from straightdp.stages.public import load_number

    private = run / "private"
    evaluation = json.loads((private / "evaluation.json").read_text())
    stamps = json.loads((private / "stages.json").read_text())
    body = {
        "accuracy": {s["name"]: s["mean"] for s in evaluation["scores"] if s["probe"] == "LeNet"},
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


def _line(body: dict) -> str:
    if "accuracy" in body:
        return str({name: round(value, 3) for name, value in body["accuracy"].items()})
    return str({name: body[name]["suspicions"] for name in ("honest", "leaky")})


def _last_line(log: Path) -> str:
    return (log.read_text().replace("\r", "\n").strip().splitlines() or ["nothing said"])[-1]


def device() -> str:
    import platform

    import torch

    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{kind}, torch {torch.__version__}, Python {platform.python_version()}"
