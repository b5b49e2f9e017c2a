"""The straight interpolation x_t = (1 - t) xi + t z, and every conversion between its quantities, once.

t = 0 is the noise end. Times have shape (n,) and broadcast over records of shape (n, ...).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


def like(t: Tensor, x: Tensor) -> Tensor:
    """t of shape (n,) reshaped to broadcast over x of shape (n, ...)."""
    return t.reshape(-1, *([1] * (x.dim() - 1)))


def interpolate(z: Tensor, xi: Tensor, t: Tensor) -> Tensor:
    """x_t = (1 - t) xi + t z."""
    t = like(t, z)
    return (1 - t) * xi + t * z


def velocity(z: Tensor, xi: Tensor) -> Tensor:
    """v = z - xi, the regression target of equation (1)."""
    return z - xi


def velocity_from_z(z: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """Equation (2): v = (z - x) / (1 - t), for z the clean record or its posterior mean. t < 1."""
    return (z - x) / (1 - like(t, x))


def z_from_velocity(v: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """z = x + (1 - t) v."""
    return x + (1 - like(t, x)) * v


def xi_from_velocity(v: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """xi = x - t v."""
    return x - like(t, x) * v


def noise_like(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)


def back_to(z: Tensor, t: float, generator: torch.Generator) -> Tensor:
    """z taken back to time t, each record by noise of its own."""
    return interpolate(z, noise_like(z, generator), torch.full((len(z),), t, device=z.device))


def uniform_times(n: int, low: float, high: float, generator: torch.Generator, device: torch.device) -> Tensor:
    """t ~ U[low, high]."""
    return low + (high - low) * torch.rand(n, generator=generator, device=device)


class Draws(Protocol):
    """Where a step's t and xi come from: a public generator, or the secret key. Shapes begin with one row a record."""

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """In [0, 1)."""
        ...

    def normal(self, shape: tuple[int, ...]) -> Tensor: ...


class TorchDraws:
    """Draws from a torch generator, on its device."""

    def __init__(self, generator: torch.Generator):
        self._generator = generator

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self._generator.device)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._generator.device)
