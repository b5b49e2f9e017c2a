"""The paper's Figure 2 from public data: (a) how long the moment field and the exact field agree, (b) the clip shapes.

  python experiments/figure2.py --sets kmnist:test fashion-mnist:test                  in pixels, two minutes on a CPU
  python experiments/figure2.py --latent --sets kmnist:test fashion-mnist:test         trains an autoencoder for each

Two public sets show how stable the knee is. Writes a JSON file with both panels' curves and draws them as SVG.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from straightdp.compiled import fastest
from straightdp.data.sources import load
from straightdp.dpsgd.planner import BETAS, edges, profile, shaped
from straightdp.flow.fit import step_generator
from straightdp.moments.basis import fit_basis
from straightdp.moments.horizon import horizon, public_moments
from straightdp.nets.spaces import Codes, Pixels, Space
from straightdp.recipe import Recipe
from straightdp.recipe import load as load_recipe
from straightdp.stages.public import fit_autoencoder
from straightdp.team import pick_device

RECIPES = {False: "experiments/mnist_paper.toml", True: "experiments/mnist_paper_latent.toml"}
PIECES = 32  # of panel (b)'s curves


def space_of(recipe: Recipe, public, device: torch.device) -> Space:
    if recipe.latent.d is None:
        return Pixels(public.shape)
    with tempfile.TemporaryDirectory() as work:
        x = public.z().to(device)
        return Codes(
            fit_autoencoder(recipe, x, speed=fastest(device), checkpoint=Path(work) / "autoencode.pt"),
            device,
        )


def measure(recipe: Recipe, source: str, device: torch.device) -> dict:
    public = load(source, size=recipe.image.size, channels=recipe.image.channels)
    space = space_of(recipe, public, device)
    z, labels = space.encode(public.z()), torch.from_numpy(public.labels)
    basis = fit_basis(z, labels, recipe.release, space.bound)
    model, z = public_moments(z, labels, basis, recipe.release).to(device), z.to(device)
    generator = step_generator(recipe.run.seed, "horizon", 0, device)
    found = horizon(model, z, labels.to(device), generator, cap=recipe.distill.tau_cap)
    ends = edges(found.tau, PIECES)
    values = profile(model, ends)
    return {
        "records": len(public),
        "knee": found.knee,
        "tau": found.tau,
        "lipschitz": found.lipschitz,
        "drift": found.drift,
        "panel_a": found.curves(),
        "panel_b": {"edges": ends, "shapes": {f"{beta:g}": list(shaped(values, beta)) for beta in BETAS}},
    }


def draw(found: dict[str, dict], out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    for k, (source, body) in enumerate(found.items()):
        curves = body["panel_a"]
        left.plot(curves["times"], curves["unconditional"], color=f"C{k}", label=f"{source}, null branch")
        left.plot(curves["times"], curves["worst_class"], color=f"C{k}", ls="--", label=f"{source}, worst class")
        left.axvline(body["knee"], color=f"C{k}", lw=0.7, ls=":")
    left.set(xlabel="t", ylabel="cosine of moment and exact field", ylim=(0, 1.02))
    left.legend(fontsize=7)
    first = next(iter(found.values()))["panel_b"]
    middles = [(a + b) / 2 for a, b in zip(first["edges"], first["edges"][1:], strict=False)]
    for beta, shape in first["shapes"].items():
        right.plot(middles, shape, label=f"beta = {beta}")
    right.set(xlabel="t", ylabel="C(t) / C_ref", yscale="log")
    right.legend(fontsize=7)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["kmnist:test", "fashion-mnist:test"])
    parser.add_argument("--latent", action="store_true")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--results", type=Path, default=None)
    options = parser.parse_args()
    recipe = load_recipe(RECIPES[options.latent], tuple(options.settings))
    device = pick_device("auto")
    found = {source: measure(recipe, source, device) for source in options.sets}
    place = options.results or Path(f"experiments/results/figure2_{'latent' if options.latent else 'pixel'}.json")
    place.write_text(json.dumps(found, indent=1))
    draw(found, place.with_suffix(".svg"))
    print("| public set | knee | tau | cosine at tau, worst class | slope | drift bound |\n|---|---|---|---|---|---|")
    for source, body in found.items():
        curve = body["panel_a"]
        at = max(k for k, t in enumerate(curve["times"]) if t <= body["tau"] + 1e-6)
        print(
            f"| {source} | {body['knee']:.3f} | {body['tau']:.3f} | {curve['worst_class'][at]:.3f} "
            f"| {body['lipschitz']:.3g} | {body['drift']:.3g} |"
        )


if __name__ == "__main__":
    main()
