"""One standalone page from the facts. Guarantee: the public edition is rendered without ever seeing private
facts, and the internal edition is the same page plus elements marked `data-edition="private"`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from straightdp.report import closeness, pictures, svg, utility, words
from straightdp.report.facts import AuditFact, ClassPictures, PrivateFacts, PublicFacts
from straightdp.report.pictures import Sheet
from straightdp.report.utility import Stat

PICTURE_BYTES = 1_300_000
MOMENT_BYTES = 400_000


def render(public: PublicFacts, private: PrivateFacts | None) -> str:
    """The page as HTML text that loads and runs nothing; `private=None` gives the public edition."""
    template = environment().get_template("report.html")
    return template.render(
        f=public,
        w=words,
        budget_meter=_budget_meter(public),
        budget_shares=_budget_shares(public),
        within_budget=public.epsilon <= public.epsilon_budget,
        gallery=_gallery(public),
        moments=_moments(public),
        stage_bars=_stage_bars(public),
        private=None if private is None else _private_view(private, public),
    )


@cache
def environment() -> Environment:
    return Environment(
        loader=PackageLoader("straightdp.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _budget_meter(public: PublicFacts) -> Markup:
    spent, budget = words.cost(public.epsilon), words.number(public.epsilon_budget)
    return svg.meter(
        "meter",
        public.epsilon,
        public.epsilon_budget,
        "Privacy budget",
        f"ε = {spent} of a budget of {budget}.",
    )


def _budget_shares(public: PublicFacts) -> Markup | None:
    """What each mechanism would take of the budget on its own, under what all take together."""
    if not public.mechanisms:
        return None
    spent = [("all together", public.epsilon), *((m.id, m.epsilon_alone) for m in public.mechanisms)]
    budget = public.epsilon_budget
    rows = [(name, cost, None, _cost_of(cost, budget)) for name, cost in spent]
    most = max((cost for cost in (budget, *(cost for _, cost in spent)) if math.isfinite(cost)), default=0.0)
    mark = (budget, f"budget: {words.number(budget)}") if math.isfinite(budget) else None
    return svg.bars("shares", rows, most, "Privacy cost of each mechanism", svg.said(rows), mark, lead=True)


def _cost_of(epsilon: float, budget: float) -> str:
    share = words.share(epsilon, budget)
    return f"{words.cost(epsilon)} ({share})" if share else words.cost(epsilon)


@dataclass(frozen=True)
class Gallery:
    """Pictures by class: with shared labels, rows that pair a class's two sheets; without, two lists."""

    rows: tuple[tuple[str, Sheet | None, Sheet | None], ...]
    synthetic: tuple[Sheet, ...]
    public: tuple[Sheet, ...]
    missing: tuple[str, ...]
    limits: str


def _gallery(public: PublicFacts) -> Gallery:
    plan = pictures.plan((public.synthetic, public.public), PICTURE_BYTES)
    made = _sheets(public.synthetic, "synthetic", plan)
    real = _sheets(public.public, "real public", plan)
    shown = {one.label for one in public.synthetic if len(one.images)}
    missing = tuple(label for label in public.classes if label not in shown)
    limits = _limits(plan, (public.synthetic, public.public))
    by_label = {sheet.label: sheet for sheet in real}
    if not any(sheet.label in by_label for sheet in made):
        return Gallery((), made, real, missing, limits)
    rows = tuple((sheet.label, sheet, by_label.pop(sheet.label, None)) for sheet in made)
    return Gallery(rows, (), tuple(by_label.values()), missing, limits)


def _sheets(group: Sequence[ClassPictures], noun: str, plan: pictures.Plan) -> tuple[Sheet, ...]:
    sheets = (pictures.sheet(one, noun, plan) for one in group[: plan.classes])
    return tuple(sheet for sheet in sheets if sheet is not None)


def _moments(public: PublicFacts) -> tuple[Sheet, ...]:
    plan = pictures.plan((public.moments,), MOMENT_BYTES)
    return _sheets(public.moments, "released mean", plan)


def _limits(plan: pictures.Plan, groups: Sequence[Sequence[ClassPictures]]) -> str:
    """What was left out or made smaller to keep the page small, in sentences; empty when all is shown."""
    said, every = [], [one for group in groups for one in group]
    if any(len(one.images) > plan.each for one in every):
        said.append(f"The first {words.plural(plan.each, 'picture', 'pictures')} of each class are shown.")
    if any(len(group) > plan.classes for group in groups):
        said.append(f"The first {words.plural(plan.classes, 'class', 'classes')} are shown.")
    if any(max(one.images.shape[1:3]) > plan.side for one in every if len(one.images)):
        said.append(f"Pictures are reduced to {plan.side} pixels on the longer side.")
    return " ".join(said)


def _stage_bars(public: PublicFacts) -> Markup | None:
    """The bars are as coarse as the words beside them, for the reason that `words.duration` gives."""
    if not public.stages:
        return None
    coarse = [(name, float(f"{seconds:.1e}")) for name, seconds in public.stages]
    rows = [(name, seconds, None, words.duration(seconds)) for name, seconds in coarse]
    longest = max((seconds for _, seconds in coarse if math.isfinite(seconds)), default=0.0)
    return svg.bars("stages", rows, longest, "Time per stage", svg.said(rows))


@dataclass(frozen=True)
class Audit:
    """One audit beside its claim; `refuted` when the bound found is above the claim."""

    fact: AuditFact
    meter: Markup
    refuted: bool


def _audits(private: PrivateFacts) -> tuple[Audit, ...]:
    views = []
    for k, fact in enumerate(private.audit):
        claimed, found = words.cost(fact.claimed), words.at_least(fact.lower_bound)
        desc = f"ε is at least {found}; claimed is at most {claimed}."
        meter = svg.meter(f"audit-{k}", fact.lower_bound, fact.claimed, "Lower bound beside the claim", desc)
        views.append(Audit(fact, meter, fact.lower_bound > fact.claimed))
    return tuple(views)


def _audit_stat(private: PrivateFacts) -> Stat:
    """The audit that comes nearest to its claim, or furthest above it."""
    if not private.audit:
        return Stat("Audited ε", "none", "no audit was run")
    fact = max(private.audit, key=lambda a: a.lower_bound / a.claimed if a.claimed else math.inf)
    beside = f"claimed at most {words.cost(fact.claimed)}; confidence {words.percent(fact.confidence)}"
    refuted = fact.lower_bound > fact.claimed
    return Stat("Audited ε, at least", words.at_least(fact.lower_bound), beside, alarm=refuted)


def _private_view(private: PrivateFacts, public: PublicFacts) -> dict[str, Any]:
    """Everything the private elements of the internal edition show."""
    stats = (
        utility.accuracy_stat(private, public),
        utility.distance_stat(private),
        closeness.near_stat(private.neighbours),
        _audit_stat(private),
    )
    return {
        "facts": private,
        "stats": [stat for stat in stats if stat is not None],
        "audits": _audits(private),
        "utility": utility.view(private, public),
        "closeness": None if private.neighbours is None else closeness.view(private.neighbours),
        "panels": _panels(private, public),
        "run_length": svg.run_length(len(private.gradient_norms.get("step", ()))),
    }


@dataclass(frozen=True)
class Panel:
    """One line chart and the sentence under it."""

    heading: str
    chart: Markup
    caption: str


def _panels(private: PrivateFacts, public: PublicFacts) -> tuple[Panel, ...]:
    g = private.gradient_norms
    if not g or not len(g["step"]):
        return ()
    rates = {m.q for m in public.mechanisms if m.q is not None}
    expected = rates.pop() * public.n if len(rates) == 1 else None
    norms = "Gradient norm before clipping"
    clip = "Fraction of records clipped"
    batch = "Records in the batch"
    size = "How many records each step drew."
    if expected is not None:
        size += f" The dashed line is the sampling rate times N, {words.number(expected)}."
    return (
        Panel(
            norms,
            svg.lines("norms", g["step"], g["q50"], norms, _range("Median", g["q50"]), (g["q10"], g["q90"])),
            "The line is the median over records, the band runs from the 10 % to the 90 % quantile.",
        ),
        Panel(
            clip,
            svg.lines(
                "clip",
                g["step"],
                g["clip_fraction"],
                clip,
                _range("Fraction", g["clip_fraction"]),
                maximum=1.0,
            ),
            "1 means that every record's gradient was shortened to the clipping norm.",
        ),
        Panel(
            batch,
            svg.lines("batch", g["step"], g["batch"], batch, _range("Size", g["batch"]), reference=expected),
            size,
        ),
    )


def _range(name: str, values: Sequence[float]) -> str:
    """Smallest, middle and largest finite value, for those who do not see the chart."""
    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array)]
    if not len(array):
        return f"{name}: no finite value in {words.plural(len(values), 'step', 'steps')}."
    low, middle, high = (words.number(float(x)) for x in (array.min(), np.median(array), array.max()))
    return f"{name} over {words.plural(len(values), 'step', 'steps')}: from {low} to {high}, typically {middle}."
