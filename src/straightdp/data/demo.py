"""The two sets that need no download: handwritten digits (private side) and drawn letters (public side)."""

from __future__ import annotations

import math
import string
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from straightdp.data.records import Records
from straightdp.errors import BadInput

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 8
HELD_OUT = 450
_LIGHT = (
    "DejaVuSans", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Oblique", "DejaVuSerif",
    "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralItalic", "cmr10", "cmss10", "cmti10", "cmtt10", "cmmi10",
)  # fmt: skip
_BOLD = (
    "DejaVuSans-Bold", "DejaVuSans-BoldOblique", "DejaVuSansMono-Bold", "DejaVuSansMono-BoldOblique",
    "DejaVuSerif-Bold", "DejaVuSerif-BoldItalic", "STIXGeneralBol", "STIXGeneralBolIta", "cmb10",
)  # fmt: skip
_FONTS = tuple((name, (2, 3, 4)) for name in _LIGHT) + tuple((name, (0, 1, 2)) for name in _BOLD)
_GLYPH = 72  # pixels of the font a glyph is first drawn at, its outline thickened by 0 to 4 of them
_TURN = 20.0  # degrees either way


def digits(split: str) -> Records:
    """scikit-learn's 1,797 handwritten digits, uint8 (n, 1, 8, 8), classes "0" to "9".

    "test" is a fixed 450: with the digits laid out class by class in file order, records at even distances,
    so each class gives its share to within one. "train" is the other 1,347. Both keep file order; no random
    number is used.
    """
    if split not in ("train", "test"):
        raise BadInput(f"digits has no split {split!r}; write digits:train or digits:test")
    from sklearn.datasets import load_digits

    values, labels = map(np.asarray, load_digits(return_X_y=True))
    held_out = np.zeros(len(labels), bool)
    by_class = np.argsort(labels, kind="stable")
    held_out[by_class[np.arange(HELD_OUT) * len(labels) // HELD_OUT]] = True
    chosen = held_out if split == "test" else ~held_out
    x = np.rint(values[chosen] * (255 / 16)).astype(np.uint8).reshape(-1, 1, SIDE, SIDE)
    return Records(x, labels[chosen].astype(np.int64), tuple(string.digits))


def letters(n: int = 6_000, seed: int = 0, size: int = SIDE) -> Records:
    """n drawn letters, uint8 (n, 1, size, size), white on black; classes "a" to "z", capitals included.

    Letter, case, font and pen are drawn evenly and each glyph is turned by up to 20 degrees. As in the
    digits, ink fills the frame's height (94 to 100 %), is squeezed to at most 65 to 80 % of its width and
    lies near the middle. It is drawn several times too large and shrunk by area. Deterministic in (n, seed,
    size) for one version of the fonts and of Pillow.
    """
    from PIL import Image

    rng = np.random.default_rng(seed)
    frame = size * max(4, math.ceil(64 / size))
    x = np.empty((n, 1, size, size), np.uint8)
    labels, capital = rng.integers(26, size=n), rng.integers(2, size=n)
    font, pen = rng.integers(len(_FONTS), size=n), rng.integers(3, size=n)
    turn = rng.uniform(-_TURN, _TURN, size=n)
    height, width = rng.uniform(0.94, 1.0, size=n) * frame, rng.uniform(0.65, 0.8, size=n) * frame
    down, right = rng.uniform(0, 1, size=n), rng.uniform(0.3, 0.7, size=n)
    for i in range(n):
        letter = (string.ascii_lowercase, string.ascii_uppercase)[capital[i]][labels[i]]
        name, pens = _FONTS[font[i]]
        ink = _turned(_glyph(name, letter, pens[pen[i]]), float(turn[i]), height[i], width[i])
        canvas = Image.new("L", (frame, frame))
        canvas.paste(ink, (round(right[i] * (frame - ink.width)), round(down[i] * (frame - ink.height))))
        x[i, 0] = np.asarray(canvas.resize((size, size), Image.Resampling.BOX))
    return Records(x, labels.astype(np.int64), tuple(string.ascii_lowercase))


@cache
def _glyph(font: str, letter: str, pen: int) -> Image:
    """One letter, white on black, its outline thickened by `pen` pixels, cut to its ink."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{font}.ttf")
    image = Image.new("L", (3 * _GLYPH, 3 * _GLYPH))
    draw = ImageDraw.Draw(image)
    draw.text((_GLYPH, _GLYPH), letter, 255, ImageFont.truetype(str(path), _GLYPH), stroke_width=pen)
    return image.crop(image.getbbox())


def _turned(glyph: Image, degrees: float, height: float, width: float) -> Image:
    """The glyph turned, cut to its ink again, scaled to `height` and squeezed to `width` if it is wider."""
    from PIL import Image

    turned = glyph.rotate(degrees, Image.Resampling.BILINEAR, expand=True)
    turned = turned.crop(turned.getbbox())
    natural = turned.width * height / turned.height
    return turned.resize((max(1, round(min(natural, width))), round(height)), Image.Resampling.BILINEAR)
