"""A folder of images, or a zip of one: class subfolders, or metadata.csv (file_name, label[, text])."""

from __future__ import annotations

import csv
import io
import itertools
import os
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np

from straightdp.data import labels as label
from straightdp.data import pixels
from straightdp.data.records import Records
from straightdp.errors import BadInput

METADATA = "metadata.csv"
_JUNK = {"thumbs.db", "desktop.ini", "__macosx"}


@dataclass(frozen=True)
class Tree:
    """What a folder or a zip holds: sorted relative names with "/", subfolders, and how to read one file."""

    where: str
    files: tuple[str, ...]
    folders: tuple[str, ...]
    read: Callable[[str], bytes]
    held_open: AbstractContextManager


@dataclass(frozen=True)
class Listing:
    """One record per entry: its file, its label, its text if the set has texts, and how an error names it."""

    files: tuple[str, ...]
    labels: tuple[str, ...]
    texts: tuple[str, ...] | None
    where: Callable[[int], str]


def load(path: Path, *, size: int | None, channels: int, classes: tuple[str, ...] | None) -> Records:
    """Read every image of a folder (or zip).

    With metadata.csv, records come in row order and its rows decide; else each subfolder of the top level is
    a class, files below it at any depth are its records, in sorted order of their names. Without `size` all
    images must share one square size.
    """
    tree = open_tree(path)
    with tree.held_open:
        return read(
            tree, list_records(tree, empty_ok=classes is not None), size=size, channels=channels, classes=classes
        )


def read(tree: Tree, found: Listing, *, size: int | None, channels: int, classes: tuple[str, ...] | None) -> Records:
    """The records of a listing; labels are checked before the first image is decoded."""
    index, names = label.index(found.labels, classes, found.where)
    return Records(_decode_all(tree, found.files, size, channels), index, names, found.texts)


def open_tree(path: Path) -> Tree:
    """List a folder or a zip. Hidden files and what file managers leave behind are not seen."""
    return _open_zip(path) if path.is_file() else _open_folder(path)


def _open_folder(path: Path) -> Tree:
    files: list[str] = []
    folders: list[str] = []

    def refuse(error: OSError) -> None:
        raise BadInput(f"folder {error.filename} could not be read ({error.strerror}); mend its permissions")

    for here, subfolders, names in os.walk(path, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not _ignored(name)]
        for name in subfolders:
            inside = Path(here, name)
            if inside.is_symlink():
                raise BadInput(f"folder {inside} is a link, and links to folders are not followed; copy it there")
            folders.append(inside.relative_to(path).as_posix())
        files += [Path(here, name).relative_to(path).as_posix() for name in names if not _ignored(name)]
    return Tree(
        str(path),
        tuple(sorted(files)),
        tuple(sorted(folders)),
        lambda n: (path / n).read_bytes(),
        nullcontext(),
    )


def _open_zip(path: Path) -> Tree:
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        raise BadInput(f"zip file {path} could not be read ({error}); fetch or write it again") from None
    names = [n for n in archive.namelist() if not any(_ignored(part) for part in PurePosixPath(n).parts)]
    files = {n for n in names if not n.endswith("/")}
    folders = {str(parent) for n in files for parent in PurePosixPath(n).parents} - {"."}
    folders |= {n.rstrip("/") for n in names if n.endswith("/")}
    return Tree(str(path), tuple(sorted(files)), tuple(sorted(folders)), archive.read, archive)


def _ignored(name: str) -> bool:
    return name.startswith(".") or name.lower() in _JUNK


def list_records(tree: Tree, *, empty_ok: bool = False) -> Listing:
    """Which file has which label, without decoding an image. `empty_ok`: the class list is declared elsewhere."""
    return _by_metadata(tree) if METADATA in tree.files else _by_subfolder(tree, empty_ok)


def _is_image(name: str) -> bool:
    return name.lower().endswith(pixels.SUFFIXES)


def _by_subfolder(tree: Tree, empty_ok: bool) -> Listing:
    top = [folder for folder in tree.folders if "/" not in folder]
    loose = [name for name in tree.files if "/" not in name and _is_image(name)]
    inside = tuple(name for name in tree.files if "/" in name)
    if not top and not loose:
        raise BadInput(f"{tree.where} holds no images; give a folder of class subfolders or one with {METADATA}")
    if loose:
        raise BadInput(
            f"{len(loose)} images of {tree.where} have no label, {loose[0]} first; move them into "
            f"one subfolder per class or add {METADATA} with columns file_name,label"
        )
    for name in inside:
        if not _is_image(name):
            raise BadInput(f"{name} in {tree.where} is not of a kind that is read; convert it to png or move it out")
    names = tuple(name.split("/", 1)[0] for name in inside)
    if (empty := [folder for folder in top if folder not in set(names)]) and not empty_ok:
        raise BadInput(f"class subfolder {empty[0]} of {tree.where} has no images; fill it or remove it")
    return Listing(inside, names, None, lambda i: f"file {inside[i]} of {tree.where}")


def _by_metadata(tree: Tree) -> Listing:
    """Rows count from 1 with the header as row 1, as a spreadsheet shows them."""
    columns, rows = _rows(tree)
    known = set(tree.files)
    first_row: dict[str, int] = {}
    for number, row in enumerate(rows, start=2):
        for column in columns:
            if not row[column]:
                raise BadInput(f"row {number} of {METADATA} in {tree.where} has no {column}; fill it in")
        name = _file_name(tree, number, row["file_name"])
        if name not in known:
            raise BadInput(f"row {number} of {METADATA} names {name}, which is not in {tree.where}; mend the row")
        if name in first_row:
            raise BadInput(
                f"rows {first_row[name]} and {number} of {METADATA} both name {name}; keep one record per file"
            )
        first_row[name] = number
    if unlisted := [name for name in tree.files if _is_image(name) and name not in first_row]:
        raise BadInput(
            f"{len(unlisted)} images of {tree.where} are not listed in {METADATA}, {unlisted[0]} first; "
            "add their rows or move them out"
        )
    texts = tuple(row["text"] for row in rows) if "text" in columns else None
    labels = tuple(row["label"] for row in rows)
    return Listing(tuple(first_row), labels, texts, lambda i: f"row {i + 2} of {METADATA} in {tree.where}")


def _rows(tree: Tree) -> tuple[list[str], list[dict[str, str]]]:
    """The columns that are used, and every row with its cells stripped."""
    try:
        text = tree.read(METADATA).decode("utf-8-sig")
        table = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise BadInput(f"{METADATA} of {tree.where} is not a UTF-8 CSV table ({error}); write it again") from None
    header = [cell.strip() for cell in table[0]] if table else []
    if missing := [column for column in ("file_name", "label") if column not in header]:
        raise BadInput(
            f"{METADATA} of {tree.where} has no column {missing[0]} (it has {', '.join(header) or 'none'}); "
            "its first row must be file_name,label or file_name,label,text"
        )
    body = table[1:]
    while body and not body[-1]:  # a trailing blank line
        body.pop()
    if not body:
        raise BadInput(f"{METADATA} of {tree.where} lists no image; add one row per image")
    for number, cells in enumerate(body, start=2):
        if len(cells) != len(header):
            raise BadInput(
                f"row {number} of {METADATA} in {tree.where} has {len(cells)} cells where the header has "
                f"{len(header)}; quote a cell that contains a comma"
            )
    rows = [dict(zip(header, (cell.strip() for cell in cells), strict=True)) for cells in body]
    return [column for column in ("file_name", "label", "text") if column in header], rows


def _file_name(tree: Tree, number: int, name: str) -> str:
    if ".." in PurePosixPath(name).parts or name.startswith("/") or PureWindowsPath(name).drive:
        raise BadInput(
            f"row {number} of {METADATA} names {name}, which leads out of {tree.where}; use names inside the folder"
        )
    return str(PurePosixPath(name))


def _decode_all(tree: Tree, files: tuple[str, ...], size: int | None, channels: int) -> np.ndarray:
    """(N, C, S, S) uint8 in the order of `files`; decoded in parallel, a block at a time."""

    def one(name: str) -> np.ndarray:
        try:
            data = tree.read(name)
        except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:
            raise BadInput(f"image {name} of {tree.where} could not be read ({error}); replace it") from None
        picture = pixels.decode(data, channels, f"{name} of {tree.where}")
        return picture if size is None else pixels.crop_resize(picture, size)

    x: np.ndarray | None = None
    done = 0
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        for start in range(0, len(files), 256):
            for picture in pool.map(one, itertools.islice(files, start, start + 256)):
                if x is None:
                    x = np.empty((len(files), *picture.shape), np.uint8)
                elif picture.shape != x.shape[1:]:
                    raise _mixed(tree, files[0], x.shape[1:], files[done], picture.shape)
                x[done] = picture
                done += 1
    assert x is not None  # a listing has at least one record
    return pixels.fit(x, size, tree.where)


def _mixed(tree: Tree, first: str, shape: tuple, other: str, other_shape: tuple) -> BadInput:
    return BadInput(
        f"{tree.where} has mixed sizes: {first} is {shape[1]}x{shape[0]} and {other} is "
        f"{other_shape[1]}x{other_shape[0]}; set image.size=N to crop and resize them all"
    )
