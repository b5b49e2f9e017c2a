"""The judge judged: Frechet distance, precision and recall of sets whose order is known beforehand.

  python experiments/judge.py --device cuda --results experiments/results/judge.json

Against MNIST's test set stand its own train set (as near as a generator can hope to come), KMNIST (another hand) and
uniform noise. All four sets are public here: nothing is spent.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor

from straightdp.data.catalogue import data_root
from straightdp.data.sources import load
from straightdp.files import write_text
from straightdp.metrics.frechet import frechet, moments
from straightdp.metrics.inception import CURE, Features, find
from straightdp.metrics.label_aware import mean_of, per_class_frechet
from straightdp.metrics.precision_recall import precision_recall
from straightdp.progress import tracker


class Clock:
    """Seconds spent on each part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, part: str, work, *inputs):
        start = time.perf_counter()
        result = work(*inputs)
        self.seconds[part] = round(self.seconds.get(part, 0.0) + time.perf_counter() - start, 2)
        return result


def sets(n: int) -> dict[str, tuple[Tensor, Tensor]]:
    """(z, labels) of the first n records of each set. MNIST's files are in no order of classes."""
    found = {}
    for name in ("mnist:test", "mnist:train", "kmnist:test"):
        records = load(name, size=28, channels=1)
        found[name] = records.z(slice(0, n)), torch.from_numpy(records.labels[:n])
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(len(found["mnist:test"][0]), 1, 28, 28, generator=generator) * 2 - 1
    return found | {"noise": (noise, torch.zeros(len(noise), dtype=torch.int64))}


def judge(features: Features, n: int) -> dict:
    clock = Clock()
    pictures = clock("reading", sets, n)
    seen = {name: clock(f"features of {name}", features, z, tracker(name)) for name, (z, _) in pictures.items()}
    summed = {name: clock("moments", moments, x) for name, x in seen.items()}
    rows = {}
    for name in ("mnist:train", "kmnist:test", "noise"):
        precision, recall = clock("precision and recall", precision_recall, seen["mnist:test"], seen[name])
        distance = clock("frechet", frechet, summed["mnist:test"], summed[name])
        rows[name] = {"frechet": distance, "precision": precision, "recall": recall}
    labels = {name: y for name, (_, y) in pictures.items()}
    ours = (seen["mnist:test"], labels["mnist:test"], seen["mnist:train"], labels["mnist:train"])
    classes = clock("frechet per class", per_class_frechet, *ours, 10)
    rows["mnist:train"] |= {"frechet per class": classes, "mean of the classes": mean_of(classes)}
    return {"n": {name: len(x) for name, x in seen.items()}, "against mnist:test": rows, "seconds": clock.seconds}


def show(result: dict) -> str:
    name, rows = result["features"], result["against mnist:test"]
    lines = [f"| against mnist:test | {name} | precision | recall |", "|---|---|---|---|"]
    for source, row in rows.items():
        lines.append(f"| {source} | {row['frechet']:.2f} | {row['precision']:.3f} | {row['recall']:.3f} |")
    classes = rows["mnist:train"]["frechet per class"]
    shown = ", ".join("–" if c is None else f"{c:.1f}" for c in classes)
    return "\n".join((*lines, "", f"{name} of mnist:train per class: {shown}", f"seconds: {result['seconds']}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10_000, help="records of each set at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=Path("experiments/results/judge.json"))
    options = parser.parse_args()
    device = torch.device(options.device)
    if (features := find(device)) is None:
        parser.error(f"no Inception weights in {data_root()}; {CURE}")
    result = {
        "features": features.name,
        "weights": features.digest,
        "resize": features.resize,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "commit": os.environ.get("STRAIGHTDP_COMMIT"),
        **judge(features, options.n),
    }
    write_text(options.results, json.dumps(result, indent=1) + "\n")
    print(show(result))


if __name__ == "__main__":
    main()
