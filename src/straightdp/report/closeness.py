"""How near synthetic images come to private training records, for the internal edition: it shows private images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from straightdp.report import pictures, svg, words
from straightdp.report.facts import ClassPictures, Neighbours
from straightdp.report.pictures import Sheet
from straightdp.report.utility import Stat

NEIGHBOUR_BYTES = 240_000
MOST_SHOWN = 12
NEAR = 0.05  # the share of held-out records that are called near
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
ORDINALS = ("nearest", "2nd nearest", "3rd nearest")


@dataclass(frozen=True)
class Row:
    """One synthetic picture, the records nearest to it with their distances, and the share of held-out records
    that are at least as near to a training record."""

    sample: Sheet
    nearest: tuple[tuple[Sheet, str], ...]
    as_near: str
    alarm: bool


@dataclass(frozen=True)
class Closeness:
    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    chart: Markup
    near: str
    expected: float
    distances: tuple[tuple[str, int, tuple[str, ...]], ...]


def view(facts: Neighbours) -> Closeness:
    rows = _rows(facts)
    sets = (("synthetic images", facts.synthetic), ("held-out real records", facts.heldout))
    spread = [(name, tuple(float(q) for q in np.quantile(values, QUANTILES)), len(values)) for name, values in sets]
    said = [(name, n, tuple(words.number(q, 3) for q in quantiles)) for name, quantiles, n in spread]
    strips = [(name, q, f"median {text[2]}") for (name, q, _), (_, _, text) in zip(spread, said, strict=True)]
    desc = " ".join(
        f"{name}: 5 % quantile {text[0]}, median {text[2]}, 95 % quantile {text[4]}." for name, _, text in said
    )
    return Closeness(
        rows=rows,
        columns=tuple(_ordinal(k) for k in range(max((len(row.nearest) for row in rows), default=0))),
        chart=svg.strips("closeness", strips, "Distance to the nearest private training record", desc),
        near=words.percent(near_share(facts)),
        expected=NEAR,
        distances=tuple(said),
    )


def near_share(facts: Neighbours) -> float:
    """The share of synthetic images nearer to a training record than all but `NEAR` of the held-out records are."""
    return float(np.mean(np.asarray(facts.synthetic) < np.quantile(facts.heldout, NEAR)))


def near_stat(facts: Neighbours | None) -> Stat | None:
    if facts is None:
        return None
    beside = f"held-out real records {words.percent(NEAR)}"
    return Stat("Unusually near to a training record", words.percent(near_share(facts)), beside)


def _rows(facts: Neighbours) -> tuple[Row, ...]:
    shown = facts.shown[:MOST_SHOWN]
    together = [ClassPictures(one.label, np.concatenate([one.sample[None], one.nearest])) for one in shown]
    plan = pictures.plan((together,), NEIGHBOUR_BYTES)
    heldout = np.asarray(facts.heldout)
    rows = []
    for one in shown:
        sample = pictures.single(one.sample, one.label, f"synthetic image of class {one.label}", plan.side)
        nearest = tuple(
            (
                pictures.single(image, one.label, f"private training record, {_ordinal(k)}", plan.side),
                words.number(distance, 3),
            )
            for k, (image, distance) in enumerate(zip(one.nearest[: plan.each - 1], one.distances, strict=False))
        )
        share = float(np.mean(heldout <= one.distances[0]))
        rows.append(Row(sample, nearest, words.percent(share) if share else "none", not share))
    return tuple(rows)


def _ordinal(k: int) -> str:
    return ORDINALS[k] if k < len(ORDINALS) else f"{k + 1}th nearest"
