"""A panel's figures drawn over the budget, or over what its rows vary, as SVG.

Bands are a standard deviation over seeds, dotted lines the paper's values.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import mean, stdev

from straightdp.reproduce.experiment import Experiment, Panel
from straightdp.reproduce.figures import FIGURES, INTERNAL
from straightdp.reproduce.jobs import Given
from straightdp.reproduce.results import Results
from straightdp.reproduce.tables import bodies_of, number

Point = tuple[float, float, float]
"""Where, the mean and the spread over seeds."""


def draw(experiment: Experiment, results: Results, seeds: Sequence[int], given: Given) -> list[bytes]:
    """One picture for each panel that asks for some and has something to show."""
    found = []
    for panel in experiment.panels:
        curves = {name: curves_of(experiment, panel, name, results, seeds, given) for name in panel.plot}
        if seen := {name: lines for name, lines in curves.items() if lines}:
            found.append(_picture(panel, seen))
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
        if row.ratio is not None:
            continue
        for epsilon, bodies in bodies_of(experiment, panel, row, results, seeds, given).items():
            values = [v for body in bodies if (v := FIGURES[figure].of(body, row.of)) is not None]
            if values:
                name, x = (row.name, epsilon) if row.at is None else (panel.title, row.at)
                spread = stdev(values) if len(values) > 1 else 0.0
                curves.setdefault(name, []).append((x, mean(values), spread))
    return {name: sorted(points) for name, points in curves.items()}


def _paper(panel: Panel, row_name: str, figure: str) -> list[tuple[float, float]]:
    """The paper's values of a row over epsilon, where it prints some."""
    printed = next((row.paper.get(figure, ()) for row in panel.rows if row.name == row_name), ())
    found = ((epsilon, number(value)) for epsilon, value in zip(panel.epsilons, printed, strict=False))
    return sorted((epsilon, value) for epsilon, value in found if value is not None)


def _picture(panel: Panel, curves: dict[str, dict[str, list[Point]]]) -> bytes:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    over_rows = any(row.at is not None for row in panel.rows)
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
        axes.set(xlabel="start time" if over_rows else "ε", ylabel=FIGURES[name].head)
        if not over_rows:
            axes.set_xscale("log")
            axes.set_xticks(panel.epsilons, [f"{epsilon:g}" for epsilon in panel.epsilons])
            axes.minorticks_off()
        axes.legend(fontsize=7)
    figure.supxlabel(INTERNAL, fontsize=7)
    data = io.BytesIO()
    FigureCanvasSVG(figure).print_svg(data, metadata={"Date": None})
    return data.getvalue()
