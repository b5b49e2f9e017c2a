"""The synthetic data set on disk: images/*.png and metadata.csv (file_name,label,text); points.csv for non-images."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import torch

from straightdp.data.records import to_pixels
from straightdp.errors import BadInput


def write(folder: Path, z: torch.Tensor, y: torch.Tensor, classes: tuple[str, ...], captions: tuple[str, ...]) -> None:
    """Write the whole set, or nothing: it is made beside `folder` and moved into place."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    rows = list(zip([classes[k] for k in y.tolist()], [captions[k] for k in y.tolist()], strict=True))
    if z.shape[1] in (1, 3):
        names = _write_images(partial, to_pixels(z))
        _write_table(partial / "metadata.csv", ["file_name", "label", "text"], names, rows)
    else:
        columns = [f"z{k}" for k in range(z[0].numel())]
        values = [",".join(f"{v:.6g}" for v in row) for row in z.flatten(1).tolist()]
        _write_table(partial / "points.csv", [*columns, "label", "text"], [v.split(",") for v in values], rows)
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_images(folder: Path, pixels: np.ndarray) -> list[list[str]]:
    from PIL import Image

    (folder / "images").mkdir()
    digits = max(5, len(str(len(pixels))))
    names = []
    for k, picture in enumerate(pixels):
        names.append([f"images/{k:0{digits}d}.png"])
        Image.fromarray(picture[0] if len(picture) == 1 else np.moveaxis(picture, 0, -1)).save(folder / names[-1][0])
    return names


def _write_table(path: Path, header: list[str], first: list[list[str]], rest: list[tuple[str, str]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(header)
        table.writerows([*a, *b] for a, b in zip(first, rest, strict=True))


def read(folder: Path, shape: tuple[int, int, int], classes: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images written by `write`, as (z, y): what a user of the release would train on. A class may have none."""
    from straightdp.data.sources import load

    records = load(str(folder), size=shape[1], channels=shape[0])
    if foreign := sorted(set(records.classes) - set(classes)):
        raise BadInput(f"{folder} has images of {foreign[0]!r}, which is no class of the release; mend metadata.csv")
    order = torch.tensor([classes.index(name) for name in records.classes])
    return records.z(), order[torch.from_numpy(records.labels)]
