"""How good the synthetic data is, for the internal edition: each number beside what it is compared with, and what
was not measured is named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from straightdp.report import svg, words
from straightdp.report.facts import REFERENCES, ClassDistance, PrivateFacts, PublicFacts, Score

MOST_CLASSES = 20


@dataclass(frozen=True)
class Chart:
    heading: str
    chart: Markup


@dataclass(frozen=True)
class Stat:
    """One number for the summary, and the values that say whether it is much or little."""

    name: str
    value: str
    beside: str
    alarm: bool = False


@dataclass(frozen=True)
class Utility:
    """What the section shows; a chart or a tuple of them is None or empty where nothing was measured."""

    accuracy: tuple[Chart, ...]
    uncertainty: str | None
    distance: Markup | None
    missing: tuple[str, ...]
    label_aware: tuple[Chart, ...]
    classes: tuple[ClassDistance, ...]
    class_chart: Markup | None


def view(private: PrivateFacts, public: PublicFacts) -> Utility:
    classes = _worst(private.class_distances)
    measured = {quality.name for quality in private.quality}
    return Utility(
        accuracy=_accuracy(private, public),
        uncertainty=_uncertainty(private),
        distance=_distance(private),
        missing=tuple(name for name in REFERENCES if name not in measured),
        label_aware=_label_aware(private, public),
        classes=classes,
        class_chart=_class_chart(classes, private.distance_name),
    )


def chance(public: PublicFacts) -> float | None:
    """The share that a guess gets right; None where there is nothing to guess."""
    return 1 / len(public.classes) if len(public.classes) > 1 else None


def accuracy_stat(private: PrivateFacts, public: PublicFacts) -> Stat | None:
    if not private.scores:
        return None
    first, *rest = private.scores
    beside = [f"{s.name} {words.percent(s.mean)}" for s in rest if s.probe == first.probe]
    guess = chance(public)
    if guess is not None:
        beside.append(f"guessing {words.percent(guess)}")
    return Stat(f"Accuracy after training on {first.name}", _score(first), "; ".join(beside))


def distance_stat(private: PrivateFacts) -> Stat | None:
    if not private.quality:
        return None
    first, *rest = private.quality
    beside = "; ".join(["lower is better", *(f"{q.name} {words.number(q.distance, 3)}" for q in rest)])
    return Stat(f"{private.distance_name} of {first.name}", words.number(first.distance, 3), beside)


def _accuracy(private: PrivateFacts, public: PublicFacts) -> tuple[Chart, ...]:
    """A chart for each classifier, in the order of their first scores."""
    title = "Accuracy on held-out real records"
    return tuple(
        Chart(
            probe,
            _shares(
                f"scores-{k}",
                [(s.name, s.mean, s.std, _score(s)) for s in private.scores if s.probe == probe],
                f"{title}, {probe}",
                chance(public),
            ),
        )
        for k, probe in enumerate(dict.fromkeys(s.probe for s in private.scores))
    )


def _shares(id: str, rows: Sequence[svg.Row], title: str, guess: float | None) -> Markup:
    """Shares on bars from 0 to 1, with a mark where guessing would be."""
    reference = None if guess is None else (guess, f"guessing at random: {words.percent(guess)}")
    desc = svg.said(rows) + ("" if reference is None else f" {reference[1].capitalize()}.")
    return svg.bars(id, rows, 1.0, title, desc, reference, lead=True)


def _score(score: Score) -> str:
    if score.std is None:
        return words.percent(score.mean)
    return f"{100 * score.mean:.1f} ± {100 * score.std:.1f}{words.NBSP}%"


def _uncertainty(private: PrivateFacts) -> str | None:
    """The headline's binomial standard error in percentage points, from the number of held-out records."""
    if not private.scores or private.holdout_n < 1:
        return None
    p = private.scores[0].mean
    return f"{100 * math.sqrt(p * (1 - p) / private.holdout_n):.2f}"


def _distance(private: PrivateFacts) -> Markup | None:
    if not private.quality:
        return None
    rows = [(q.name, q.distance, None, words.number(q.distance, 3)) for q in private.quality]
    title = f"{private.distance_name} to held-out real records, lower is better"
    return svg.bars("distance", rows, max(q.distance for q in private.quality), title, svg.said(rows), lead=True)


def _label_aware(private: PrivateFacts, public: PublicFacts) -> tuple[Chart, ...]:
    """One chart for each of the two shares that was measured of any image set."""
    kinds = (
        ("consistency", "Labels found again", [(a.name, a.consistency) for a in private.label_aware], chance(public)),
        ("domain", "Taken for private", [(a.name, a.domain_rate) for a in private.label_aware], None),
    )
    charts = []
    for id, title, shares, guess in kinds:
        rows = [(name, share, None, words.percent(share)) for name, share in shares if share is not None]
        if rows:
            charts.append(Chart(title, _shares(id, rows, title, guess)))
    return tuple(charts)


def _worst(distances: Sequence[ClassDistance]) -> tuple[ClassDistance, ...]:
    """All classes in their order, or, of many, those with the largest distances, largest first."""
    if len(distances) <= MOST_CLASSES:
        return tuple(distances)
    known = [(one.distance, one) for one in distances if one.distance is not None]
    return tuple(one for _, one in sorted(known, key=lambda pair: -pair[0])[:MOST_CLASSES])


def _class_chart(classes: Sequence[ClassDistance], name: str) -> Markup | None:
    known = [(one.label, one.distance) for one in classes if one.distance is not None]
    if not known:
        return None
    rows = [(label, distance, None, words.number(distance, 3)) for label, distance in known]
    most = max(distance for _, distance in known)
    return svg.bars("class-distance", rows, most, f"{name} within each class", svg.said(rows))
