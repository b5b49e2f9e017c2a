"""What tests of the moments share: keyed draws, times up to both ends, and a vault that adds no noise."""

import torch
from hypothesis import strategies as st
from torch import Tensor

TIMES = [0.0, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-4]
seeds = st.integers(0, 10**6)


def keyed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def at(t: float, n: int, dtype=torch.float64) -> Tensor:
    return torch.full((n,), t, dtype=dtype)


class OpenVault:
    """Gives out the declared sums exactly."""

    def __init__(self, z: Tensor, y: Tensor, classes: int):
        self.z, self.y, self.n, self.classes = z, y, len(z), classes
        self.asked: list[str] = []

    def gaussian_sum(self, id, statistic):
        self.asked.append(id)
        return statistic.assemble(statistic.exact(self.z, self.y))
