"""The public choice of t0: how late guided sampling may start before the public pictures get worse (section 4.4).

The pretrained net, the moments of the public records and their captions play the run's roles; nothing private is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from straightdp.flow.path import noise_like
from straightdp.flow.sampler import Network, euler, guided
from straightdp.metrics.frechet import frechet, moments
from straightdp.moments.basis import Basis
from straightdp.moments.field import MomentModel
from straightdp.recipe import Sample

TIMES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6)
ALLOWED = 1.1  # of the distance at t0 = 0
DRAWS = 1000


@dataclass(frozen=True)
class Plateau:
    """The Frechet distance of samples started at each time, in public PCA features, and the edge of its flat part."""

    times: list[float]
    distances: list[float]

    @property
    def t0(self) -> float:
        """The last time before the distance first exceeds its allowance; 0 is always allowed."""
        within = [d <= ALLOWED * self.distances[0] for d in self.distances]
        return self.times[[*within, False].index(False) - 1] if within[0] else 0.0


@torch.no_grad()
def plateau(
    net: Network,
    model: MomentModel,
    basis: Basis,
    z: Tensor,
    y: Tensor,
    ids: Tensor,
    null: Tensor,
    section: Sample,
    generator: torch.Generator,
) -> Plateau:
    """z, y, ids: public records, their classes and captions. The same records' captions are drawn at every time."""
    real = moments(basis.features(z.flatten(1).double().cpu()))
    rows = torch.randint(len(z), (min(DRAWS, len(z)),), generator=generator, device=z.device)
    distances = []
    for t0 in TIMES:
        pieces = []
        for part in rows.split(section.batch):
            start = noise_like(z[part], generator) if t0 == 0 else model.tilted_start(y[part], t0, generator)
            field = guided(net, ids[part], null, section.guidance)
            pieces.append(euler(field, start.reshape(-1, *z.shape[1:]), section.steps, t0))
        drawn = torch.cat(pieces).flatten(1).double().cpu()
        distances.append(frechet(real, moments(basis.features(drawn))))
    return Plateau(list(TIMES), distances)
