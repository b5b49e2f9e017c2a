"""Facts for tests of the report: made up ones with words that could come from nowhere else, and real pictures."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np

from straightdp.data.demo import digits, letters
from straightdp.report import (
    AssumptionFact,
    AuditFact,
    ClassDistance,
    ClassPictures,
    LabelAware,
    MechanismFact,
    Neighbour,
    Neighbours,
    PrivateFacts,
    PublicFacts,
    Quality,
    Score,
)


def pictures(n_classes: int, n: int, side: int = 28, channels: int = 1, seed: int = 0) -> tuple[ClassPictures, ...]:
    """Uniform noise: the worst case for a PNG."""
    draw = np.random.default_rng(seed).integers(0, 256, (n_classes, n, side, side, channels), dtype=np.uint8)
    return tuple(ClassPictures(f"class {i}", images) for i, images in enumerate(draw))


def public_facts(n_classes: int = 3, **changes) -> PublicFacts:
    facts = PublicFacts(
        title="Digits",
        version="0.1.0",
        epsilon_budget=1.0,
        epsilon=0.99941,
        delta=1e-5,
        unit="one record",
        adjacency="add or remove one record",
        n=60_000,
        mode="tight",
        accountant="PLD",
        releasable=True,
        why_not="",
        mechanisms=(
            MechanismFact("means", "class means", "gaussian_sum", 1.118, 15.0, None, 1, 1, 0.29),
            MechanismFact("dpsgd", "clipped gradients", "noisy_gradient", 0.5, 2.77, 0.034, 300, 300, 0.72),
        ),
        assumptions=(AssumptionFact("N", "60000", "recipe"),),
        classes=tuple(f"class {i}" for i in range(n_classes)),
        synthetic=pictures(n_classes, 4),
        public=pictures(n_classes, 4, seed=1),
        moments=pictures(n_classes, 1, seed=2),
        n_synthetic=10_000,
        stages=(("pretrain", 1340.0), ("train", 77.0)),
        files=(("transcript.jsonl", 48_211, "the transcript"),),
    )
    return dataclasses.replace(facts, **changes)


def neighbours(n: int = 2, k: int = 3, side: int = 28, channels: int = 1) -> Neighbours:
    """Held-out distances 1, 2, ..., 100, so that shares can be counted on one's fingers."""
    draw = np.random.default_rng(5).integers(0, 256, (n, k + 1, side, side, channels), dtype=np.uint8)
    shown = tuple(
        Neighbour(f"class {i}", x[0], x[1:], tuple(7.25 + 2.5 * j for j in range(k))) for i, x in enumerate(draw)
    )
    return Neighbours(shown, [2.0, 4.0, 30.0, 60.0], list(range(1, 101)), "SENTINEL-space")


def private_facts(steps: int = 30, **changes) -> PrivateFacts:
    """Numbers and words that could come from nowhere else on the page."""
    wave = 31.4159 + np.sin(np.arange(steps))
    norms = {key: list(wave * k) for key, k in (("q10", 0.5), ("q50", 1.0), ("q90", 2.0))}
    facts = PrivateFacts(
        scores=(
            Score("SENTINEL-score", 0.8642, 0.0137, "SENTINEL-note"),
            Score("reference", 0.7531, None, ""),
            Score("SENTINEL-score", 0.9123, None, "", "SENTINEL-net"),
        ),
        gradient_norms={
            "step": list(range(steps)),
            **norms,
            "clip_fraction": [0.6271] * steps,
            "batch": [2037] * steps,
        },
        holdout_n=98_765,
        notes=("SENTINEL-remark",),
        quality=(
            Quality("SENTINEL-images", 4_321, 17.17, 0.3131, 0.4242, 27.27, "SENTINEL-measured"),
            Quality("public images", 4_322, 171.7, None, None, None, ""),
        ),
        features_note="SENTINEL-features",
        label_aware=(LabelAware("SENTINEL-labels", 0.5959, 0.6868), LabelAware("other", None, 0.0404)),
        class_distances=(ClassDistance("SENTINEL-class", 83.83, 3.83), ClassDistance("second", 84.84)),
        neighbours=neighbours(),
        audit=(AuditFact(1.0, 0.2468, 0.95, "SENTINEL-attack", "SENTINEL-control"),),
    )
    return dataclasses.replace(facts, **changes)


def by_class(x: np.ndarray, labels: np.ndarray, names: tuple[str, ...], n: int) -> tuple[ClassPictures, ...]:
    """The first n of each class; x is (n, C, H, W)."""
    x = np.moveaxis(x, 1, -1)
    return tuple(ClassPictures(name, x[labels == k][:n]) for k, name in enumerate(names))


@cache
def realistic() -> tuple[PublicFacts, PrivateFacts]:
    """A page as a run would make it, from real pictures: held-out digits stand for synthetic ones."""
    made, real, public = digits("test"), digits("train"), letters(600)
    means = np.stack([real.x[real.labels == k].mean(axis=0).round() for k in range(10)]).astype(np.uint8)
    return (
        public_facts(
            title="Handwritten digits under ε = 1",
            classes=made.classes,
            synthetic=by_class(made.x, made.labels, made.classes, 10),
            public=by_class(public.x, public.labels, public.classes[:10], 10),
            moments=by_class(means, np.arange(10), made.classes, 1),
        ),
        private_facts(300, neighbours=nearest(made.x, made.labels, real.x, made.x[::2])),
    )


def nearest(made: np.ndarray, labels: np.ndarray, real: np.ndarray, heldout: np.ndarray, n=6, k=4) -> Neighbours:
    """Found the slow way, in pixels from 0 to 1."""
    flat = real.reshape(len(real), -1) / 255
    far = [np.linalg.norm(flat - one.ravel() / 255, axis=1) for one in (*made, *heldout)]
    picture = [np.moveaxis(one, 0, -1) for one in made[:n]]
    order = [np.argsort(far[i])[:k] for i in range(n)]
    shown = tuple(
        Neighbour(
            str(labels[i]),
            picture[i],
            np.moveaxis(real[order[i]], 1, -1),
            tuple(float(d) for d in far[i][order[i]]),
        )
        for i in range(n)
    )
    closest = [float(d.min()) for d in far]
    return Neighbours(shown, closest[: len(made)], closest[len(made) :], "pixels from 0 to 1, Euclidean")
