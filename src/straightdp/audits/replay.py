"""Replay: recompute epsilon from a transcript alone, or name the first line that is wrong.

A transcript is tied together by hashes, so a changed, dropped, repeated or moved line shows. What hashes cannot
show, because anyone can compute them anew, is checked for sense: every line against a strict schema, every
mechanism against what the project knows of it, the certificate against the declarations, every execution against
what was declared, and the released files against the hashes in the last line. The synthetic set, the card and the
report follow from released values at no cost and are not hashed there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from straightdp.audits.schema import KINDS, Declare, Execute, Header, Totals, known, read_entry
from straightdp.errors import BadInput, BudgetRefused
from straightdp.files import file_hash
from straightdp.folder import KINDS as KINDS_OF_RUN
from straightdp.privacy.accountant import Declaration, epsilon
from straightdp.privacy.ledger import TranscriptError, read_chain
from straightdp.privacy.workload import GRADIENTS, bucket_id, bucket_steps

ORDER = tuple(KINDS)
TOLERANCE = 1e-6
MADE_BY = {
    "moments.safetensors": "release/",
    "elected.safetensors": "release/votes",
    "embedding.safetensors": "rival/embedding",
}  # what a mechanism's id begins with
HASHED = (*MADE_BY, "model.safetensors", "model.json")
UNHASHED = ("transcript.jsonl", "synthetic", "README.md", "model_card.md", "croissant.json", "report.html")
NOT_RELEASABLE = {
    "pinned": "the noise key was pinned, so whoever knows it can remove the noise",
    "audit": "canaries were planted: this is an audit, not a release",
    "leaky": "the noise is not what was declared: an audit's control, or a run without noise",
}
ASSUMED = {"N", "class list", "image range", "public data"}


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
        lines = [read_entry(k, entry) for k, entry in enumerate(read_chain(file.read_bytes()), start=1)]
        recomputed = check(lines)
        _files(lines[-1], file.parent)
    except TranscriptError as error:
        return Verdict(False, False, math.nan, error.line, f"WRONG: {file.name} {error}")
    header: Header = lines[0]
    text = (
        f"{file.name}: {len(lines)} lines hold. Recomputed epsilon = {recomputed:.6g} at delta = {header.delta:g} "
        f"(budget {header.epsilon:g}), {header.unit}, {header.adjacency}, N = {header.n}."
    )
    reasons = list(_why_not(header, lines[-1], file.parent))
    text += "".join(f"\nNOT RELEASABLE: {reason}" for reason in reasons)
    return Verdict(True, not reasons, recomputed, 1 if reasons else None, text)


def find_transcript(path: Path) -> Path:
    for candidate in (path, *(path / kind / "transcript.jsonl" for kind in ("", *KINDS_OF_RUN))):
        if candidate.is_file():
            return candidate
    raise BadInput(f"no transcript.jsonl was found at {path}; give a release folder or a transcript")


def check(lines: list[Any]) -> float:
    """Everything but the hash chain and the files. Returns the recomputed epsilon."""
    _order(lines)
    header: Header = lines[0]
    declared: dict[str, Declaration] = {}
    for entry in lines:
        if isinstance(entry, Declare):
            declared[entry.mechanism.id] = _declaration(entry, declared)
    certificate = next(entry for entry in lines if entry.kind == "certificate")
    _whole(certificate.line, declared)
    missing = ASSUMED - {entry.name for entry in lines if entry.kind == "assumption"}
    if missing:
        raise TranscriptError(certificate.line, f"certifies a run that does not say what it assumes of {min(missing)}")
    try:
        recomputed = epsilon(list(declared.values()), header.delta, header.accountant.interval)
    except (BudgetRefused, ArithmeticError, ValueError, MemoryError) as error:
        raise TranscriptError(certificate.line, f"certifies a workload that cannot be accounted ({error})") from None
    if abs(recomputed - certificate.epsilon) > TOLERANCE * max(1.0, recomputed):
        raise TranscriptError(
            certificate.line, f"certifies epsilon = {certificate.epsilon:.6g}, the declarations give {recomputed:.6g}"
        )
    if recomputed > header.epsilon * (1 + TOLERANCE):
        raise TranscriptError(certificate.line, f"certifies more than the budget of {header.epsilon:g}")
    _totals(lines[-1], _executions(lines, declared), declared, recomputed)
    return recomputed


def _order(lines: list[Any]) -> None:
    """header, assumptions, declarations, one certificate, executions, one totals line."""
    if not lines:
        raise TranscriptError(1, "is missing: the transcript is empty")
    place = 0
    for entry in lines:
        kind = ORDER.index(entry.kind)
        once = entry.kind in ("header", "certificate", "totals") and kind == place and entry.line != 1
        if kind < place or once or (entry.line == 1 and entry.kind != "header"):
            raise TranscriptError(entry.line, f"is a {entry.kind} entry out of place")
        place = kind
    kinds = [entry.kind for entry in lines]
    for kind in ("certificate", "totals"):
        if kind not in kinds:
            raise TranscriptError(len(lines) + 1, f"is missing: there is no {kind} line, the run is not complete")


def _declaration(entry: Declare, before: dict[str, Declaration]) -> Declaration:
    part = entry.mechanism
    if part.id in before:
        raise TranscriptError(entry.line, f"declares {part.id} a second time")
    if (facts := known(part.id)) is None:
        raise TranscriptError(entry.line, f"declares {part.id!r}, which is no mechanism of this project")
    kind, least = facts
    if part.kind != kind or (part.q is None) == (kind == "poisson_gaussian"):
        raise TranscriptError(entry.line, f"declares {part.id} as {part.kind} with rate {part.q}; it is {kind}")
    if part.sensitivity < least * (1 - 1e-9):
        raise TranscriptError(entry.line, f"declares {part.id} with sensitivity {part.sensitivity:g}, below {least:g}")
    if not math.isclose(part.noise_std, part.sigma * part.sensitivity, rel_tol=1e-9):
        raise TranscriptError(entry.line, f"declares {part.id} with noise that is not sigma x sensitivity")
    return part.declaration()


def _whole(line: int, declared: dict[str, Declaration]) -> None:
    """Declarations that belong together: time buckets that share their steps out, one way to release means, and what
    the components' rounds start from."""
    steps = {id: part for id, part in declared.items() if id.startswith(GRADIENTS)}
    total, k = sum(part.count for part in steps.values()), len(steps)
    wanted = {bucket_id(i, k): bucket_steps(total, i, k) for i in range(k)}
    if {id: part.count for id, part in steps.items()} != wanted or len({part.q for part in steps.values()}) > 1:
        raise TranscriptError(line, "certifies time buckets that do not share out the steps of one DP-SGD")
    if len(declared.keys() & {"release/means", "release/mean", "release/cross"}) > 1:
        raise TranscriptError(line, "certifies two releases of the means")
    rounds = {id for id in declared if id.startswith("release/components/")}
    if rounds and not (
        rounds == {f"release/components/{k}" for k in range(1, len(rounds) + 1)}
        and {"release/means", "release/covariance", "release/trace"} <= declared.keys()
    ):
        raise TranscriptError(line, "certifies rounds of components that are not all there, or without class moments")
    if "release/votes" in declared and "release/means" not in declared:
        raise TranscriptError(line, "certifies votes without the class moments that candidates are drawn by")
    if any(id.startswith("rival/") for id in declared) and len(declared) > 1:
        raise TranscriptError(line, "certifies a rival's mechanism beside another")


def _executions(lines: list[Any], declared: dict[str, Declaration]) -> dict[str, int]:
    seen: set[tuple[str, int]] = set()
    clips: dict[str, float | None] = {}
    for entry in lines:
        if not isinstance(entry, Execute):
            continue
        part = declared.get(entry.id)
        if part is None:
            raise TranscriptError(entry.line, f"executes {entry.id!r}, which was not declared")
        if entry.step >= part.count:
            raise TranscriptError(entry.line, f"executes step {entry.step} of {part.id}, declared for {part.count}")
        if (entry.clip is None) == (part.kind == "poisson_gaussian") or clips.setdefault(
            part.kind, entry.clip
        ) != entry.clip:
            raise TranscriptError(
                entry.line, f"executes {part.id} with clip {entry.clip}; one clip holds for all steps"
            )
        if (part.id, entry.step) in seen:
            raise TranscriptError(entry.line, f"executes step {entry.step} of {part.id} a second time")
        seen.add((part.id, entry.step))
    return {id: sum(1 for name, _ in seen if name == id) for id in declared}


def _totals(entry: Totals, executed: dict[str, int], declared: dict[str, Declaration], recomputed: float) -> None:
    if entry.executed != executed:
        raise TranscriptError(entry.line, "counts other executions than the lines above")
    short = [part.id for part in declared.values() if executed[part.id] != part.count]
    if short:
        raise TranscriptError(entry.line, f"closes the run, but {short[0]} did not run as often as it was declared")
    needed = {"model.safetensors", "model.json"}
    needed |= {name for name, first in MADE_BY.items() if any(id.startswith(first) for id in declared)}
    if needed - set(entry.files):
        raise TranscriptError(entry.line, f"does not name {min(needed - set(entry.files))}, which such a run releases")
    if odd := MADE_BY.keys() & entry.files.keys() - needed:
        raise TranscriptError(entry.line, f"names {min(odd)}, but declares nothing that would make it")
    if abs(entry.epsilon - recomputed) > TOLERANCE * max(1.0, recomputed):
        raise TranscriptError(entry.line, f"claims epsilon = {entry.epsilon:.6g}, recomputed {recomputed:.6g}")


def _files(entry: Totals, folder: Path) -> None:
    """Released files beside the transcript must be those it names."""
    for name in HASHED:
        path = folder / name
        if path.is_file() and name not in entry.files:
            raise TranscriptError(entry.line, f"does not name the {name} beside the transcript")
        if path.is_file() and file_hash(path) != entry.files[name]:
            raise TranscriptError(entry.line, f"names another {name} than the one beside the transcript")


def _why_not(header: Header, totals: Totals, folder: Path):
    """Reasons not to publish a folder whose transcript holds."""
    if header.noise != "os":
        yield f"line 1 says {NOT_RELEASABLE[header.noise]}."
    if header.delta >= 1 / header.n:
        yield f"line 1 has delta = {header.delta:g}, not below 1/N = {1 / header.n:.2g}."
    beside = {path.name for path in folder.iterdir()}
    if beside <= {"transcript.jsonl"}:
        return  # the transcript alone was given
    lost = sorted(set(totals.files) - beside)
    if lost:
        yield f"{', '.join(lost)} is missing beside the transcript."
    extra = sorted(beside - set(HASHED + UNHASHED)) + _foreign(folder / "synthetic")
    if extra:
        yield f"{', '.join(extra[:5])} does not belong to a release; nothing is known of it."


def _foreign(synthetic: Path) -> list[str]:
    """Files in the synthetic set that are neither its pictures nor its table."""
    files = (path.relative_to(synthetic.parent) for path in synthetic.rglob("*") if path.is_file())
    tables = {"synthetic/metadata.csv", "synthetic/points.csv"}
    return sorted(
        p.as_posix()
        for p in files
        if p.as_posix() not in tables and not (p.parent.as_posix() == "synthetic/images" and p.suffix == ".png")
    )
