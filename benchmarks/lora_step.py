"""How long does a DP-LoRA step of an SD3 transformer take, against a non-private LoRA step of the same network?

    PYTHONPATH=src python benchmarks/lora_step.py --width 1536 --layers 24 --records 16 --draws 4 --device cuda

The network has SD3's architecture, random weights, frozen in `--dtype`, and float32 adapters. A step is the gradient
of all records (DP: each record's clipped to C, summed, noised), divided by their number, and AdamW. With --checkpoint
both compute the transformer's blocks again in the backward pass: ours its own way, the other as diffusers does. They
run at one --speed, one after the other in one process; the first step, which captures or compiles, is not in the
median. Memory is the most that CUDA had allocated at once, the first step included. Before it is timed, the DP step
without clip and noise is compared with the other.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from dp_step import commit, installed, on_cpu, on_device, processor
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from straightdp.compiled import ATTENTION, Compiled
from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.dpsgd.trainer import Bucket, draw, record_losses
from straightdp.flow.fit import trainable
from straightdp.flow.path import TorchDraws
from straightdp.recipe import DpSgd
from straightdp.sd3.loading import Prior, PromptTable
from straightdp.sd3.lora import add_adapters
from straightdp.sd3.velocity import Velocity

warnings.filterwarnings("error", message="not compiled|not captured|wrong when")  # what fell back is not to be timed

CHANNELS, TEXT, POOLED, PROMPTS = 16, 4096, 2048, 11  # SD3's; prompts of a made-up table
CLIP, SIGMA = 1.0, 1.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128, help="of the transformer, a multiple of 64; SD3 medium: 1536")
    parser.add_argument("--layers", type=int, default=2, help="SD3 medium: 24")
    parser.add_argument("--size", type=int, default=16, help="of the latent; 64 is an image of 512 pixels")
    parser.add_argument("--tokens", type=int, default=154, help="of a prompt")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--records", type=int, default=4)
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the frozen weights; bfloat16 on CUDA")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--speed", choices=("plain", "captured", "compiled"), default="plain", help="of both steps")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timed steps for each")
    parser.add_argument("--out", type=Path, help="JSON file to add to")
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    return arguments


def network(arguments: argparse.Namespace) -> Velocity:
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=arguments.size,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=arguments.layers,
        attention_head_dim=64,
        num_attention_heads=arguments.width // 64,
        joint_attention_dim=TEXT,
        caption_projection_dim=arguments.width,
        pooled_projection_dim=POOLED,
        pos_embed_max_size=max(arguments.size // 2, 96),
    )
    shape = (CHANNELS, arguments.size, arguments.size)
    prior = Prior(transformer, None, "random", "", shape, shape)
    table = PromptTable(torch.randn(PROMPTS, arguments.tokens, TEXT), torch.randn(PROMPTS, POOLED))
    net = Velocity(prior, table).eval().to(arguments.device, getattr(torch, arguments.dtype))
    add_adapters(net, arguments.rank, seed=0)
    with torch.no_grad():
        for p in trainable(net):
            p.add_(torch.randn_like(p) * 0.05)  # half of them start at zero, and the others have no gradient there
    return net


def made_up(arguments: argparse.Namespace) -> tuple[Tensor, ...]:
    """On the CPU first, so that every device gets the same."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(arguments.records, CHANNELS, arguments.size, arguments.size, generator=generator)
    ids, null = torch.arange(arguments.records)[:, None] % (PROMPTS - 1), torch.full((1, 1), PROMPTS - 1)
    batch = draw(z, ids, null, DpSgd(draws=arguments.draws), Bucket(0.0, 1.0), TorchDraws(generator))
    return tuple(x.to(arguments.device) for x in batch)


Gradient = Callable[[], Tensor]
"""The sum over the batch's records, as one vector."""


def plain(net: Velocity, batch: tuple[Tensor, ...], arguments: argparse.Namespace) -> Gradient:
    if arguments.checkpoint:
        net.transformer.enable_gradient_checkpointing()
    parameters, losses = trainable(net), record_losses(net)

    def gradient(*batch: Tensor) -> Tensor:
        with sdpa_kernel(ATTENTION[arguments.device]):  # for the blocks that run again, too
            found = torch.autograd.grad(losses(*batch).sum(), parameters)
        return torch.cat([g.flatten() for g in found])

    compiled = Compiled(gradient, speed=arguments.speed)
    return lambda: compiled(*batch)


def private(
    net: Velocity, batch: tuple[Tensor, ...], arguments: argparse.Namespace, clip: float = CLIP, sigma: float = SIGMA
) -> Gradient:
    blocks = net.transformer.transformer_blocks if arguments.checkpoint else ()
    engine = ClippingEngine(net, record_losses(net), clip, speed=arguments.speed, blocks=blocks)
    engine.preflight(tuple(x[:2] for x in batch))
    mask = torch.ones(arguments.records, device=arguments.device)

    def gradient() -> Tensor:
        total = engine(batch, mask).total
        return total + torch.randn_like(total) * (sigma * clip)

    return gradient


def measure(build: Callable[..., Gradient], arguments: argparse.Namespace) -> dict:
    cuda = arguments.device == "cuda"
    net, batch = network(arguments), made_up(arguments)
    parameters = trainable(net)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=cuda)
    gradient = build(net, batch, arguments)
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        flat = gradient() / arguments.records
        for p, g in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = g.view_as(p)
        optimizer.step()

    start = time.perf_counter()
    step()
    if cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    times = (on_device if cuda else on_cpu)(step, arguments.seconds)
    row = {"ms": statistics.median(times), "steps": len(times), "first_call_s": first}
    return row | ({"peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30} if cuda else {})


def distance(arguments: argparse.Namespace) -> float:
    """Of the unclipped sum without noise from the non-private gradient, as a part of its length."""
    net, batch = network(arguments), made_up(arguments)
    mine = private(net, batch, arguments, clip=1e9, sigma=0.0)()
    theirs = plain(net, batch, arguments)()
    return float((mine - theirs).norm() / theirs.norm())


def main() -> int:
    arguments = parse()
    off = distance(arguments)
    rows = {}
    for name, build in (("plain", plain), ("private", private)):
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        rows[name] = measure(build, arguments)
    ratio = rows["private"]["ms"] / rows["plain"]["ms"]
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else processor()
    case = {name: value for name, value in vars(arguments).items() if name != "out"}
    versions = {name: installed(name) for name in ("torch", "diffusers", "peft")} | {"straightdp": commit()}
    result = {"what": __doc__.splitlines()[0], "case": case, "device": device, "versions": versions, "rows": rows}
    result |= {"ratio": ratio, "unclipped_distance": off}
    if arguments.out:
        before = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps([*before, result], indent=1) + "\n")
    print(
        f"{arguments.layers} blocks of width {arguments.width}, rank {arguments.rank}, {arguments.records} records x "
        f"{arguments.draws} draws, {arguments.dtype}, {arguments.speed}, on {device}"
    )
    for name, row in rows.items():
        memory = f", {row['peak_memory_gib']:.2f} GiB" if "peak_memory_gib" in row else ""
        print(f"{name:8s} {row['ms']:9.1f} ms/step{memory}, first step {row['first_call_s']:.1f} s")
    print(f"ratio    {ratio:9.2f}; without clip and noise the two are {off:.1e} apart")
    return 0


if __name__ == "__main__":
    sys.exit(main())
