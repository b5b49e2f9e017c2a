"""Which runs are seeds of one recipe, what tells the recipes apart, and what publishing all of them costs.

Guarantee: no private source's name leaves this file, and neither does the path of a public one.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from straightdp.recipe import Recipe
from straightdp.report.compare.facts import OWN, Measure, Run, plain

EPSILON = "privacy.epsilon"
SEEDS = {  # what may differ between runs that are repetitions of one another
    "run.seed",
    "run.title",
    "run.device",
    "run.compile",
    "privacy.pinned_key",
    "dpsgd.micro_batch",
    "dpsgd.checkpoint_every",
    "sample.batch",
}
PRIVATE = "private.data"
SOURCES = (PRIVATE, "private.holdout", "public.data")
SHORT = 40


@dataclass(frozen=True)
class Spread:
    """Mean of a figure over `n` runs, with the sample standard deviation when there are several."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one recipe but for its seed. `series` names what it shares with groups of another ε; `settings` are
    those in which recipes differ, empty for a release alone."""

    name: str
    series: str
    settings: dict[str, str]
    runs: tuple[Run, ...]

    @property
    def epsilon(self) -> float:
        return max(run.epsilon for run in self.runs)

    @property
    def delta(self) -> float:
        return max(run.delta for run in self.runs)

    @property
    def releasable(self) -> bool:
        return not any(run.reasons for run in self.runs)

    def spread(self, measure: Measure) -> Spread | None:
        values = [run.measured[measure] for run in self.runs if run.measured and measure in run.measured]
        if not values:
            return None
        return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def grouped(runs: Sequence[Run]) -> tuple[Group, ...]:
    """One group a recipe, by series and then by ε; a release alone is a group of its own and comes last."""
    known = [run for run in runs if run.recipe is not None]
    rows = _settings([run.recipe for run in known if run.recipe is not None])
    alike: dict[tuple, list[Run]] = {}
    for run, row in zip(known, rows, strict=True):
        alike.setdefault(tuple(row.items()), []).append(run)
    distinct = [dict(key) for key in alike]
    differ = _differing(distinct)
    lines = [name or OWN for name in _named([{key: row[key] for key in row if key != EPSILON} for row in distinct])]
    groups = [
        Group(name or _folders(members), line, {_bare(key, row): row[key] for key in differ}, tuple(members))
        for name, line, row, members in zip(_named(distinct), lines, distinct, alike.values(), strict=True)
    ]
    groups.sort(key=lambda group: (lines.index(group.series), group.epsilon))
    for run in runs:
        if run.recipe is None:
            name = _fresh(run.name, [group.name for group in groups])
            groups.append(Group(name, name, {}, (run,)))
    return tuple(groups)


def together(groups: Sequence[Group]) -> list[tuple[str, tuple[Run, ...], float, float]]:
    """For each private set that two or more runs' recipes name: what it is called when there are several (else ""),
    those runs, and the (ε, δ) of all of them, which add up.

    Going by the name keeps what the records are out of it; a set that has two names is taken for two.
    """
    by_set: dict[str, list[Run]] = {}
    for group in groups:
        by_set.setdefault(group.settings.get(PRIVATE, ""), []).extend(r for r in group.runs if r.recipe is not None)
    return [
        (name, tuple(runs), _sum(run.epsilon for run in runs), _sum(run.delta for run in runs))
        for name, runs in by_set.items()
        if len(runs) > 1
    ]


def _sum(values: Iterable[float]) -> float:
    """As one would add them on paper: thirteen times 0.00001 is 0.00013, so rounding up leaves it alone."""
    return float(sum(Decimal(repr(value)) for value in values))


def _settings(recipes: Sequence[Recipe]) -> list[dict[str, str]]:
    """Every recipe as section.key -> text, without what repetitions may differ in. Sources are told apart, but a
    path is not shown: it says where somebody's files lie, and a private one may say whose."""
    rows: list[dict[str, Any]] = []
    for recipe in recipes:
        tree = recipe.model_dump(mode="json")
        rows.append({f"{section}.{key}": value for section, body in tree.items() for key, value in body.items()})
    for key in SOURCES:
        sources = list(dict.fromkeys(source for row in rows for source in _sources(row[key])))
        said = [Path(source).name for source in sources]
        if key != "public.data" or len(set(said)) < len(said):
            said = [f"set {k}" for k in range(1, len(sources) + 1)]
        names = dict(zip(sources, said, strict=True))
        for row in rows:
            row[key] = ", ".join(names[source] for source in _sources(row[key])) or row[key]
    return [{key: _text(value) for key, value in row.items() if key not in SEEDS} for row in rows]


def _sources(value: Any) -> list[str]:
    """Those that a setting names; one that is a fraction names none."""
    return [value] if isinstance(value, str) else value if isinstance(value, list) else []


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return "none" if value is None else plain(value)
    return repr(value).removesuffix(".0") if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _differing(rows: Sequence[dict[str, str]]) -> list[str]:
    return [key for key in (rows[0] if rows else ()) if len({row[key] for row in rows}) > 1]


def _named(rows: Sequence[dict[str, str]]) -> list[str]:
    """Each row by the keys that tell the rows apart: of those that differ none can be left out, and ε never is."""
    keys = _differing(rows)
    count = len({tuple(row.items()) for row in rows})
    for key in reversed(keys):
        fewer = [k for k in keys if k != key]
        if key != EPSILON and len({tuple(row[k] for k in fewer) for row in rows}) == count:
            keys = fewer
    names: dict[tuple, str] = {}
    for row in rows:
        if tuple(row.items()) not in names:
            name = ", ".join(f"{_bare(key, row)}={_cut(row[key])}" for key in keys)
            names[tuple(row.items())] = _fresh(name, list(names.values()))
    return [names[tuple(row.items())] for row in rows]


def _bare(key: str, keys: Iterable[str]) -> str:
    """A setting's name without its section, where no other section has one of that name."""
    last = key.partition(".")[2]
    return last if sum(k.partition(".")[2] == last for k in keys) == 1 else key


def _cut(text: str) -> str:
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


def _folders(members: Sequence[Run]) -> str:
    return members[0].name + (f" and {len(members) - 1} more" if len(members) > 1 else "")


def _fresh(name: str, taken: Sequence[str]) -> str:
    """The name, with a number when it is taken."""
    numbered = (name if k == 1 else f"{name} ({k})" for k in itertools.count(1))
    return next(one for one in numbered if one not in taken)
