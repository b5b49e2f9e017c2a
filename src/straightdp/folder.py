"""A run's folder: where each artefact lies, which stage is done, and who may write."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from straightdp.errors import BadInput
from straightdp.files import file_hash, write_text
from straightdp.recipe import Recipe, load
from straightdp.turns import turn

RELEASE, AUDITED, NOT_PRIVATE = KINDS = ("release", "audited", "private/not-private")
"""What a run makes, in which folder: a release, an audit's network, or what has no noise at all."""


class RunFolder:
    """`release/` may be published, all of it; `private/` never. Nothing is created before `create`."""

    def __init__(self, root: Path, release: str = RELEASE):
        self.root = root
        self.recipe = root / "recipe.toml"
        self.release = root / release
        self.is_audit = release == AUDITED
        self.private = root / "private"
        self.ledger = self.private / "transcript.jsonl"  # the authoritative one; release/ gets the same lines
        self.transcript = self.release / "transcript.jsonl"
        self.moments = self.release / "moments.safetensors"
        self.elected = self.release / "elected.safetensors"
        self.embedding = self.release / "embedding.safetensors"
        self.model = self.release / "model.safetensors"
        self.model_card = self.release / "model.json"
        self.synthetic = self.release / "synthetic"
        self.checkpoints = self.private / "checkpoints"
        self.autoencoder = self.checkpoints / "autoencoder.safetensors"
        self.prior = self.checkpoints / "prior.safetensors"
        self.calibration = self.checkpoints / "calibration.safetensors"
        self.candidates = self.checkpoints / "candidates.safetensors"
        self.sums = self.checkpoints / "sums.safetensors"
        self.horizon = self.checkpoints / "horizon.json"
        self.allocation = self.checkpoints / "allocation.json"
        self.plateau = self.checkpoints / "plateau.json"
        self.plan = self.checkpoints / "plan.json"
        self.diagnostics = self.private / "diagnostics.jsonl"
        self.evaluation = self.private / "evaluation.json"
        self.neighbours = self.private / "neighbours.safetensors"
        self.audit = self.private / "audit.json"
        self.coins = self.private / "coins"  # of an audit: which canaries are in
        self.fingerprint = self.private / "fingerprint"
        self.stamps = self.private / "stages.json"

    def check(self, recipe: Recipe, *, resume: bool) -> None:
        """Refuse a folder that is something else, another recipe's, unfinished without `resume`, or already spent."""
        if not self.root.exists():
            return
        if not self.root.is_dir() or (not self.recipe.exists() and self._holds_something_else()):
            raise BadInput(f"{self.root} exists and is not a run's folder; give another --out")
        if not self.recipe.exists():
            return
        if load(self.recipe).digest() != recipe.digest():
            raise BadInput(f"{self.root} belongs to another recipe; give another --out, or that recipe")
        other = next((self.root / kind for kind in KINDS if (self.root / kind).exists()), self.release)
        if other != self.release:
            raise BadInput(f"{self.root} is a run of another kind, whose noise differs ({other}); give another --out")
        if self.transcript.exists() and not (self.ledger.exists() and self.fingerprint.exists()):
            raise BadInput(f"{self.private} was lost, so what {self.root} spent is not known; give another --out")
        if resume:
            return
        if any(p.exists() and b'"kind":"totals"' in p.read_bytes() for p in (self.ledger, self.transcript)):
            raise BadInput(
                f"the budget of {self.root} is already spent; use `straightdp sample`, or give another --out "
                "(two releases of one private set cost the sum of both)"
            )
        raise BadInput(f"{self.root} holds an unfinished run of this recipe; add --resume to go on with it")

    def _holds_something_else(self) -> bool:
        """Beside what a run that was killed in its first moments leaves behind."""
        ours = {self.private / "lock", self.coins, self.recipe.with_name(self.recipe.name + ".partial")}
        return any(path.is_file() and path not in ours for path in self.root.rglob("*"))

    def create(self, recipe: Recipe, fingerprint: str) -> None:
        """Make the folder, or make it good. A resumed run repeats its noise, so its records must be the same ones."""
        if self.fingerprint.exists() and self.fingerprint.read_text() != fingerprint:
            raise BadInput(f"the private records are not those that {self.root} began with; give another --out")
        self.private.mkdir(parents=True, exist_ok=True)
        self.private.chmod(0o700)
        for folder in (self.release, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(self.recipe, recipe.to_toml())
        write_text(self.fingerprint, fingerprint)

    def centres(self, id: str) -> Path:
        """Released values that the sum of a mechanism hangs on, kept before it."""
        return self.checkpoints / f"centres-{id.rpartition('/')[2]}.safetensors"

    @contextmanager
    def lock(self):
        """One process a folder: two would both spend."""
        self.private.mkdir(parents=True, exist_ok=True)
        with open(self.private / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadInput(f"another process is running {self.root}; wait for it or stop it") from None
            yield

    def stage(self, name: str, key: str, outputs: list[Path], work: Callable[[], None]) -> bool:
        """Do a stage unless it was done with this key and its outputs are unchanged. Returns whether it ran."""
        stamps = self.read_stamps()
        stamp = stamps.get(name)
        if stamp and stamp["key"] == key and stamp["outputs"] == self._hashes(outputs):
            return False
        with turn(name) as mine:
            start = time.monotonic()
            work()
            seconds = time.monotonic() - start - mine.waited
        entry = {"key": key, "outputs": self._hashes(outputs), "seconds": seconds}
        write_text(self.stamps, json.dumps(self.read_stamps() | {name: entry}, indent=1))
        return True

    def read_stamps(self) -> dict:
        return json.loads(self.stamps.read_text()) if self.stamps.exists() else {}

    def _hashes(self, paths: list[Path]) -> dict[str, str | None]:
        return {str(p.relative_to(self.root)): file_hash(p) if p.exists() else None for p in paths}
