"""Euler integration of dx/dt = v_theta from t0 to 1, with classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Field = Callable[[Tensor, Tensor], Tensor]
"""(x, t of shape (n,)) to dx/dt."""

Network = Callable[[Tensor, Tensor, Tensor], Tensor]
"""v_theta: (x, t, caption ids) to a velocity."""


def euler(field: Field, x: Tensor, steps: int, t0: float = 0.0) -> Tensor:
    """`steps` equal steps from t0 to 1. The last evaluation is at 1 - (1 - t0) / steps, never at t = 1."""
    width = (1 - t0) / steps
    for k in range(steps):
        t = torch.full((len(x),), t0 + k * width, device=x.device, dtype=x.dtype)
        x = x + width * field(x, t)
    return x


def guided(net: Network, captions: Tensor, null: Tensor, weight: float) -> Field:
    """Classifier-free guidance: v_null + weight (v_caption - v_null). 0 and 1 need, and make, one evaluation."""

    def field(x: Tensor, t: Tensor) -> Tensor:
        if weight in (0, 1):
            return net(x, t, captions if weight else null.expand_as(captions))
        both = net(torch.cat([x, x]), torch.cat([t, t]), torch.cat([captions, null.expand_as(captions)]))
        conditional, unconditional = both.chunk(2)
        return unconditional + weight * (conditional - unconditional)

    return field
