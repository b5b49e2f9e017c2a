"""Pictures moved a little at random, as public knowledge of pictures allows: what they show stays what it is."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

TURN = math.radians(8)
SLANT = 0.1
STRETCH = 0.08  # of either side, on its own
SHIFT = 1 / 28  # of the side


def jitter(images: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Images (n, C, H, W), each under an affine map of its own around its middle, by `strength` times the standard
    deviations above; what comes in over an edge is that edge's colour.

    Guarantee: strength 0 draws nothing and gives the images back as they are; but for rounding, no value leaves the
    range they are in.
    """
    if not strength:
        return images
    draws = strength * torch.randn(len(images), 6, generator=generator, device=generator.device).to(images)
    turn, slant = TURN * draws[:, 0], SLANT * draws[:, 1]
    wide, high = (STRETCH * draws[:, 2]).exp(), (STRETCH * draws[:, 3]).exp()
    shift = 2 * SHIFT * draws[:, 4:]  # coordinates go from -1 to 1
    cos, sin = turn.cos(), turn.sin()
    rows = torch.stack([cos * wide, (slant - sin) * high, shift[:, 0], sin * wide, cos * high, shift[:, 1]], dim=1)
    grid = F.affine_grid(rows.reshape(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
