"""Which rows of choice.toml the recipes for digits take, by the rule in that table's note, and what to set for that.

python experiments/choose.py

Values are taken as they are: of a seventh of the records at seven times the ε, every sum, vote and gradient has about
the same signal for its noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from straightdp.recipe import load
from straightdp.reproduce.experiment import read
from straightdp.reproduce.jobs import Job, job_of, recipe_source
from straightdp.reproduce.results import Results, measured

HERE = Path(__file__).parent
TAKERS = {"mnist_in_pixels": -2, "best-mnist": -1}  # recipes, and the panel whose rows each chooses from
WITHIN = 0.01  # what accuracy may be given for distance
ELSEWHERE = {"release.components", "sample.n"}  # panels of their own look at these
CHOSEN = ("latent", "net", "pretrain", "release", "distill", "dpsgd", "sample")  # sections of a recipe


@dataclass(frozen=True)
class Candidate:
    job: Job
    accuracy: float
    distance: float


def candidates(results: Results, taker: str) -> Iterator[Candidate]:
    """The rows that were measured."""
    experiment = read(str(HERE / "choice.toml"))
    panel = experiment.panels[TAKERS[taker]]
    for row in panel.rows:
        job = job_of(experiment, panel, row, *panel.epsilons, *experiment.seeds)
        found = measured(results.find(job) or {}, ("accuracy", "distance"))
        if len(found) == 2:
            yield Candidate(job, **found)


def choose(every: Sequence[Candidate]) -> Candidate:
    """Of those whose accuracy is within 0.01 of the best, the one of the smallest distance."""
    best = max(one.accuracy for one in every)
    return min((one for one in every if one.accuracy >= best - WITHIN), key=lambda one: one.distance)


def settings(job: Job, recipe: str) -> list[str]:
    """What must be set in the recipe for it to do what the job did."""
    mine, theirs = (
        one.model_dump(mode="json", include=set(CHOSEN)) for one in (load(recipe_source(recipe)), job.loaded)
    )
    return [
        f"{section}.{key}={json.dumps(value)}"
        for section in CHOSEN
        for key, value in theirs[section].items()
        if value != mine[section][key] and f"{section}.{key}" not in ELSEWHERE
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of what was measured")
    options = parser.parse_args()
    results = Results(options.results)
    for taker in TAKERS:
        every = list(candidates(results, taker))
        if not every:
            print("no row was measured; run `straightdp reproduce experiments/choice.toml` first", file=sys.stderr)
            return 2
        taken = choose(every)
        for one in sorted(every, key=lambda one: one.distance):
            mark = "*" if one is taken else " "
            print(f"{mark} {one.accuracy:.3f} {one.distance:6.1f}  {one.job.row}")
        print(f"to set in {taker}: " + (", ".join(settings(taken.job, taker)) or "nothing"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
