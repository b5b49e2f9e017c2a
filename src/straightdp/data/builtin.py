"""The sets that have a name: which files they lie in, and what their classes are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from straightdp.data import arrays, folder
from straightdp.data import labels as label
from straightdp.data.catalogue import CATALOGUE, data_root
from straightdp.errors import BadInput

# Relative to the data root; the first that exists is read.
FILES: dict[str, tuple[str, ...]] = {
    "mnist:train": ("mnist/train-images-idx3-ubyte.gz",),
    "mnist:test": ("mnist/t10k-images-idx3-ubyte.gz",),
    "fashion-mnist:train": ("fashion-mnist/train-images-idx3-ubyte.gz",),
    "fashion-mnist:test": ("fashion-mnist/t10k-images-idx3-ubyte.gz",),
    "kmnist:train": ("kmnist/kmnist-train-imgs.npz", "kmnist/train-images-idx3-ubyte.gz"),
    "kmnist:test": ("kmnist/kmnist-test-imgs.npz", "kmnist/t10k-images-idx3-ubyte.gz"),
    "kuzushiji-kanji": ("kuzushiji-kanji/kuzushiji-kanji-28.npz",),
    "kuzushiji-kanji:common10": ("kuzushiji-kanji/kuzushiji-kanji-28.npz",),
    "kuzushiji-kanji:rest": ("kuzushiji-kanji/kuzushiji-kanji-28.npz",),
    "flowers102": ("flowers102/flowers102-128.zip",),
    "flowers102:first20": ("flowers102/flowers102-128.zip",),
    "flowers102:rest": ("flowers102/flowers102-128.zip",),
}
DRAWN = ("digits:train", "digits:test", "letters", "strokes", "mixture", "mixture:public")
# Made from the plain set named beside them (`composed`).
COMPOSED = {
    "composed-mnist:train": "mnist:train",
    "composed-mnist:test": "mnist:test",
    "composed-kmnist:train": "kmnist:train",
    "composed-kmnist:test": "kmnist:test",
}
NAMES = (*FILES, *COMPOSED, *DRAWN)

CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag",
                      "ankle boot"),
    "kmnist": ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
}  # fmt: skip


def locate(name: str) -> Path:
    """The file a named set lies in, or a refusal that names the folder looked in and the cure."""
    root = data_root()
    for file in FILES[name]:
        if (path := arrays.present(root / file)) is not None:
            return path
    plain = name.partition(":")[0]
    fetch = f"run 'straightdp data get {plain}'" if plain in CATALOGUE else f"put {FILES[name][-1]} there"
    raise BadInput(
        f"data set {name} was not found in {root / plain}; {fetch} or set STRAIGHTDP_DATA to the folder that has it"
    )


def read_arrays(name: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Images (N, H, W, 1), labels (N,) and class names of a named set that lies in an array file."""
    path = locate(name)
    images, labels = arrays.read_npz(path) if path.suffix == ".npz" else arrays.read_idx(path)
    if name.startswith("kuzushiji-kanji"):
        codepoints = arrays.load_npz(path).get("codepoints", np.array([], "U6"))
        classes = tuple(f"kanji {point}" for point in codepoints.tolist())
    else:
        classes = CLASSES[name.partition(":")[0]]
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= len(classes):
        raise BadInput(
            f"labels of {path} should lie in 0 to {len(classes) - 1} but do not; fetch or write that file again"
        )
    return _kanji(name, images, labels, classes) if name.startswith("kuzushiji-kanji:") else (images, labels, classes)


def _kanji(
    name: str, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """`common10` has the ten kanji with the most pictures, `rest` the others without the pictures that are also among
    those: so that one can stand for a private set and the other for a public one of the same hand."""
    common = np.sort(np.argsort(-np.bincount(labels, minlength=len(classes)), kind="stable")[:10])
    chosen = np.isin(labels, common)
    if name.endswith(":rest"):
        taken = {image.tobytes() for image in images[chosen]}
        chosen = ~chosen & np.array([image.tobytes() not in taken for image in images])
    kept = np.unique(labels[chosen])
    return images[chosen], np.searchsorted(kept, labels[chosen]), tuple(classes[k] for k in kept)


def relabel(
    labels: np.ndarray, own: tuple[str, ...], classes: tuple[str, ...] | None, where: Callable[[int], str]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Positions in a set's own class list to positions in the list asked for, matched by name."""
    if classes is None:
        return labels.astype(np.int64), own
    return label.index([own[y] for y in labels.tolist()], classes, where)


def flowers(name: str, tree: folder.Tree) -> tuple[folder.Listing, tuple[str, ...]]:
    """The flowers' listing, each class called by its name (the metadata's text); the names in label order.

    `first20` has the first twenty of each class in the file's order, 2,040 in all, `rest` the others that are not the
    same file as one of those: the set holds a few pictures twice.

    The texts say no more than the names, so the records carry none: captions come from the template.
    """
    found = folder.list_records(tree)
    pairs = set(zip(found.labels, found.texts or (), strict=found.texts is not None))
    if not len(pairs) == len(set(found.labels)) == len({text for _, text in pairs}):
        raise BadInput(f"metadata.csv of {tree.where} should hold one text per label; fetch or write that file again")
    order = tuple(text for _, text in sorted(pairs, key=lambda pair: label.number_key(pair[0])))
    rows, seen = list(range(len(found.files))), Counter()
    if name != "flowers102":
        early, late = [], []
        for i, own in enumerate(found.labels):
            seen[own] += 1
            (early if seen[own] <= 20 else late).append(i)
        taken = {tree.read(found.files[i]) for i in early}
        rows = early if name.endswith("first20") else [i for i in late if tree.read(found.files[i]) not in taken]
    files, texts = tuple(found.files[i] for i in rows), tuple((found.texts or ())[i] for i in rows)
    return folder.Listing(files, texts, None, lambda i: found.where(rows[i])), order
