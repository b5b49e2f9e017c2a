"""What bfloat16 spares a processor: one gradient, plain or clipped, in float32 and in bfloat16, taking turns.

python benchmarks/processor_step.py --out benchmarks/results/cpu_bfloat16.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from dp_step import processor

from straightdp.compiled import halves
from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.dpsgd.trainer import Bucket, draw, made_up, record_losses
from straightdp.flow.path import TorchDraws
from straightdp.nets.backbone import own_net
from straightdp.recipe import DpSgd, Net, load

SHAPE, RECORDS, DRAWS = (1, 28, 28), 32, 4
NETS = {"the paper's MM-DiT": Net(), "best-mnist's U-Net": load("best-mnist").net, "small's MM-DiT": load("small").net}


def steps(net: Net) -> dict[str, Callable[[], object]]:
    """A whole gradient of the batch, and the sum of its records' clipped gradients."""
    torch.manual_seed(0)
    made = own_net(net, SHAPE)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p) * 0.02)  # some layers start at zero, and have no gradient there
    section, null = DpSgd(draws=DRAWS), torch.zeros(1, net.caption_length, dtype=torch.int64)
    draws = TorchDraws(torch.Generator().manual_seed(1))
    captions = torch.ones(RECORDS, net.caption_length, dtype=torch.int64)
    batch = draw(draws.normal((RECORDS, *SHAPE)), captions, null, section, Bucket(0.0, 1.0), draws)
    losses, parameters = record_losses(made), list(made.parameters())
    engine = ClippingEngine(made, losses, 1.0)
    engine.preflight(made_up(made, null, section, Bucket(0.0, 1.0)))
    mask = torch.ones(RECORDS)
    return {
        "plain": lambda: torch.autograd.grad(losses(*batch).sum(), parameters),
        "clipped": lambda: engine(batch, mask),
    }


def seconds(step: Callable[[], object]) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="of each, after one that is not counted")
    parser.add_argument("--out", type=Path, help="a file for the result")
    options = parser.parse_args()
    rows = {}
    for name, net in NETS.items():
        made, found = steps(net), {}
        for turn in range(options.turns + 1):
            for wanted in ("off", "on"):
                os.environ["STRAIGHTDP_BFLOAT16"] = wanted
                for kind, step in made.items():
                    took = seconds(step)
                    if turn:
                        found.setdefault(f"{kind}, {'bfloat16' if halves('cpu') else 'float32'}", []).append(took)
        rows[name] = {kind: round(1000 * median(values), 1) for kind, values in found.items()}
        print(name, rows[name])
    body = {
        "what": f"milliseconds a gradient of {RECORDS} records x {DRAWS} draws, median of {options.turns} turns",
        "device": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": os.environ.get("STRAIGHTDP_COMMIT", "unknown"),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
