"""The raw private reader. No module outside `privacy/` may import this one (a test sees to it)."""

from __future__ import annotations

from dataclasses import dataclass

from straightdp.data.records import Records
from straightdp.data.sources import load
from straightdp.data.split import split_by_content
from straightdp.recipe import Recipe


@dataclass(frozen=True)
class PrivateSets:
    train: Records
    holdout: Records | None


def read_private(recipe: Recipe, size: int) -> PrivateSets:
    """Both private sets at the public image size. A held-out fraction is chosen by each record's own hash."""
    section = recipe.private

    def read(source: str) -> Records:
        return load(source, size=size, channels=recipe.image.channels, classes=section.classes)

    everything = read(section.data)
    if isinstance(section.holdout, str):
        holdout = load(section.holdout, size=size, channels=recipe.image.channels, classes=everything.classes)
        return PrivateSets(everything, holdout)
    if section.holdout == 0:
        return PrivateSets(everything, None)
    train, holdout = split_by_content(everything, section.holdout)
    return PrivateSets(train, holdout if len(holdout) else None)
