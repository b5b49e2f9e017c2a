"""Run jobs in processes of their own, as many at once as there is room for, and write each result down at once.

Public stages are shared, and jobs that differ in how they sample alone go on from one trained model. On a GPU jobs take
turns at it (`straightdp.turns`). What is stopped or killed goes on the next time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from straightdp import turns
from straightdp.errors import BadInput
from straightdp.folder import RunFolder
from straightdp.progress import say
from straightdp.reproduce.figures import FIGURES
from straightdp.reproduce.gather import gather
from straightdp.reproduce.jobs import Job
from straightdp.reproduce.results import Results, measured

POLL, SAY_EVERY = 0.25, 60.0  # seconds
PARTIAL = ".partial"  # how the name of a copy ends that is not whole
SAID = ("accuracy", "distance", "bound", "caught")


@dataclass(frozen=True)
class Room:
    """How many jobs may run at once, and after how many seconds all are ended."""

    processes: int = 1
    stop: float = float("inf")

    def __post_init__(self) -> None:
        if self.processes < 1 or self.stop <= 0:
            raise BadInput("--processes must be at least 1 and --stop above 0 seconds")


@dataclass
class _Sitting:
    jobs: Sequence[Job]
    out: Path
    waiting: list[Job]
    running: dict[subprocess.Popen, tuple[Job, float]] = field(default_factory=dict)
    walls: list[float] = field(default_factory=list)
    failed: list[Job] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    @property
    def now(self) -> float:
        return time.monotonic() - self.start

    def at_work(self) -> list[Job]:
        return [job for job, _ in self.running.values()]

    def left(self, room: Room) -> str:
        """How far it is, and the time left if the rows that wait take as long as those that are done."""
        count = len(self.jobs)
        done = count - len(self.waiting) - len(self.running) - len(self.failed)
        text = f"{done} of {count} done"
        if not self.walls or not (self.waiting or self.running):
            return text
        each = sum(self.walls) / len(self.walls)
        begun = sum(max(0.0, each - (time.monotonic() - began)) for _, began in self.running.values())
        seconds = (begun + each * len(self.waiting)) / min(room.processes, len(self.waiting + self.at_work()))
        return f"{text}, about {duration(seconds)} left"


def run_all(jobs: Sequence[Job], out: Path, results: Results, room: Room) -> list[Job]:
    """Run the jobs, in their order but where there is no room; returns those that failed, which stop no others.

    A job's result goes to the file of the experiment that asked for it first.
    """
    out.mkdir(parents=True, exist_ok=True)
    sitting = _Sitting(jobs, out, list(jobs))
    said = 0.0
    with _ended_with_us(sitting.running):
        while (sitting.waiting or sitting.running) and sitting.now < room.stop:
            _begin_what_fits(sitting, room)
            time.sleep(POLL)
            for process in [p for p in sitting.running if p.poll() is not None]:
                _finish(sitting, process, results)
                say(f"  {sitting.left(room)}")
            if sitting.now - said >= SAY_EVERY:
                said = sitting.now
                for job in sitting.at_work():
                    say(f"{_clock(sitting)} {job.shown}: {last_line(log_of(out, job))}")
    for job in sitting.at_work():
        say(f"stopped, can go on: {job.name} ({job.shown}): {last_line(log_of(out, job))}")
    if sitting.waiting:
        say(f"not begun: {len(sitting.waiting)}")
    return sitting.failed


@contextmanager
def _ended_with_us(running: dict[subprocess.Popen, tuple[Job, float]]) -> Iterator[None]:
    """No job is left behind, unless this process is killed outright: a job loses what came after its checkpoint."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _begin_what_fits(sitting: _Sitting, room: Room) -> None:
    for job in list(sitting.waiting):
        busy = sitting.at_work()
        if len(busy) >= room.processes:
            return
        donor = _trained(sitting, job)
        if donor is None and any(other.training == job.training for other in busy):
            continue  # it will go on from that one's model
        sitting.waiting.remove(job)
        if donor is not None and job.command == "run":
            _copy_training(donor, sitting.out / job.name)
        sitting.running[_start(job, sitting.out)] = (job, time.monotonic())
        say(f"{_clock(sitting)} begins: {job.name} ({job.shown})")


def _trained(sitting: _Sitting, job: Job) -> Path | None:
    """A run, of now or earlier, that has trained the job's model and that nothing writes to any more."""
    busy = {other.name for other in sitting.at_work()}
    runs = (path.parent for path in sitting.out.glob("*/recipe.toml"))
    whole = (run for run in runs if run.name not in busy and run.suffix != PARTIAL)
    return next((run for run in whole if _has_trained(run, job)), None)


def _has_trained(run: Path, job: Job) -> bool:
    return "sample" in RunFolder(run).read_stamps() and job.key in (run / "recipe.toml").read_text(encoding="utf-8")


def _copy_training(donor: Path, run: Path) -> None:
    """Put a run that has trained the same model in the place of one that has not begun."""
    if run.exists():
        return
    partial = run.with_name(f"{run.name}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(donor, partial)
    partial.rename(run)


def _start(job: Job, out: Path) -> subprocess.Popen:
    shared = {"STRAIGHTDP_CACHE": str(out / "public")}
    if torch.cuda.is_available():
        shared[turns.VARIABLE] = turns.of_this_device()
    if job.command == "audit":
        RunFolder(out / job.name).audit.unlink(missing_ok=True)  # an audit that dies leaves none behind
    with open(log_of(out, job), "w") as log:
        return subprocess.Popen(
            job.words(out / job.name),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=shared | dict(os.environ),
            start_new_session=True,
        )


def _finish(sitting: _Sitting, process: subprocess.Popen, results: Results) -> None:
    job, began = sitting.running.pop(process)
    wall = time.monotonic() - began
    body = gather(job, sitting.out / job.name, process.returncode)
    if body is None:
        sitting.failed.append(job)
        log = log_of(sitting.out, job)
        say(f"{_clock(sitting)} FAILED: {job.name} ({job.shown}), exit {process.returncode}: {last_line(log)}")
        return
    sitting.walls.append(wall)
    results.add(job.experiment, job, body | {"wall_seconds": round(wall, 1)})
    found = [f"{FIGURES[name].head} {value:.3f}" for name, value in measured(body, SAID).items()]
    say(f"{_clock(sitting)} done in {duration(wall)}: {job.shown}: internal: {', '.join(found)}")


def log_of(out: Path, job: Job) -> Path:
    return out / f"{job.name}.log"


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").replace("\r", "\n").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "nothing said"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _clock(sitting: _Sitting) -> str:
    return f"{sitting.now:6.0f} s"
