"""docs/results.md with its pictures, and the README's table, from experiments/results and the words in *.md.jinja:

python experiments/results_page.py

No figure that is kept in results/ is typed into the words: they are filled in, so that the pages follow the results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from sd3_prior import given

from straightdp.audits import findings
from straightdp.files import write_durably
from straightdp.reproduce import plots
from straightdp.reproduce.experiment import read
from straightdp.reproduce.figures import INTERNAL
from straightdp.reproduce.notes import LEGEND, Origin, extent, origins_of
from straightdp.reproduce.render import markdown_picture, markdown_table
from straightdp.reproduce.results import Results
from straightdp.reproduce.tables import Cell, Line, Table, compared, tables_of

HERE = Path(__file__).parent
README_TABLE = ("<!-- made by experiments/results_page.py -->\n", "<!-- made so far -->\n")
GIVEN = given("runs/prior")  # to tables of a frozen model


class Page:
    """What the words may ask for. Pictures that they ask for are drawn on the way."""

    def __init__(self, folder: Path):
        self.folder, self.results = folder, Results(folder)
        self.pictures: dict[str, bytes] = {}

    def table(self, name: str) -> str:
        """An experiment's tables with their note and runs; of a panel that nothing was measured of, its name alone.
        A file of experiments/ is called by its name with .toml."""
        experiment = read(str(HERE / name) if name.endswith(".toml") else name)
        shared = (self.results, (), GIVEN)
        parts, origins = [], []
        for panel, table in zip(experiment.panels, tables_of(experiment, *shared), strict=True):
            found = origins_of(experiment, panel, *shared)
            origins += found
            parts += [f"**{table.title}**"] if table.title and found else []
            parts.append(markdown_table(table) if found else f"{table.title or 'All of it'}: not yet.")
        parts += [" ".join(part for part in (experiment.note, INTERNAL if origins else "") if part)]
        return "\n\n".join(
            [*parts, folded(f"{extent(experiment, origins)} Commits and devices:", runs(origins))] if origins else parts
        )

    def picture(self, name: str) -> str:
        """Nothing of an experiment that has nothing to show."""
        found = plots.draw(read(name), self.results, (), GIVEN)
        files = [f"{name}{f'-{k}' if k else ''}.svg" for k in range(len(found))]
        self.pictures |= {file: picture.data for file, picture in zip(files, found, strict=True)}
        return "\n\n".join(markdown_picture(file, one.alt) for file, one in zip(files, found, strict=True))

    def kept(self, name: str) -> dict:
        """A file of results of another shape."""
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))

    def rows(self, name: str) -> dict:
        """The results of a file by the row that asked for them."""
        return {body["row"].partition(": ")[2]: body for body in self.kept(name).values()}

    def took(self, name: str, setting: str, stages: Sequence[str]) -> str:
        """From the least to the most seconds of these stages, of a file's runs with that setting on a GPU."""
        runs = (run for run in self.kept(name).values() if setting in run["settings"] and "CPU" not in run["device"])
        seconds = [sum(run["seconds"][stage] for stage in stages) for run in runs]
        return f"{min(seconds):.0f} to {max(seconds):.0f}"


def runs(origins: Sequence[Origin]) -> str:
    """Which commit and device each row, budget and seed is of."""
    seeds: dict[tuple[str, str, str, float], list[int]] = {}
    for one in origins:
        seeds.setdefault((one.commit, one.device, one.row, one.epsilon), []).append(one.seed)
    budgets: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    for (commit, device, row, epsilon), found in seeds.items():
        told = f"seed{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
        budgets.setdefault((commit, device), {}).setdefault((row, told), []).append(f"{epsilon:g}")
    lines = []
    for (commit, device), rows in budgets.items():
        told = (f"{row}, ε = {', '.join(epsilons)}, {seed}" for (row, seed), epsilons in rows.items())
        lines.append(Line(f"commit {commit}", (Cell(device), Cell("; ".join(told)))))
    return markdown_table(Table("", ("device", "runs"), tuple(lines)))


def folded(head: str, body: str) -> str:
    return f"<details><summary>{head}</summary>\n\n{body}\n\n</details>"


def said(values: Iterable[float]) -> str:
    """The mean over seeds, and their spread."""
    return compared(list(values), "", 3).ours


def attacks(runs: dict[str, dict]) -> str:
    """An audit's own table, of what is kept of its runs."""
    return findings.table({name: findings.Findings.read(run) for name, run in runs.items()})


def filled(words: str, asked: Page) -> str:
    """A page's words with their figures."""
    made = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    asked_for = (asked.table, asked.picture, asked.kept, asked.rows, asked.took)
    methods = {method.__name__: method for method in (*asked_for, folded, said, attacks)}
    template = made.from_string((HERE / words).read_text(encoding="utf-8"))
    return template.render(methods | {"INTERNAL": INTERNAL, "LEGEND": LEGEND})


def page(folder: Path) -> dict[str, bytes]:
    """The files of docs/, by name."""
    asked = Page(folder)
    return {"results.md": filled("results_page.md.jinja", asked).encode()} | asked.pictures


def readme(folder: Path, before: str) -> str:
    """The README with its table of figures made anew."""
    first, last = README_TABLE
    head, _, rest = before.partition(first)
    return head + first + filled("readme_table.md.jinja", Page(folder)) + last + rest.partition(last)[2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs")
    options = parser.parse_args()
    written = {options.out / name: data for name, data in page(options.results).items()}
    front = options.out.parent / "README.md"
    if front.exists() and README_TABLE[0] in (before := front.read_text(encoding="utf-8")):
        written[front] = readme(options.results, before).encode()
    for path, data in written.items():
        write_durably(path, data)
        print(path)
