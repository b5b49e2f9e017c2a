"""Judging a release by itself: what anyone can measure who has `release/` and nothing private."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from straightdp import cache
from straightdp.audits.replay import replay
from straightdp.data import synthetic
from straightdp.data.records import Records
from straightdp.data.sources import load
from straightdp.errors import BadInput
from straightdp.generator import open_generator
from straightdp.metrics import inception
from straightdp.metrics.frechet import frechet, moments, reference
from straightdp.metrics.probe import PROBES, agreement, fit_probe
from straightdp.nets.classifiers import SMALLEST
from straightdp.progress import tracker
from straightdp.recipe import Evaluate
from straightdp.team import pick_device

LEFT_OUT = (
    "Left out, because it needs the private records: accuracy on held-out real records, Fréchet distance, precision "
    "and recall to them, label consistency, domain rate, nearest training records, gradient norms. "
    "`straightdp evaluate RUN` measures them where the run's folder and its private set are."
)


def evaluate_release(release: Path, against: str | None, section: Evaluate) -> str:
    """What a release shows of itself, and beside a set that the caller may see, as lines to print.

    BadInput for a folder that is no release. `against` names a data set of the same kind of images, whose statistics
    $STRAIGHTDP_CACHE keeps.
    """
    device = pick_device("auto")
    cache.check()
    generator = open_generator(release, device)
    classes, image = generator.conditioning.classes, generator.image
    if not (release / "synthetic").is_dir():
        raise BadInput(f"{release} is not a release: synthetic is missing")
    verdict = replay(release)
    lines = [verdict.text, ""]
    if image[0] not in (1, 3) or min(image[1:]) < SMALLEST:
        return "\n".join([*lines, "Not images of at least 8 pixels: nothing else is measured.", LEFT_OUT])
    z, y = synthetic.read(release / "synthetic", image, classes)
    counts = torch.bincount(y, minlength=len(classes))
    lines.append(f"synthetic images: {len(z)} in {len(classes)} classes, {counts.min()} to {counts.max()} a class")
    lines += _halves(z, y, len(classes), section, device)
    if against is None:
        lines.append("No reference set was given: --against NAME compares with one that you may see.")
    else:
        real = load(against, size=image[1], channels=image[0])
        lines += _beside(z, y, real, against, classes, section, device)
    return "\n".join([*lines, "", LEFT_OUT])


def _halves(z: Tensor, y: Tensor, classes: int, section: Evaluate, device: torch.device) -> list[str]:
    """Whether labels can be learnt from the images at all."""
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))
    one, other = order[: len(z) // 2], order[len(z) // 2 :]
    if not len(one):
        return []
    found = agreement(fit_probe(z[one], y[one], classes, section, 0, device), z[other], y[other])
    return [f"labels found in one half by a LeNet trained on the other: {found:.3f} (a guess: {1 / classes:.3f})"]


def _beside(
    z: Tensor, y: Tensor, real: Records, name: str, classes: tuple[str, ...], section: Evaluate, device: torch.device
) -> list[str]:
    lines, thorough = [], section.is_thorough(device.type)
    if set(real.classes) <= set(classes):
        labels = torch.tensor([classes.index(c) for c in real.classes])[torch.from_numpy(real.labels)]
        for probe in PROBES if thorough else list(PROBES)[:1]:
            found = agreement(fit_probe(z, y, len(classes), section, 0, device, probe), real.z(), labels)
            lines.append(f"accuracy on {name} of a {probe} trained on the release: {found:.3f}")
    else:
        lines.append(f"accuracy on {name}: not measured, its classes are not those of the release")
    if min(len(z), len(real)) < 2:
        return [*lines, f"Fréchet distance to {name}: not measured (it needs at least two images on either side)"]
    features = inception.find(device) if thorough else None
    if features is None:
        why = "no Inception weights were found" if thorough else "--set evaluate.thorough=on measures it"
        return [*lines, f"Fréchet distance to {name}: not measured ({why})"]
    chosen = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))[: section.images]
    rows = torch.randperm(len(real), generator=torch.Generator().manual_seed(0))[: section.images].sort().values
    found, pictures = features(z[chosen], tracker("features")), real.z(rows.numpy())
    statistics = reference(features, pictures, cache.folder("features"), tracker("reference"))
    distance = frechet(moments(found), statistics)
    return [*lines, f"{features.name} of {len(found)} images to {len(rows)} of {name}: {distance:.2f}"]
