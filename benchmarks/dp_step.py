"""How long does one DP-SGD step take, and how much memory, against a non-private step and against other libraries?

    PYTHONPATH=src python benchmarks/dp_step.py --case demo --device cpu

Each contender runs in a process of its own, with empty compiler caches, so that neither memory nor a failure spreads.
The first step (compilation included) and the first of each round are not in the median. Ratios are to two non-private
steps of the same run: the eager one, and the faster of the two compiled ones, which is the baseline for memory too.

Memory on CUDA is the most that was allocated at once from the first step on (a CUDA graph's own memory is seen only
while it is captured); on the CPU it is the peak resident size of the process, interpreter and compiler included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

from turns import add_turns, preparing, turn

LIMIT_S = 900  # for one contender
BURST = 10  # steps between two waits for the device
ROUNDS = 6  # of turns
BASELINES = ("plain_compiled", "plain_graph")


def main() -> int:
    arguments = parse()
    if arguments.only:
        print(json.dumps(measure(arguments)))
        return 0
    from contenders import CONTENDERS

    names = arguments.contenders.split(",") if arguments.contenders else list(CONTENDERS)
    if unknown := [name for name in names if name not in CONTENDERS]:
        print(f"unknown contender {', '.join(unknown)}; known: {', '.join(CONTENDERS)}", file=sys.stderr)
        return 2
    try:
        case_of(arguments)
    except ValueError as error:
        print(f"{error}; give --records and --micro-batch that divide", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(len(names) if arguments.turns else 1) as pool:
        rows = list(pool.map(in_own_process, names))
    compare(rows)
    result = {"what": __doc__.splitlines()[0], **about(arguments), "rows": rows}
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("demo", "paper"), default="demo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--records", type=int, help="instead of the case's own number")
    parser.add_argument("--micro-batch", type=int, help="records at once in private steps; the case's own, or all")
    parser.add_argument("--contenders", help="comma-separated; all that the device allows if left out")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timed steps for each contender")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    add_turns(parser)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    return parser.parse_args()


def case_of(arguments: argparse.Namespace):
    from cases import CASES

    case = CASES[arguments.case]()
    records = arguments.records or case.records
    micro_batch = arguments.micro_batch or min(case.micro_batch, records)
    return replace(case, device=arguments.device, records=records, micro_batch=micro_batch)


def in_own_process(name: str) -> dict:
    """The contender's row, or a row with the last line of its error."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as caches:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(caches, "inductor")),
            "TRITON_CACHE_DIR": str(Path(caches, "triton")),
        }
        command = [sys.executable, *sys.argv, "--only", name]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"contender": name, "error": f"took longer than {LIMIT_S} s"}
    if done.returncode == 0:
        row = json.loads(done.stdout.splitlines()[-1])
        if looped := sorted(set(re.findall(r"batching rule for (aten::\w+)", done.stderr))):
            row["note"] += f"; vmap loops over records in {', '.join(looped)}"
        return {"contender": name, **row}
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return {"contender": name, "error": lines[-1] if lines else f"ended with {done.returncode}"}


def measure(arguments: argparse.Namespace) -> dict:
    import torch
    from contenders import CONTENDERS

    torch.set_num_threads(os.cpu_count() or 1)
    case = case_of(arguments)
    cuda = case.device == "cuda"
    with preparing(arguments.turns):
        contender = CONTENDERS[arguments.only](case)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        contender.step()
        if cuda:
            torch.cuda.synchronize()
        first = time.perf_counter() - start
    times: list[float] = []
    rounds = ROUNDS if arguments.turns else 1
    for _ in range(rounds):  # in turn with the others, so that a busy minute of the machine meets all of them
        with turn(arguments.turns):
            contender.step()
            times += (on_device if cuda else on_cpu)(contender.step, arguments.seconds / rounds)
        time.sleep(0.2)
    ms, deciles = statistics.median(times), statistics.quantiles(times, n=10)
    row = {
        "ms": ms,
        "ms_p10": deciles[0],
        "ms_p90": deciles[-1],
        "steps": len(times),
        "us_per_record": ms * 1e3 / case.records,
        "first_call_s": first,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else peak_resident_gib(),
        "note": contender.note,
    }
    return row | ({"peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30} if cuda else {})


def on_cpu(step, seconds: float) -> list[float]:
    """Milliseconds of each step; at least three."""
    times: list[float] = []
    while sum(times) < seconds * 1e3 or len(times) < 3:
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def on_device(step, seconds: float) -> list[float]:
    """Milliseconds from one step's end to the next one's, without a wait between the steps of a burst."""
    import torch

    times: list[float] = []
    torch.cuda.synchronize()
    while sum(times) < seconds * 1e3:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(BURST + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        times += [a.elapsed_time(b) for a, b in pairwise(events)]
    return times


def peak_resident_gib() -> float:
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def compare(rows: list[dict]) -> None:
    """Adds the ratios to the rows, where their baselines ran."""
    done = {row["contender"]: row for row in rows if "ms" in row}
    eager = done.get("plain_eager")
    compiled = min((done[name] for name in BASELINES if name in done), key=lambda row: row["ms"], default=None)
    for row in done.values():
        if eager:
            row["ratio_to_eager"] = row["ms"] / eager["ms"]
        if compiled:
            row["ratio_to_compiled"] = row["ms"] / compiled["ms"]
            row["memory_ratio"] = row["peak_memory_gib"] / compiled["peak_memory_gib"]
            row["baseline"] = compiled["contender"]


def about(arguments: argparse.Namespace) -> dict:
    import torch

    case = case_of(arguments)
    return {
        "case": {
            "name": arguments.case,
            "net": case.net.model_dump(),
            "shape": case.shape,
            "records": case.records,
            "draws": case.draws,
            "micro_batch": case.micro_batch,
            "clip": case.clip,
            "sigma": case.sigma,
        },
        "seconds": arguments.seconds,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else processor(),
        "threads": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "opacus": installed("opacus"),
            "straightdp": commit(),
        },
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Of the checkout that this file is in, with `+` if tracked files differ from it; STRAIGHTDP_COMMIT without git."""
    if "STRAIGHTDP_COMMIT" in os.environ:
        return os.environ["STRAIGHTDP_COMMIT"]

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", *words]
        here = Path(__file__).resolve().parent
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


COLUMNS = (
    ("ms/step", "ms", "{:.1f}"),
    ("p10", "ms_p10", "{:.1f}"),
    ("p90", "ms_p90", "{:.1f}"),
    ("x eager", "ratio_to_eager", "{:.2f}"),
    ("x compiled", "ratio_to_compiled", "{:.2f}"),
    ("us/record", "us_per_record", "{:.1f}"),
    ("peak GiB", "peak_memory_gib", "{:.2f}"),
    ("x memory", "memory_ratio", "{:.2f}"),
    ("first s", "first_call_s", "{:.1f}"),
)


def table(result: dict) -> str:
    case, versions = result["case"], result["versions"]
    head = (
        f"{case['name']}: {case['records']} records x {case['draws']} draws, on {result['device']}, "
        f"{result['threads']} threads, torch {versions['torch']}, opacus {versions['opacus']}, "
        f"straightdp {versions['straightdp']}"
    )
    lines = [head, "contender".ljust(16) + "".join(title.rjust(11) for title, _, _ in COLUMNS) + "  note"]
    for row in result["rows"]:
        cells = [form.format(row[key]).rjust(11) if key in row else "-".rjust(11) for _, key, form in COLUMNS]
        lines.append(row["contender"].ljust(16) + "".join(cells) + "  " + (row.get("error") or row["note"]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
