"""Contact sheets as inline PNG. Guarantee: the sheets made under one plan hold no more pixel bytes than its
budget."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from straightdp.report import words
from straightdp.report.facts import ClassPictures

SIDES = (128, 96, 64, 48, 32)
ENOUGH = 5
COLUMNS = 5
SHOWN = 60


@dataclass(frozen=True)
class Sheet:
    """One PNG of one class's pictures, `width` x `height` pixels, to be shown `scale` times as large."""

    label: str
    alt: str
    source: str
    width: int
    height: int
    scale: int


@dataclass(frozen=True)
class Plan:
    """What fits on a page: so many classes and so many pictures of each, none larger than `side` pixels."""

    classes: int
    each: int
    side: int


def plan(groups: Sequence[Sequence[ClassPictures]], budget: int) -> Plan:
    """The largest pictures of which `ENOUGH` per class fit; else fewer pictures, then fewer classes."""
    classes = max((len(group) for group in groups), default=0)
    each = max((len(one.images) for group in groups for one in group), default=0)
    if not classes or not each:
        return Plan(classes, each, SIDES[0])
    fits, side = 0, SIDES[-1]
    for side in SIDES:
        one_each = sum(_cost(one, side) for group in groups for one in group)
        fits = budget // max(1, one_each)
        if fits >= min(each, ENOUGH):
            break
    if fits:
        return Plan(classes, min(each, fits), side)
    dearest = max(_cost(one, side) for group in groups for one in group)
    return Plan(budget // (dearest * len(groups)), 1, side)


def sheet(one: ClassPictures, noun: str, limit: Plan) -> Sheet | None:
    """The class's first pictures, up to five a row, with transparent gaps; None when the class has none."""
    images = [_fit(image, limit.side) for image in one.images[: limit.each]]
    if not images:
        return None
    columns = math.ceil(len(images) / math.ceil(len(images) / COLUMNS))
    height, width, channels = images[0].shape
    gap = 2 if width >= 24 else 1
    rows = math.ceil(len(images) / columns)
    canvas = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap, channels + 1), np.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        canvas[top : top + height, left : left + width, :channels] = image
        canvas[top : top + height, left : left + width, channels] = 255
    alt = f"{words.plural(len(images), f'{noun} image', f'{noun} images')} of class {one.label}"
    scale = max(1, round(SHOWN / width))
    return Sheet(one.label, alt, _data_uri(canvas), canvas.shape[1], canvas.shape[0], scale)


def single(image: np.ndarray, label: str, alt: str, side: int) -> Sheet:
    """One (H, W, C) picture by itself, no larger than `side`."""
    small = _fit(image, side)
    height, width = small.shape[:2]
    source = _data_uri(small.squeeze(-1) if small.shape[2] == 1 else small)
    return Sheet(label, alt, source, width, height, max(1, round(SHOWN / width)))


def _cost(one: ClassPictures, side: int) -> int:
    """Bytes of one picture's pixels at that size; nothing for a class without pictures."""
    if not len(one.images):
        return 0
    height, width = _shape(one.images[0], side)
    return height * width * one.images.shape[3]


def _shape(image: np.ndarray, side: int) -> tuple[int, int]:
    height, width = image.shape[:2]
    ratio = min(1.0, side / max(height, width))
    return max(1, round(height * ratio)), max(1, round(width * ratio))


def _fit(image: np.ndarray, side: int) -> np.ndarray:
    """The picture itself, or a smaller copy whose longer side is `side`."""
    height, width = _shape(image, side)
    if (height, width) == image.shape[:2]:
        return image
    small = Image.fromarray(image.squeeze(-1) if image.shape[2] == 1 else image)
    return np.asarray(small.resize((width, height), Image.Resampling.LANCZOS)).reshape(height, width, -1)


def _data_uri(canvas: np.ndarray) -> str:
    stream = io.BytesIO()
    Image.fromarray(canvas).save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
