"""Stage 2: declared DP-SGD on t in [t_min, 1], in one time bucket or several.

A bucket with clip C_k = c_k C is trained by dividing its losses by c_k, clipping to C and multiplying the noised sum by
c_k: the same contribution and noise, with one compiled step for all buckets.

The vault calls this room's clipped sum with a batch of records, and adds the noise itself; what comes back, and is
trained on, is noised. Nothing of a batch is kept here, but for a compiled step's buffers, which end with the training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from straightdp.compiled import Speed, half
from straightdp.dpsgd.clipping import ClippedSum, ClippingEngine, RecordLosses
from straightdp.dpsgd.planner import edges
from straightdp.flow.fit import fit
from straightdp.flow.loss import squared_error
from straightdp.flow.path import Draws, TorchDraws, interpolate, velocity
from straightdp.nets.velocity import VelocityNet
from straightdp.privacy.vault import MicroBatch, Vault
from straightdp.privacy.workload import GRADIENTS, Shape, bucket_id
from straightdp.recipe import DpSgd
from straightdp.team import Team


@dataclass(frozen=True)
class Bucket:
    """Times in [low, high], clipped to c C; its steps execute the mechanism `id`."""

    low: float
    high: float
    c: float = 1.0
    id: str = GRADIENTS


def buckets(t_min: float, shape: Shape) -> list[Bucket]:
    ends, k = edges(t_min, len(shape)), len(shape)
    return [Bucket(ends[i], ends[i + 1], shape[i], bucket_id(i, k)) for i in range(k)]


def record_losses(net: VelocityNet) -> RecordLosses:
    """Equation (1) averaged over k draws, times a record's weight (n,).

    z is (n, ...), captions (n, k, length), t (n, k), xi (n, k, ...).
    """
    network = half(net)

    def losses(z: Tensor, captions: Tensor, t: Tensor, xi: Tensor, weight: Tensor) -> Tensor:
        n, k = t.shape
        z, t, xi = z.repeat_interleave(k, dim=0), t.flatten(), xi.flatten(0, 1)
        prediction = network(interpolate(z, xi, t), t, captions.flatten(0, 1))
        return squared_error(prediction, velocity(z, xi)).reshape(n, k).mean(dim=1) * weight

    return losses


def draw(
    z: Tensor, captions: Tensor, null: Tensor, section: DpSgd, bucket: Bucket, draws: Draws
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `record_losses` takes: k draws a record, t in the bucket; a draw's caption is dropped with p_uncond."""
    n, k = len(z), section.draws
    t = bucket.low + (bucket.high - bucket.low) * draws.uniform((n, k))
    xi = draws.normal((n, k, *z.shape[1:]))
    dropped = draws.uniform((n, k, 1)) < section.p_uncond
    return z, torch.where(dropped, null, captions[:, None]), t, xi, torch.full((n,), 1 / bucket.c, device=z.device)


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


def rows_at_once(net: VelocityNet, device: torch.device) -> int:
    """Draws in one forward pass: on a CPU what its caches like, on a GPU what its memory holds, while it helps."""
    if device.type != "cuda":
        return 512
    return max(8, min(8192, int(0.6 * torch.cuda.mem_get_info(device)[0] / (ROW_BYTES * net.work))))


ROW_BYTES = 80  # of a step's memory, for each token, channel and block of a draw; 62 were measured


def train(
    net: VelocityNet,
    vault: Vault,
    null: Tensor,
    section: DpSgd,
    *,
    clip: float,
    t_min: float,
    shape: Shape,
    speed: Speed,
    recompute: bool = False,
    checkpoint: Path,
    identity: str,
    team: Team,
    track,
) -> None:
    """Spend the declared steps, buckets taking turns, and leave the EMA weights in `net`. `null` is one row of ids;
    `recompute` runs the network's blocks again in the backward pass instead of remembering them."""
    parts = buckets(t_min, shape)
    engine = ClippingEngine(net, record_losses(net), clip, speed=speed, blocks=net.blocks if recompute else ())
    engine.preflight(made_up(net, null, section, parts[0]))
    size = micro_batch(section, vault.n, team.size, rows_at_once(net, null.device))

    def gradients(step: int) -> None:
        bucket = parts[step % len(parts)]
        due = (step + 1) % section.checkpoint_every == 0 or step + 1 == section.steps

        def clipped_sum(batch: MicroBatch) -> ClippedSum:
            return engine(draw(batch.z, batch.captions, null, section, bucket, batch.draws), batch.mask)

        noisy = vault.noisy_gradient(
            bucket.id,
            step // len(parts),
            clipped_sum,
            clip=clip,
            micro_batch=size,
            device=null.device,
            diagnostics_due=due,
        )
        if due:  # a checkpoint follows
            engine.vouch(team)
        for parameter, gradient in zip(engine.parameters(), engine.split(noisy * bucket.c), strict=True):
            parameter.grad = gradient.to(parameter.dtype)

    fit(
        net,
        gradients,
        steps=section.steps,
        lr=section.lr,
        ema=section.ema,
        checkpoint=checkpoint,
        identity=identity,
        every=section.checkpoint_every,
        writes=team.leads,
        track=track,
    )


def made_up(net: VelocityNet, null: Tensor, section: DpSgd, bucket: Bucket) -> tuple[Tensor, ...]:
    """Three records of noise under captions of their own, for the engine's preflight."""
    draws = TorchDraws(torch.Generator(null.device).manual_seed(0))
    captions = torch.arange(3 * null.shape[1], device=null.device).reshape(3, -1) % net.vocabulary
    return draw(draws.normal((3, *net.shape)), captions, null, section, bucket, draws)
