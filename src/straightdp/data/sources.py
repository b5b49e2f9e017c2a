"""The one door for data: a name, a file or a folder in, `Records` out."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from straightdp.data import arrays, builtin, folder, pixels
from straightdp.data import labels as label
from straightdp.data.records import Records
from straightdp.errors import BadInput


def load(source: str, *, size: int | None, channels: int, classes: tuple[str, ...] | None = None) -> Records:
    """Read a whole labelled image set.

    `source` is a built-in name (`builtin.NAMES`), or the path of an .npz, an idx images file, an image folder
    or a zip of one; a name wins over a folder of the same name, which is then written ./name. Guarantee: `x`
    is uint8 (N, channels, S, S) with N >= 1, labels are int64 positions in the class list, and the order is
    the file's own or that of sorted file names, so the same source always gives the same records. `size`
    crops to a centred square and resizes; without it all images must share one square size. `classes` is the
    list labels must come from; without it the list is what is found. Only folders with texts and the composed
    sets bring texts; those name the class as the set does, whatever `classes` says of its position. `mixture`
    alone is float32 (N, 2, 1, 1) and wants channels = 2.
    """
    label.check_classes(classes)
    if source in ("mixture", "mixture:public"):
        return _mixture(source, size, channels, classes)
    if channels not in (1, 3):
        raise BadInput(f"images are read as grey or colour but image.channels is {channels}; set it to 1 or 3")
    if size is not None and size < 1:
        raise BadInput(f"image.size should be a side in pixels but is {size}; set it to 1 or more")
    if source in builtin.NAMES:
        return _named(source, size, channels, classes)
    return _path(source, size, channels, classes)


def load_together(sources: Sequence[str], *, size: int | None, channels: int) -> Records:
    """Several sets as one, in their order. Classes of the same name in two sets are two classes, told apart by their
    sets' names; texts are kept where all sets bring them."""
    if len(sources) == 1:
        return load(sources[0], size=size, channels=channels)
    if len(set(sources)) < len(sources) or not sources:
        raise BadInput(f"a list of sets should name each once, and at least one, but is {list(sources)}")
    found = [load(source, size=size, channels=channels) for source in sources]
    if len({records.shape for records in found}) > 1:
        sides = ", ".join(f"{source} {records.shape[1]}" for source, records in zip(sources, found, strict=True))
        raise BadInput(f"sets that are taken as one differ in their images' side ({sides}); set image.size")
    often = Counter(name for records in found for name in set(records.classes))
    classes = [
        name if often[name] == 1 else f"{name} of {Path(source).name}"
        for source, records in zip(sources, found, strict=True)
        for name in records.classes
    ]
    if len(set(classes)) < len(classes):
        raise BadInput("two sets that are taken as one have the same name and classes; rename one of them")
    first = accumulate((len(records.classes) for records in found[:-1]), initial=0)
    labels = [records.labels + start for records, start in zip(found, first, strict=True)]
    texts = [records.texts for records in found if records.texts is not None]
    return Records(
        np.concatenate([records.x for records in found]),
        np.concatenate(labels),
        tuple(classes),
        tuple(chain.from_iterable(texts)) if len(texts) == len(found) else None,
    )


def _named(name: str, size: int | None, channels: int, classes: tuple[str, ...] | None) -> Records:
    if name in builtin.DRAWN:
        return _drawn(name, size, channels, classes)
    if name in builtin.COMPOSED:
        return _composed(name, size, channels, classes)
    if name.startswith("flowers102"):
        tree = folder.open_tree(builtin.locate(name))
        with tree.held_open:
            found, own = builtin.flowers(name, tree)
            return folder.read(tree, found, size=size, channels=channels, classes=classes or own)
    images, raw, own = builtin.read_arrays(name)
    labels, order = builtin.relabel(raw, own, classes, lambda i: f"record {i} of {name}")
    return Records(_fit(images, size, channels, name), labels, order)


def _composed(name: str, size: int | None, channels: int, classes: tuple[str, ...] | None) -> Records:
    from straightdp.data import composed

    images, raw, own = builtin.read_arrays(builtin.COMPOSED[name])
    labels, order = builtin.relabel(raw, own, classes, lambda i: f"record {i} of {name}")
    pictures, texts = composed.compose(name, images, raw, own)
    return Records(_fit(pictures, size, channels, name), labels, order, texts)


def _drawn(name: str, size: int | None, channels: int, classes: tuple[str, ...] | None) -> Records:
    from straightdp.data import demo
    from straightdp.data.strokes import strokes

    kind, _, split = name.partition(":")
    sized = {} if size is None else {"size": size}
    if kind == "digits":
        records = demo.digits(split)
    else:
        records = demo.letters(**sized) if kind == "letters" else strokes(**sized)
    labels, order = builtin.relabel(records.labels, records.classes, classes, lambda i: f"record {i} of {name}")
    return Records(_fit(records.x.transpose(0, 2, 3, 1), size, channels, name), labels, order)


def _mixture(source: str, size: int | None, channels: int, classes: tuple[str, ...] | None) -> Records:
    from straightdp.data import mixture

    if channels != 2 or size not in (None, 1):
        raise BadInput(
            f"a record of mixture is two numbers, not {channels} channels of side {size or 'unset'}; set "
            "image.channels=2 and leave image.size out"
        )
    records = mixture.sample() if source == "mixture" else mixture.public()
    labels, order = builtin.relabel(records.labels, records.classes, classes, lambda i: f"record {i} of {source}")
    return Records(records.x, labels, order)


def _path(source: str, size: int | None, channels: int, classes: tuple[str, ...] | None) -> Records:
    path = Path(source).expanduser()
    if not source or not path.exists():
        raise BadInput(_not_found(source))
    if path.is_dir() or path.suffix.lower() == ".zip":
        return folder.load(path, size=size, channels=channels, classes=classes)
    if path.suffix.lower() == ".npz":
        images, raw = arrays.read_npz(path)
    elif "idx" in path.name:
        images, raw = arrays.read_idx(path)
    else:
        raise BadInput(
            f"file {path} is of no kind that is read; give an .npz, an idx images file, an image folder or a zip of one"
        )

    def where(i: int) -> str:
        return f"record {i} of {path}"

    labels, order = label.index(label.names_of(raw, classes, where), classes, where)
    return Records(_fit(images, size, channels, str(path)), labels, order)


def _fit(images: np.ndarray, size: int | None, channels: int, where: str) -> np.ndarray:
    return pixels.fit(pixels.to_channels(images, channels), size, where)


def _not_found(source: str) -> str:
    names = ", ".join(builtin.NAMES)
    if not source:
        return f"no data source was given; set private.data or public.data to a path or one of {names}"
    if splits := [name for name in builtin.NAMES if name.startswith(source.partition(":")[0] + ":")]:
        return f"data set {source!r} needs one of its splits; write {' or '.join(splits)}"
    near = difflib.get_close_matches(source, builtin.NAMES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"give a folder or file that exists, or one of {names}"
    return f"data source {source!r} is neither a path that exists nor a built-in name; {hint}"
