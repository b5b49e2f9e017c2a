"""Integration of dx/dt = v_theta from t0 to 1, with classifier-free guidance, a pull of moments, and fresh noise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from straightdp.flow.path import like, noise_like, xi_from_velocity

Field = Callable[[Tensor, Tensor], Tensor]
"""(x, t of shape (n,)) to dx/dt."""

Network = Callable[[Tensor, Tensor, Tensor], Tensor]
"""v_theta: (x, t, caption ids) to a velocity."""


def euler(
    field: Field,
    x: Tensor,
    steps: int,
    t0: float = 0.0,
    churn: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`steps` equal steps from t0 to 1. The last evaluation is at 1 - (1 - t0) / steps, never at t = 1.

    With `churn` a part of the noise that x is taken to hold is drawn anew at each step but the last: 1 is the ancestral
    sampler, x_s ~ p(x_s | x_t, z = the field's estimate), and between lies DDIM's eta. What the field takes for signal
    and passes on is so looked at afresh.
    """
    if churn and generator is None:
        raise ValueError("fresh noise needs a generator")
    width = (1 - t0) / steps
    for k in range(steps):
        t, later = t0 + k * width, t0 + (k + 1) * width
        times = torch.full((len(x),), t, device=x.device, dtype=x.dtype)
        v = field(x, times)
        if generator is not None and churn and k < steps - 1:
            fresh = churn**2 * (1 - (t * (1 - later) / (later * (1 - t))) ** 2)
            xi = xi_from_velocity(v, x, times)
            stirred = ((1 - fresh) ** 0.5 - 1) * xi + fresh**0.5 * noise_like(x, generator)
            x = x + width * v + (1 - later) * stirred
        else:
            x = x + width * v
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


def pulled(field: Field, towards: Field, away: Field, weight: float, until: float) -> Field:
    """The field plus weight (towards - away) at times before `until`: where `away` is a model of what the field learned
    and `towards` one of the same kind of something else, it is led there by what sets the two apart."""

    def moved(x: Tensor, t: Tensor) -> Tensor:
        v, early = field(x, t), t < until
        if not bool(early.any()):
            return v
        return v + weight * like(early, x) * (towards(x, t) - away(x, t))

    return moved
