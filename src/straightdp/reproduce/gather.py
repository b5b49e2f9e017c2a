"""What is kept of a finished run or audit: its figures, the seconds of its stages, and the replayed epsilon."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

from straightdp.audits.replay import replay
from straightdp.folder import RunFolder
from straightdp.progress import say
from straightdp.reproduce.figures import INTERNAL
from straightdp.reproduce.jobs import Job
from straightdp.stages.public import load_number


def gather(job: Job, run: Path, code: int) -> dict | None:
    """None of one that failed, or whose transcript does not hold. An audit that ends with 1 has found something."""
    folder = RunFolder(run)
    kept = folder.audit if job.command == "audit" else folder.evaluation
    if code not in ((0, 1) if job.command == "audit" else (0,)) or not kept.exists():
        return None
    about = {
        "internal": INTERNAL,
        "row": job.shown,
        "recipe": Path(job.recipe).name if Path(job.recipe).is_absolute() else job.recipe,  # says not where files lie
        "settings": list(job.settings),
        "resolved": job.loaded.model_dump(mode="json"),
        "noise": job.noise,
        "commit": os.environ.get("STRAIGHTDP_COMMIT", "unknown"),
        "device": device(),
    }
    if job.command == "audit":
        return about | {"exit": code} | json.loads(kept.read_text())
    spent = None if not job.noise else replay(folder.release)
    if spent is not None and not spent.holds:
        say(f"{run}: {spent.text}")
        return None
    return about | {"epsilon_replayed": spent and spent.epsilon} | _measured(job, folder)


def _measured(job: Job, folder: RunFolder) -> dict:
    """Accuracies are those of the evaluation's first classifier."""
    evaluation = json.loads(folder.evaluation.read_text())
    scores = evaluation["scores"]
    probe = scores[0]["probe"] if scores else None
    body = {
        "probe": probe,
        "accuracy": {s["name"]: s["mean"] for s in scores if s["probe"] == probe},
        "seconds": {name: round(stamp["seconds"], 1) for name, stamp in folder.read_stamps().items()},
    }
    body |= {name: evaluation[name] for name in ("quality", "label_aware") if name in evaluation}
    stronger = {s["name"]: s["mean"] for s in scores if s["probe"] != probe}
    body |= {"accuracy of the residual net": stronger} if stronger else {}
    if folder.calibration.exists() and not job.loaded.sd3.model:
        body["pretrain_loss"] = load_number(folder.calibration, "pretrain_loss")
    if folder.diagnostics.exists():
        rows = [json.loads(line) for line in folder.diagnostics.read_text().splitlines()]
        keys = ("q50", "q90", "clip_fraction")
        body["gradient_norms"] = {k: sorted(row[k] for row in rows)[len(rows) // 2] for k in keys}  # medians over steps
    for path in (folder.plan, folder.horizon, folder.allocation, folder.plateau):
        if path.exists():
            body[path.stem] = json.loads(path.read_text())
    return body


def device() -> str:
    import torch

    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{kind}, torch {torch.__version__}, Python {platform.python_version()}"
