"""Pictures that a class alone does not describe: a glyph in a thin or thick stroke, and a marker in one quadrant."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from straightdp.data.captions import Template
from straightdp.errors import BadInput

STROKES = ("thin", "thick")
QUADRANTS = ("upper left", "upper right", "lower left", "lower right")
SLOTS = {"stroke": STROKES, "quadrant": QUADRANTS}
TEMPLATES = {
    "mnist": "a {stroke} {label} marked {quadrant}",
    "kmnist": "a {stroke} kana {label} marked {quadrant}",
}
SIDE, GLYPH, MARKER = 28, 20, 4  # pixels of a picture, of the shrunk glyph in its middle, of a marker in its corner
_EDGE = (SIDE - GLYPH) // 2
_CHUNK = 4_096  # pictures worked on at once: what they need then stays small


def compose(
    name: str, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The plain set's images, uint8 (N, 28, 28, 1), made into the set `name`: pictures of that shape, and captions.

    `name` is one of `builtin.COMPOSED`; `labels` are positions in `classes`, the plain set's own. Guarantee:
    the caption of record i is what `TEMPLATES` says of its class and of entry i of `attributes(name, N)`.
    """
    if images.shape[1:] != (SIDE, SIDE, 1):
        shape = "x".join(map(str, images.shape[1:]))
        raise BadInput(
            f"images of {name} should be made from {SIDE}x{SIDE}x1 but its plain set's are {shape}; fetch or write "
            "that set again"
        )
    plain = name.removeprefix("composed-").partition(":")[0]
    captions = np.array(Template.read(TEMPLATES[plain], classes, SLOTS).captions(), object)
    strokes, quadrants = attributes(name, len(images))
    rows = np.ravel_multi_index((labels, strokes, quadrants), (len(classes), len(STROKES), len(QUADRANTS)))
    return draw(images[..., 0], strokes, quadrants)[..., None], tuple(captions[rows])


def attributes(name: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Each record's stroke and quadrant, (n,) each: positions in `STROKES` and `QUADRANTS`.

    Guarantee: independent and uniform, from a seed that is the set's name; record i's do not depend on n.
    """
    codes = np.random.default_rng(list(name.encode())).integers(len(STROKES) * len(QUADRANTS), size=n)
    return codes // len(QUADRANTS), codes % len(QUADRANTS)


def draw(glyphs: np.ndarray, strokes: np.ndarray, quadrants: np.ndarray) -> np.ndarray:
    """uint8 (N, 28, 28) to uint8 (N, 28, 28): each glyph shrunk, in its stroke, with its marker.

    Guarantee: the marker, a 4x4 square in the picture's own corner of the quadrant, is 255, and the other
    three corners are 0, whatever the glyph: shrunk it ends where the markers do, and a thick stroke grows it
    only sideways and up and down. Pixel by pixel thin <= shrunk <= thick, the glyph's brightest pixel is the
    same in all three, and unless the shrunk glyph is blank, thick has more ink than thin. Deterministic on
    every machine: whole numbers only. A quadrant of -1 gives a picture without a marker.
    """
    pictures = np.zeros(glyphs.shape, np.uint8)
    for start in range(0, len(glyphs), _CHUNK):
        part = slice(start, start + _CHUNK)
        shrunk, thick = _shrunk(glyphs[part]), strokes[part] == STROKES.index("thick")
        pictures[part][thick] = _thick(shrunk[thick])
        pictures[part][~thick] = _thin(shrunk[~thick])
    for quadrant in range(len(QUADRANTS)):
        rows, columns = marker(quadrant)
        pictures[np.flatnonzero(quadrants == quadrant), rows, columns] = 255
    return pictures


def marker(quadrant: int) -> tuple[slice, slice]:
    """Rows and columns of the marker of that position in `QUADRANTS`."""
    vertical, horizontal = QUADRANTS[quadrant].split()
    first, last = slice(0, MARKER), slice(SIDE - MARKER, SIDE)
    return first if vertical == "upper" else last, first if horizontal == "left" else last


def _shrunk(glyphs: np.ndarray) -> np.ndarray:
    """Area averages, rounded, in the middle of a black picture. Sums of weights are exact in float32."""
    fine = np.gcd(SIDE, GLYPH)  # 28 pixels cut in 5 parts each, taken 7 at a time, are 20 pixels
    parts, taken = GLYPH // fine, SIDE // fine
    weights = np.repeat(np.eye(SIDE, dtype=np.float32), parts, axis=0).reshape(GLYPH, taken, SIDE).sum(axis=1)
    total = (weights @ glyphs.astype(np.float32) @ weights.T).astype(np.int32)
    return np.pad((total + taken**2 // 2) // taken**2, ((0, 0), (_EDGE, _EDGE), (_EDGE, _EDGE))).astype(np.uint8)


def _thick(shrunk: np.ndarray) -> np.ndarray:
    """Grey dilation: the brightest of a pixel and its four neighbours."""
    return _over_neighbours(shrunk, np.maximum)


def _thin(shrunk: np.ndarray) -> np.ndarray:
    """Grey erosion that spares ridges: a pixel loses at most what its brightest neighbour has more than it.

    Erosion by itself would leave little of a stroke two pixels wide. Flanks darken, crests keep their value.
    """
    ridge = np.clip(2 * shrunk.astype(np.int16) - _over_neighbours(shrunk, np.maximum), 0, 255).astype(np.uint8)
    return np.maximum(ridge, _over_neighbours(shrunk, np.minimum))


def _over_neighbours(x: np.ndarray, pick: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """`pick` over each pixel and its four neighbours; black lies outside the picture."""
    around = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    best = pick(pick(x, around[:, :-2, 1:-1]), around[:, 2:, 1:-1])
    return pick(pick(best, around[:, 1:-1, :-2]), around[:, 1:-1, 2:])
