"""Figures on disk: JSON files of results by name. Each says by its recipe and settings what was run.

Every file of a folder is read, so that a table shows what any other one has run; other JSON files may lie beside them.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from straightdp.errors import BadInput
from straightdp.files import write_durably
from straightdp.recipe import Recipe
from straightdp.reproduce.figures import FIGURES, SYNTHETIC
from straightdp.reproduce.jobs import Job, identity


class Results:
    def __init__(self, folder: Path):
        self.folder = folder
        self._found: dict[str, list[dict]] = {}
        for path in sorted(folder.glob("*.json")):
            for body in _read(path).values():
                if isinstance(body, dict) and {"recipe", "settings"} <= body.keys():
                    self._keep(body)

    def _keep(self, body: dict) -> None:
        """By the recipe that was run, as it was; of older results by the recipe of that name, as it is."""
        command, noise = "audit" if "honest" in body else "run", body.get("noise", True)
        try:
            if "resolved" in body:
                found = identity(command, noise, Recipe.model_validate(body["resolved"]))
            else:
                found = Job(body["recipe"], tuple(body["settings"]), command, noise).identity
        except (BadInput, ValidationError):  # of a recipe that is not here, or is no longer allowed: no row of ours
            return
        self._found.setdefault(found, []).append(body)

    def find(self, job: Job, figures: Sequence[str] = (), of: str = SYNTHETIC) -> dict | None:
        """What was measured of a job; where it was run more than once, the first of those that have most figures."""
        found = self._found.get(job.identity, [])
        return max(found, key=lambda body: len(measured(body, figures, of)), default=None)

    def add(self, name: str, job: Job, body: dict) -> None:
        """Write a result down in the file `name`, at once; other processes may be doing the same."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / f"{name}.json"
        with _locked(self.folder):
            every = (_read(path) if path.exists() else {}) | {job.name: body}
            write_durably(path, json.dumps(every, indent=1, ensure_ascii=False).encode(), mode=0o600)
        self._found.setdefault(job.identity, []).insert(0, body)


def measured(body: dict, figures: Sequence[str], of: str = SYNTHETIC) -> dict[str, float]:
    """Those of the figures that a result has."""
    found = {name: FIGURES[name].of(body, of) for name in figures}
    return {name: value for name, value in found.items() if value is not None}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / ".lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> dict:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"results {path} could not be read ({error}); mend the file, or move it away") from None
    return tree if isinstance(tree, dict) else {}
