"""The paper's Table 3, row by row: each row is one run of a route of `straightdp sd3`, with its noise pinned.

Rows that are there are not run again, and a row that was stopped goes on. Pinned noise makes the controls use the very
release that guidance uses; `replay` calls such runs not releasable.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from straightdp.errors import BadInput
from straightdp.files import write_durably
from straightdp.folder import RELEASE
from straightdp.progress import say

GUIDANCE = ("release.weight=0.1", "dpsgd.weight=0.9", "sample.port=guide")
UNTRAINED = ("dpsgd.steps=0",)  # whatever the steps of other rows are set to
UNCLIPPED = ("dpsgd.clip=1e6", "dpsgd.clip_quantile=0")


@dataclass(frozen=True)
class Row:
    """A route and its settings, and the paper's accuracy and FID. `of`: which set of the run's evaluation it shows."""

    route: str
    epsilon: float
    settings: tuple[str, ...] = ()
    noise: bool = True
    paper: tuple[float, float | None] = (0.0, None)
    of: str = "synthetic data"


TABLE3 = {
    "zero-shot": Row("guide", 2, UNTRAINED, paper=(0.588, 40.2), of="public model only"),
    "uniform DP-SGD, ε = 10": Row("lora", 10, paper=(0.580, 37.9)),
    "uniform DP-SGD, ε = 2": Row("lora", 2, paper=(0.603, 38.6)),
    "Private Evolution": Row("evolve", 10, paper=(0.593, 43.5)),
    "distillation + DP-SGD": Row("distill", 10, paper=(0.088, 105.7)),
    "moment guidance": Row("guide", 2, UNTRAINED, paper=(0.625, 37.8)),
    "DP-SGD + guidance": Row("lora", 10.4, GUIDANCE, paper=(0.614, 38.0)),
    "non-private LoRA": Row("lora", 10, UNCLIPPED, noise=False, paper=(0.657, 35.8)),
    "non-private LoRA + guidance": Row("lora", 10, UNCLIPPED + GUIDANCE, noise=False, paper=(0.678, 35.4)),
    "control: zero mean": Row("guide", 2, (*UNTRAINED, "sample.tilt=zero"), paper=(0.548, 64.0)),
    "control: random direction": Row("guide", 2, (*UNTRAINED, "sample.tilt=random"), paper=(0.555, 64.0)),
    "control: public-prior mean": Row("guide", 2, (*UNTRAINED, "sample.tilt=public"), paper=(0.606, None)),
    "control: exact moments": Row("guide", 2, UNTRAINED, noise=False, paper=(0.624, None)),
}


def table3(rows: Sequence[str], seeds: Sequence[int], out: Path, given: tuple[str, ...]) -> str:
    """Run what is missing of these rows and seeds, keep it in `out`/private, and return the table of all there is.

    `given` are settings of every run: the model, the private set, N and delta among them.
    """
    if unknown := [name for name in rows if name not in TABLE3]:
        raise BadInput(f"table3 has no row {unknown[0]!r}; its rows: {', '.join(TABLE3)}")
    kept = out / "private" / "table3.json"  # measured on private records without noise
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found: dict[str, dict] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for seed in seeds:
        for name in rows or TABLE3:
            key = f"{name}, seed {seed}"
            if key not in found:
                say(f"--- {key}")
                found[key] = _measured(TABLE3[name], seed, out, given)
                write_durably(kept, json.dumps(found, indent=1, ensure_ascii=False).encode(), mode=0o600)
    return describe(found)


def _measured(row: Row, seed: int, out: Path, given: tuple[str, ...]) -> dict:
    """Run a row, unless its run is there, and read what its set's accuracy and distance are."""
    pinned = hashlib.sha256(f"table 3, seed {seed}".encode()).hexdigest()
    settings = (*given, f"privacy.epsilon={row.epsilon}", f"run.seed={seed}", *row.settings)
    digest = hashlib.sha256(repr((row.route, row.noise, settings)).encode()).hexdigest()
    run = out / f"{row.route}-{digest[:12]}"
    command = [sys.executable, "-m", "straightdp", "sd3", row.route, "--out", str(run)]
    command += ["--resume"] if (run / "recipe.toml").exists() else []
    command += [] if row.noise else ["--without-noise"]
    for setting in (*settings, f'privacy.pinned_key="{pinned}"'):
        command += ["--set", setting]
    cache = os.environ.get("STRAIGHTDP_CACHE") or str(out / "public")
    done = subprocess.run(command, env=os.environ | {"STRAIGHTDP_CACHE": cache}, check=False)
    if done.returncode:
        raise BadInput(f"the row stopped (exit {done.returncode}); mend what it says above, and run this again")
    return _figures(run, row)


def _figures(run: Path, row: Row) -> dict:
    from straightdp.audits.replay import replay

    evaluation = json.loads((run / "private" / "evaluation.json").read_text(encoding="utf-8"))
    score = next((s for s in evaluation["scores"] if s["name"] == row.of), None)
    quality = evaluation.get("quality") or {"features": None, "sets": ()}
    distance = next((one["distance"] for one in quality["sets"] if one["name"] == row.of), None)
    return {
        "epsilon": (0.0 if row.of == ZERO_SHOT else replay(run / RELEASE).epsilon) if row.noise else None,
        "accuracy": score and score["mean"],
        "probe": score and score["probe"],
        "distance": distance,
        "features": quality["features"],
        "run": run.name,
    }


ZERO_SHOT = TABLE3["zero-shot"].of


def describe(found: dict[str, dict]) -> str:
    """Mean and spread over seeds, the paper's beside them."""
    heads = ("internal, not for publication", "ε", "accuracy", "paper", "distance", "paper's FID")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, row in TABLE3.items():
        bodies = [body for key, body in found.items() if key.rpartition(", seed ")[0] == name]
        if not bodies:
            continue
        epsilon = "∞" if bodies[0]["epsilon"] is None else f"{bodies[0]['epsilon']:.4g}"
        features = bodies[0]["features"] or ""
        accuracy, fid = row.paper
        cells = (
            name,
            epsilon,
            _spread([body["accuracy"] for body in bodies], 3),
            f"{accuracy:.3f}",
            f"{features} {_spread([body['distance'] for body in bodies], 1)}".strip(),
            "–" if fid is None else f"{fid:.1f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(values: list[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    spread = f" ± {stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{mean(known):.{digits}f}{spread}"
