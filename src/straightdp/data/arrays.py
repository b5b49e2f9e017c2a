"""Array files: idx (MNIST's format, gzipped or not) and npz, as images (N, H, W, C) and raw labels (N,)."""

from __future__ import annotations

import gzip
import math
import re
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile

from straightdp.errors import BadInput

_GARBLED = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    RuntimeError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)
_IMAGES = re.compile(r"images([-.])idx3")


def read_idx(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """An idx images file and the labels file beside it, found by its name (images-idx3 becomes labels-idx1).

    Either file may be gzipped or not, whatever its name ends in. Guarantee: as many labels as images, at
    least one.
    """
    if not _IMAGES.search(path.name):
        raise BadInput(
            f"idx file {path} does not have images-idx3 in its name, so its labels file cannot be found; "
            "give the images file, and name the two like train-images-idx3-ubyte and train-labels-idx1-ubyte"
        )
    beside = path.with_name(_IMAGES.sub(r"labels\1idx1", path.name))
    labels_path = present(beside)
    if labels_path is None:
        raise BadInput(f"labels file {beside} of {path.name} is missing; put it beside the images file")
    images = _parse_idx(path, dimensions=3)
    labels = _parse_idx(labels_path, dimensions=1)
    check_counts(len(images), len(labels), str(path))
    return _as_nhwc(images, str(path)), labels


def present(path: Path) -> Path | None:
    """`path`, or the same file with .gz added or taken away, whichever exists; None if neither does."""
    other = path.with_suffix("") if path.suffix == ".gz" else path.with_name(path.name + ".gz")
    return next((candidate for candidate in (path, other) if candidate.is_file()), None)


def _parse_idx(path: Path, dimensions: int) -> np.ndarray:
    cure = "fetch or write that file again"
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"idx file {path} could not be read ({error}); {cure}") from None
    magic = bytes((0, 0, 8, dimensions))
    head = 4 + 4 * dimensions
    if data[:4] != magic or len(data) < head:
        raise BadInput(
            f"idx file {path} should begin with {magic.hex()} (uint8, {dimensions} dimensions) but "
            f"begins with {data[:4].hex() or 'nothing'}; {cure}"
        )
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", dimensions, offset=4))
    if len(data) - head != math.prod(shape):
        raise BadInput(f"idx file {path} promises {math.prod(shape):,} values but holds {len(data) - head:,}; {cure}")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """An .npz with keys images and labels, or with key arr_0 and its labels in a second file beside it.

    The second file is NAME-labels.npz, for NAME.npz, NAME-imgs.npz or NAME-images.npz. Images are uint8 as
    (N, H, W), (N, H, W, C) or (N, C, H, W) with C = 1, 3 or 4 (the last axis is tried first); labels are
    whole numbers or text. Guarantee: as many labels as images, at least one; nothing pickled is ever loaded.
    """
    held = load_npz(path)
    if {"images", "labels"} <= held.keys():
        images, labels = held["images"], held["labels"]
    elif "arr_0" in held:
        images, labels = held["arr_0"], _labels_beside(path)
    else:
        raise BadInput(
            f"npz file {path} should have keys images and labels (or arr_0) but has "
            f"{', '.join(held) or 'none'}; write it with numpy.savez(path, images=..., labels=...)"
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        raise BadInput(
            f"labels of {path} should be one whole number or text per image but are {labels.dtype} of shape "
            f"{labels.shape}; write them as a one-dimensional array"
        )
    check_counts(len(images) if images.ndim else 0, len(labels), str(path))
    return _as_nhwc(images, str(path)), labels


def _labels_beside(path: Path) -> np.ndarray:
    stem = path.stem.removesuffix("-imgs").removesuffix("-images")
    beside = path.with_name(f"{stem}-labels.npz")
    if not beside.is_file():
        raise BadInput(
            f"labels file {beside} of {path.name} is missing; put it there, or save both arrays in one file "
            "with numpy.savez(path, images=..., labels=...)"
        )
    held = load_npz(beside)
    key = "arr_0" if "arr_0" in held else "labels"
    if key not in held:
        raise BadInput(
            f"labels file {beside} should have key arr_0 but has {', '.join(held) or 'none'}; write it with "
            "numpy.savez(path, labels)"
        )
    return held[key]


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """Every array of an .npz, read in full; a garbled file or one that holds Python objects is refused."""
    try:
        held = np.load(path, allow_pickle=False)
        if not isinstance(held, NpzFile):
            raise ValueError("it is a single array")
        with held:
            return {key: held[key] for key in held.files}
    except _GARBLED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if "pickle" in reason:  # numpy's sentence goes on to recommend loading it unsafely
            reason = "it is no npz, or holds Python objects"
        raise BadInput(f"npz file {path} could not be read ({reason}); write it again with numpy.savez") from None


def _as_nhwc(images: np.ndarray, where: str) -> np.ndarray:
    if images.dtype != np.uint8:
        raise BadInput(
            f"images of {where} should be uint8 (0 to 255) but are {images.dtype}; convert them first, "
            "values in 0..1 with (images * 255).round().astype('uint8')"
        )
    if images.ndim == 3:
        images = images[..., None]
    elif images.ndim == 4 and images.shape[3] not in (1, 3, 4) and images.shape[1] in (1, 3, 4):
        images = images.transpose(0, 2, 3, 1)
    if images.ndim != 4 or images.shape[3] not in (1, 3, 4) or 0 in images.shape:
        raise BadInput(
            f"images of {where} should have shape (N, H, W), (N, H, W, C) or (N, C, H, W) with C = 1, 3 or 4 "
            f"but have {images.shape}; reshape them"
        )
    return images


def check_counts(images: int, labels: int, where: str) -> None:
    """One label for each image, and at least one of both."""
    if images != labels:
        raise BadInput(f"{where} has {images:,} images but {labels:,} labels; give one label for each image")
    if not images:
        raise BadInput(f"{where} holds no records; give a file with at least one")
