"""The door private data comes through: it is checked, counted, and handed to a vault. Nothing else can reach it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from straightdp.data.records import Records, to_z
from straightdp.errors import BadInput
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.noise import Noise
from straightdp.privacy.reader import read_private
from straightdp.privacy.vault import Vault
from straightdp.recipe import Recipe
from straightdp.team import ALONE, Team

Predict = Callable[[torch.Tensor], torch.Tensor]
Fit = Callable[[torch.Tensor, torch.Tensor], Predict]


class Intake:
    """Private sets that were read and found sound. What it tells the outside (N, the classes) is assumed public."""

    def __init__(self, recipe: Recipe, size: int):
        sets = read_private(recipe, size)
        self.__train, self.__holdout = sets.train, sets.holdout
        self.classes: tuple[str, ...] = sets.train.classes
        declared = recipe.privacy.n
        if declared is not None and declared < len(sets.train):
            raise BadInput(
                f"{len(sets.train)} private records were found but N = {declared} is declared; raise privacy.n"
            )
        self.n = len(sets.train) if declared is None else declared
        if self.n < 1:
            raise BadInput("no private records are left to train on; lower private.holdout or declare privacy.n")
        if recipe.privacy.delta >= 1 / self.n:
            raise BadInput(
                f"delta = {recipe.privacy.delta:g} is not below 1/N = {1 / self.n:.2g}, so publishing a record "
                "outright would count as private; lower privacy.delta"
            )
        self.n_source = (
            "counted in the private set and treated as public" if declared is None else "declared in the recipe"
        )
        self.classes_source = (
            "found in the private set and treated as public"
            if recipe.private.classes is None
            else "declared in the recipe"
        )

    def vault(self, ledger: Ledger, noise: Noise, diagnostics: Path, team: Team = ALONE) -> Vault:
        return Vault(self.__train, ledger, noise, n=self.n, diagnostics=diagnostics, team=team)

    def fingerprint(self) -> str:
        """A hash of the private training records and their classes, to know them again on resume. `private/` only."""
        digest = hashlib.sha256(repr((self.__train.classes, self.__train.x.shape)).encode())
        digest.update(np.ascontiguousarray(self.__train.x).tobytes())
        digest.update(self.__train.labels.tobytes())
        return digest.hexdigest()

    def refuse_overlap(self, public: Records) -> None:
        """Refuse a public set that holds private records: it would be shown, and trained on, without noise."""
        seen = {picture.tobytes() for picture in public.x}
        for records in filter(None, (self.__train, self.__holdout)):
            shared = sum(picture.tobytes() in seen for picture in records.x)
            if shared:
                raise BadInput(f"{shared} private records are in the public set too; take them out of public.data")

    @property
    def holdout_n(self) -> int:
        """How many held-out records there are. Internal: it belongs in `private/` only."""
        return 0 if self.__holdout is None else len(self.__holdout)

    def accuracy(self, predict: Predict) -> float:
        """Of a classifier on the held-out real records. Without noise: the result may go to `private/` only."""
        if self.__holdout is None:
            raise BadInput("there are no held-out records; set private.holdout")
        hits = 0
        for start in range(0, len(self.__holdout), 1000):
            z = to_z(self.__holdout.x[start : start + 1000])
            y = torch.from_numpy(self.__holdout.labels[start : start + 1000])
            hits += int((predict(z).cpu() == y).sum())
        return hits / len(self.__holdout)

    def real_accuracy(self, fit: Fit) -> float:
        """The non-private upper bound: the same probe trained on the private records themselves. `private/` only."""
        return self.accuracy(fit(self.__train.z(), torch.from_numpy(self.__train.labels)))
