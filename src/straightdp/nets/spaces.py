"""Where the flow lives: in pixels, or in the code of a frozen public autoencoder. z is a point of that space."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from straightdp.nets.autoencoder import Autoencoder

SLOTS = 256  # images encoded at once; always this many, so that a record's code hangs on nothing else


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
        self._slots = SLOTS if self._places_are_alike() else 1

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """In full batches of one size, whose places were seen to be alike to the bit; else one by one."""
        found = []
        for part in images.split(self._slots):
            padded = F.pad(part, (0, 0, 0, 0, 0, 0, 0, self._slots - len(part)))
            found.append(self.autoencoder.encode(padded.to(self.device))[: len(part)].float().cpu())
        return torch.cat(found) if found else torch.zeros(0, *self.shape)

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        parts = [self.autoencoder.decode(part.to(self.device)) for part in z.split(500)]
        return torch.cat(parts) if parts else torch.zeros(0, *self.image)

    @torch.no_grad()
    def _places_are_alike(self) -> bool:
        """Whether copies of one image, whatever it shows, get the same code to the bit in every place of a batch."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            image = torch.rand(1, *self.image, generator=generator) * 2 - 1
            codes = self.autoencoder.encode(image.to(self.device).expand(SLOTS, -1, -1, -1).contiguous())
            if not torch.equal(codes, codes[:1].expand_as(codes)):
                return False
        return True
