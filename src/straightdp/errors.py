"""The ways a command may stop short. Each prints one sentence and writes nothing further."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BadInput(Exception):
    """Exit code 2: what was expected, what came, and what to do, in one sentence."""


class BudgetRefused(Exception):
    """Exit code 3: the workload does not fit the budget, or a mechanism was never declared."""


class TeamBroken(Exception):
    """Exit code 4: another process of the same run has ended; the run can be resumed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is not known."""
    known = list(known)
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(known)}"
