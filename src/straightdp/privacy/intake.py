"""The door private data comes through: it is checked, counted, and handed to a vault. Nothing else can reach it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from straightdp.data.captions import Template
from straightdp.data.records import Records
from straightdp.errors import BadInput
from straightdp.moments.text import Featuriser
from straightdp.nets.captions import CaptionIds
from straightdp.nets.spaces import Space
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.measures import Measures
from straightdp.privacy.noise import Noise
from straightdp.privacy.planted import Planted
from straightdp.privacy.reader import PrivateSets, read_private
from straightdp.privacy.vault import Captions, Vault
from straightdp.recipe import OWN_TEXT, Recipe
from straightdp.team import ALONE, Team


class Intake:
    """Private sets that were read and found sound. What it tells the outside (N, the classes) is assumed public."""

    def __init__(self, recipe: Recipe, size: int, planted: Planted | None = None):
        sets = read_private(recipe, size)
        declared, own = recipe.privacy.n, len(sets.train)
        if planted is not None:
            declared = planted.declared_n(declared or len(sets.train)) if planted.shadow is None else None
            sets = PrivateSets(*planted.among(sets.train, sets.holdout))
        self.__train, self.__holdout = sets.train, sets.holdout
        self.classes: tuple[str, ...] = sets.train.classes
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
        section = recipe.private
        self.own_texts = section.caption == OWN_TEXT
        self.prompts = Template.read(
            section.prompt if self.own_texts else section.caption, self.classes, {} if self.own_texts else section.slots
        )
        self.__texts = sets.train.texts if self.own_texts else None
        if self.own_texts and self.__texts is None:
            raise BadInput("private.caption is {text} but the records have none; add a text column to metadata.csv")
        self.__prompt = sets.train.labels if self.own_texts else _parsed(self.prompts, sets.train)
        self.measures = Measures(
            sets.train, sets.holdout, self.prompts, self.__prompt, own=None if planted is None else own
        )
        self.n_source = (
            "counted in the private set and treated as public" if declared is None else "declared in the recipe"
        )
        self.classes_source = (
            "found in the private set and treated as public"
            if recipe.private.classes is None
            else "declared in the recipe"
        )

    def vault(
        self,
        ledger: Ledger,
        noise: Noise,
        diagnostics: Path,
        *,
        space: Space,
        tokenizer: CaptionIds,
        featuriser: Featuriser | None = None,
        team: Team = ALONE,
    ) -> Vault:
        """The records behind their mechanisms, with the captions they train under."""

        def each(of: Callable[[tuple[str, ...]], torch.Tensor]) -> torch.Tensor:
            """A row a record, of its own text or of its prompt."""
            if self.__texts is not None:
                return of(self.__texts)
            return of(self.prompts.captions())[torch.from_numpy(self.__prompt)]

        captions = Captions(
            lambda: each(tokenizer.encode).reshape(-1, tokenizer.length),
            None if featuriser is None else lambda: each(featuriser),
        )
        return Vault(
            self.__train, ledger, noise, n=self.n, diagnostics=diagnostics, team=team, space=space, captions=captions
        )

    def fingerprint(self) -> str:
        """A hash of the private training records, classes and texts, to know them again on resume. `private/` only."""
        digest = hashlib.sha256(repr((self.__train.classes, self.__train.x.shape)).encode())
        digest.update(np.ascontiguousarray(self.__train.x).tobytes())
        digest.update(self.__train.labels.tobytes())
        digest.update(repr(self.__train.texts).encode())
        return digest.hexdigest()

    def refuse_overlap(self, public: Records) -> None:
        """Refuse a public set that holds private records: it would be shown, and trained on, without noise."""
        seen = {picture.tobytes() for picture in public.x}
        for records in filter(None, (self.__train, self.__holdout)):
            shared = sum(picture.tobytes() in seen for picture in records.x)
            if shared:
                raise BadInput(f"{shared} private records are in the public set too; take them out of public.data")


def _parsed(template: Template, records: Records) -> np.ndarray:
    """Which of the template's captions each record has: its class's, or, with slots, what its text says."""
    if len(template.slots) == 1:
        return records.labels
    if records.texts is None:
        raise BadInput("private.caption has slots but the records have no texts; add a text column to metadata.csv")
    found, classes = [template.index(text) for text in records.texts], template.combinations()[:, 0]
    wrong = sum(k is None or classes[k] != y for k, y in zip(found, records.labels.tolist(), strict=True))
    if wrong:
        raise BadInput(
            f"the texts of {wrong} private records do not fit private.caption and its slots, or name another class "
            "than the label; mend them, or set private.caption to {text}"
        )
    return np.array(found, dtype=np.int64)
