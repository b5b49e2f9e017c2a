"""Runs side by side: a table for the terminal, and two editions of one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from straightdp.errors import BadInput
from straightdp.files import write_durably, write_text
from straightdp.report.compare import tables
from straightdp.report.compare.facts import Run, read_run
from straightdp.report.compare.groups import grouped
from straightdp.report.compare.page import render
from straightdp.report.compare.tables import Table
from straightdp.report.words import NBSP

PAGE = "compare.html"


def compare(runs: Sequence[Path], out: Path) -> str:
    """Compare runs' folders, or release folders alone; returns the tables as Markdown that reads well as it is.

    Writes `out/compare.html` (internal, for its owner's eyes: mode 0600) and `out/public/compare.html`. Nothing is
    written before every run was found sound. A run that is given twice is refused: its cost would count twice.
    """
    if not runs:
        raise BadInput("there is nothing to compare; name one or more runs' folders")
    _check_out(out)
    found = [read_run(path) for path in runs]
    _refuse_twice(found, runs)
    inside, outside = render(found, internal=True), render(found, internal=False)
    (out / "public").mkdir(parents=True, exist_ok=True)
    write_durably(out / PAGE, inside.encode(), mode=0o600)
    write_text(out / "public" / PAGE, outside)
    return _text(found)


def _check_out(out: Path) -> None:
    """Only a new or empty folder or an earlier comparison's, and none that lies inside a release."""
    ours = {folder / name for folder in (out, out / "public") for name in (PAGE, f"{PAGE}.partial")}
    if out.exists() and (not out.is_dir() or any(not path.is_dir() and path not in ours for path in out.rglob("*"))):
        raise BadInput(f"{out} exists and is not an earlier comparison; give another --out")
    place = out.resolve()
    for folder in (place, *place.parents):
        if (folder / "transcript.jsonl").exists():
            raise BadInput(f"{out} lies inside {folder}, part of a run; the internal page must not: give another --out")


def _refuse_twice(found: Sequence[Run], paths: Sequence[Path]) -> None:
    seen: dict[str, Path] = {}
    for run, path in zip(found, paths, strict=True):
        if run.identity in seen:
            raise BadInput(f"{path} and {seen[run.identity]} are the same run; give it once")
        seen[run.identity] = path


def _text(runs: Sequence[Run]) -> str:
    groups = grouped(runs)
    parts = ["Privacy (ε recomputed from the transcripts and rounded up):", _markdown(tables.privacy_table(groups))]
    parts += _list(tables.cautions(groups) + tables.left_out(groups))
    parts += ["What differs:", _markdown(tables.settings_table(groups))]
    inside = [table for table in (tables.measured_table(groups), tables.reference_table(groups)) if table is not None]
    if inside:
        parts += ["Internal, not for publication: measured on private records without noise.", *map(_markdown, inside)]
    return "\n\n".join(parts + _list(tables.unmeasured(groups)))


def _list(sentences: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {sentence}" for sentence in sentences)] if sentences else []


def _markdown(table: Table) -> str:
    rows = [[cell.replace("|", "\\|").replace(NBSP, " ") for cell in row] for row in (table.head, *table.rows)]
    widths = [max(3, *(len(row[k]) for row in rows)) for k in range(len(table.head))]

    def line(cells: Sequence[str]) -> str:
        padded = (cells[k].ljust(w) if k in table.words else cells[k].rjust(w) for k, w in enumerate(widths))
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if k in table.words else "-" * (w - 1) + ":" for k, w in enumerate(widths)]
    return "\n".join([line(rows[0]), line(rule), *map(line, rows[1:])])
