"""Pictures of pen strokes that follow no script: a public set from a random process, where a private one is written.

Whoever learns on them learns how a pen moves, turns and ends; no letter or digit was looked at to make them.
"""

from __future__ import annotations

import numpy as np

from straightdp.data.records import Records

CLASSES = ("one stroke", "two strokes", "three strokes", "four strokes")
SHARES = (0.4, 0.3, 0.2, 0.1)
SIDE = 28  # pixels of a picture, unless another side is asked for
POINTS = 21  # of a stroke
_FINE = 4  # a picture is drawn so many times too large, and shrunk by area
# In parts of the picture's side: what the drawing spans, the pen's radius, and the shrunk picture's blur.
_SPAN, _PEN, _BLUR = (0.55, 0.95), (0.025, 0.06), (0.0, 0.02)
_LENGTH = (0.3, 1.6)  # of a stroke, in parts of each other
_TURN, _WANDER = 2.5, 3.0  # radians, standard deviations: how far a stroke turns evenly, and how far it strays
_CORNERS, _BEND = 0.8, (np.pi / 3, 0.9 * np.pi)  # sudden turns in a stroke, on average, and how far they go
_NEAR = 0.12  # a later stroke passes the first at about this distance
_TAPER, _WIDE = 0.3, 0.15  # change of the pen's radius to either end at most; standard deviation of log width : height


def strokes(n: int = 30_000, seed: int = 0, size: int = SIDE) -> Records:
    """n drawings of one to four strokes, uint8 (n, 1, size, size), white on black; the class is how many.

    A stroke's curvature wanders, with a sudden corner now and then; later strokes pass near the first. The drawing is
    scaled to a random part of the frame and lies near its middle; pen and sharpness are random too. Deterministic in
    (n, seed, size) for one version of Pillow.
    """
    from PIL import ImageFilter

    rng = np.random.default_rng(seed)
    counts = rng.choice(len(CLASSES), size=n, p=SHARES) + 1
    paths = _paths(n, rng)
    span, pen, blur = (rng.uniform(*bounds, size=n) * size for bounds in (_SPAN, _PEN, _BLUR))
    wide, taper = np.exp(rng.normal(0, _WIDE, size=n)), rng.uniform(-_TAPER, _TAPER, size=(n, len(CLASSES)))
    x = np.empty((n, 1, size, size), np.uint8)
    for i in range(n):
        drawn = paths[i, : counts[i]] * (wide[i], 1.0)
        low, high = drawn.min(axis=(0, 1)), drawn.max(axis=(0, 1))
        drawn = (drawn - (low + high) / 2) * (span[i] - 2 * pen[i]) / (high - low).max()
        middle = size / 2 - 0.7 * drawn.mean(axis=(0, 1))  # nearer to the middle of its ink than to that of its frame
        radii = pen[i] * (1 + taper[i, : counts[i], None] * np.linspace(-1, 1, POINTS))
        canvas = _draw((drawn + middle) * _FINE, radii * _FINE, size * _FINE)
        x[i, 0] = np.asarray(canvas.reduce(_FINE).filter(ImageFilter.GaussianBlur(float(blur[i]))))
    return Records(x, counts.astype(np.int64) - 1, CLASSES)


def _paths(n: int, rng: np.random.Generator) -> np.ndarray:
    """Where pens go, (n, 4, POINTS, 2), in no unit yet."""
    shape = (n, len(CLASSES), POINTS - 1)
    step = rng.uniform(*_LENGTH, size=(*shape[:2], 1)) / shape[2]
    even = rng.normal(0, _TURN, size=(*shape[:2], 1)) / shape[2]
    astray = rng.normal(0, _WANDER / shape[2] ** 1.5, size=shape).cumsum(axis=2)
    corner = rng.random(shape) < _CORNERS / shape[2]
    bend = corner * rng.uniform(*_BEND, size=shape) * rng.choice([-1, 1], size=shape)
    heading = rng.uniform(0, 2 * np.pi, size=(*shape[:2], 1)) + (even + astray + bend).cumsum(axis=2)
    paths = np.zeros((*shape[:2], POINTS, 2))
    paths[:, :, 1:] = (np.stack([np.cos(heading), np.sin(heading)], axis=3) * step[..., None]).cumsum(axis=2)
    rows = np.arange(n)
    for later in range(1, len(CLASSES)):
        there, here = paths[rows, 0, rng.integers(POINTS, size=n)], paths[rows, later, rng.integers(POINTS, size=n)]
        paths[:, later] += (there - here + rng.normal(0, _NEAR, size=(n, 2)))[:, None]
    return paths


def _draw(paths: np.ndarray, radii: np.ndarray, side: int):
    """The strokes' points (k, POINTS, 2) joined by a round pen whose radius (k, POINTS) changes on the way."""
    from PIL import Image, ImageDraw

    canvas = Image.new("L", (side, side))
    pen = ImageDraw.Draw(canvas)
    for points, widths in zip(paths, radii, strict=True):
        for a, b, radius in zip(points[:-1], points[1:], widths[1:], strict=True):
            pen.line([*a, *b], 255, max(1, round(2 * radius)))
            pen.ellipse([*(b - radius), *(b + radius)], 255)
    return canvas
