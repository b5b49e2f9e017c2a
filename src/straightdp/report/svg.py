"""Small charts as inline SVG. Guarantee: each is one `role="img"` element with a title and a description,
shows finite values only, and takes its colours from the style sheet, so it follows light, dark and print."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup, escape

from straightdp.report import words

Row = tuple[str, float, float | None, str]

MOST_POINTS = 400
NAME_LENGTH = 36


def meter(id: str, value: float, maximum: float, title: str, desc: str) -> Markup:
    """A thin bar filled to value / maximum; one that is over is full and carries the class `over`."""
    part = value / maximum if maximum > 0 and math.isfinite(value / maximum) else 1.0
    over = " over" if part > 1 or not math.isfinite(value) else ""
    width = 300 * min(1.0, max(0.0, part))
    body = (
        '<rect class="track" width="300" height="8" rx="4"/>'
        f'<rect class="fill{over}" width="{width:.1f}" height="8" rx="4"/>'
    )
    return element(id, 300, 8, title, desc, body, "meter")


def bars(
    id: str,
    rows: Sequence[Row],
    maximum: float,
    title: str,
    desc: str,
    reference: tuple[float, str] | None = None,
    lead: bool = False,
) -> Markup:
    """Bars from zero, one a row of (name, value, spread or None, value in words); `lead` marks the first as
    the one that the others are references for; `reference` is a dashed mark on every bar, its label below."""
    width, pitch, top = 440, 44, 4
    height = top + pitch * len(rows) + (22 if reference else 0)
    unit = width / maximum if maximum > 0 and math.isfinite(maximum) else 0.0
    parts: list[str] = []
    for i, (name, value, spread, text) in enumerate(rows):
        y = top + pitch * i
        length = _clamp(value * unit, width)
        kind = "fill" if lead and i == 0 else "fill quiet"
        parts.append(f'<text class="name" x="0" y="{y + 13}">{escape(_short(name))}</text>')
        parts.append(f'<text class="value" x="{width}" y="{y + 13}">{escape(text)}</text>')
        parts.append(f'<rect class="track" y="{y + 20}" width="{width}" height="12" rx="2"/>')
        parts.append(f'<rect class="{kind}" y="{y + 20}" width="{length:.1f}" height="12" rx="2"/>')
        if spread:
            low, high = _clamp((value - spread) * unit, width), _clamp((value + spread) * unit, width)
            ends = f"M{low:.1f} {y + 22}v8M{high:.1f} {y + 22}v8M{low:.1f} {y + 26}H{high:.1f}"
            parts.append(f'<path class="halo" d="{ends}"/><path class="spread" d="{ends}"/>')
    if reference:
        x = _clamp(reference[0] * unit, width)
        anchor = "start" if x < width / 2 else "end"
        marks = "".join(f"M{x:.1f} {top + pitch * i + 18}v16" for i in range(len(rows)))
        parts.append(f'<path class="reference" d="{marks}"/>')
        parts.append(label(x, height - 3, anchor, reference[1]))
    return element(id, width, height, title, desc, "".join(parts), "bars")


def said(rows: Sequence[Row]) -> str:
    """The bars in words, for those who do not see them."""
    return "; ".join(f"{name}: {text}" for name, _, _, text in rows) + "."


def strips(id: str, rows: Sequence[tuple[str, Sequence[float], str]], title: str, desc: str) -> Markup:
    """How values spread, one row of (name, five rising quantiles, them in words) each, from zero: a thin bar from
    the first quantile to the last, a thick one from the second to the fourth, a mark at the middle one."""
    width, pitch, top = 440, 44, 4
    maximum = max((q[-1] for _, q, _ in rows), default=0.0)
    unit = width / maximum if maximum > 0 else 0.0
    parts: list[str] = []
    for i, (name, quantiles, text) in enumerate(rows):
        y = top + pitch * i
        a, b, c, d, e = (_clamp(q * unit, width) for q in quantiles)
        kind = "fill" if i == 0 else "fill quiet"
        parts.append(f'<text class="name" x="0" y="{y + 13}">{escape(_short(name))}</text>')
        parts.append(f'<text class="value" x="{width}" y="{y + 13}">{escape(text)}</text>')
        parts.append(f'<rect class="track" y="{y + 20}" width="{width}" height="14" rx="2"/>')
        parts.append(f'<rect class="{kind}" x="{a:.1f}" y="{y + 25}" width="{e - a:.1f}" height="4"/>')
        parts.append(f'<rect class="{kind}" x="{b:.1f}" y="{y + 20}" width="{d - b:.1f}" height="14" rx="2"/>')
        parts.append(f'<path class="middle" d="M{c:.1f} {y + 18}v18"/>')
    return element(id, width, top + pitch * len(rows), title, desc, "".join(parts), "bars")


def lines(
    id: str,
    x: Sequence[float],
    middle: Sequence[float],
    title: str,
    desc: str,
    band: tuple[Sequence[float], Sequence[float]] | None = None,
    maximum: float | None = None,
    reference: float | None = None,
) -> Markup:
    """A line over x from zero up, with an optional band and a dashed reference; values that are not finite
    leave a gap, and a long series is drawn as medians of equal runs of steps."""
    width, height, left, right, top, bottom = 280, 180, 42, 6, 10, 28
    series = [np.asarray(values, dtype=np.float64) for values in (x, middle, *(band or ()))]
    xs, ys, *edges = (_thin(values) for values in series)
    seen = np.concatenate([ys, *edges, [reference if reference is not None else 0.0]])
    peak = maximum or float(np.max(seen[np.isfinite(seen)], initial=0.0)) or 1.0
    y_ticks = _ticks(peak)
    peak = max(peak, y_ticks[-1])
    first, last = (float(xs[0]), float(xs[-1])) if len(xs) else (0.0, 1.0)
    across = (xs - first) / (last - first) if last > first else np.full(len(xs), 0.5)
    px = left + across * (width - left - right)

    def py(values: np.ndarray) -> np.ndarray:
        return height - bottom - values / peak * (height - top - bottom)

    parts: list[str] = []
    for tick in y_ticks:
        y = float(py(np.array(tick)))
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{width - right}"/>')
        parts.append(label(left - 6, y + 4, "end", _tick(tick)))
    ends = ((first, left, "start"), (last, width - right, "end")) if last > first else ((first, px[0], "middle"),)
    for value, at, anchor in ends:
        parts.append(label(at, height - 10, anchor, f"step {words.number(value)}"))
    if edges:
        parts.append(f'<path class="band" d="{_band(px, py(edges[0]), py(edges[1]))}"/>')
    parts.append(f'<path class="line" d="{_path(px, py(ys))}"/>')
    if reference is not None:
        parts.append(f'<path class="reference" d="M{left} {float(py(np.array(reference))):.1f}H{width - right}"/>')
    return element(id, width, height, title, desc, "".join(parts), "lines")


def run_length(n: int) -> int:
    """How many steps one drawn point stands for in a series of n."""
    return max(1, math.ceil(n / MOST_POINTS))


def element(id: str, width: int, height: int, title: str, desc: str, body: str, kind: str) -> Markup:
    name, what = f"{id}-title", f"{id}-desc"
    return Markup(
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-labelledby="{name} {what}">'
        f'<title id="{name}">{escape(title)}</title><desc id="{what}">{escape(desc)}</desc>{body}</svg>'
    )


def label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _thin(values: np.ndarray) -> np.ndarray:
    """At most `MOST_POINTS` values: the median of the finite ones in each run, NaN where a run has none."""
    run = run_length(len(values))
    finite = np.where(np.isfinite(values), values, np.nan)
    if run == 1:
        return finite
    runs = [finite[i : i + run] for i in range(0, len(finite), run)]
    return np.array([np.median(r[~np.isnan(r)]) if (~np.isnan(r)).any() else np.nan for r in runs])


def _runs(ok: np.ndarray) -> list[slice]:
    """The unbroken stretches of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], ok.astype(np.int8), [0]])))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _path(x: np.ndarray, y: np.ndarray) -> str:
    """A stroke through the finite points; a lone point becomes a dot (a stroke of no length, round ends)."""
    strokes = []
    for run in _runs(np.isfinite(y)):
        points = [f"{a:.1f} {b:.1f}" for a, b in zip(x[run], y[run], strict=True)]
        strokes.append("M" + "L".join(points) + ("h0" if len(points) == 1 else ""))
    return "".join(strokes)


def _band(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    areas = []
    for run in _runs(np.isfinite(low) & np.isfinite(high)):
        there = [f"{a:.1f} {b:.1f}" for a, b in zip(x[run], high[run], strict=True)]
        back = [f"{a:.1f} {b:.1f}" for a, b in zip(x[run][::-1], low[run][::-1], strict=True)]
        areas.append("M" + "L".join(there + back) + "Z")
    return "".join(areas)


def _ticks(peak: float) -> list[float]:
    """Zero and about four round values up to the first at or above the peak."""
    raw = peak / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    return [i * step for i in range(math.ceil(peak / step - 1e-9) + 1)]


def _tick(value: float) -> str:
    """A short axis label: 1,200 but 25k and 3M, so that it fits beside the axis."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{words.number(value / (1e3 if unit == 'k' else size), 3)}{unit}"
    return words.number(value, 3)


def _clamp(x: float, high: float) -> float:
    return min(high, max(0.0, x)) if math.isfinite(x) else 0.0


def _short(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1].rstrip() + "…"
