"""Where records are seen: in pixels, or in the code of a frozen public autoencoder. z is a point of that space."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from straightdp.nets.autoencoder import Autoencoder
from straightdp.nets.rowwise import RowWise


class Space(Protocol):
    shape: tuple[int, int, int]  # of one z
    image: tuple[int, int, int]  # of what it decodes to
    bound: float  # no number in z is larger than this

    def encode(self, images: Tensor) -> Tensor:
        """Images in [-1, 1] to z, on the CPU, float32. Guarantee: a record's z does not depend on the others."""
        ...

    def decode(self, z: Tensor) -> Tensor:
        """z, wherever it lies, to images in [-1, 1]."""
        ...


class Pixels:
    """z is the image itself."""

    bound = 1.0

    def __init__(self, shape: tuple[int, int, int]):
        self.shape = self.image = shape

    def encode(self, images: Tensor) -> Tensor:
        return images.float().cpu()

    def decode(self, z: Tensor) -> Tensor:
        return z.clamp(-1, 1)


class Codes:
    """z is the autoencoder's code, with |z| <= R."""

    def __init__(self, autoencoder: Autoencoder, device: torch.device):
        self.autoencoder = autoencoder.to(device).eval()
        self.device = device
        self.shape, self.image = autoencoder.shape, autoencoder.image
        self.bound = float(autoencoder.radius) * (1 + 1e-5)
        self._encode = RowWise(autoencoder.encode, self.image, device)

    def encode(self, images: Tensor) -> Tensor:
        return self._encode(images)

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        parts = [self.autoencoder.decode(part.to(self.device)) for part in z.split(500)]
        return torch.cat(parts) if parts else torch.zeros(0, *self.image)


def flow_of(space: Space) -> Space:
    """Where the network works beside a release of that space's z: there too, or in the pixels that its codes are of."""
    if isinstance(space, Codes) and space.autoencoder.section.flow == "pixels":
        return Pixels(space.image)
    return space
