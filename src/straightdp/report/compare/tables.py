"""Comparisons as tables of words: the same cells for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from straightdp.report import words
from straightdp.report.compare.facts import CAPTIONS, MOMENTS, OWN, REAL, Measure
from straightdp.report.compare.groups import Group, Spread, together

WHAT = ("accuracy", "distance", "precision", "recall", "per-class distance", "label consistency", "domain rate")
DISTANCES = ("distance", "per-class distance")
ALONE = "not known"


@dataclass(frozen=True)
class Table:
    """A head and rows of cells; the columns in `words` are words, the others figures."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[int]


def privacy_table(groups: Sequence[Group]) -> Table:
    head = ("Compared", "ε", "δ", "Releasable", "Runs", "Synthetic records")
    rows = [
        (
            group.name,
            words.cost(group.epsilon),
            words.number(group.delta),
            "yes" if group.releasable else "NO",
            words.count(len(group.runs)),
            " to ".join(words.count(n) for n in sorted({min(sizes), max(sizes)})),
        )
        for group in groups
        for sizes in [[run.n_synthetic for run in group.runs]]
    ]
    return Table(head, tuple(rows), frozenset({0, 3}))


def settings_table(groups: Sequence[Group]) -> Table:
    """Every setting in which the recipes differ, whether or not it is part of a group's name, and the folders."""
    keys = list(dict.fromkeys(key for group in groups for key in group.settings))
    rows = [
        (
            group.name,
            *(group.settings.get(key, ALONE) for key in keys),
            ", ".join(run.name for run in group.runs),
        )
        for group in groups
    ]
    return Table(("Compared", *keys, "Folders"), tuple(rows), frozenset(range(len(keys) + 2)))


def measured_table(groups: Sequence[Group]) -> Table | None:
    """What was measured against private records, a column a figure; None when nothing was."""
    return _figures(groups, [m for m in measures(groups) if not _reference(m)])


def reference_table(groups: Sequence[Group]) -> Table | None:
    """The same figures of what the synthetic data may be held against."""
    return _figures(groups, [m for m in measures(groups) if _reference(m)])


def _figures(groups: Sequence[Group], found: Sequence[Measure]) -> Table | None:
    rows = [
        (group.name, *(cell(m, group.spread(m), len(group.runs)) for m in found))
        for group in groups
        if any(group.spread(m) for m in found)
    ]
    head = ("Compared", *(heading(m, measures(groups)) for m in found))
    return Table(head, tuple(rows), frozenset({0})) if found else None


def measures(groups: Sequence[Group]) -> list[Measure]:
    """Every kind of figure there is, in the order in which it is shown."""
    found = {m for group in groups for run in group.runs for m in run.measured or ()}
    order = [MOMENTS, *REAL]

    def place(m: Measure) -> tuple:
        on = order.index(m.on) if m.on in order else m.on != OWN
        return WHAT.index(m.what), on, m.by != "LeNet", m.by, m.digest, m.on

    return sorted(found, key=place)


def _reference(m: Measure) -> bool:
    return m.on in (MOMENTS, *REAL)


def heading(m: Measure, among: Sequence[Measure]) -> str:
    """A column's name. Features of one name but other weights are told apart."""
    by = m.by
    if len({one.digest for one in among if one.by == m.by}) > 1:
        by += f" {m.digest[:8] or 'without digest'}"
    if m.on.startswith(CAPTIONS):
        return f"{m.on[0].upper()}{m.on[1:]}, {by}"
    what = {"distance": by, "per-class distance": f"{by} per class"}.get(m.what)
    what = what or (f"{m.what}, {by}" if by else m.what)
    text = what if m.on == OWN else f"{m.on}: {what}"
    return text[0].upper() + text[1:]


def cell(m: Measure, spread: Spread | None, runs: int) -> str:
    """The mean, with ± over runs when there are several, and how many when not all of them have the figure."""
    if spread is None:
        return "–"
    if m.what in DISTANCES:
        text = words.number(spread.mean) + ("" if spread.std is None else f" ± {words.number(spread.std, 2)}")
    elif spread.std is None:
        text = words.percent(spread.mean)
    else:
        text = f"{100 * spread.mean:.1f} ± {100 * spread.std:.1f}{words.NBSP}%"
    return text if spread.n == runs else f"{text} ({spread.n} of {runs} runs)"


# --- in sentences -----------------------------------------------------------------------------------------


def cautions(groups: Sequence[Group]) -> list[str]:
    """What publishing more than one of these costs, as far as it is known."""
    runs = [run for group in groups for run in group.runs]
    said = []
    for name, members, epsilon, delta in together(groups):
        n, otherwise = len(members), ", had each been releasable" if any(run.reasons for run in members) else ""
        which = "All of these runs" if n == len(runs) else f"{n} of these {len(runs)} runs"
        said.append(
            f"{which} use {f'private {name}' if name else 'the same private set'}, by their recipes, and what they "
            f"cost adds up: publishing all {n} spends ε = {words.cost(epsilon)} at δ = {words.cost(delta)}{otherwise}."
        )
    alone = [run.name for run in runs if run.recipe is None]
    if alone and len(runs) > 1:
        said.append(
            f"Which private set a release alone comes from ({', '.join(alone)}) is not known here; where it is that "
            "of another run, their costs add up too."
        )
    if len(runs) > 1:
        said.append(
            "Picking one run because of a figure that was measured on private records uses those records once "
            "more, and no ε here covers that."
        )
    return said


def left_out(groups: Sequence[Group]) -> list[str]:
    """What is not in the tables, and why; and what a reader should know of a single run."""
    said = []
    for run in (run for group in groups for run in group.runs):
        if run.recipe is None:
            said.append(f"{run.name}: its release alone was given, so its settings and internal figures are left out.")
        said += [f"{run.name}: not releasable: {reason}" for reason in run.reasons]
        said += [f"{run.name}: {note}." for note in run.notes]
    return said


def unmeasured(groups: Sequence[Group]) -> list[str]:
    """Runs with a recipe but without figures. Internal: it tells what there is in private/."""
    runs = [run for group in groups for run in group.runs if run.recipe is not None and not run.measured]
    return [
        f"{run.name}: nothing was measured; `straightdp evaluate` does so where records are held out." for run in runs
    ]
