"""Downstream utility: a classifier trained on synthetic (image, label) pairs. `privacy/` scores it on real records."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from straightdp.nets.classifiers import LeNet, ResidualNet
from straightdp.recipe import Evaluate

Predict = Callable[[Tensor], Tensor]
"""Images in [-1, 1] to labels."""

Batch = Callable[[torch.Generator], tuple[Tensor, Tensor]]
"""Some pictures and their labels, by a generator's draws."""

PROBES = {"LeNet": LeNet, "residual net": ResidualNet}  # the second is stronger


def fit_probe(
    z: Tensor, y: Tensor, classes: int, section: Evaluate, seed: int, device: torch.device, probe: str = "LeNet"
) -> Predict:
    """Train the probe on pictures z of classes y, and return its predict function (z to labels)."""
    z, y = z.to(device), y.to(device)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(z), (section.probe_batch,), generator=generator, device=device)
        return z[rows], y[rows]

    return fit_on_batches(batch, tuple(z.shape[1:]), classes, section, seed, device, probe)  # type: ignore[arg-type]


def fit_on_batches(
    batch: Batch,
    shape: tuple[int, int, int],
    classes: int,
    section: Evaluate,
    seed: int,
    device: torch.device,
    probe: str = "LeNet",
) -> Predict:
    """Train the probe on pictures of that shape as they are made. One fixed recipe: Adam 1e-3, cosine decay."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        net = PROBES[probe](shape, classes).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, section.probe_steps)
    for _ in range(section.probe_steps):
        z, y = batch(generator)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(z), y).backward()
        optimizer.step()
        schedule.step()
    net.eval()

    @torch.no_grad()
    def predict(batch: Tensor) -> Tensor:
        return net(batch.to(device)).argmax(dim=1)

    return predict


def agreement(predict: Predict, z: Tensor, y: Tensor) -> float:
    """How often a classifier finds y in the images z, n >= 1."""
    hits = [(predict(a).cpu() == b.cpu()).sum() for a, b in zip(z.split(1000), y.split(1000), strict=True)]
    return float(sum(hits)) / len(z)
