"""`straightdp reproduce`: run what is missing of experiments, resume, and write their tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from straightdp.errors import BadInput
from straightdp.files import write_durably
from straightdp.progress import say
from straightdp.reproduce import plots, slurm
from straightdp.reproduce.experiment import Experiment, names, read
from straightdp.reproduce.grids import grids
from straightdp.reproduce.jobs import Given, Job, check_chosen, is_frozen, jobs_of
from straightdp.reproduce.notes import notes_of
from straightdp.reproduce.render import FORMATS
from straightdp.reproduce.results import Results, measured
from straightdp.reproduce.runner import Room, log_of, run_all
from straightdp.reproduce.tables import tables_of


def reproduce(options: argparse.Namespace) -> int:
    """0: every row that was asked for is there, or was stopped in time; 1: some failed."""
    if not options.names:
        print("\n".join(f"{name:<18}{read(name).title}" for name in names()))
        return 0
    experiments = [read(name) for name in options.names]
    if len({one.name for one in experiments}) < len(experiments):
        raise BadInput("an experiment was named twice; name each once")
    check_chosen(experiments, options.rows, options.epsilons, options.settings)
    if options.dry_run and options.model is None:
        options.model = "MODEL"
    given = _given(options)
    room = Room(options.processes, options.stop)
    results = Results(options.results or options.out / "private")
    jobs = _wanted(experiments, options, given, results)
    if options.dry_run:
        _say_plan(experiments, jobs, options)
    elif options.slurm is not None:
        _hand_over(jobs, options)
    else:
        failed = [] if options.print else run_all(jobs, options.out, results, room)
        for experiment in experiments:
            _show(experiment, results, options, given)
        for job in failed:
            say(f"failed: {job.shown}: see {log_of(options.out, job)}")
        return 1 if failed else 0
    return 0


def _given(options: argparse.Namespace) -> Given:
    named = {"sd3.model": options.model, "private.data": options.private}
    frozen = (f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None)
    return Given(tuple(options.settings), tuple(frozen))


def _wanted(
    experiments: Sequence[Experiment], options: argparse.Namespace, given: Given, results: Results
) -> list[Job]:
    """What has no result yet, each once. With `--again` also what lacks a figure that its table shows."""
    wanted: dict[str, Job] = {}
    for experiment in experiments:
        shown = {row.name: (panel.figures, row.of) for panel, row in experiment.rows()}
        for job in jobs_of(experiment, options.rows, options.epsilons, options.seeds, given):
            figures, of = shown[job.row]
            body = results.find(job, figures, of)
            if body is None or (options.again and len(measured(body, figures, of)) < len(figures)):
                wanted.setdefault(job.identity, job)
    return list(wanted.values())


def _say_plan(experiments: Sequence[Experiment], jobs: Sequence[Job], options: argparse.Namespace) -> None:
    print(f"{len(jobs)} to run in {options.out}")
    for job in jobs:
        print(f"  {job.name}  {job.shown}")
    asked = [row for one in experiments for _, row in one.rows() if not options.rows or row.name in options.rows]
    if frozen := [row.name for row in asked if row.ratio is None and is_frozen(row.runs().recipe)]:
        from straightdp.sd3 import estimates

        if known := [name for name in frozen if name in estimates.ROWS]:
            print("\nWhat each row needs with the real model, estimated:\n")
            print(estimates.table(estimates.estimate(known)))


def _hand_over(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    if not jobs:
        print("nothing to hand over: every row is there")
        return
    out = options.out.resolve()
    common = ["--out", str(out), *(["--results", str(options.results.resolve())] if options.results else [])]
    common += [word for key in ("model", "private") if (value := getattr(options, key)) for word in (f"--{key}", value)]
    common += [word for setting in options.settings for word in ("--set", setting)]
    common += ["--again"] if options.again else []
    sources = {read(name).name: str(Path(name).resolve()) if Path(name).is_file() else name for name in options.names}
    slurm.write(options.slurm, slurm.script(jobs, sources, common, out), out)
    said = slurm.submit(options.slurm) if options.submit else f"submit it with: sbatch {options.slurm}"
    print(f"{options.slurm}: {len(jobs)} rows; {said}")


def _show(experiment: Experiment, results: Results, options: argparse.Namespace, given: Given) -> None:
    """Print a table in the format that is asked for; unless that is all, write it in each, and its pictures."""
    shared = (experiment, results, options.seeds, given)
    parts = (experiment.title, tables_of(*shared), notes_of(*shared))
    print(FORMATS[options.format][1](*parts, ()))
    if options.print:
        return
    drawn = {"svg": plots.draw(*shared), "png": grids(experiment, options.out, given)}
    pictures = [
        (f"{experiment.name}.{k}.{ending}" if k else f"{experiment.name}.{ending}", picture)
        for ending, found in drawn.items()
        for k, picture in enumerate(found)
    ]
    files = {f"{experiment.name}.{ending}": write(*parts, pictures).encode() for ending, write in FORMATS.values()}
    files |= {name: picture.data for name, picture in pictures}
    results.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, data in files.items():
        write_durably(results.folder / name, data, mode=0o600)
    say(f"written: {', '.join(str(results.folder / name) for name in files)}")
