"""The paper's toy sweep: Wasserstein-2 distance to the true mixture against epsilon, for both plans.

python experiments/mixture.py --results experiments/results/mixture.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from straightdp import pipeline, recipe
from straightdp.audits.replay import replay
from straightdp.data import mixture

HERE = Path(__file__).parent
EPSILONS = (0.3, 1.0, 3.0, 10.0)
PLANS = ("uniform", "tha")


def distance(points: np.ndarray, seed: int) -> float:
    """W2 between the points and as many fresh draws of the truth, by optimal assignment."""
    truth = mixture.sample(len(points), seed=1000 + seed).x.reshape(len(points), 2)
    cost = cdist(points, truth, "sqeuclidean")
    return float(np.sqrt(cost[linear_sum_assignment(cost)].mean()))


def run(folder: Path, epsilon: float, plan: str, seed: int) -> dict:
    torch.set_num_threads(1)  # the tensors are small
    settings = (
        f"privacy.epsilon={epsilon}",
        f"dpsgd.plan={plan}",
        f"run.seed={seed}",
        f"privacy.pinned_key={seed:064x}",
    )
    finished = pipeline.run(recipe.load(HERE / "mixture.toml", settings), folder)
    assert finished is not None
    points = np.loadtxt(finished.synthetic / "points.csv", delimiter=",", skiprows=1, usecols=(0, 1))
    return {"W2": distance(points, seed), "epsilon_replayed": replay(finished.release).epsilon}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    start = time.monotonic()
    jobs = {f"{p}_eps{e:g}_seed{s}": (e, p, s) for s in range(options.seeds) for e in EPSILONS for p in PLANS}
    with tempfile.TemporaryDirectory() as work:
        os.environ["STRAIGHTDP_CACHE"] = str(Path(work) / "public")
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
            waiting = {name: pool.submit(run, Path(work) / name, *job) for name, job in jobs.items()}
            found = {name: result.result() for name, result in waiting.items()}
    fresh = mixture.sample(2000, seed=7).x.reshape(2000, 2)
    body = {
        "what": "W2 to the true mixture, 2,000 samples against 2,000 fresh draws",
        "recipe": "experiments/mixture.toml",
        "floor": distance(fresh, 0),
        "public": distance(mixture.public(2000, seed=7).x.reshape(2000, 2), 0),
        "seconds": round(time.monotonic() - start, 1),
        "runs": found,
    }
    if options.results:
        options.results.write_text(json.dumps(body, indent=1))
    print(
        f"\nW2, {body['seconds']} s in all; two draws of the truth: {body['floor']:.4f}; public: {body['public']:.4f}"
    )
    print("| epsilon | " + " | ".join(PLANS) + " |\n|---|---|---|")
    for epsilon in EPSILONS:
        cells = []
        for plan in PLANS:
            values = [found[f"{plan}_eps{epsilon:g}_seed{seed}"]["W2"] for seed in range(options.seeds)]
            cells.append(f"{np.mean(values):.4f}" + (f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""))
        print(f"| {epsilon:g} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
