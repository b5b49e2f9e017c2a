"""Points with error bars as inline SVG, for comparisons. Guarantee: as in `svg`; and series differ in the shape of
their marker, not in colour alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from straightdp.report import svg

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 14, 44
SHAPES = (  # round, square, diamond, triangle, inverted triangle; each about as large as the others
    "M{x:.1f} {y:.1f}m-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z",
    "M{x:.1f} {y:.1f}m-4.5 -4.5h9v9h-9Z",
    "M{x:.1f} {y:.1f}m0 -6.5l6.5 6.5l-6.5 6.5l-6.5 -6.5Z",
    "M{x:.1f} {y:.1f}m0 -6l6 10.5h-12Z",
    "M{x:.1f} {y:.1f}m0 6l6 -10.5h-12Z",
)
COLOURS = 6
APART, ASIDE = 7, 40  # pixels between points of different series over the same ε, and between the outermost


@dataclass(frozen=True)
class Point:
    """Where a group lies, with the spread over its runs, and a few words beside it."""

    x: float
    y: float
    x_spread: float | None = None
    y_spread: float | None = None
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points that a line joins in this order; `marks` are short dashes that they may be held against."""

    points: tuple[Point, ...]
    marks: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Axis:
    """What is read off, how a value is said, and where the values of an axis that is not log end by nature."""

    label: str
    say: Callable[[float], str]
    log: bool = False
    low: float = -math.inf
    high: float = math.inf


class _Scale:
    """From values to pixels between `start` and `end`, with a little air around the values that there are."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float):
        self.log, self.start, self.end = axis.log, start, end
        low, high = min(map(self._of, values)), max(map(self._of, values))
        air = max(0.08 * (high - low), 0.15 if axis.log else 0.02 * abs(high)) or 0.05
        self.low, self.high = max(low - air, axis.low), min(high + air, axis.high)

    def _of(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def __call__(self, value: float) -> float:
        part = (self._of(value) - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, part)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Up to seven round values, one at least: on a log axis small numbers times powers of ten."""
        if not self.log:
            raw = (self.high - self.low) / 7
            power = 10.0 ** math.floor(math.log10(raw))
            step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [round(k * step, 12) for k in range(first, last + 1)]
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        for steps in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
            ticks = [m * 10.0**k for k in powers for m in steps if self.low <= math.log10(m * 10.0**k) <= self.high]
            if len(ticks) <= 7:
                return ticks
        return ticks[:: math.ceil(len(ticks) / 7)]


def points(
    id: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    title: str,
    desc: str,
    lines: Sequence[tuple[float, str]] = (),
) -> Markup:
    """All series in one chart; `lines` are dashed horizontal references with their names. There must be a point,
    and on a log axis nothing but positive numbers.

    On a log axis, points of different series over the same x are drawn a few pixels apart: none hides another's bar.
    """
    everything = [point for one in series for point in one.points]
    xs = [value for p in everything for value in _ends(p.x, p.x_spread)]
    ys = [value for p in everything for value in _ends(p.y, p.y_spread)] + [value for value, _ in lines]
    apart = min(APART, ASIDE / len(series)) if x.log else 0.0
    margin = 8 + apart * len(series) / 2
    room = max(6 * len(p.label) for p in everything)
    across = _Scale(x, xs, LEFT + margin, WIDTH - RIGHT - margin - room)
    up = _Scale(y, ys + [value for one in series for _, value in one.marks], HEIGHT - BOTTOM, TOP)
    parts = _axes(across, up, x, y)
    for value, name in lines:
        at = up(value)
        parts.append(f'<path class="reference" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(svg.label(WIDTH - RIGHT, at + (14 if at < TOP + 14 else -5), "end", name))
    for k, one in enumerate(series):
        shift = apart * (k - (len(series) - 1) / 2)
        at = [(across(p.x) + shift, up(p.y), p) for p in one.points]
        body = "".join(
            f'<path class="reference" d="M{across(a) + shift - 7:.1f} {up(b):.1f}h14"/>' for a, b in one.marks
        )
        if len(at) > 1:
            body += f'<path class="join" d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b, _ in at)}"/>'
        for a, b, p in at:
            body += _bars(a, b, p, across, up) + _shape(k, a, b)
            body += svg.label(a + 8, b - 7, "start", p.label) if p.label else ""
        parts.append(f'<g class="series{k % COLOURS}">{body}</g>')
    return svg.element(id, WIDTH, HEIGHT, title, desc, "".join(parts), "points")


def marker(k: int) -> Markup:
    """The marker of series k alone, for a legend; the words beside it say what it means."""
    return Markup(f'<svg class="series{k % COLOURS}" viewBox="0 0 16 16" aria-hidden="true">{_shape(k, 8, 8)}</svg>')


def _shape(k: int, x: float, y: float) -> str:
    hollow = " hollow" if k // len(SHAPES) % 2 else ""
    return f'<path class="point{hollow}" d="{SHAPES[k % len(SHAPES)].format(x=x, y=y)}"/>'


def _ends(value: float, spread: float | None) -> tuple[float, float]:
    return value - (spread or 0.0), value + (spread or 0.0)


def _bars(a: float, b: float, p: Point, across: _Scale, up: _Scale) -> str:
    strokes = ""
    if p.y_spread:
        low, high = map(up, _ends(p.y, p.y_spread))
        strokes += f"M{a:.1f} {low:.1f}V{high:.1f}M{a - 4:.1f} {low:.1f}h8M{a - 4:.1f} {high:.1f}h8"
    if p.x_spread:
        low, high = map(across, _ends(p.x, p.x_spread))
        strokes += f"M{low:.1f} {b:.1f}H{high:.1f}M{low:.1f} {b - 4:.1f}v8M{high:.1f} {b - 4:.1f}v8"
    return f'<path class="error" d="{strokes}"/>' if strokes else ""


def _axes(across: _Scale, up: _Scale, x: Axis, y: Axis) -> list[str]:
    parts = []
    for tick in up.ticks():
        parts.append(f'<path class="grid" d="M{LEFT} {up(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(svg.label(LEFT - 6, up(tick) + 4, "end", y.say(tick)))
    for tick in across.ticks():
        parts.append(f'<path class="grid" d="M{across(tick):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(svg.label(across(tick), HEIGHT - BOTTOM + 16, "middle", x.say(tick)))
    parts.append(svg.label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "middle", x.label))
    return parts
