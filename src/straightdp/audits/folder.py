"""Replay of every release below a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from straightdp.audits.replay import Verdict, replay
from straightdp.errors import BadInput

TRANSCRIPT = "transcript.jsonl"


def replay_all(root: Path) -> list[tuple[Path, Verdict]]:
    """Each release folder below `root`, or `root` itself, with its verdict, sorted by path.

    A release is a folder with a transcript; what lies in a `private/` below `root` is none. BadInput if there is none
    at all.
    """
    below = (path.parent for path in root.rglob(TRANSCRIPT) if path.is_file())
    releases = sorted(folder for folder in below if "private" not in folder.relative_to(root).parts)
    if not releases:
        raise BadInput(f"no release was found below {root}; give a folder that holds runs or releases")
    return [(release, replay(release)) for release in releases]


def table(root: Path, found: Sequence[tuple[Path, Verdict]]) -> str:
    """One line a release: where it is, its recomputed epsilon, and what is wrong with it; last, how many are sound."""
    rows = [("release", "epsilon", "verdict")]
    rows += [(str(path.relative_to(root)), _epsilon(verdict), _words(verdict)) for path, verdict in found]
    first, second = (max(len(row[k]) for row in rows) for k in (0, 1))
    lines = [f"{path:<{first}}  {epsilon:>{second}}  {words}" for path, epsilon, words in rows]
    sound = sum(verdict.holds and verdict.releasable for _, verdict in found)
    return "\n".join([*lines, f"{sound} of {len(found)} hold and may be published."])


def _epsilon(verdict: Verdict) -> str:
    return f"{verdict.epsilon:.6g}" if verdict.holds else "-"


def _words(verdict: Verdict) -> str:
    """One line: what is wrong, or every reason not to publish, or that it holds."""
    lines = verdict.text.splitlines()
    if not verdict.holds:
        return lines[0]
    return " ".join(lines[1:]) or "holds"
