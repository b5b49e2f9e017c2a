"""The table of an experiment's panel: each figure's mean and spread over seeds, the paper's value, the difference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from straightdp.reproduce.experiment import Experiment, Panel, Row
from straightdp.reproduce.figures import FIGURES, PUBLIC, features_of
from straightdp.reproduce.jobs import Given, job_of
from straightdp.reproduce.results import Results

NOTHING = "not yet"


@dataclass(frozen=True)
class Cell:
    ours: str = ""
    paper: str = ""
    difference: str = ""

    def __str__(self) -> str:
        beside = "; ".join(part for part in (self.paper, self.difference) if part)
        return f"{self.ours} ({beside})" if beside else self.ours


@dataclass(frozen=True)
class Line:
    name: str
    cells: tuple[Cell, ...]
    block: str = ""


@dataclass(frozen=True)
class Table:
    """`groups` are the heads above the heads, each with how many it stands above; none where there is one row."""

    title: str
    heads: tuple[str, ...]
    lines: tuple[Line, ...]
    groups: tuple[tuple[str, int], ...] = ()


Values = dict[tuple[float, str], list[float]]
"""What the seeds measured, by budget and figure."""
Bodies = dict[float, dict[int, dict]]
"""Results by budget and seed."""


def tables_of(experiment: Experiment, results: Results, seeds: Sequence[int], given: Given) -> list[Table]:
    """A table for each panel, of the seeds that are named and those of the file."""
    return [_table(experiment, panel, results, seeds, given) for panel in experiment.panels]


def _table(experiment: Experiment, panel: Panel, results: Results, seeds: Sequence[int], given: Given) -> Table:
    values: dict[str, Values] = {}
    features: set[str] = set()
    for row in panel.rows:
        bodies = bodies_of(experiment, panel, row, results, seeds, given)
        values[row.name] = {(e, f): values_of(row, f, found) for e, found in bodies.items() for f in panel.figures}
        features |= features_in(bodies)
    heads = [head_of(figure, features) for figure in panel.figures]
    lines = tuple(_line(panel, row, values) for row in panel.rows)
    if not panel.epsilons:
        return Table(panel.title, ("ε", *heads), lines)
    if len(panel.epsilons) == 1:
        title = ", ".join(part for part in (panel.title, f"ε = {panel.epsilons[0]:g}") if part)
        return Table(title, tuple(heads), lines)
    groups = tuple((f"ε = {epsilon:g}", len(heads)) for epsilon in panel.epsilons)
    return Table(panel.title, tuple(heads) * len(panel.epsilons), lines, groups)


def bodies_of(
    experiment: Experiment, panel: Panel, row: Row, results: Results, seeds: Sequence[int], given: Given
) -> Bodies:
    """The row's results: those that are there, of the file's seeds and those that are named. None of a ratio."""
    if row.ratio is not None:
        return {}
    every = tuple(dict.fromkeys((*(panel.seeds or experiment.seeds), *seeds)))
    found: Bodies = {}
    for epsilon in panel.budgets(row):
        jobs = {seed: job_of(experiment, panel, row, epsilon, seed, given) for seed in every}
        bodies = {seed: results.find(job, panel.figures, row.of) for seed, job in jobs.items()}
        found[epsilon] = {seed: body for seed, body in bodies.items() if body is not None}
    return found


def values_of(row: Row, figure: str, found: dict[int, dict]) -> list[float]:
    """What the seeds measured of a figure."""
    return [value for body in found.values() if (value := FIGURES[figure].of(body, row.of)) is not None]


def features_in(bodies: Bodies) -> set[str]:
    return {name for found in bodies.values() for body in found.values() if (name := features_of(body))}


def head_of(figure: str, features: set[str]) -> str:
    """Distances are named by the features they were taken in: the paper's FID may be another one."""
    head = FIGURES[figure].head
    if figure not in ("distance", "per_class") or len(features) != 1:
        return head
    (name,) = features
    return name if figure == "distance" else f"per-class {name}"


def _line(panel: Panel, row: Row, values: dict[str, Values]) -> Line:
    cells = []
    for k, epsilon in enumerate(panel.budgets(row)):
        for figure in panel.figures:
            paper = row.paper[figure][k] if figure in row.paper else ""
            if row.ratio is None:
                cells.append(compared(values[row.name][epsilon, figure], paper, FIGURES[figure].digits))
            else:
                above, below = (values[name][epsilon, figure] for name in row.ratio)
                cells.append(Cell(f"{mean(above) / mean(below):.2f} ×" if above and any(below) else NOTHING, paper))
    if not panel.epsilons:
        cells.insert(0, Cell(_spent(row)))
    return Line(row.name, tuple(cells), row.block)


def _spent(row: Row) -> str:
    if row.of == PUBLIC or row.ratio is not None:
        return "0" if row.of == PUBLIC else ""
    return f"{row.epsilon:g}" if row.runs().noise else "∞"


def compared(values: Sequence[float], paper: str, digits: int) -> Cell:
    """The mean and spread over seeds, and how far the mean is from the paper's."""
    if not values:
        return Cell(NOTHING, paper)
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    theirs = number(paper)
    difference = "" if theirs is None else f"{mean(values) - theirs:+.{digits}f}".replace("-", "−")
    return Cell(f"{mean(values):.{digits}f}{spread}", paper, difference)


def number(paper: str) -> float | None:
    """The mean that the paper prints, if it prints one."""
    found = re.fullmatch(r"([-−+]?\d+(?:\.\d+)?)(?: ± .*)?", paper)
    return float(found[1].replace("−", "-")) if found else None
