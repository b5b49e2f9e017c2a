"""Does any record's contribution exceed the clip, in the arithmetic that is used? Recomputed in float64.

    PYTHONPATH=src python benchmarks/margin.py --device cuda

Every record's a and g are taken as the network's own arithmetic (bfloat16 on CUDA) left them; its clip factor is the
engine's; the contribution, factor times sum g a^T over all layers, is recomputed in float64. Beside it, for some
records, the length of what the whole compiled step adds for that record alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from cases import Work, paper
from torch import Tensor
from turns import add_turns, preparing, turn

from straightdp.compiled import fastest
from straightdp.dpsgd.clipping import ClippingEngine, clip_factor, gradient_norms
from straightdp.dpsgd.factors import Factor, Outer

BATCH = 100
ALONE = 4  # records of each kind that go through the compiled step by themselves


def kinds(z: Tensor, xi: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """(z, xi) of random records, and of ones made to provoke rounding."""
    opposite = torch.cat([xi[:, ::2], -xi[:, ::2]], dim=1)
    return {
        "random": (z, xi),
        "huge": (z * 1e4, xi),
        "tiny": (z * 1e-6, xi * 1e-6),
        "cancelling draws": (torch.zeros_like(z), opposite),
        "one bright pixel": (torch.where(z == z.flatten(1).amax(dim=1).view(-1, 1, 1, 1), 1e3, 0.0), xi * 1e-3),
        "constant": (torch.ones_like(z), torch.zeros_like(xi)),
    }


def contribution(factors: list[Factor], factor: Tensor) -> Tensor:
    """Norm of each record's part of the sum, in float64."""
    squared = torch.zeros(len(factor), dtype=torch.float64, device=factor.device)
    for value in factors:
        assert isinstance(value, Outer)
        a, g = value.a.double(), value.g.double() * factor.double()[:, None, None]
        squared += (g.mT @ a).square().sum(dim=(1, 2)) + value.bias * g.sum(dim=1).square().sum(dim=1)
    return squared.sqrt()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--records", type=int, default=10_000, help="in all")
    parser.add_argument("--clip", type=float, default=0.01, help="below every norm but a constant record's")
    parser.add_argument("--out", type=Path)
    add_turns(parser)
    arguments = parser.parse_args()
    case = replace(paper(), device=arguments.device, records=BATCH, micro_batch=BATCH, clip=arguments.clip)
    with preparing(arguments.turns):
        work = Work(case)
        engine = ClippingEngine(work.net, work.losses, case.clip)
        compiled = ClippingEngine(work.net, work.losses, case.clip, speed=fastest(arguments.device))
        for one in (engine, compiled):
            one.preflight(tuple(x[:2] for x in work.batch))
        compiled(work.batch, torch.ones(BATCH, device=work.device))
    with turn(arguments.turns):
        rows = measure(work, engine, compiled, arguments.records)
    worst = max(max(row["largest"], row["largest_as_added"]) for row in rows)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    result = {"what": __doc__.splitlines()[0], "device": name, "clip": case.clip, "kinds": rows, "largest": worst}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'records':>20} {'number':>7} {'largest/C':>11} {'smallest/C of clipped':>22} {'as added/C':>11}")
    for row in rows:
        print(
            f"{row['kind']:>20} {row['records']:>7} {row['largest']:>11.7f} {row['smallest_clipped']:>22.7f} "
            f"{row['largest_as_added']:>11.7f}"
        )
    return 0 if worst <= 1 else 1


def measure(work: Work, engine: ClippingEngine, compiled: ClippingEngine, records: int) -> list[dict]:
    generator = torch.Generator(work.device).manual_seed(2)
    found: dict[str, list[Tensor]] = {}
    added: dict[str, list[Tensor]] = {}
    clipped: dict[str, list[Tensor]] = {}
    rounds = -(-records // (BATCH * 6))
    everyone = torch.ones(BATCH, device=work.device)
    for k in range(rounds):
        z = torch.rand(work.batch[0].shape, generator=generator, device=work.device) * 2 - 1
        xi = torch.randn(work.batch[3].shape, generator=generator, device=work.device)
        t = torch.rand(work.batch[2].shape, generator=generator, device=work.device)
        for kind, (z_kind, xi_kind) in kinds(z, xi).items():
            batch = (z_kind, work.batch[1], t, xi_kind)
            factors = list(engine._backward(batch, everyone)[1].values())
            bound = gradient_norms(factors)[1]
            factor = clip_factor(bound, everyone, engine.clip)
            found.setdefault(kind, []).append(contribution(factors, factor) / engine.clip)
            clipped.setdefault(kind, []).append(factor < 1)
            for i in range(ALONE if k == 0 else 0):
                alone = torch.zeros_like(everyone)
                alone[i] = 1
                added.setdefault(kind, []).append(compiled(batch, alone).total.double().norm() / engine.clip)
    rows = []
    for kind, values in found.items():
        ratios, below = torch.cat(values), torch.cat(clipped[kind])
        rows.append(
            {
                "kind": kind,
                "records": len(ratios),
                "largest": float(ratios.max()),
                "smallest_clipped": float(ratios[below].min()) if bool(below.any()) else 0.0,
                "largest_as_added": float(torch.stack(added[kind]).max()),
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
