"""Rows handed to Slurm: one array job, a task for each model that is trained.

Each task is `straightdp reproduce` of its own rows, so that it resumes, gathers on its own node, and adds to the same
results. Public stages wait for each other on the shared file system.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from straightdp.errors import BadInput
from straightdp.files import write_durably
from straightdp.reproduce.jobs import Job

SCRIPT = """#!/usr/bin/env bash
#SBATCH --job-name=straightdp
#SBATCH --array=0-{last}
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
#SBATCH --output={out}/slurm-%A_%a.log
# Partition, account and time are yours to add: here, or in SBATCH_PARTITION, SBATCH_ACCOUNT and SBATCH_TIMELIMIT.
set -euo pipefail
cd {here}
tasks=(
{tasks}
)
eval "${{tasks[$SLURM_ARRAY_TASK_ID]}}"
"""


def script(jobs: Sequence[Job], sources: dict[str, str], common: Sequence[str], out: Path) -> str:
    """`sources`: how each experiment was named on the command line; `common`: what every task is told beside its rows.

    Jobs that go on from one trained model are one task: its rows have one budget and one seed.
    """
    tasks: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        tasks.setdefault((job.experiment, job.training), []).append(job)
    lines = []
    for (experiment, _), group in tasks.items():
        loaded = group[0].loaded
        words = [sys.executable, "-m", "straightdp", "reproduce", sources[experiment]]
        words += ["--epsilons", repr(loaded.privacy.epsilon), "--seeds", str(loaded.run.seed), *common]
        words += ["--rows", *(job.row for job in group)]
        lines.append("  " + shlex.quote(shlex.join(words)))
    here, place = shlex.quote(str(Path.cwd())), str(out.resolve())
    return SCRIPT.format(last=len(lines) - 1, out=place, here=here, tasks="\n".join(lines))


def write(file: Path, text: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)  # Slurm makes no folder for its logs
    write_durably(file, text.encode(), mode=0o755)


def submit(file: Path) -> str:
    """What sbatch said."""
    if shutil.which("sbatch") is None:
        raise BadInput(f"sbatch is not on this machine's PATH; submit {file} where it is")
    done = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadInput(
            f"sbatch refused {file} ({done.stderr.strip() or done.returncode}); mend that, and submit it again"
        )
    return done.stdout.strip()
