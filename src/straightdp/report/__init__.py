"""The report of a run: facts in, one standalone page and one card out; nothing here opens a data set."""

from straightdp.report.cards import dataset_card
from straightdp.report.facts import (
    AssumptionFact,
    ClassPictures,
    MechanismFact,
    PrivateFacts,
    PublicFacts,
    Score,
)
from straightdp.report.page import render

__all__ = [
    "AssumptionFact",
    "ClassPictures",
    "MechanismFact",
    "PrivateFacts",
    "PublicFacts",
    "Score",
    "dataset_card",
    "render",
]
