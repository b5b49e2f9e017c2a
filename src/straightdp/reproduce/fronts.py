"""One figure of a panel against another: what is better high over what is better low, a field for each budget.

Filled marks are ours and hollow ones the paper's, whose distance may be another one: those of a row are tied by a thin
line, and nothing is said across. A front joins the marks that no other one of its kind is better than in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import mean
from typing import TYPE_CHECKING

from straightdp.reproduce.experiment import Experiment, Panel
from straightdp.reproduce.figures import FIGURES, INTERNAL
from straightdp.reproduce.jobs import Given
from straightdp.reproduce.labels import place
from straightdp.reproduce.results import Results
from straightdp.reproduce.tables import bodies_of, features_in, head_of, number, values_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#4d4d4d", "#8a5a00", "#0b5fa5", "#b03a0a", "#0a7a50", "#7a3e9d")  # of families, dark enough for letters
WIDE, HIGH = 6.0, 4.2  # inches, a field's
PAPERS = {"distance": "FID", "per_class": "per-class FID"}  # what the paper calls its own
Place = tuple[float, float]
"""The low-is-better figure, then the high-is-better one."""


@dataclass(frozen=True)
class Mark:
    """A row at a budget, where it lies for us and in the paper; None where it was not measured, or is not printed."""

    row: str
    family: str
    epsilon: float
    ours: Place | None
    paper: Place | None


def marks_of(
    experiment: Experiment, panel: Panel, results: Results, seeds: Sequence[int], given: Given
) -> tuple[list[Mark], str]:
    """Those that lie somewhere, and what our low-is-better figure is called."""
    marks, features, family = [], set(), ""
    for row in panel.rows:
        family = row.block or family
        bodies = bodies_of(experiment, panel, row, results, seeds, given)
        features |= features_in(bodies)
        for k, (epsilon, found) in enumerate(bodies.items()):
            names = (panel.against, panel.plot[0])
            ours = [mean(values) if (values := values_of(row, name, found)) else None for name in names]
            theirs = [number(row.paper[name][k]) if name in row.paper else None for name in names]
            mark = Mark(row.name, family, epsilon, _place(ours), _place(theirs))
            marks += [mark] if mark.ours or mark.paper else []
    return marks, head_of(panel.against, features)


def _place(pair: Sequence[float | None]) -> Place | None:
    x, y = pair
    return None if x is None or y is None else (x, y)


def front(places: Iterable[Place]) -> list[Place]:
    """Those that no other one is as good as in both and better in one, from the lowest distance on."""
    best: list[Place] = []
    for x, y in sorted(set(places), key=lambda place: (place[0], -place[1])):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best


def alt(panel: Panel, marks: Sequence[Mark], distance: str) -> str:
    """What lies on each front, in words."""
    parts = [
        f"{FIGURES[panel.plot[0]].head.capitalize()} against distance, a field for each ε; filled marks are ours, at "
        f"their {distance}, hollow ones the paper's, at its {_papers(panel)}."
    ]
    for epsilon in panel.epsilons:
        here = [mark for mark in marks if mark.epsilon == epsilon]
        ours = {mark.ours: mark.row for mark in here if mark.ours}
        theirs = {mark.paper: mark.row for mark in here if mark.paper}
        for who, found in (("our", ours), ("the paper's", theirs)):
            names = (f"{found[at]} ({_said(panel, at)})" for at in front(found))
            parts.append(f"On {who} front at ε = {epsilon:g}: {', '.join(names) or 'nothing yet'}.")
    return " ".join(parts)


def told(panel: Panel, marks: Sequence[Mark]) -> str:
    """Every mark."""
    return " ".join(
        f"{mark.row}, ε = {mark.epsilon:g}: {_said(panel, mark.ours)}; the paper's {_said(panel, mark.paper)}."
        for mark in marks
    )


def _said(panel: Panel, at: Place | None) -> str:
    y, x = FIGURES[panel.plot[0]].digits, FIGURES[panel.against].digits
    return f"{at[1]:.{y}f} at {at[0]:.{x}f}" if at else "none"


def _papers(panel: Panel) -> str:
    return PAPERS.get(panel.against, FIGURES[panel.against].head)


def figure(panel: Panel, marks: Sequence[Mark], distance: str) -> Figure:
    from matplotlib.figure import Figure

    columns = min(2, len(panel.epsilons))
    rows = ceil(len(panel.epsilons) / columns)
    size = (WIDE * columns, HIGH * rows + 1.3)
    drawn = Figure(figsize=size)
    drawn.subplots_adjust(0.65 / size[0], 0.75 / size[1], 1 - 0.1 / size[0], 1 - 0.55 / size[1], 0.03, 0.04)
    fields = drawn.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    families = list(dict.fromkeys(mark.family for mark in marks))
    colours = {family: COLOURS[k % len(COLOURS)] for k, family in enumerate(families)}
    x = [at[0] for mark in marks for at in (mark.ours, mark.paper) if at]
    low, high = min(x) / 1.6, max(x) * 1.6
    ticks = [t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if 1.1 * low < t < high / 1.1]
    for axes, epsilon in zip(fields, panel.epsilons, strict=False):
        axes.set(xscale="log", xlim=(low, high), ylim=(-0.04, 1.04))
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
        axes.grid(color="#0001")
        axes.set_title(f"ε = {epsilon:g}", loc="right", fontsize=10, x=0.97, y=0.04)  # in the worst corner
        _field(axes, [mark for mark in marks if mark.epsilon == epsilon], colours)
    drawn.supylabel(f"{FIGURES[panel.plot[0]].head} (more is better)", fontsize=9, x=0.1 / size[0])
    drawn.supxlabel(
        f"{distance} of ours, {_papers(panel)} of the paper's: two distances, on one log scale (less is better)\n"
        f"{INTERNAL}",
        fontsize=9,
        y=0.1 / size[1],
    )
    _legend(drawn, colours)
    return drawn


def _field(axes: Axes, marks: Sequence[Mark], colours: dict[str, str]) -> None:
    for places, style in (([m.ours for m in marks], "-"), ([m.paper for m in marks], ":")):
        if best := front(at for at in places if at):
            axes.plot(*zip(*best, strict=True), ls=style, color="#999", lw=1.2, drawstyle="steps-post", zorder=1)
    for mark in marks:
        colour = colours[mark.family]
        if mark.ours and mark.paper:
            axes.plot(*zip(mark.ours, mark.paper, strict=True), color=colour, lw=0.6, alpha=0.45, zorder=2)
        if mark.paper:
            axes.plot(*mark.paper, "o", ms=5, mfc="white", mec=colour, mew=1.1, zorder=3)
        if mark.ours:
            axes.plot(*mark.ours, "o", ms=5.5, color=colour, zorder=4)
    first_ours = sorted(marks, key=lambda mark: mark.ours is None)
    labels = [(at, mark.row, colours[mark.family]) for mark in first_ours if (at := mark.ours or mark.paper)]
    place(axes, labels, [at for mark in marks for at in (mark.ours, mark.paper) if at])


def _legend(figure: Figure, colours: dict[str, str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, lw=4, label=family) for family, colour in colours.items()]
    handles += [
        Line2D([], [], marker="o", ls="", color="#444", label="ours"),
        Line2D([], [], marker="o", ls="", mfc="white", mec="#444", label="the paper's"),
        Line2D([], [], color="#999", label="our front"),
        Line2D([], [], color="#999", ls=":", label="the paper's front"),
    ]
    figure.legend(handles=handles, loc="upper center", ncols=4, fontsize=8, frameon=False)
