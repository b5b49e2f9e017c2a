"""Replay: recompute epsilon from a transcript alone, or name the first line that is wrong.

A transcript is tied together by hashes, so a change, a dropped, repeated or moved line shows. What hashes cannot
show, because anyone can compute them anew, is checked for sense: every noise deviation against its multiplier and
sensitivity, the certificate against the declarations, every execution against what was declared, and the released
files against the hashes in the last line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from straightdp.errors import BadInput, BudgetRefused
from straightdp.folder import file_hash
from straightdp.privacy.accountant import ADJACENCY, Declaration, epsilon
from straightdp.privacy.ledger import VERSION, TranscriptError, read_chain

ORDER = ("header", "assumption", "declare", "certificate", "execute", "totals")
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Verdict:
    """`epsilon` is what was recomputed (nan when a line is wrong)."""

    holds: bool
    releasable: bool
    epsilon: float
    line: int | None
    text: str


def replay(path: Path) -> Verdict:
    """Check a release folder, a run's folder or a transcript file."""
    file = find_transcript(path)
    try:
        entries = read_chain(file.read_bytes())
        recomputed = check(entries, file.parent)
    except TranscriptError as error:
        return Verdict(False, False, math.nan, error.line, f"WRONG: {file.name} {error}")
    header = entries[0]
    text = (
        f"{file.name}: {len(entries)} lines hold. Recomputed epsilon = {recomputed:.6g} at delta = {header['delta']:g} "
        f"(budget {header['epsilon']:g}), {header['unit']}, {header['adjacency']}, N = {header['n']}."
    )
    if header["noise"] != "os":
        text += "\nNOT RELEASABLE: line 1 says the noise key was pinned, so whoever knows it can remove the noise."
        return Verdict(True, False, recomputed, 1, text)
    return Verdict(True, True, recomputed, None, text)


def find_transcript(path: Path) -> Path:
    for candidate in (path, path / "transcript.jsonl", path / "release" / "transcript.jsonl"):
        if candidate.is_file():
            return candidate
    raise BadInput(f"no transcript.jsonl was found at {path}; give a release folder or a transcript")


def check(entries: list[dict[str, Any]], folder: Path) -> float:
    """Everything but the hash chain. Returns the recomputed epsilon."""
    _order(entries)
    header = entries[0]
    if header.get("version") != VERSION or header.get("adjacency") != ADJACENCY:
        raise TranscriptError(1, "is of a version or an adjacency that this program does not know")
    declared = {}
    for entry in entries:
        if entry["kind"] == "declare":
            part = _declaration(entry)
            if part.id in declared:
                raise TranscriptError(entry["line"], f"declares {part.id} a second time")
            declared[part.id] = part
    certificate = next(entry for entry in entries if entry["kind"] == "certificate")
    line = certificate["line"]
    try:
        recomputed = epsilon(list(declared.values()), header["delta"], header["accountant"]["interval"])
    except (BudgetRefused, KeyError, TypeError, ValueError) as error:
        raise TranscriptError(line, f"certifies a workload that cannot be accounted ({error})") from None
    if abs(recomputed - certificate["epsilon"]) > TOLERANCE * max(1.0, recomputed):
        raise TranscriptError(
            line,
            f"certifies epsilon = {certificate['epsilon']:.6g}, the declarations above give {recomputed:.6g}",
        )
    if recomputed > header["epsilon"] * (1 + TOLERANCE):
        raise TranscriptError(line, f"certifies {recomputed:.6g}, more than the budget of {header['epsilon']:g}")
    _totals(entries[-1], _executions(entries, declared), recomputed, folder)
    return recomputed


def _order(entries: list[dict[str, Any]]) -> None:
    """header, assumptions, declarations, one certificate, executions, one totals line."""
    if not entries:
        raise TranscriptError(1, "is missing: the transcript is empty")
    place = 0
    for entry in entries:
        line, kind = entry["line"], entry.get("kind")
        if kind not in ORDER:
            raise TranscriptError(line, f"is of an unknown kind {kind!r}")
        if ORDER.index(kind) < place:
            raise TranscriptError(line, f"is a {kind} entry after a {ORDER[place]} entry")
        once = kind in ("header", "certificate", "totals") and ORDER.index(kind) == place and line != 1
        if once or (line == 1 and kind != "header"):
            raise TranscriptError(line, f"is a {kind} entry out of place")
        place = ORDER.index(kind)
    kinds = [entry["kind"] for entry in entries]
    for kind in ("certificate", "totals"):
        if kind not in kinds:
            raise TranscriptError(len(entries) + 1, f"is missing: there is no {kind} line, the run is not complete")


def _declaration(entry: dict[str, Any]) -> Declaration:
    body = dict(entry.get("mechanism", {}))
    try:
        std = body.pop("noise_std")
        part = Declaration(**body)
        wrong = not math.isclose(std, part.sigma * part.sensitivity, rel_tol=1e-9) or part.count < 0
    except (TypeError, KeyError, ValueError):
        raise TranscriptError(entry["line"], "declares something that is not a mechanism") from None
    if wrong:
        raise TranscriptError(entry["line"], f"declares {part.id} with noise that is not sigma x sensitivity")
    return part


def _executions(entries: list[dict[str, Any]], declared: dict[str, Declaration]) -> dict[str, int]:
    seen: set[tuple[str, int]] = set()
    for entry in entries:
        if entry["kind"] != "execute":
            continue
        id, step = entry.get("id"), entry.get("step")
        part = declared.get(id)  # type: ignore[arg-type]
        if part is None:
            raise TranscriptError(entry["line"], f"executes {id!r}, which was not declared")
        if not isinstance(step, int) or not 0 <= step < part.count:
            raise TranscriptError(entry["line"], f"executes step {step} of {id}, declared for {part.count}")
        if (part.id, step) in seen:
            raise TranscriptError(entry["line"], f"executes step {step} of {id} a second time")
        seen.add((part.id, step))
    return {id: sum(1 for name, _ in seen if name == id) for id in declared}


def _totals(entry: dict[str, Any], executed: dict[str, int], recomputed: float, folder: Path) -> None:
    line = entry["line"]
    if entry["executed"] != executed:
        raise TranscriptError(line, "counts other executions than the lines above")
    if abs(entry["epsilon"] - recomputed) > TOLERANCE * max(1.0, recomputed):
        raise TranscriptError(line, f"claims epsilon = {entry['epsilon']:.6g}, recomputed {recomputed:.6g}")
    for name, digest in entry["files"].items():
        path = folder / Path(name).name
        if path.exists() and file_hash(path) != digest:
            raise TranscriptError(line, f"names another {name} than the one beside the transcript")
