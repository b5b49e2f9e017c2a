"""The frozen VAE's code as the space the flow lives in, scaled as the transformer was trained on it."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from straightdp.errors import BadInput
from straightdp.nets.rowwise import RowWise
from straightdp.sd3.loading import Prior

PIXELS = 1 << 20  # that pass through the VAE at once: four images of 512 x 512, one of 1024 x 1024
MOST = 32  # images at once, however small


class VaeCodes:
    """z is the mean of the VAE's posterior, shifted and scaled, with |z| <= R; R is infinite until `settle`.

    With `offload` the VAE is on the device only while it is used.
    """

    def __init__(self, prior: Prior, device: torch.device, radius: float = math.inf, offload: bool = False):
        self.vae, self.device, self.offload = prior.vae, device, offload
        self.shape, self.image = prior.shape, prior.image
        self._at_once = max(1, min(MOST, PIXELS // (self.image[1] * self.image[2])))
        self._set_radius(radius)

    def settle(self, codes: Tensor, quantile: float) -> None:
        """R from this quantile of the norms of public codes. Those, too, may be brought `within` it then."""
        norms = codes.flatten(1).double().norm(dim=1).cpu()
        radius = float(norms.quantile(quantile)) if len(norms) else math.nan
        if not 0 < radius < math.inf:
            raise BadInput(
                f"R cannot be taken from the {len(norms)} public codes (it would be {radius}); see that sd3.model "
                "draws pictures in diffusers, and fetch or copy it again if it does not"
            )
        self._set_radius(radius)

    def _set_radius(self, radius: float) -> None:
        self.radius, self.bound = radius, radius * (1 + 1e-5)

    def within(self, z: Tensor) -> Tensor:
        """Every code brought within R. Guarantee: finite, and |z| <= R up to float32's rounding."""
        flat = z.flatten(1).nan_to_num(0.0, posinf=1e18, neginf=-1e18).double()
        length = flat.norm(dim=1, keepdim=True).clamp_min(1e-30)
        return (flat * (self.radius / length).clamp_max(1.0)).float().reshape(z.shape)

    def encode(self, images: Tensor) -> Tensor:
        """Images in [-1, 1] to z, on the CPU, float32. Guarantee: a record's z does not depend on the others."""
        with self._at_hand():
            return self._encode(images.float())

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        """z, wherever it lies, to images in [-1, 1], on the CPU. What the VAE cannot draw, NaN, is grey."""
        if not len(z):
            return torch.zeros(0, *self.image)
        with self._at_hand():
            return torch.cat([self._picture(part.to(self.device)).cpu() for part in z.split(self._at_once)])

    @cached_property
    def _encode(self) -> RowWise:
        return RowWise(self._code, self.image, self.device, self._at_once)

    def _code(self, images: Tensor) -> Tensor:
        latent = self.vae.encode(images, return_dict=False)[0].mode()
        return self.within((latent - self.vae.config.shift_factor) * self.vae.config.scaling_factor)

    def _picture(self, z: Tensor) -> Tensor:
        latent = z.float() / self.vae.config.scaling_factor + self.vae.config.shift_factor
        return self.vae.decode(latent, return_dict=False)[0].nan_to_num(0.0).clamp(-1, 1)

    @contextmanager
    def _at_hand(self):
        self.vae.to(self.device)
        try:
            yield
        finally:
            if self.offload:
                self.vae.to("cpu")
