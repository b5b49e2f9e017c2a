"""Does every contender compute what it is timed for? Its sum against autograd, one record after the other.

Runs the timed step itself, twice, with sigma = 0 and a learning rate of 0, on a small case in which half of the
records are clipped and which takes several micro-batches. Exits with 1 if one is off by more than the tolerance.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

import torch
from cases import Case, Work
from contenders import CONTENDERS
from torch import Tensor

from straightdp.recipe import Net

TOLERANCE = {"cpu": 1e-3, "cuda": 2e-2}  # float32; bfloat16 against float32


def small(device: str) -> Case:
    net = Net(width=32, depth=2, heads=2, patch=2, caption_width=16)
    return Case(net, (1, 8, 8), records=12, draws=3, micro_batch=4, sigma=0.0, lr=0.0, device=device)


def record_gradients(case: Case) -> Tensor:
    """(records, parameters) in float32 on the CPU, each by a backward pass of its own."""
    work = Work(replace(case, device="cpu"))
    rows = []
    for i in range(case.records):
        loss = work.losses(*(x[i : i + 1] for x in work.batch))[0]
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, work.parameters)]))
    return torch.stack(rows)


def found(name: str, case: Case) -> Tensor:
    contender = CONTENDERS[name](case)
    contender.step()
    contender.step()
    return torch.cat([p.grad.flatten() for p in contender.parameters]).cpu() * case.records


def main() -> int:
    os.environ["STRAIGHTDP_BFLOAT16"] = "off"  # on a CPU; what is compared with must be float32
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    gradients = record_gradients(small(device))
    norms = gradients.norm(dim=1)
    case = replace(small(device), clip=float(norms.median()))
    factor = (case.clip / norms).clamp_max(1.0)
    print(f"{case.records} records x {case.draws} draws, norms {norms.min():.3g} to {norms.max():.3g}, ", end="")
    print(f"C = {case.clip:.3g}, {int((factor < 1).sum())} clipped")
    expected = {"plain": gradients.sum(dim=0), "private": factor @ gradients}
    bad = 0
    for name in CONTENDERS:
        theirs = expected["plain" if name.startswith("plain") else "private"]
        try:
            off = float((found(name, case) - theirs).norm() / theirs.norm())
        except Exception as error:
            off, verdict = float("nan"), f"FAILED: {type(error).__name__}: {error}"
        else:
            verdict = "ok" if off <= TOLERANCE[device] else "WRONG"
        bad += verdict != "ok"
        print(f"{name:16s} relative distance {off:9.2e}  {verdict}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
