"""Stage 2: declared DP-SGD on t in [t_min, 1].

The vault calls this room's clipped sum with a batch of records, and adds the noise itself; what comes back, and is
trained on, is noised. Nothing of a batch is kept here, but for a compiled step's buffers, which end with the training.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from straightdp.compiled import half
from straightdp.dpsgd.clipping import ClippedSum, ClippingEngine, RecordLosses
from straightdp.flow.fit import fit
from straightdp.flow.loss import squared_error
from straightdp.flow.path import Draws, TorchDraws, interpolate, velocity
from straightdp.nets.mmdit import MMDiT
from straightdp.privacy.vault import MicroBatch, Vault
from straightdp.privacy.workload import GRADIENTS
from straightdp.recipe import DpSgd
from straightdp.team import Team


def record_losses(net: MMDiT) -> RecordLosses:
    """Equation (1) averaged over k draws: z is (n, ...), captions (n, k, length), t (n, k), xi (n, k, ...)."""
    network = half(net)

    def losses(z: Tensor, captions: Tensor, t: Tensor, xi: Tensor) -> Tensor:
        n, k = t.shape
        z, t, xi = z.repeat_interleave(k, dim=0), t.flatten(), xi.flatten(0, 1)
        prediction = network(interpolate(z, xi, t), t, captions.flatten(0, 1))
        return squared_error(prediction, velocity(z, xi)).reshape(n, k).mean(dim=1)

    return losses


def draw(
    z: Tensor, captions: Tensor, null: Tensor, section: DpSgd, t_min: float, draws: Draws
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `record_losses` takes: k draws a record, t in [t_min, 1]; a draw's caption is dropped with p_uncond."""
    n, k = len(z), section.draws
    t = t_min + (1 - t_min) * draws.uniform((n, k))
    xi = draws.normal((n, k, *z.shape[1:]))
    dropped = draws.uniform((n, k, 1)) < section.p_uncond
    return z, torch.where(dropped, null, captions[:, None]), t, xi


def public_clip(engine: ClippingEngine, batches: list[tuple[Tensor, ...]], section: DpSgd) -> float:
    """C from public records alone: `clip` times a quantile of their gradient norms, or `clip` itself."""
    if section.clip_quantile == 0:
        return section.clip
    norms = [engine(batch, torch.ones(len(batch[0]), device=batch[0].device)).norms.clone() for batch in batches]
    return section.clip * float(torch.cat(norms).quantile(section.clip_quantile))


def micro_batch(section: DpSgd, n: int, size: int, rows: int) -> int:
    """Records a micro-batch for one of `size` processes: the recipe's, or equal parts of at most `rows` draws.

    The parts hold a batch of mean m and deviation s up to m + 2.5 s; a larger one, which is rare, takes one part more.
    Which records share a part changes no draw and no noise, so this may hang on the machine.
    """
    mean = section.q * n / size
    whole = max(8, math.ceil((mean + 2.5 * math.sqrt(mean * (1 - section.q))) / 8) * 8)
    if section.micro_batch is not None:
        return min(section.micro_batch, whole)
    parts = math.ceil(whole * section.draws / rows)
    return math.ceil(whole / parts / 8) * 8


def rows_at_once(net: MMDiT, device: torch.device) -> int:
    """Draws in one forward pass: on a CPU what its caches like, on a GPU what its memory holds, while it helps."""
    if device.type != "cuda":
        return 512
    tokens = math.prod(net.grid) + net.section.caption_length
    row = ROW_BYTES * tokens * net.section.width * net.section.depth
    return max(64, min(8192, int(0.6 * torch.cuda.mem_get_info(device)[0] / row)))


ROW_BYTES = 80  # of a step's memory, for each token, channel and block of a draw; 62 were measured


def train(
    net: MMDiT,
    vault: Vault,
    captions: Tensor,
    null: Tensor,
    section: DpSgd,
    *,
    clip: float,
    t_min: float,
    compile: bool,
    checkpoint: Path,
    team: Team,
    track,
) -> None:
    """Spend the declared steps and leave the EMA weights in `net`. `captions` holds one row of ids a class."""
    engine = ClippingEngine(net, record_losses(net), clip, compile=compile)
    engine.preflight(made_up(net, captions, null, section, t_min))
    size = micro_batch(section, vault.n, team.size, rows_at_once(net, captions.device))

    def clipped_sum(batch: MicroBatch) -> ClippedSum:
        return engine(draw(batch.z, captions[batch.y], null, section, t_min, batch.draws), batch.mask)

    def gradients(step: int) -> None:
        noisy = vault.noisy_gradient(
            GRADIENTS,
            step,
            clipped_sum,
            clip=clip,
            micro_batch=size,
            device=captions.device,
            diagnostics_every=section.checkpoint_every,
        )
        for parameter, gradient in zip(engine.parameters(), engine.split(noisy), strict=True):
            parameter.grad = gradient.to(parameter.dtype)

    fit(
        net,
        gradients,
        steps=section.steps,
        lr=section.lr,
        ema=section.ema,
        checkpoint=checkpoint,
        every=section.checkpoint_every,
        writes=team.leads,
        track=track,
    )


def made_up(net: MMDiT, captions: Tensor, null: Tensor, section: DpSgd, t_min: float) -> tuple[Tensor, ...]:
    """Three records of noise, for the engine's preflight."""
    draws = TorchDraws(torch.Generator(captions.device).manual_seed(0))
    rows = torch.arange(3, device=captions.device) % len(captions)
    return draw(draws.normal((3, *net.shape)), captions[rows], null, section, t_min, draws)
