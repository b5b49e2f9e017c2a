"""Downstream utility: a classifier trained on synthetic (image, label) pairs. `privacy/` scores it on real records."""

from __future__ import annotations

import torch
from torch import Tensor

from straightdp.nets.classifiers import LeNet, Predict, ResidualNet, fit_classifier
from straightdp.recipe import Evaluate

PROBES = {"LeNet": LeNet, "residual net": ResidualNet}  # the second is stronger


def fit_probe(
    z: Tensor, y: Tensor, classes: int, section: Evaluate, seed: int, device: torch.device, probe: str = "LeNet"
) -> Predict:
    """Train the probe on pictures z of classes y, and return its predict function (z to labels)."""
    z, y = z.to(device), y.to(device)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(z), (section.probe_batch,), generator=generator, device=device)
        return z[rows], y[rows]

    return fit_classifier(lambda: PROBES[probe](tuple(z.shape[1:]), classes), batch, section.probe_steps, seed, device)  # type: ignore[arg-type]


def agreement(predict: Predict, z: Tensor, y: Tensor) -> float:
    """How often a classifier finds y in the images z, n >= 1."""
    hits = [(predict(a).cpu() == b.cpu()).sum() for a, b in zip(z.split(1000), y.split(1000), strict=True)]
    return float(sum(hits)) / len(z)
