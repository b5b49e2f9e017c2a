"""Numbers and the promise in words for page and card. Guarantee: a privacy cost is rounded up, never down, and a
lower bound on one down."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context

from straightdp.report.facts import PublicFacts

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
NBSP = "\u00a0"
SIZE_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def number(x: float, digits: int = 4, rounding: str = ROUND_HALF_EVEN) -> str:
    """`x` to so many significant digits: 1,234; 0.0123; 1.5 × 10⁻⁷; ∞ and n/a otherwise."""
    if math.isnan(x):
        return "n/a"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    rounded = Context(prec=digits, rounding=rounding).create_decimal(repr(float(x)))
    if rounded == 0:
        return "0"
    exponent = rounded.adjusted()
    if -5 < exponent < 9:
        text = f"{rounded:,f}"
        return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")
    mantissa = f"{rounded.scaleb(-exponent).normalize():f}".replace("-", "−")
    power = "10" + str(exponent).translate(SUPERSCRIPT)
    return power if mantissa == "1" else f"{mantissa} × {power}"


def cost(epsilon: float) -> str:
    """A privacy cost, rounded up to four significant digits."""
    return number(epsilon, rounding=ROUND_CEILING)


def at_least(epsilon: float) -> str:
    """A lower bound on a privacy cost, rounded down to three significant digits."""
    return number(epsilon, 3, ROUND_FLOOR)


def share(epsilon: float, budget: float) -> str:
    """A privacy cost as whole per cent of the budget, rounded up; empty where that is no number."""
    if not math.isfinite(epsilon) or not 0 < budget < math.inf:
        return ""
    return f"{math.ceil(100 * epsilon / budget - 1e-9)}{NBSP}%"


def count(n: int) -> str:
    return f"{n:,}"


def plural(n: int, one: str, many: str) -> str:
    return f"{n:,} {one if n == 1 else many}"


def percent(x: float) -> str:
    return f"{100 * x:.1f}{NBSP}%"


def size(n: int) -> str:
    """Bytes in decimal units, three significant digits."""
    power = 0
    while n >= 1000 ** (power + 1) and power < len(SIZE_UNITS) - 1:
        power += 1
    return f"{number(n / 1000**power, 3)} {SIZE_UNITS[power]}"


def duration(seconds: float) -> str:
    """Two significant digits on purpose: exact times depend slightly on which records were sampled."""
    if not seconds >= 60:
        return f"{number(seconds, 2)} s"
    return f"{number(seconds / 60, 2)} min" if seconds < 3600 else f"{number(seconds / 3600, 2)} h"


def guess_bound(epsilon: float, delta: float) -> str:
    """Best accuracy of telling neighbours apart at even odds, (e^ε + δ) / (e^ε + 1), rounded up."""
    wrong = 100 * (1 - delta) / (math.exp(min(epsilon, 700.0)) + 1)
    digits = max(1, math.ceil(-math.log10(max(wrong, 1e-300))))
    if digits > 9:
        return f"100{NBSP}%"
    return f"{math.ceil((100 - wrong) * 10**digits) / 10**digits:.{digits}f}{NBSP}%"


def promise(facts: PublicFacts) -> tuple[str, ...]:
    """The guarantee for a reader who does not know differential privacy, in sentences."""
    bound = guess_bound(facts.epsilon, facts.delta)
    unit, adjacency = facts.unit.rstrip("."), facts.adjacency.rstrip(".")
    epsilon, delta = f"ε{NBSP}={NBSP}{cost(facts.epsilon)}", f"δ{NBSP}={NBSP}{number(facts.delta)}"
    return (
        "Differential privacy limits how much a published result can depend on any one unit of the private data.",
        f"Here the unit is: {unit}.",
        "Random noise is added while the private data is used, so that two data sets that are neighbours "
        f"({adjacency}) lead to almost the same results with almost the same probabilities.",
        f"ε says how far those probabilities may be apart and {delta} how much may fall outside that bound: "
        "the smaller, the stronger the protection.",
        f"At {epsilon}, someone who knows everything else and must guess, at even odds, which of two "
        f"neighbouring data sets was used is right at most {bound} of the time; tossing a coin gives "
        f"50{NBSP}%.",
        "Whatever is later computed from the released files alone keeps this bound.",
    )


def limits() -> tuple[str, ...]:
    """What the guarantee does not cover, in sentences."""
    return (
        "It does not hide what is true of the private data as a whole: general patterns are what the release "
        "is for, and a conclusion drawn from them can concern someone whose data was never used.",
        "It protects one unit at a time; whoever contributed several has weaker protection.",
        "It does not cover what is assumed to be public, nor the public images; other results published from "
        "the same private data cost privacy on top of this ε.",
        "It holds only while the noise itself stays secret, and it says nothing about how accurate, fair or "
        "fit for a purpose the synthetic images are.",
    )


def releasable(facts: PublicFacts) -> bool:
    """Whether page and card may call the run releasable: never when its own numbers speak against it."""
    return facts.releasable and not _overspent(facts)


def verdict(facts: PublicFacts) -> str:
    """Why a run must not be published, in sentences that always give some reason."""
    reasons = [facts.why_not.strip()] if facts.why_not.strip() else []
    return " ".join(reasons + _overspent(facts)) or "The run did not meet the conditions for release."


def _overspent(facts: PublicFacts) -> list[str]:
    said = [] if facts.epsilon <= facts.epsilon_budget else ["The ε achieved exceeds the budget."]
    more = [m.id for m in facts.mechanisms if m.executed > m.count]
    return said + ([f"Executed more often than declared: {', '.join(more)}."] if more else [])
