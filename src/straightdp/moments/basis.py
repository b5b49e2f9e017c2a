"""The public PCA basis and the public radii: all the geometry the release needs, fitted on public data alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from straightdp.errors import BadInput
from straightdp.recipe import Release


@dataclass(frozen=True)
class Basis:
    """f = P (z - mu_pub) with P (p, d) of orthonormal rows. Everything float64."""

    mean: Tensor
    P: Tensor
    radius: float  # R_feat
    residual_radius: float
    widest_residual: float
    image_radius: float  # of z - mu_pub

    def features(self, z: Tensor) -> Tensor:
        return (z - self.mean) @ self.P.T

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


def fit_basis(z: Tensor, labels: Tensor, section: Release) -> Basis:
    """PCA of the public records z (n, d), and public quantiles for every radius."""
    z = z.flatten(1).double()
    check_features(section.features, *z.shape)
    mean = z.mean(dim=0)
    centred = z - mean
    _, vectors = torch.linalg.eigh(centred.T @ centred / len(z))
    P = vectors.flip(1)[:, : section.features].T.contiguous()
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
