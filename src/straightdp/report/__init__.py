"""The report of a run: facts in, one standalone page, two cards and the metadata of the synthetic set out. Nothing
here opens a private data set."""

from straightdp.report.cards import dataset_card, model_card
from straightdp.report.croissant import croissant
from straightdp.report.facts import (
    AssumptionFact,
    AuditFact,
    ClassDistance,
    ClassPictures,
    LabelAware,
    MechanismFact,
    Neighbour,
    Neighbours,
    PrivateFacts,
    PublicFacts,
    Quality,
    Score,
)
from straightdp.report.page import render

__all__ = [
    "AssumptionFact",
    "AuditFact",
    "ClassDistance",
    "ClassPictures",
    "LabelAware",
    "MechanismFact",
    "Neighbour",
    "Neighbours",
    "PrivateFacts",
    "PublicFacts",
    "Quality",
    "Score",
    "croissant",
    "dataset_card",
    "model_card",
    "render",
]
