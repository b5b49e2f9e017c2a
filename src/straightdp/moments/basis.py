"""The public PCA basis and the public radii: all the geometry the release needs, fitted on public data alone."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from straightdp.errors import BadInput
from straightdp.recipe import Release

Z_BITS = 16  # behind the point of z; a pixel step is 2^-7


def on_grid(x: Tensor, bits: int) -> Tensor:
    """x rounded to multiples of 2^-bits."""
    return torch.round(x * 2.0**bits) / 2.0**bits


def exact_bits(size: float, bound: float = 1.0) -> int:
    """How many bits numbers may have whose sizes add up to `size`, so that the sum of their products with numbers of
    z, each up to `bound`, stays below 53 bits."""
    return 52 - Z_BITS - math.ceil(math.log2(size * max(bound, 1.0)))


@dataclass(frozen=True)
class Basis:
    """f = P (z - mu_pub) with P (p, d) of orthonormal rows. Everything float64.

    Guarantee: a record's features are the same to the bit whatever batch it is computed in. z and P are rounded to
    fixed-point grids on which float64 adds d products without rounding, in any order.
    """

    mean: Tensor
    P: Tensor
    radius: float  # R_feat
    residual_radius: float
    widest_residual: float
    image_radius: float  # of z - mu_pub

    def features(self, z: Tensor) -> Tensor:
        return on_grid(z, Z_BITS) @ self.P.T - self.mean @ self.P.T

    def digest(self) -> str:
        """A hash of all its numbers."""
        radii = (self.radius, self.residual_radius, self.widest_residual, self.image_radius)
        numbers = self.mean.numpy().tobytes() + self.P.contiguous().numpy().tobytes()
        return hashlib.sha256(repr(radii).encode() + numbers).hexdigest()

    def lift(self, f: Tensor) -> Tensor:
        """Features back to records: mu_pub + P^T f."""
        return self.mean + f @ self.P


def check_features(features: int, n: int, d: int) -> None:
    """Refuse a basis that n public records of d values cannot carry."""
    if features > min(n - 1, d):
        raise BadInput(
            f"{n} public records of {d} values cannot carry {features} features; set release.features to at most "
            f"{min(n - 1, d)}"
        )


def fit_basis(z: Tensor, labels: Tensor, section: Release, bound: float = 1.0) -> Basis:
    """PCA of the public records z (n, d), and public quantiles for every radius. `bound` holds for every z there is.

    Without `section.project` the basis is the whole space: the paper's ablation.
    """
    z = z.flatten(1).double()
    mean = z.mean(dim=0)
    centred = z - mean
    if section.project:
        check_features(section.features, *z.shape)
        # the sizes in a row of unit length add up to sqrt(d), and rounding adds far less than the bits left over
        size = 1.001 * math.sqrt(z.shape[1])
        P = on_grid(_directions(centred, section.features), exact_bits(size, bound))
    else:
        P = torch.eye(z.shape[1], dtype=torch.float64)
    features = centred @ P.T
    residuals = features.clone()
    for label in labels.unique():
        residuals[labels == label] -= features[labels == label].mean(dim=0)

    def quantile(x: Tensor, level: float) -> float:
        return max(float(np.quantile(x.norm(dim=1).numpy(), level)), 1e-6)

    return Basis(
        mean,
        P,
        radius=quantile(features, section.radius_quantile),
        residual_radius=quantile(residuals, section.residual_quantile),
        widest_residual=quantile(residuals, 0.99),
        image_radius=quantile(centred, section.radius_quantile),
    )


def _directions(centred: Tensor, p: int) -> Tensor:
    """The p directions of largest variance of (n, d) rows, (p, d), without a d x d matrix where n < d."""
    n, d = centred.shape
    if d <= n:
        return torch.linalg.eigh(centred.T @ centred / n).eigenvectors.flip(1)[:, :p].T.contiguous()
    weights = torch.linalg.eigh(centred @ centred.T / n).eigenvectors.flip(1)[:, :p]
    return torch.linalg.qr(centred.T @ weights).Q.T.contiguous()
