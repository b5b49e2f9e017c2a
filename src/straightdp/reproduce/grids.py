"""Sample grids: of each row and budget one image a class, from the runs whose folders are still there."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from straightdp.folder import NOT_PRIVATE, RELEASE, RunFolder
from straightdp.reproduce.experiment import Experiment, Panel
from straightdp.reproduce.jobs import Given, job_of
from straightdp.reproduce.render import Picture

if TYPE_CHECKING:
    from PIL.Image import Image

PINNED = "Internal: of runs whose noise was pinned or left out."
AT_MOST, SIDE, GAP = 10, 48, 8  # images of a run; pixels


def grids(experiment: Experiment, out: Path, given: Given) -> list[Picture]:
    """A PNG for each panel that asks for one; rows and budgets in their order, the first seed's images."""
    found = [(panel, _grid(_strips(experiment, panel, out, given))) for panel in experiment.panels if panel.grid]
    return [Picture(data, _alt(panel)) for panel, data in found if data is not None]


def _alt(panel: Panel) -> str:
    budgets = ", ".join(f"{epsilon:g}" for epsilon in panel.epsilons)
    across = f"; from left to right ε = {budgets}" if budgets else ""
    return f"Images of each run, one a class. From the top: {', '.join(panel.names())}{across}."


def _strips(experiment: Experiment, panel: Panel, out: Path, given: Given) -> list[list[list[Image]]]:
    seed = (panel.seeds or experiment.seeds)[0]
    rows = [row for row in panel.rows if row.ratio is None]
    jobs = [[job_of(experiment, panel, row, e, seed, given) for e in panel.budgets(row)] for row in rows]
    return [
        [
            first_of_each_class(RunFolder(out / job.name, RELEASE if job.noise else NOT_PRIVATE).synthetic)
            for job in line
        ]
        for line in jobs
    ]


def first_of_each_class(synthetic: Path) -> list[Image]:
    """In the classes' order; none of a run that is not there, or makes no images."""
    from PIL import Image

    table = synthetic / "metadata.csv"
    if not table.exists():
        return []
    with open(table, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    first = {row["label"]: row["file_name"] for row in reversed(rows)}
    return [Image.open(synthetic / first[label]).convert("RGB") for label in sorted(first)[:AT_MOST]]


def _grid(strips: list[list[list[Image]]]) -> bytes | None:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    images = max((len(strip) for line in strips for strip in line), default=0)
    if not images:
        return None
    wide, high = images * SIDE + GAP, SIDE + GAP
    canvas = Image.new("RGB", (max(map(len, strips)) * wide + GAP, len(strips) * high + GAP), "white")
    for i, line in enumerate(strips):
        for j, strip in enumerate(line):
            for k, picture in enumerate(strip):
                place = (GAP + j * wide + k * SIDE, GAP + i * high)
                canvas.paste(picture.resize((SIDE, SIDE), Image.Resampling.NEAREST), place)
    data, about = io.BytesIO(), PngInfo()
    about.add_text("Comment", PINNED)
    canvas.save(data, format="PNG", pnginfo=about)
    return data.getvalue()
