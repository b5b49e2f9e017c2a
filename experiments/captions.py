"""The paper's text table: caption featurisations on MNIST and on composed-MNIST, and what the two corrections do.

  python experiments/captions.py --work runs/captions --results experiments/results/captions.json

Each run also shows what the released moments alone give, which tells the release from the training after it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from runner import Job, run_all

PLANNED = ("dpsgd.plan=tha",)
ROWS = {
    "one-hot": ("release.condition=onehot",),
    "slots": ("release.condition=slots",),
    "pooled": ("release.condition=pooled",),
    "pooled, not projected": ("release.condition=pooled", "release.project=false"),
    "pooled, not centred": ("release.condition=pooled", "release.centre=false"),
}
PAPER = {  # MNIST accuracy; composed: class, quadrant, stroke
    "one-hot": (0.724, (0.106, 1.000, 1.000)),
    "slots": (0.632, (0.114, 1.000, 0.843)),
    "pooled": (0.464, (0.111, 0.886, 0.748)),
    "pooled, not projected": (0.32, None),
    "pooled, not centred": (0.12, None),
}
SLOTS = ("captions' label", "captions' quadrant", "captions' stroke")


def name(data: str, row: str) -> str:
    return f"{data}_{row.replace(', ', '_').replace(' ', '-')}"


def jobs(extra: tuple[str, ...]) -> list[Job]:
    found = [Job(name("mnist", r), "experiments/mnist_paper.toml", PLANNED + s + extra) for r, s in ROWS.items()]
    attributes = [row for row, (_, slots) in PAPER.items() if slots]
    return found + [Job(name("composed", r), "experiments/composed.toml", ROWS[r] + extra) for r in attributes]


def show(results: dict) -> str:
    lines = ["| featurisation | MNIST (paper) | release alone | class, quadrant, stroke (paper) |", "|---|---|---|---|"]
    for row, (accuracy, slots) in PAPER.items():
        plain = results.get(name("mnist", row), {}).get("accuracy", {})
        composed = results.get(name("composed", row), {}).get("accuracy", {})
        cell = ", ".join(f"{composed.get(s, float('nan')):.3f}" for s in SLOTS) if composed else "–"
        paper = f" ({', '.join(f'{v:.3f}' for v in slots)})" if slots else ""
        synthetic, alone = plain.get("synthetic data", float("nan")), plain.get("released moments alone", float("nan"))
        lines.append(f"| {row} | {synthetic:.3f} ({accuracy:.3f}) | {alone:.3f} | {cell}{paper} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/captions"))
    parser.add_argument("--results", type=Path, default=Path("experiments/results/captions.json"))
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no job after this")
    parser.add_argument("--print", action="store_true", help="only show what is there")
    options = parser.parse_args()
    if options.print:
        results = json.loads(options.results.read_text())
    else:
        todo = jobs(tuple(options.settings))
        results = run_all(todo, options.work, options.results, parallel=options.parallel, seconds=options.seconds)
    print(show(results))


if __name__ == "__main__":
    main()
