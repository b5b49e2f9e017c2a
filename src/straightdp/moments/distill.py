"""Distillation: the analytic field into the weights for t <= tau, public replay for the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from straightdp.flow.path import interpolate, noise_like, uniform_times, velocity
from straightdp.moments.field import MomentModel
from straightdp.recipe import Distill


def distill_batch(
    moments: MomentModel,
    public: Tensor,
    captions: Tensor,
    null: Tensor,
    section: Distill,
    tau: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x_t, t, captions, target velocity) of one batch.

    Rows of the first kind are draws of the release at t <= tau with the analytic field as target (the mixture's for the
    null caption). Rows of the second kind replay public images at t > tau, half without a caption and half with a
    random private class's, so that late refinement does not hang on the caption.
    """
    device = captions.device
    n_replay = min(round(section.batch * section.replay), section.batch - 1)
    n = section.batch - n_replay

    y = torch.multinomial(moments.prior, n, replacement=True, generator=generator)
    z = moments.sample(y, generator).reshape(n, *public.shape[1:])
    t = uniform_times(n, 0.0, tau, generator, device)
    x = interpolate(z, noise_like(z, generator), t)
    n_null = round(n * section.p_uncond)
    target = torch.cat(
        [
            moments.mixture_velocity(x[:n_null], t[:n_null]),
            moments.velocity(x[n_null:], t[n_null:], y[n_null:]),
        ]
    )
    ids = torch.cat([null.expand(n_null, -1), captions[y[n_null:]]])

    rows = torch.randint(len(public), (n_replay,), generator=generator, device=device)
    late = uniform_times(n_replay, tau, 1.0, generator, device)
    xi = noise_like(public[rows], generator)
    any_class = torch.randint(len(captions), (n_replay,), generator=generator, device=device)
    without = torch.rand(n_replay, generator=generator, device=device) < 0.5
    late_ids = torch.where(without[:, None], null.expand(n_replay, -1), captions[any_class])

    x = torch.cat([x, interpolate(public[rows], xi, late)])
    return x, torch.cat([t, late]), torch.cat([ids, late_ids]), torch.cat([target, velocity(public[rows], xi)])
