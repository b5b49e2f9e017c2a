"""A convolutional autoencoder of public images, frozen once it is trained: the latent variant works in its code.

Every operation is of one record alone (group norm, no batch statistics). Codes are standardised by public statistics
and brought within a radius R, so that a private record's code is bounded whatever the record shows.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from straightdp.errors import BadInput
from straightdp.recipe import Latent

COARSEST = 4  # side of a code's grid
WIDEST = 128


def code_shape(d: int, side: int) -> tuple[int, int, int]:
    """(C, H, W) of a code of d numbers for images of `side` pixels."""
    grid = sides(side)[-1]
    if d % grid**2:
        raise BadInput(
            f"a code of {d} numbers does not fill a grid of {grid} x {grid}; make latent.d a multiple of {grid**2}"
        )
    return d // grid**2, grid, grid


def sides(side: int, coarsest: int = COARSEST) -> list[int]:
    """The image's side halved, rounding up, until it is no more than the coarsest."""
    found = [side]
    while found[-1] > coarsest:
        found.append((found[-1] + 1) // 2)
    return found


class Level(nn.Sequential):
    """Two convolutions at one resolution; the first may halve it."""

    def __init__(self, before: int, after: int, stride: int = 1):
        super().__init__(
            nn.Conv2d(before, after, 3, stride, padding=1),
            nn.GroupNorm(8, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.GroupNorm(8, after),
            nn.SiLU(),
        )


class Autoencoder(nn.Module):
    """Images (n, C, H, W) in [-1, 1] to codes and back. `radius` and the standardisation are set by `settle`."""

    mean: Tensor
    scale: Tensor
    radius: Tensor

    def __init__(self, section: Latent, image: tuple[int, int, int]):
        super().__init__()
        if section.d is None:
            raise ValueError("latent.d is not set")
        self.image, self.section = image, section
        self.shape = code_shape(section.d, image[1])
        self.sides = sides(image[1])
        base = -(-section.width // 8) * 8
        widths = [min(base * 2**k, max(base, WIDEST)) for k in range(len(self.sides))]
        steps = list(pairwise(widths))
        self.first = nn.Conv2d(image[0], widths[0], 3, padding=1)
        self.down = nn.ModuleList(Level(a, b, 2) for a, b in steps)
        self.to_code = nn.Conv2d(widths[-1], self.shape[0], 1)
        self.from_code = nn.Conv2d(self.shape[0], widths[-1], 1)
        self.up = nn.ModuleList(Level(b, a) for a, b in reversed(steps))
        self.last = nn.Conv2d(widths[0], image[0], 3, padding=1)
        self.register_buffer("mean", torch.zeros(self.shape))
        self.register_buffer("scale", torch.ones(self.shape))
        self.register_buffer("radius", torch.tensor(float("inf")))

    def raw_code(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for level in self.down:
            x = level(x)
        return self.to_code(x)

    def from_raw(self, code: Tensor) -> Tensor:
        x = self.from_code(code)
        for level, side in zip(self.up, reversed(self.sides[:-1]), strict=True):
            x = level(F.interpolate(x, size=(side, side), mode="nearest"))
        return self.last(x)

    def within(self, code: Tensor) -> Tensor:
        """Every code brought within R. Guarantee: finite, and |code| <= R up to float32's rounding."""
        flat = code.flatten(1).nan_to_num(0.0, posinf=1e18, neginf=-1e18)
        length = flat.norm(dim=1, keepdim=True).clamp_min(1e-30)
        return (flat * (self.radius / length).clamp_max(1.0)).reshape(code.shape)

    def encode(self, x: Tensor) -> Tensor:
        return self.within((self.raw_code(x) - self.mean) / self.scale)

    def decode(self, code: Tensor) -> Tensor:
        return self.from_raw(self.within(code) * self.scale + self.mean).clamp(-1, 1)

    def loss(self, x: Tensor, noise: Tensor) -> Tensor:
        """Squared error of the picture made from a code with a little noise, as generated codes will have."""
        code = self.raw_code(x)
        spread = code.detach().std(dim=0, keepdim=True)
        return (
            self.from_raw(code + self.section.noise * spread * noise) - x
        ).square().mean() + SIZE * code.square().mean()

    @torch.no_grad()
    def settle(self, x: Tensor) -> None:
        """Freeze: standardise by the public images' codes, and take R from the quantile of their norms."""
        raw = torch.cat([self.raw_code(part) for part in x.split(500)])
        if not bool(torch.isfinite(raw).all()):
            raise BadInput("the autoencoder's training diverged: its codes are not finite; lower latent.lr")
        self.mean.copy_(raw.mean(dim=0))
        self.scale.copy_(raw.std(dim=0).clamp_min(1e-6))
        norms = ((raw - self.mean) / self.scale).flatten(1).norm(dim=1).double().cpu()
        self.radius.fill_(float(norms.quantile(self.section.radius_quantile)))
        self.requires_grad_(False).eval()


SIZE = 1e-4  # keeps codes from growing to drown that noise
