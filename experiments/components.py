"""Components of the release on pseudo-private sets: accuracy of a LeNet trained on draws of the release alone.

python experiments/components.py --out runs/components --results experiments/results/components.json

Fashion-MNIST in MNIST's place with KMNIST as the public set, and the other way round. Of KMNIST there are 8,000
records, for which 7.5 times the epsilon stands for 60,000 (at epsilon 3 that is more than the accountant takes: 2
stands in). What was measured is kept, and not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path

from straightdp import pipeline, recipe
from straightdp.audits.replay import replay

HERE = Path(__file__).parent
RELEASES = {"64 features": (64, 1), "128 features": (128, 1), "8 components": (128, 8), "20 components": (128, 20)}
ALONE = (
    "pretrain.steps=0",
    "distill.steps=0",
    "dpsgd.steps=0",
    "sample.port=release",
    "evaluate.seeds=1",
    "evaluate.real_reference=false",
)
TASKS = {
    "fashion": (
        "private.data=fashion-mnist:train",
        "private.holdout=fashion-mnist:test",
        "private.caption=the garment {label}",
        'private.classes=["t-shirt","trouser","pullover","dress","coat","sandal","shirt","sneaker","bag","ankle boot"]',
    ),
    "kmnist": (
        "private.data=kmnist:test",
        "private.holdout=0.2",
        "private.caption=the kana {label}",
        'private.classes=["o","ki","su","tsu","na","ha","ma","ya","re","wo"]',
        "privacy.n=8000",
        "public.data=fashion-mnist:train",
        "public.caption=the garment {label}",
    ),
}
EPSILONS = {"fashion": (1.0, 3.0, 0.3), "kmnist": (1.0, 0.3, 2.0)}
SCALE = {"fashion": 1.0, "kmnist": 7.5}  # of epsilon


def measure(out: Path, task: str, epsilon: float, release: str, seed: int) -> dict:
    features, components = RELEASES[release]
    settings = (
        *ALONE,
        *TASKS[task],
        f"privacy.epsilon={epsilon * SCALE[task]:g}",
        f"release.features={features}",
        f"release.rank={features}",
        f"release.components={components}",
        f"run.seed={seed}",
        f"privacy.pinned_key={seed:064x}",
    )
    finished = pipeline.run(recipe.load(HERE / "mnist.toml", settings), out, resume=True)
    assert finished is not None
    score = json.loads(finished.evaluation.read_text())["scores"][0]
    assert score["name"] == "synthetic data"
    replayed = replay(finished.release).epsilon
    return {
        "accuracy": round(score["mean"], 4),
        "epsilon_replayed": round(replayed, 4),
        "commit": os.environ.get("STRAIGHTDP_COMMIT", ""),
        "settings": settings,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    head = {
        "what": "accuracy of a LeNet trained on 10,000 draws of the release alone, by its components",
        "command": "python experiments/components.py --out DIR --results experiments/results/components.json",
        "recipe": "experiments/mnist.toml",
        "device": "CPU",
    }
    body = json.loads(options.results.read_text()) if options.results.exists() else {"runs": {}}
    body = head | {"runs": body["runs"]}
    for seed, k, task, release in itertools.product(range(options.seeds), range(3), TASKS, RELEASES):
        epsilon = EPSILONS[task][k]
        name = f"{task}, epsilon {epsilon:g}, {release}, seed {seed}"
        if name not in body["runs"]:
            body["runs"][name] = measure(options.out / name.replace(", ", "-"), task, epsilon, release, seed)
            options.results.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
