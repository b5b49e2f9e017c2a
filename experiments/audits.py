"""Audits: many small honest runs, none of whose bounds may exceed the claim, and the recipes at epsilon = 1.

  python experiments/audits.py small --runs 20            minutes on a CPU
  python experiments/audits.py mnist                      pixel and latent, with their controls: a GPU

Audits need no pinned noise: nothing of them is released. Results keep figures only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from runner import ROOT, device

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
RECIPES = {"pixel": "experiments/mnist_paper.toml", "latent": "experiments/mnist_paper_latent.toml"}


def audited(name: str, recipe: str, settings: tuple[str, ...], work: Path) -> dict:
    command = [sys.executable, "-m", "straightdp", "audit", recipe, "--out", str(work / name)]
    command += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if not (work / name / "private/audit.json").exists():
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    print(f"{name}: exit {done.returncode}", flush=True)
    return {"settings": list(settings), "exit": done.returncode} | json.loads(
        (work / name / "private/audit.json").read_text()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["small", "mnist"])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--work", type=Path, default=Path("runs/audits"))
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args()
    work, extra = options.work.resolve(), tuple(options.settings)
    if options.what == "small":
        jobs = {f"small-{k}": ("demo", (*SMALL, f"run.seed={k}", *extra)) for k in range(options.runs)}
    else:
        jobs = {f"mnist-{space}": (recipe, ("privacy.epsilon=1.0", *extra)) for space, recipe in RECIPES.items()}
    found = {name: audited(name, recipe, settings, work) for name, (recipe, settings) in jobs.items()}
    place = options.results or Path(f"experiments/results/audits_{options.what}.json")
    place.write_text(json.dumps({"device": device(), "audits": found}, indent=1))
    bounds = [body["honest"]["one_run"]["bound"] for body in found.values()]
    claims = [body["honest"]["claimed"] for body in found.values()]
    caught = sum(bool(body["leaky"]["suspicions"]) for body in found.values())
    over = sum(b > c for b, c in zip(bounds, claims, strict=True))
    print(f"bounds {min(bounds):.3f} to {max(bounds):.3f}, {over} above the claims, {min(claims):.3f} or more")
    print(f"controls caught: {caught} of {len(found)}")


if __name__ == "__main__":
    main()
