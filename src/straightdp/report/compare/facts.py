"""What a comparison knows of one run, read from its folder.

Guarantee: ε is recomputed from the run's transcript. What was measured against private records lies in
`Run.measured` and `Run.holdout_n` alone, so a run that is `published` carries none of it.
"""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from straightdp.audits.replay import replay
from straightdp.data import folder as images
from straightdp.errors import BadInput
from straightdp.files import file_hash
from straightdp.folder import RunFolder
from straightdp.privacy.ledger import read_chain
from straightdp.recipe import Recipe, load
from straightdp.report.facts import ClassPictures

OWN = "synthetic data"
MOMENTS = "released moments alone"
REAL = ("real private data", "real private training records")
CAPTIONS = "captions' "  # what their words say, found in the pictures again
QUALITY = {"distance": "distance", "precision": "precision", "recall": "recall", "per_class": "per-class distance"}
AWARE = {"consistency": "label consistency", "domain_rate": "domain rate"}
EACH = 5
CLASSES = 10


@dataclass(frozen=True)
class Measure:
    """One kind of figure: what, by which probe or features (and their digest), of the data that `on` names."""

    what: str
    by: str
    on: str
    digest: str = ""


@dataclass(frozen=True, eq=False)
class Run:
    """One finished run. `identity` is its transcript's hash, `declared` that of the recipe it was declared under,
    `reasons` say why it is not releasable; `recipe` is None when the release alone is known."""

    name: str
    release: Path
    identity: str
    declared: str
    epsilon: float
    delta: float
    reasons: tuple[str, ...]
    classes: tuple[str, ...]
    n_synthetic: int
    recipe: Recipe | None = None
    notes: tuple[str, ...] = ()
    measured: dict[Measure, float] | None = None
    holdout_n: int = 0

    def published(self) -> Run:
        """The run without what was computed from private records without noise."""
        return replace(self, measured=None, holdout_n=0)


def read_run(path: Path) -> Run:
    """A run's folder, or a release folder alone; anything else, and a run without a whole transcript, is refused."""
    folder = RunFolder(path)
    if folder.recipe.is_file() and folder.transcript.is_file():
        if not folder.synthetic.is_dir():
            raise _unfinished(path)
        return _with_private(_read_release(path, folder.release), folder)
    if (path / "transcript.jsonl").is_file() and not (path / "fingerprint").exists():  # the latter lies in private/
        return _read_release(path, path)
    raise BadInput(f"{path} is neither a run's folder nor a release folder; give one that `straightdp run` has made")


def _read_release(path: Path, release: Path) -> Run:
    transcript = release / "transcript.jsonl"
    data = transcript.read_bytes()
    if b'"kind":"totals"' not in data:
        raise _unfinished(path)
    verdict = replay(release)
    if not verdict.holds:
        raise BadInput(f"the transcript of {path} does not hold, so its ε is not known ({verdict.text}); leave it out")
    entries = read_chain(data)
    if entries[0]["noise"] in ("audit", "leaky"):
        raise BadInput(f"{path} is an audit, or a run without noise: nothing of it is private; leave it out")
    classes = next(entry["value"] for entry in entries if entry.get("name") == "class list")
    resolved = path.resolve()
    return Run(
        name=plain(resolved.parent.name if resolved.name == "release" else resolved.name),
        release=release,
        identity=file_hash(transcript),
        declared=entries[0]["recipe"],
        epsilon=verdict.epsilon,
        delta=entries[0]["delta"],
        reasons=tuple(line.partition(": ")[2] for line in verdict.text.splitlines()[1:]),
        classes=_names(classes),
        n_synthetic=_count(release / "synthetic"),
    )


def _unfinished(path: Path) -> BadInput:
    return BadInput(f"{path} is not finished; finish it with `straightdp run --resume`, or leave it out")


def _names(text: str) -> tuple[str, ...]:
    try:
        return tuple(map(str, json.loads(text)))
    except (ValueError, TypeError):
        return ()


def _count(folder: Path) -> int:
    """Records in a synthetic set; 0 when there is none."""
    for table in (folder / images.METADATA, folder / "points.csv"):
        if table.is_file():
            with open(table, newline="", encoding="utf-8") as file:
                return sum(1 for row in csv.reader(file) if row) - 1
    return 0


def _with_private(run: Run, folder: RunFolder) -> Run:
    """The same run with its recipe, and with what was measured inside, where that was done."""
    try:
        recipe = load(folder.recipe)
    except BadInput as error:
        raise BadInput(f"the recipe of {folder.root} cannot be read: {error}") from None
    edited = "its recipe.toml is not the one that its transcript names: edited since, or of another version"
    notes = () if run.declared == recipe.digest() else (edited,)
    if not folder.evaluation.is_file():
        return replace(run, recipe=recipe, notes=notes)
    try:
        body = json.loads(folder.evaluation.read_text())
        measured, holdout = read_measured(body), int(body["holdout_n"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            f"{folder.evaluation} cannot be read; write it again with `straightdp evaluate {folder.root}`"
        ) from None
    return replace(run, recipe=recipe, notes=notes, measured=measured, holdout_n=holdout)


def read_measured(body: dict[str, Any]) -> dict[Measure, float]:
    """The figures of an evaluation.json that a comparison shows; what is missing, None or not finite is left out."""
    found: dict[Measure, float | None] = {}
    for score in body["scores"]:
        found[Measure("accuracy", score.get("probe") or "LeNet", score["name"])] = score["mean"]
    quality = body.get("quality") or {}
    for part in quality.get("sets") or ():
        for key, what in QUALITY.items():
            measure = Measure(what, quality["features"], part["name"], quality.get("digest") or "")
            found[measure] = part.get(key)
    for key, what in AWARE.items():
        for part in body.get("label_aware") or ():
            found[Measure(what, "", part["name"])] = part.get(key)
    return {m: float(v) for m, v in found.items() if v is not None and math.isfinite(v) and _shown(m)}


def _shown(m: Measure) -> bool:
    """All of a run's own data; accuracy and distance of what it is compared with."""
    reference = m.on in (MOMENTS, *REAL) and m.what in ("accuracy", "distance")
    return m.on == OWN or m.on.startswith(CAPTIONS) or reference


def sample_pictures(run: Run, classes: tuple[str, ...]) -> tuple[ClassPictures, ...]:
    """The first `EACH` synthetic pictures of each of these classes; none when the records are not pictures."""
    folder = run.release / "synthetic"
    if not (folder / images.METADATA).is_file():
        return ()
    tree = images.open_tree(folder)
    found = images.list_records(tree)
    chosen = [k for name in classes for k in [k for k, label in enumerate(found.labels) if label == name][:EACH]]
    if not chosen:
        return ()
    files, labels = (tuple(column[k] for k in chosen) for column in (found.files, found.labels))
    grey = Image.open(io.BytesIO(tree.read(files[0]))).mode in ("1", "L")
    part = images.Listing(files, labels, None, lambda k: f"image {files[k]} of {folder}")
    x = np.moveaxis(images.read(tree, part, size=None, channels=1 if grey else 3, classes=None).x, 1, -1)
    named = np.array(labels)
    return tuple(ClassPictures(name, x[named == name]) for name in classes)


def plain(text: str) -> str:
    """One line of printable characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
