"""What an audit's attacks made of a run, what of it speaks against the claim, and the table that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from straightdp.audits.membership import Attack
from straightdp.audits.one_run import OneRun

CONFIDENCE = 0.95  # of the lower bound on epsilon
TELLS = 0.75  # an AUC surely above this is a leak; one nearer 0.5 may come from sets that differ, or few shadows


@dataclass(frozen=True)
class Findings:
    """What the attacks made of one run: `one_run` guesses from the network, `from_sums` from the released class sums,
    if there are any. `noise` is each mechanism's noise over what was declared, and how likely one as far off is."""

    claimed: float
    one_run: OneRun
    from_sums: OneRun | None
    loss: Attack
    lira: Attack | None
    exposure: float
    chance: float
    first: int
    included: int
    references: int
    generated: int
    noise: dict[str, tuple[float, float]]
    replayed: str

    @classmethod
    def read(cls, tree: dict[str, Any]) -> Findings:
        """Of what `audit.json` holds of one run."""
        given = {field.name: tree[field.name] for field in fields(cls)}
        for name, kind in (("one_run", OneRun), ("from_sums", OneRun), ("loss", Attack), ("lira", Attack)):
            given[name] = given[name] and kind(**given[name])
        return cls(**given)

    @property
    def bound(self) -> float:
        """The lower bound on epsilon."""
        return max(one.bound for one in (self.one_run, self.from_sums) if one)

    @property
    def suspicions(self) -> list[str]:
        """What speaks against the claim, in words; an honest run has none, but for bad luck."""
        found = []
        if self.bound > self.claimed:
            found.append(f"the one-run audit refutes ε = {self.claimed:.3g}")
        attacks = {"loss": self.loss, "LiRA": self.lira}
        found += [f"{name} tells members from others" for name, a in attacks.items() if a and a.interval[0] > TELLS]
        if self.first > 3 + 10 * self.included / self.references:
            found.append("canaries are extracted")
        if self.generated:
            found.append("canaries are generated")
        if off := [id for id, (_, p) in self.noise.items() if p < 1e-6]:
            found.append(f"the noise of {', '.join(off)} is not what was declared")
        return found


def table(found: dict[str, Findings]) -> str:
    """The findings side by side."""

    def rate(value: float | None) -> str:
        return "too few" if value is None else f"{value:.3f}"

    def right(one: OneRun | None) -> str:
        return "not run" if one is None else f"{one.v} of {one.r} ({one.m} canaries)"

    def attack(a: Attack | None) -> str:
        return "not run" if a is None else f"{a.auc:.3f} ({a.interval[0]:.3f} to {a.interval[1]:.3f})"

    rows: list[tuple[str, Callable[[Findings], str]]] = [
        ("claimed ε, recomputed from the transcript", lambda f: f"{f.claimed:.4g}"),
        (f"one-run lower bound on ε ({CONFIDENCE:.0%})", lambda f: f"{f.bound:.3f}"),
        ("  right guesses from the network", lambda f: right(f.one_run)),
        ("  right guesses from the released sums", lambda f: right(f.from_sums)),
        ("membership by loss, AUC", lambda f: attack(f.loss)),
        ("  true positives at 1 % and 0.1 % false", lambda f: f"{rate(f.loss.tpr_at_1)}, {rate(f.loss.tpr_at_01)}"),
        ("membership by LiRA, AUC", lambda f: attack(f.lira)),
        ("canaries' exposure in bits (left out)", lambda f: f"{f.exposure:.2f} ({f.chance:.2f})"),
        ("canaries that rank first", lambda f: f"{f.first} of {f.included}, {f.included / f.references:.1f} by chance"),
        ("canaries generated", lambda f: str(f.generated)),
        ("noise over what was declared", lambda f: ", ".join(f"{r:.3f}" for r, _ in f.noise.values())),
        ("speaks against the claim", lambda f: "; ".join(f.suspicions) or "nothing"),
    ]
    lines = [f"| internal, not for publication | {' | '.join(found)} |", "|---|" + "---|" * len(found)]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(map(cell, found.values()))} |" for name, cell in rows)])
