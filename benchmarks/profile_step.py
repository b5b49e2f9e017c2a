"""Where does the time of a DP-SGD step go, by kernel group, and what would the arithmetic alone take?

    PYTHONPATH=src python benchmarks/profile_step.py --out FILE.json

The floor of a group is its floating-point operations over the rate that a large bfloat16 product reaches on the same
device in the same run. Elementwise work has no such floor; it is bound by memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from cases import Case, Work, paper
from torch.profiler import ProfilerActivity, profile
from turns import add_turns, preparing, turn

from straightdp.compiled import Compiled
from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.dpsgd.factors import Outer

STEPS = 5
GROUPS = {
    "norms": ("_direct_norms", "_ghost_norms"),
    "clipped sum": ("_weighted",),
    "attention": ("sdpa", "flash", "fmha", "compute_dot_do_o", "convert_dq"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitKreduce"),
    "elementwise and reductions": ("triton_", "elementwise", "reduce_kernel", "vectorized"),
}


def group(kernel: str) -> str:
    return next((name for name, words in GROUPS.items() if any(word in kernel for word in words)), "other")


def kernel_groups(step) -> dict[str, dict[str, float]]:
    """Milliseconds and launches of one step, by group."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"ms": 0.0, "launches": 0.0})
    for event in record.key_averages():
        entry = found[group(event.key)]
        entry["ms"] += event.self_device_time_total / 1e3 / STEPS
        entry["launches"] += event.count / STEPS
    return dict(found)


def operations(case: Case, factors: list[Outer], *, private: bool) -> dict[str, float]:
    """Floating-point operations of one step in matrix units, by group."""
    count: dict[str, float] = defaultdict(float)
    for value in factors:
        (_, tokens, d), p = value.a.shape, value.g.shape[2]
        product = 2.0 * case.records * tokens * d * p
        count["matrix products"] += 2 * product if private else 3 * product
        if private:
            count["clipped sum"] += product
            count["norms"] += 2.0 * case.records * tokens**2 * (d + p) if value.ghost else product
    length = (case.shape[1] // case.net.patch) ** 2 + case.net.caption_length
    one = 2.0 * 2 * case.records * case.draws * length**2 * case.net.width  # q k^T and its product with v
    count["attention"] = case.net.depth * one * 3.5  # once forward, two and a half times backward
    return dict(count)


def matrix_rate() -> float:
    """Operations a second of a large bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for k in range(30):
        if k == 10:
            events[0].record()
        a @ b
    events[1].record()
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (events[0].elapsed_time(events[1]) / 1e3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1200)
    parser.add_argument("--out", type=Path)
    add_turns(parser)
    arguments = parser.parse_args()
    case = replace(paper(), device="cuda", records=arguments.records, micro_batch=arguments.records)
    with preparing(arguments.turns):
        work = Work(case)
        engine = ClippingEngine(work.net, work.losses, case.clip, speed="compiled")
        engine.preflight(tuple(x[:2] for x in work.batch))
        mask = torch.ones(case.records, device="cuda")
        plain = Compiled(lambda *b: torch.autograd.grad(work.losses(*b).mean(), work.parameters), speed="compiled")
        steps = {"non-private": lambda: plain(*work.batch), "DP": lambda: engine(work.batch, mask)}
        for step in steps.values():
            step()
    few = tuple(x[:2] for x in work.batch)
    factors = list(ClippingEngine(work.net, work.losses, 1.0)._backward(few, mask[:2])[1].values())
    result: dict = {"what": __doc__.splitlines()[0], "device": torch.cuda.get_device_name(), "records": case.records}
    with turn(arguments.turns):
        rate = matrix_rate()
        for name, step in steps.items():
            floor = operations(case, factors, private=name == "DP")
            groups = kernel_groups(step)
            for key, entry in groups.items():
                entry["floor_ms"] = floor.get(key, 0.0) / rate * 1e3
            result[name] = groups
    result["matrix_rate_tflops"] = rate / 1e12
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in steps:
        total = sum(entry["ms"] for entry in result[name].values())
        print(f"{name}: {total:.1f} ms of kernels, products at {rate / 1e12:.0f} TFLOP/s at best")
        for key, entry in sorted(result[name].items(), key=lambda item: -item[1]["ms"]):
            print(
                f"  {key:<28}{entry['ms']:>8.2f} ms{entry['launches']:>7.0f} launches  floor {entry['floor_ms']:.2f} ms"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
