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

PROBES = {"LeNet": LeNet, "residual net": ResidualNet}  # the second is stronger


def fit_probe(
    z: Tensor, y: Tensor, classes: int, section: Evaluate, seed: int, device: torch.device, probe: str = "LeNet"
) -> Predict:
    """Train the probe and return its predict function (z to labels). One fixed recipe: Adam 1e-3, cosine decay."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        net = PROBES[probe](tuple(z.shape[1:]), classes).to(device)  # type: ignore[arg-type]
    z, y = z.to(device), y.to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, section.probe_steps)
    for _ in range(section.probe_steps):
        rows = torch.randint(len(z), (section.probe_batch,), generator=generator, device=device)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(z[rows]), y[rows]).backward()
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
