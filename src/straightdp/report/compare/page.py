"""The comparison as one standalone page. Guarantee: the public edition is rendered from runs that carry nothing
private, and the internal edition is the same page plus elements marked `data-edition="private"`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from straightdp import __version__
from straightdp.report import pictures, words
from straightdp.report.compare import charts, tables
from straightdp.report.compare.charts import Axis, Point, Series
from straightdp.report.compare.facts import CLASSES, MOMENTS, OWN, REAL, Measure, Run, sample_pictures
from straightdp.report.compare.groups import PRIVATE, Group, grouped
from straightdp.report.page import environment
from straightdp.report.pictures import Sheet

PICTURE_BYTES = 1_300_000


def render(runs: Sequence[Run], *, internal: bool) -> str:
    """The page as HTML text that loads and runs nothing."""
    groups = grouped(runs if internal else [run.published() for run in runs])
    template = environment().get_template("compare.html")
    return template.render(
        w=words,
        version=__version__,
        n_runs=len(runs),
        privacy=tables.privacy_table(groups),
        settings=tables.settings_table(groups),
        cautions=tables.cautions(groups),
        notes=tables.left_out(groups),
        gallery=_gallery(groups),
        private=_private_view(groups) if internal else None,
    )


# --- pictures ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gallery:
    """For each run its group, its name, the width of its widest sheet, and (class, sheet or None) for each class."""

    runs: tuple[tuple[str, str, int, tuple[tuple[str, Sheet | None], ...]], ...]
    limits: str
    missing: tuple[str, ...]


def _gallery(groups: Sequence[Group]) -> Gallery:
    members = [(group, run) for group in groups for run in group.runs]
    shared = [name for name in members[0][1].classes if all(name in run.classes for _, run in members)]
    found = [sample_pictures(run, tuple(shared or run.classes)[:CLASSES]) for _, run in members]
    plan = pictures.plan(found, PICTURE_BYTES)
    shown, missing = [], []
    for (group, run), classes in zip(members, found, strict=True):
        rows = tuple((one.label, pictures.sheet(one, "synthetic", plan)) for one in classes[: plan.classes])
        width = max((sheet.width for _, sheet in rows if sheet is not None), default=0)
        shown += [(group.name, run.name, width, rows)] if width else []
        missing += [] if width else [run.name]
    limits = f"The first {words.plural(plan.classes, 'class', 'classes')} are shown, "
    limits += f"and the first {words.plural(plan.each, 'picture', 'pictures')} of each."
    return Gallery(tuple(shown), limits, tuple(missing))


# --- what the internal edition shows ----------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One chart under its heading."""

    heading: str
    chart: Markup


def _private_view(groups: Sequence[Group]) -> dict[str, Any]:
    found = tables.measures(groups)
    lines = list(dict.fromkeys(group.series for group in groups if any(group.spread(m) for m in found)))
    mine = [m for m in found if m.on == OWN]
    accuracies = [m for m in mine if m.what == "accuracy"]
    distances = [m for m in mine if m.what == "distance"]
    sizes = sorted({run.holdout_n for group in groups for run in group.runs if run.measured})
    pairs = [(a, d) for a in accuracies for d in distances]
    return {
        "table": tables.measured_table(groups),
        "references": tables.reference_table(groups),
        "holdout": " to ".join(words.count(n) for n in dict.fromkeys((sizes[0], sizes[-1]))) if sizes else "0",
        "unmeasured": tables.unmeasured(groups),
        "legend": [(charts.marker(k), line) for k, line in enumerate(lines)],
        "marks": any(replace(m, on=MOMENTS) in found for m in accuracies + distances),
        "against_epsilon": [
            figure
            for k, m in enumerate(accuracies + distances)
            if (figure := _against_epsilon(k, m, found, groups, lines))
        ],
        "tradeoff": [figure for k, (a, d) in enumerate(pairs) if (figure := _tradeoff(k, a, d, found, groups, lines))],
    }


def _against_epsilon(
    k: int, m: Measure, found: Sequence[Measure], groups: Sequence[Group], lines: list[str]
) -> Figure | None:
    """A figure over ε, for the groups that have it; an ε of zero or infinity has no place on the axis."""
    reference = replace(m, on=MOMENTS)
    series, said = [], []
    for line in lines:
        points, marks = [], []
        for group in groups:
            spread = group.spread(m)
            if group.series != line or spread is None or not 0 < group.epsilon < math.inf:
                continue
            points.append(Point(group.epsilon, spread.mean, None, spread.std))
            said.append(f"{group.name}, ε = {words.cost(group.epsilon)}: {tables.cell(m, spread, len(group.runs))}")
            if alone := group.spread(reference):
                marks.append((group.epsilon, alone.mean))
        series.append(Series(tuple(points), tuple(marks)))
    if not said:
        return None
    real = _real(m, groups)
    said += [name for _, name in real]
    heading = f"{tables.heading(m, found)} against ε"
    axis = Axis("ε (logarithmic)", words.number, log=True)
    return Figure(
        heading, charts.points(f"eps{k}", series, axis, _axis(m, found), heading, "; ".join(said) + ".", real)
    )


def _tradeoff(
    k: int, a: Measure, d: Measure, found: Sequence[Measure], groups: Sequence[Group], lines: list[str]
) -> Figure | None:
    """Accuracy over distance, for the groups that have both."""
    series, said = [], []
    for line in lines:
        points = []
        for group in groups:
            y, x = group.spread(a), group.spread(d)
            if group.series == line and x and y:
                label = f"ε = {words.cost(group.epsilon)}"
                points.append(Point(x.mean, y.mean, x.std, y.std, label))
                texts = (tables.cell(m, s, len(group.runs)) for m, s in ((a, y), (d, x)))
                said.append(f"{group.name}, {label}: {' at '.join(texts)}")
        series.append(Series(tuple(points)))
    if not said:
        return None
    heading = f"{tables.heading(a, found)}, against {tables.heading(d, found)}"
    axes = _axis(d, found), _axis(a, found)
    return Figure(heading, charts.points(f"trade{k}", series, *axes, heading, "; ".join(said) + "."))


def _axis(m: Measure, found: Sequence[Measure]) -> Axis:
    if m.what == "accuracy":
        return Axis(tables.heading(m, found), lambda v: f"{round(100 * v, 6):g}{words.NBSP}%", low=0.0, high=1.0)
    return Axis(tables.heading(m, found), lambda v: words.number(v, 3), low=0.0)


def _real(m: Measure, groups: Sequence[Group]) -> list[tuple[float, str]]:
    """The same figure of real private records, one line for each private set that is compared."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for on in REAL:
            for run in group.runs:
                if run.measured and replace(m, on=on) in run.measured:
                    name = ", ".join(part for part in (on, group.settings.get(PRIVATE)) if part)
                    values.setdefault(name, []).append(run.measured[replace(m, on=on)])
    means = {name: statistics.fmean(some) for name, some in values.items()}
    return [(mean, f"{name}: {_axis(m, ()).say(round(mean, 3))}") for name, mean in means.items()]
