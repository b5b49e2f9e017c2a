"""What keeps the backbone quiet under noise: bounds on tokens and on the map that captions flow in by (section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor


def within(x: Tensor, B0: float | None) -> Tensor:
    """Every token projected onto the ball of radius B0: h min(1, B0 / |h|). None leaves it."""
    if B0 is None:
        return x
    length = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)
    return x * (B0 / length.clamp_min(1e-12)).clamp_max(1.0).to(x.dtype)


def spectral_bound(weight: Tensor) -> Tensor:
    """An upper bound on the largest singular value, at most 1.1 times it for ranks up to 256.

    ||(W W^T)^16||_F^(1/32) is the 64-norm of the singular values; squaring four times takes little for a small matrix.
    """
    weight = weight.detach().float()
    with torch.autocast(weight.device.type, enabled=False):  # a bound holds in float32 alone
        gram = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
        scale = torch.linalg.matrix_norm(gram).clamp_min(1e-30)  # keeps the powers within float32
        gram = gram / scale
        log = torch.zeros((), device=weight.device)
        for k in range(4):
            gram = gram @ gram
            size = torch.linalg.matrix_norm(gram).clamp_min(1e-30)
            gram, log = gram / size, log + size.log() / 2 ** (k + 1)
    return scale.sqrt() * (log / 2).exp() * (1 + 1e-5)


def cap(weight: Tensor, s: float) -> Tensor:
    """What to multiply a linear map's output with so that its spectral norm is at most s; a constant to gradients."""
    return s / spectral_bound(weight).clamp_min(s)
