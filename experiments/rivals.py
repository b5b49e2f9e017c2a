"""The paper's prior methods in our protocol: Table 1's first block, and epsilon = 10 of its FID table.

  python experiments/rivals.py
  python experiments/rivals.py --methods dp-merf --epsilons 1 --seeds 0 1 2

`--print` shows the table of what is there, with the paper's figures beside ours.
"""

from __future__ import annotations

import argparse
from statistics import mean

from runner import Job, add_options, measured

RECIPE = "experiments/mnist_paper.toml"
PAPER = {  # accuracy and FID
    "dp-merf": {0.3: (0.823, 280.6), 1: (0.856, 182.8), 3: (0.842, 109.1), 10: (None, 97.4)},
    "dp-hp": {0.3: (0.762, 284.3), 1: (0.751, 219.8), 3: (0.780, 167.3), 10: (None, 158.5)},
    "dp-ntk": {0.3: (0.737, 333.8), 1: (0.786, 292.7), 3: (0.811, 249.1), 10: (None, 229.8)},
    "private-evolution": {0.3: (0.044, 122.4), 1: (0.059, 81.4), 3: (0.082, 52.8), 10: (None, 35.4)},
}


def name(method: str, epsilon: float, seed: int) -> str:
    return f"{method}_eps{epsilon:g}_seed{seed}"


def job(method: str, epsilon: float, seed: int) -> Job:
    settings = (f"run.method={method}", f"privacy.epsilon={float(epsilon)}", f"run.seed={seed}")
    return Job("rivals", name(method, epsilon, seed), RECIPE, (*settings, "evaluate.references=false"), light=True)


def show(results: dict) -> str:
    """Accuracy and Frechet distance, the mean over seeds, with the paper's accuracy and FID in brackets."""
    heads = [f"ε = {e:g}: accuracy, FD-slim (paper: accuracy, FID)" for e in (0.3, 1, 3, 10)]
    lines = [f"| method | {' | '.join(heads)} |", "|---|---|---|---|---|"]
    for method, figures in PAPER.items():
        cells = []
        for epsilon, (accuracy, fid) in figures.items():
            found = [body for seed in range(3) if (body := results.get(name(method, epsilon, seed)))]
            paper = f"({'–' if accuracy is None else f'{accuracy:.3f}'}, {fid:.0f})"
            if not found:
                cells.append(f"– {paper}")
                continue
            ours = mean(body["accuracy"]["synthetic data"] for body in found)
            distances = [body["quality"]["sets"][0]["distance"] for body in found if body.get("quality")]
            cells.append(f"{ours:.3f}, {f'{mean(distances):.0f}' if distances else '–'} {paper}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--methods", nargs="+", default=list(PAPER), choices=list(PAPER))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.3, 1, 3, 10])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    options = parser.parse_args()
    jobs = [job(m, epsilon, seed) for seed in options.seeds for epsilon in options.epsilons for m in options.methods]
    print(show(measured(jobs, options)))


if __name__ == "__main__":
    main()
