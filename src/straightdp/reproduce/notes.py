"""What stands below a table: how to read it, and which runs it is of, for it may mix several commits and devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from straightdp.reproduce.experiment import Experiment, Panel
from straightdp.reproduce.figures import INTERNAL
from straightdp.reproduce.jobs import Given
from straightdp.reproduce.results import Results, measured
from straightdp.reproduce.tables import bodies_of

LEGEND = "Ours (the paper's; difference), mean ± standard deviation over seeds; one seed where no ± stands."


@dataclass(frozen=True)
class Origin:
    """A run of which a table shows something."""

    row: str
    epsilon: float
    seed: int
    commit: str
    device: str


def origins_of(
    experiment: Experiment, panel: Panel, results: Results, seeds: Sequence[int], given: Given
) -> list[Origin]:
    return [
        Origin(row.name, epsilon, seed, body.get("commit", "unknown"), body.get("device", "unknown"))
        for row in panel.rows
        for epsilon, found in bodies_of(experiment, panel, row, results, seeds, given).items()
        for seed, body in found.items()
        if measured(body, panel.figures, row.of)
    ]


def notes_of(experiment: Experiment, results: Results, seeds: Sequence[int], given: Given) -> list[str]:
    set_for_all = f"Set for every run: {', '.join(given.settings)}." if given.settings else ""
    found = [o for panel in experiment.panels for o in origins_of(experiment, panel, results, seeds, given)]
    notes = (experiment.note, LEGEND, set_for_all, extent(experiment, found), places(found), INTERNAL)
    return [note for note in notes if note]


def extent(experiment: Experiment, origins: Sequence[Origin]) -> str:
    """How much of an experiment was measured, and with how many seeds."""
    wanted = sum(len(panel.budgets(row)) for panel, row in experiment.rows() if row.ratio is None)
    cells = Counter((one.row, one.epsilon) for one in origins)
    seeds = ", ".join(f"{count} with {n} seed{'s' * (n > 1)}" for n, count in sorted(Counter(cells.values()).items()))
    return f"Measured: {len(cells)} of {wanted} rows and budgets" + (f" ({seeds})." if seeds else ".")


def places(origins: Sequence[Origin]) -> str:
    """Which commits and devices the runs are of."""
    runs = Counter((one.commit, one.device) for one in origins)
    told = "; ".join(f"commit {commit}, {device} ({count})" for (commit, device), count in runs.items())
    return f"Runs of each commit and device: {told}." if told else ""
