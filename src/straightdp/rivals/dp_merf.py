"""DP-MERF (Harder et al., 2021): random Fourier features of the Gaussian kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from straightdp.errors import BadInput
from straightdp.moments.basis import exact_bits, on_grid
from straightdp.privacy.mechanisms import RowSum
from straightdp.rivals.embedding import ROOM, Numbers, as_seen

SUBSET = 2_000  # public records whose distances are looked at


class DpMerf:
    """phi = [cos W x; sin W x] / sqrt(rows of W), of length 1, for frequencies W (features // 2, d).

    With rows w ~ N(0, I / l^2), phi(x) . phi(x') approximates exp(-|x - x'|^2 / 2 l^2). The paper's 10,000 features
    are 5,000 frequencies.
    """

    def __init__(self, W: Tensor):
        W = W.double()
        self._numbers = Numbers(on_grid(W, exact_bits(W.shape[1], float(W.abs().max()))))
        self.width = 2 * len(W)

    @classmethod
    def fit(cls, public_z: Tensor, features: int, seed: int) -> DpMerf:
        """Draw the frequencies, for l^2 the median squared distance between public records."""
        if features < 2:
            raise BadInput(f"{features} features are too few for a cosine and a sine; ask for at least 2")
        z = public_z.flatten(1)
        generator = torch.Generator().manual_seed(seed)
        squared = median_squared_distance(z, generator)
        W = torch.randn(features // 2, z.shape[1], generator=generator, dtype=torch.float64)
        return cls(W / math.sqrt(squared))

    def phi(self, z: Tensor) -> Tensor:
        """(n, d) to (n, width), differentiable, in z's precision."""
        (W,) = self._numbers.like(z)
        angles = z @ W.T
        return torch.cat([angles.cos(), angles.sin()], dim=1) * (ROOM / math.sqrt(len(W)))

    def statistic(self, classes: int, device: torch.device) -> RowSum:
        return RowSum(lambda z, _: self.phi(as_seen(z)), self.width, bound=1.0, blocks=classes, device=device)

    def class_sums(self, z: Tensor) -> Tensor:
        return self.phi(z.flatten(0, 1)).unflatten(0, z.shape[:2]).sum(dim=1)

    def digest(self) -> str:
        return self._numbers.digest("dp-merf")


def median_squared_distance(z: Tensor, generator: torch.Generator) -> float:
    """Over all pairs of at most SUBSET records z (n, d), drawn at random."""
    rows = torch.randperm(len(z), generator=generator)[:SUBSET]
    distances = torch.pdist(z.detach().cpu().double()[rows])
    squared = float(distances.median()) ** 2 if len(distances) else 0.0
    if not 0 < squared < math.inf:
        raise BadInput(
            f"the median distance of {len(rows)} public records is {math.sqrt(squared):g}, which gives no bandwidth; "
            "give public records that differ"
        )
    return squared
