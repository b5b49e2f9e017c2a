"""A panel's figures drawn over the budget, over what its rows vary, or one against another, as SVG.

Bands are a standard deviation over seeds, dotted lines the paper's values.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING

from straightdp.reproduce import fronts
from straightdp.reproduce.experiment import Experiment, Panel
from straightdp.reproduce.figures import FIGURES, INTERNAL
from straightdp.reproduce.jobs import Given
from straightdp.reproduce.render import Picture
from straightdp.reproduce.results import Results
from straightdp.reproduce.tables import bodies_of, number, values_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, float, float]
"""Where, the mean and the spread over seeds."""


def draw(experiment: Experiment, results: Results, seeds: Sequence[int], given: Given) -> list[Picture]:
    """One picture for each panel that asks for some and has something to show."""
    found = []
    for panel in experiment.panels:
        if panel.against:
            marks, distance = fronts.marks_of(experiment, panel, results, seeds, given)
            if any(mark.ours for mark in marks):
                drawn, alt = fronts.figure(panel, marks, distance), fronts.alt(panel, marks, distance)
                found.append(_saved(drawn, alt, fronts.told(panel, marks)))
            continue
        curves = {name: curves_of(experiment, panel, name, results, seeds, given) for name in panel.plot}
        if seen := {name: lines for name, lines in curves.items() if lines}:
            found.append(_saved(_figure(panel, seen), _alt(panel, seen)))
    return found


def curves_of(
    experiment: Experiment,
    panel: Panel,
    figure: str,
    results: Results,
    seeds: Sequence[int],
    given: Given,
) -> dict[str, list[Point]]:
    """Every row's points over epsilon; rows that are `at` something are the points of one curve."""
    curves: dict[str, list[Point]] = {}
    for row in panel.rows:
        for epsilon, found in bodies_of(experiment, panel, row, results, seeds, given).items():
            if values := values_of(row, figure, found):
                name, x = (row.name, epsilon) if row.at is None else (panel.title, row.at)
                spread = stdev(values) if len(values) > 1 else 0.0
                curves.setdefault(name, []).append((x, mean(values), spread))
    return {name: sorted(points) for name, points in curves.items()}


def _paper(panel: Panel, row_name: str, figure: str) -> list[tuple[float, float]]:
    """The paper's values of a row over epsilon, where it prints some."""
    printed = next((row.paper.get(figure, ()) for row in panel.rows if row.name == row_name), ())
    found = ((epsilon, number(value)) for epsilon, value in zip(panel.epsilons, printed, strict=False))
    return sorted((epsilon, value) for epsilon, value in found if value is not None)


def _over(panel: Panel) -> str:
    return "start time" if any(row.at is not None for row in panel.rows) else "ε"


def _figure(panel: Panel, curves: dict[str, dict[str, list[Point]]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(curves), 3.6), layout="constrained")
    for k, (name, lines) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(1, len(curves), k)
        for label, points in lines.items():
            x, y, spread = (list(column) for column in zip(*points, strict=True))
            (line,) = axes.plot(x, y, marker="o", label=label)
            low, high = ([a + sign * b for a, b in zip(y, spread, strict=True)] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, lw=0)
            if theirs := _paper(panel, label, name):
                axes.plot(*zip(*theirs, strict=True), ls=":", color=line.get_color())
        axes.set(xlabel=_over(panel), ylabel=FIGURES[name].head)
        if _over(panel) == "ε":
            axes.set_xscale("log")
            axes.set_xticks(panel.epsilons, [f"{epsilon:g}" for epsilon in panel.epsilons])
            axes.minorticks_off()
        axes.legend(fontsize=7)
    figure.supxlabel(INTERNAL, fontsize=7)
    return figure


def _alt(panel: Panel, curves: dict[str, dict[str, list[Point]]]) -> str:
    parts = []
    for name, lines in curves.items():
        head, digits = FIGURES[name].head, FIGURES[name].digits
        told = (
            f"{label}: " + ", ".join(f"{y:.{digits}f} at {x:g}" for x, y, _ in points)
            for label, points in lines.items()
        )
        parts.append(f"Lines of {head} over {_over(panel)}. {'; '.join(told)}.")
    return " ".join([*parts, "Dotted: the paper's."])


def _saved(figure: Figure, alt: str, told: str = "") -> Picture:
    """Letters stay text, a picture drawn twice is the same, and its description tells all that it shows."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    data = io.BytesIO()
    about = {"Date": None, "Description": " ".join(part for part in (alt, told, INTERNAL) if part)}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "straightdp"}):
        FigureCanvasSVG(figure).print_svg(data, metadata=about)
    return Picture(data.getvalue(), alt)
