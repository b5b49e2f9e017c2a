"""From pictures of any kind to uint8 arrays of one size: colour, transparency, crop and resize."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from straightdp.errors import BadInput

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")


def to_channels(x: np.ndarray, channels: int) -> np.ndarray:
    """uint8 (..., H, W, C) with C = 1, 2 (grey, alpha), 3 or 4 (colour, alpha) to (..., H, W, channels).

    Guarantee: transparency is composited on black, the "no ink" value; colour to grey is the ITU-R 601 luma,
    bit for bit Pillow's; grey to colour repeats the channel; what already fits is returned as it is.
    """
    if x.shape[-1] in (2, 4):
        alpha = x[..., -1:].astype(np.uint16)
        x = ((x[..., :-1] * alpha + 127) // 255).astype(np.uint8)
    if x.shape[-1] == channels:
        return x
    if channels == 3:
        return np.repeat(x, 3, axis=-1)
    red, green, blue = (x[..., i : i + 1].astype(np.uint32) for i in range(3))
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).astype(np.uint8)


def fit(x: np.ndarray, size: int | None, where: str) -> np.ndarray:
    """(N, H, W, C) uint8 to (N, C, S, S), a copy. Pillow is called only when something needs resizing.

    With `size`, S = size: centre crop to a square, then bicubic with antialiasing (`crop_resize`). Without it
    the images must be square already.
    """
    height, width = x.shape[1:3]
    if size is None and height != width:
        raise BadInput(f"images of {where} are {width}x{height}, not square; set image.size=N to crop and resize them")
    if size is not None and (height, width) != (size, size):
        resized = np.empty((len(x), size, size, x.shape[-1]), np.uint8)
        for i, picture in enumerate(x):
            resized[i] = crop_resize(picture, size)
        x = resized
    return np.array(x.transpose(0, 3, 1, 2), order="C")


def crop_resize(picture: np.ndarray, size: int) -> np.ndarray:
    """(H, W, C) uint8 to (size, size, C): the central square, then Pillow's bicubic filter both ways.

    Pillow widens the filter when it shrinks, so shrinking is antialiased. An odd margin loses its extra pixel
    at the right or the bottom. A square that has the size already comes back untouched.
    """
    from PIL import Image

    height, width = picture.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = picture[top : top + side, left : left + side]
    if side == size:
        return square
    grey = square.shape[-1] == 1
    image = Image.fromarray(np.ascontiguousarray(square[..., 0] if grey else square))
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC)).reshape(size, size, -1)


def decode(data: bytes, channels: int, where: str) -> np.ndarray:
    """The bytes of one image file to (H, W, channels) uint8.

    The camera's orientation tag is obeyed; 16-bit grey keeps its high byte; of an animation the first frame
    counts. A file that is damaged, cut short or of an unknown kind is refused by name.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            picture = _as_array(ImageOps.exif_transpose(image))
    except Exception as error:  # the decoders raise a dozen kinds, SyntaxError and struct.error among them
        reason = "unknown image format" if type(error).__name__ == "UnidentifiedImageError" else error
        raise BadInput(
            f"image {where} could not be read ({reason}); replace or remove that file ({_kinds()} are read)"
        ) from None
    return to_channels(picture, channels)


def _as_array(image: Image) -> np.ndarray:
    """Any Pillow mode to (H, W, 1 | 2 | 3 | 4) uint8."""
    if image.mode.startswith("I"):  # 16-bit grey, or what older Pillow makes of it
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("grey values outside 16 bits")
        return (values >> 8).astype(np.uint8)[..., None]
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range")
    if image.mode in ("PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
    elif image.mode == "1":
        image = image.convert("L")
    elif image.mode not in ("L", "LA", "RGB", "RGBA"):
        image = image.convert("RGB")
    array = np.asarray(image)
    return array[..., None] if array.ndim == 2 else array


def _kinds() -> str:
    return ", ".join(suffix[1:] for suffix in SUFFIXES)
