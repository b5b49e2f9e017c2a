"""Audits: many small honest runs, none of whose bounds may exceed the claim, and the recipes at epsilon = 1.

  python experiments/audits.py small --runs 20            minutes on a CPU
  python experiments/audits.py mnist                      pixel and latent, with their controls: a GPU

Audits need no pinned noise: nothing of them is released. Results keep figures only.
"""

from __future__ import annotations

import argparse

from runner import Job, add_options, measured

SMALL = (
    "net.width=32",
    "net.depth=2",
    "net.heads=2",
    "pretrain.steps=60",
    "distill.steps=60",
    "dpsgd.steps=40",
    "sample.steps=4",
    "audit.samples=0",
    "audit.shadows=0",
    "audit.draws=8",
)
DEMO = "src/straightdp/recipes/demo.toml"
RECIPES = {"pixel": "experiments/mnist_paper.toml", "latent": "experiments/mnist_paper_latent.toml"}


def small(runs: int) -> list[Job]:
    settings = [(*SMALL, f"run.seed={k}") for k in range(runs)]
    return [Job("audits_small", f"small-{k}", DEMO, s, light=True, audit=True) for k, s in enumerate(settings)]


def mnist() -> list[Job]:
    return [
        Job("audits_mnist", f"mnist-{space}", recipe, ("privacy.epsilon=1.0",), light=space == "latent", audit=True)
        for space, recipe in RECIPES.items()
    ]


def show(results: dict) -> str:
    if not results:
        return "nothing yet"
    bounds = [body["honest"]["one_run"]["bound"] for body in results.values()]
    claims = [body["honest"]["claimed"] for body in results.values()]
    caught = sum(bool(body["leaky"]["suspicions"]) for body in results.values())
    over = sum(b > c for b, c in zip(bounds, claims, strict=True))
    found = f"bounds {min(bounds):.3f} to {max(bounds):.3f}, {over} above the claims, {min(claims):.3f} or more"
    return f"{found}\ncontrols caught: {caught} of {len(results)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["small", "mnist"])
    parser.add_argument("--runs", type=int, default=20)
    add_options(parser)
    options = parser.parse_args()
    print(show(measured(small(options.runs) if options.what == "small" else mnist(), options)))


if __name__ == "__main__":
    main()
