"""The paper's Table 1, our rows: uniform and planned DP-SGD, with and without the release, in pixels and in latents.

  python experiments/table1.py
  python experiments/table1.py --spaces latent --epsilons 1 --rows "uniform + moments"

`--print` shows the table of what is there, with the paper's figures beside ours.
"""

from __future__ import annotations

import argparse

from runner import Job, add_options, measured

RECIPES = {"pixel": "experiments/mnist_paper.toml", "latent": "experiments/mnist_paper_latent.toml"}
NO_RELEASE = ("release.weight=0",)
PLANNED = ("dpsgd.plan=tha",)
BACKBONE = ("net.B0=16.0", "net.l0=1", "net.decoupled=true", "net.s=1.0")
ROWS = {
    "uniform": NO_RELEASE,
    "THA": NO_RELEASE + PLANNED,
    "uniform + moments": (),
    "THA + moments": PLANNED,
    "THA + moments + low-B0": PLANNED + BACKBONE,
    "late injection only": (*PLANNED, "net.l0=1", "net.decoupled=true"),
    "stream clamp only": (*PLANNED, "net.B0=16.0"),
    "post-hoc clamp": (*PLANNED, *BACKBONE, "net.post_hoc=true"),
}
TABLE = tuple(ROWS)[:5]
PAPER = {
    "pixel": {
        "uniform": {0.3: 0.055, 1: 0.207, 3: 0.620},
        "THA": {0.3: 0.056, 1: 0.226, 3: 0.641},
        "uniform + moments": {0.3: 0.484, 1: 0.706, 3: 0.859},
        "THA + moments": {0.3: 0.443, 1: 0.724, 3: 0.848},
        "THA + moments + low-B0": {0.3: 0.561, 1: 0.697, 3: 0.788},
        "late injection only": {0.3: 0.402},
        "stream clamp only": {0.3: 0.535},
        "post-hoc clamp": {0.3: 0.02},
    },
    "latent": {
        "uniform": {0.3: 0.434, 1: 0.709, 3: 0.808},
        "THA": {0.3: 0.408, 1: 0.695, 3: 0.798},
        "uniform + moments": {0.3: 0.695, 1: 0.814, 3: 0.843},
        "THA + moments": {0.3: 0.682, 1: 0.811, 3: 0.839},
        "THA + moments + low-B0": {0.3: 0.633, 1: 0.792, 3: 0.835},
    },
}


def job(space: str, row: str, epsilon: float) -> Job:
    settings = (f"privacy.epsilon={float(epsilon)}", *ROWS[row], "evaluate.references=false")
    return Job("table1", name(space, row, epsilon), RECIPES[space], settings, light=space == "latent")


def name(space: str, row: str, epsilon: float) -> str:
    return f"{space}_{row.replace(' ', '').replace('+', '_')}_eps{epsilon:g}"


def show(results: dict) -> str:
    lines = [
        "| space | row | " + " | ".join(f"ε = {e:g}: ours (paper)" for e in (0.3, 1, 3)) + " |",
        "|---|---|---|---|---|",
    ]
    for space, rows in PAPER.items():
        for row, figures in rows.items():
            cells = []
            for epsilon in (0.3, 1, 3):
                found = results.get(name(space, row, epsilon))
                ours = "–" if found is None else f"{found['accuracy']['synthetic data']:.3f}"
                cells.append(f"{ours} ({figures[epsilon]:.3f})" if epsilon in figures else "")
            if any(not cell.startswith("–") for cell in cells if cell):
                lines.append(f"| {space} | {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--spaces", nargs="+", default=list(PAPER), choices=list(PAPER))
    parser.add_argument("--rows", nargs="+", default=list(TABLE), choices=list(ROWS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.3, 1, 3])
    options = parser.parse_args()
    jobs = [
        job(space, row, epsilon) for epsilon in options.epsilons for row in options.rows for space in options.spaces
    ]
    print(show(measured(jobs, options)))


if __name__ == "__main__":
    main()
