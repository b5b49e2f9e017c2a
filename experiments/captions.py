"""The paper's text table: caption featurisations on MNIST and on composed-MNIST, and what the two corrections do.

  python experiments/captions.py

Each run also shows what the released moments alone give, which tells the release from the training after it.
"""

from __future__ import annotations

import argparse

from runner import Job, add_options, measured

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


def jobs() -> list[Job]:
    plain, composed = "experiments/mnist_paper.toml", "experiments/composed.toml"
    off = ("evaluate.thorough=off",)
    found = [Job("captions", name("mnist", row), plain, PLANNED + s + off) for row, s in ROWS.items()]
    attributes = [row for row, (_, slots) in PAPER.items() if slots]
    return found + [Job("captions", name("composed", row), composed, ROWS[row] + off) for row in attributes]


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
    add_options(parser)
    print(show(measured(jobs(), parser.parse_args())))


if __name__ == "__main__":
    main()
