"""Pictures planted among private records for an audit, each put in or left out by a coin of its own."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from straightdp.data.records import Records
from straightdp.errors import BadInput
from straightdp.files import write_durably


@dataclass(frozen=True)
class Planted:
    """Canaries (m, C, H, W) uint8 under classes (m,), taken modulo their number, and which of them are in.

    The held-out records are dealt into `parts`: the last part stays held out. `shadow` k trains on part k instead of
    the private records and canaries, so that it has seen none of what is scored.
    """

    pictures: np.ndarray
    labels: np.ndarray
    included: np.ndarray
    parts: int = 1
    shadow: int | None = None

    def among(self, train: Records, holdout: Records | None) -> tuple[Records, Records]:
        """The sets that a run of the audit sees."""
        if holdout is None or len(holdout) < 2 * self.parts:
            found = 0 if holdout is None else len(holdout)
            raise BadInput(
                f"an audit wants {2 * self.parts} held-out records or more, {found} are; set private.holdout"
            )
        dealt = np.arange(len(holdout)) % self.parts
        others = holdout.subset(np.flatnonzero(dealt == self.parts - 1))
        if self.shadow is not None:
            return holdout.subset(np.flatnonzero(dealt == self.shadow)), others
        if train.x.dtype != np.uint8:
            raise BadInput("canaries are pictures; these records are not, so they cannot be audited")
        x = np.concatenate([train.x, self.pictures[self.included]])
        labels = np.concatenate([train.labels, self.labels[self.included] % len(train.classes)])
        return Records(x, labels, train.classes, None), others

    def declared_n(self, n: int) -> int:
        """N with every canary counted, so that it says nothing about the coins."""
        return n + (len(self.pictures) if self.shadow is None else 0)


def coins(m: int, path: Path) -> np.ndarray:
    """m independent fair coins from the operating system, made once and kept at `path`, in `private/`."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, bytes(secrets.randbits(1) for _ in range(m)), mode=0o600)
    found = np.frombuffer(path.read_bytes(), np.uint8).astype(bool)
    if len(found) != m:
        raise BadInput(f"{path} holds {len(found)} coins, not {m}: it is of another audit; give another --out")
    return found
