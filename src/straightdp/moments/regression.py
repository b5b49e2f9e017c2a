"""Conditional means as a linear function of caption features: ridge regression on released cross moments.

mu(c) = mu_0 + M_zc (M_cc + lambda I)^{-1} e(c), section 3.1. Post-processing of released values, nothing private.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from straightdp.moments.basis import Basis, on_grid
from straightdp.moments.covariance import project_psd
from straightdp.moments.statistics import split_cross_moments
from straightdp.moments.text import TextBasis

DESIGN_BITS = 20


@dataclass(frozen=True)
class Regression:
    """Caption features to feature means. W (p, width) maps a row of the design.

    Guarantee: a caption's mean is the same to the bit whatever batch it is computed in: rows and W lie on grids on
    which float64 adds the products without rounding.
    """

    W: Tensor
    text: TextBasis
    between: Tensor  # (p, p), E[mu(c) mu(c)^T] over the records

    def __call__(self, e: Tensor) -> Tensor:
        return on_grid(self.text.design(e), DESIGN_BITS) @ self.W.T


def regress(moments: Tensor, basis: Basis, text: TextBasis, ridge: float, noise_std: float = 0.0) -> Regression:
    """From the averaged, noised cross moments, whitened. The intercept, if there is one, is not shrunk.

    With `noise_std` (of one entry; tight mode) the ridge is raised by the edge of the noise's spectrum, so that
    directions of M_cc that are only noise are not divided by.
    """
    p = len(basis.P)
    width = _width(len(moments), p)
    cross, square = split_cross_moments(moments, p, width)
    penalty = torch.full((width,), ridge + noise_std * math.sqrt(2 * width), dtype=torch.float64)
    if text.centre is not None:
        penalty[0] = 0.0
    square = project_psd(square)
    W = torch.linalg.lstsq(square + torch.diag(penalty), cross.T, driver="gelsd").solution.T * basis.radius
    between = W @ square @ W.T
    largest = max(float(W.abs().max()), 1e-30) * width
    return Regression(on_grid(W, 52 - DESIGN_BITS - math.ceil(math.log2(largest))), text, between)


def _width(size: int, p: int) -> int:
    """The w with p w + w (w + 1) / 2 = size."""
    return round((math.sqrt((2 * p + 1) ** 2 + 8 * size) - (2 * p + 1)) / 2)
