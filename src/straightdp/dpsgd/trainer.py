"""Stage 2: declared DP-SGD on t in [t_min, 1]. Private records stay in the vault; this room sees noised gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.flow.fit import fit
from straightdp.flow.loss import squared_error
from straightdp.flow.path import Draws, interpolate, velocity
from straightdp.nets.mmdit import MMDiT
from straightdp.privacy.vault import ClippedSum, MicroBatch, Vault
from straightdp.privacy.workload import GRADIENTS
from straightdp.recipe import DpSgd


def record_losses(
    net: MMDiT,
    z: Tensor,
    captions: Tensor,
    null: Tensor,
    section: DpSgd,
    t_min: float,
    draws: Draws,
) -> Callable[[], Tensor]:
    """Equation (1) averaged over k draws of (t, xi) a record; a draw's caption is dropped with p_uncond."""
    n, k = len(z), section.draws
    z = z.repeat_interleave(k, dim=0)
    captions = captions.repeat_interleave(k, dim=0)
    t = t_min + (1 - t_min) * draws.uniform(n * k)
    xi = draws.normal(tuple(z.shape))
    dropped = draws.uniform(n * k) < section.p_uncond
    captions = torch.where(dropped[:, None], null.expand_as(captions), captions)

    def losses() -> Tensor:
        with torch.autocast(z.device.type, dtype=torch.bfloat16, enabled=z.device.type == "cuda"):
            prediction = net(interpolate(z, xi, t), t, captions)
        return squared_error(prediction.float(), velocity(z, xi)).reshape(n, k).mean(dim=1)

    return losses


def public_clip(
    net: MMDiT,
    z: Tensor,
    captions: Tensor,
    null: Tensor,
    section: DpSgd,
    t_min: float,
    draws: Draws,
) -> float:
    """C from public records alone: `clip` times a quantile of their gradient norms, or `clip` itself."""
    if section.clip_quantile == 0:
        return section.clip
    engine = ClippingEngine(net, clip=1.0)
    norms = []
    for start in range(0, len(z), section.micro_batch):
        part, ids = z[start : start + section.micro_batch], captions[start : start + section.micro_batch]
        losses = record_losses(net, part, ids, null, section, t_min, draws)
        norms.append(engine.norms(losses, len(part), part.device))
    return section.clip * float(torch.cat(norms).quantile(section.clip_quantile))


def train(
    net: MMDiT,
    vault: Vault,
    captions: Tensor,
    null: Tensor,
    section: DpSgd,
    *,
    clip: float,
    t_min: float,
    checkpoint: Path,
    track,
) -> None:
    """Spend the declared steps and leave the EMA weights in `net`. `captions` holds one row of ids a class."""
    engine = ClippingEngine(net, clip)
    device = captions.device

    def clipped_sum(batch: MicroBatch) -> ClippedSum:
        losses = record_losses(net, batch.z, captions[batch.y], null, section, t_min, batch.draws)
        return engine.clipped_sum(losses, batch.mask)

    def gradients(step: int) -> None:
        noisy = vault.noisy_gradient(
            GRADIENTS, step, clipped_sum, clip=clip, micro_batch=section.micro_batch, device=device
        )
        for parameter, gradient in zip(engine.parameters(), noisy, strict=True):
            parameter.grad = gradient.to(parameter.dtype).reshape(parameter.shape)

    fit(
        net,
        gradients,
        steps=section.steps,
        lr=section.lr,
        ema=section.ema,
        checkpoint=checkpoint,
        every=section.checkpoint_every,
        track=track,
    )
