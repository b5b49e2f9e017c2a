"""Names beside the marks of a plot, moved away from marks and from each other. Marks are drawn above zorder 2.5."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import cos, hypot, pi, sin
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = 7.5  # points, of the letters
ASPECT = 0.58  # a letter's width over its size, on average
ROUND = 4.0  # points to keep off a mark
MISTAKEN = 10.0  # square points of a label that a mark nearer to it than its own is as bad as
Points = Sequence[Sequence[float]]
Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""


def place(
    axes: Axes, labels: Sequence[tuple[tuple[float, float], str, str]], marks: Sequence[tuple[float, float]]
) -> None:
    """Write each (where, text, colour) as near to its mark as there is room; further off, a line leads back.

    The axes' limits and place must be final: room is looked for on paper, not in the data.
    """
    frame = _points(axes.bbox.extents, axes)
    at = [_points(axes.transData.transform(mark), axes) for mark in marks]
    taken: list[Box] = [(x - ROUND, y - ROUND, x + ROUND, y + ROUND) for x, y in at]
    for where, text, colour in labels:
        x, y = _points(axes.transData.transform(where), axes)
        wide = ASPECT * SIZE * len(text)
        tried = [
            _box(x, y, wide, radius, angle) for radius in (7, 14, 22, 32, 44, 58, 74) for angle in range(0, 360, 30)
        ]
        box = min(tried, key=lambda box: _cost(box, (x, y), at, taken, frame))
        taken.append(box)
        left, bottom, right, top = box
        centre = ((left + right) / 2 - x, (bottom + top) / 2 - y)
        axes.annotate(
            text,
            where,
            centre,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=SIZE,
            color=colour,
            bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.2},
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3},
            zorder=2.5,  # below the marks
        )


def _points(pixels: Iterable[float], axes: Axes) -> list[float]:
    return [float(value) * 72 / axes.figure.dpi for value in pixels]


def _box(x: float, y: float, wide: float, radius: float, angle: float) -> Box:
    """A label whose nearest edge lies that far off, in that direction."""
    dx, dy = cos(angle * pi / 180), sin(angle * pi / 180)
    x, y = x + dx * (radius + wide / 2), y + dy * (radius + SIZE / 2)
    return x - wide / 2, y - SIZE * 0.6, x + wide / 2, y + SIZE * 0.6


def _cost(box: Box, own: Sequence[float], marks: Points, taken: Sequence[Box], frame: Sequence[float]) -> float:
    """How much of a label is over something or outside, how many marks are nearer to it than its own, how far it is."""
    area = (box[2] - box[0]) * (box[3] - box[1])
    hidden = sum(_common(box, other) for other in taken) + area - _common(box, frame)
    far = _distance(box, own)
    nearer = sum(_distance(box, mark) < far for mark in marks)
    return hidden + MISTAKEN * nearer + far / 2


def _common(a: Sequence[float], b: Sequence[float]) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _distance(box: Box, mark: Sequence[float]) -> float:
    left, bottom, right, top = box
    x, y = mark
    return hypot(max(left - x, 0, x - right), max(bottom - y, 0, y - top))
