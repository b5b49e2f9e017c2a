"""How a time or a place is told to a network."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def waves(position: Tensor, width: int) -> Tensor:
    """Sinusoidal features of a scalar position, (n,) to (n, width)."""
    frequencies = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=position.device) / (width // 2))
    angles = position.unsqueeze(-1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
