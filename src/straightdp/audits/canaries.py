"""Canaries: pictures unlike any record, put among the records to see whether a run gives them away.

Exposure (Carlini et al., 2019) ranks a canary among pictures that were drawn like it but never trained on. Draw both
in one call of `make`, so that no reference picture is a near copy of a canary.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from straightdp.errors import BadInput
from straightdp.metrics.neighbours import BLOCK, nearest, squared_distances

Kind = Literal["noise", "stripes", "checker"]

APART = 1 / 16  # two pictures' mean squared difference is at least this, with pixels from 0 to 1
ROUNDS = 50  # of drawing anew what came out too close to another picture


def make(n: int, shape: tuple[int, int, int], kind: Kind, seed: int) -> np.ndarray:
    """n pictures, uint8 (n, C, H, W), no two of them close to each other, in random order; the same for the same seed.

    "noise": every value uniform on 0..255. "stripes" and "checker": black and white waves of a random width, phase
    and direction, each channel its own. Guarantee: any two differ by APART at least. BadInput for more pictures than
    there is room for at that distance (few pixels have room for few patterns).
    """
    if kind not in get_args(Kind):
        raise ValueError(f"a kind of canary out of {', '.join(get_args(Kind))} was expected, but {kind!r} came")
    rng = np.random.default_rng(seed)
    found = np.empty((0, *shape), np.uint8)
    for _ in range(ROUNDS):
        missing = [_draw(rng, shape, kind) for _ in range(n - len(found))]
        found = _spread(np.concatenate([found, np.array(missing, np.uint8).reshape(-1, *shape)]))
        if len(found) == n:
            return rng.permutation(found)
    raise BadInput(
        f"only {len(found)} {kind} canaries of shape {shape} were found that are not close to each other, and {n} are "
        "wanted; ask for fewer, or for noise"
    )


def _spread(pictures: np.ndarray) -> np.ndarray:
    """The pictures without those that are close to an earlier one that stays."""
    x = torch.from_numpy(pictures).flatten(1).double() / 255
    blocks = [(squared < APART * x.shape[1]).numpy() for _, squared, _ in squared_distances(x, x, BLOCK)]
    stays = np.zeros(len(x), bool)
    for i, close in enumerate(row for block in blocks for row in block):
        stays[i] = not (close & stays).any()
    return pictures[stays]


def _draw(rng: np.random.Generator, shape: tuple[int, int, int], kind: Kind) -> np.ndarray:
    """One picture, (C, H, W), values from 0 to 255."""
    channels, height, width = shape
    if kind == "noise":
        return rng.integers(256, size=shape)
    y, x = np.mgrid[:height, :width]

    def wave(along: np.ndarray) -> np.ndarray:
        """Half a period is 1.5 to 6 pixels."""
        phase, pixels = rng.uniform(0, 2 * np.pi, (channels, 1, 1)), rng.uniform(1.5, 6, (channels, 1, 1))
        return np.sin(np.pi / pixels * along + phase) >= 0

    turn = rng.uniform(0, np.pi, (channels, 1, 1))
    along, across = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    return 255 * (wave(along) if kind == "stripes" else wave(along) ^ wave(across))


def exposure(canaries: np.ndarray, references: np.ndarray) -> np.ndarray:
    """log2|R| - log2 rank of each canary's score, (n,): bits that the run gave away of it.

    R is the reference set and the canary itself, so |R| = len(references) + 1; rank 1 is the highest score (the lowest
    loss), and a canary ranks behind the references that it ties with. From 0, for the last, to log2|R|. Canaries that
    nothing was learnt of have a uniform rank, and so about 1 / ln 2 = 1.44 bits on average, not 0.
    """
    canaries, references = (np.asarray(scores, dtype=np.float64) for scores in (canaries, references))
    if np.isnan(canaries).any() or np.isnan(references).any() or len(references) == 0:
        raise ValueError("scores that are numbers, and one reference at least, were expected")
    better = len(references) - np.searchsorted(np.sort(references), canaries, side="left")
    return np.log2(len(references) + 1) - np.log2(1 + better)


def extracted(exposures: np.ndarray, size: int) -> int:
    """How many canaries rank first among |R| = size. Where nothing was learnt, one in |R| does so by chance."""
    return int(np.sum(np.asarray(exposures) > np.log2(size) - 0.5))  # rank 2 is one whole bit below


def half_apart(pictures: Tensor) -> float:
    """Half the distance of the two closest pictures: what is nearer than that to one is near to no other.

    The threshold for `found_in`; take it over canaries and references together. ValueError for fewer than 2 pictures,
    or two that are equal.
    """
    distance = float(nearest(pictures, pictures, 2)[0][:, 1].min())
    if distance == 0:
        raise ValueError("two of the pictures are equal, so a sample near to them would say nothing")
    return distance / 2


def found_in(samples: Tensor, canaries: Tensor, threshold: float) -> int:
    """How many canaries have a sample at a Euclidean distance below the threshold: they are generated.

    Samples and canaries are on the same scale, (m, C, H, W) and (n, C, H, W). Under the threshold of `half_apart` a
    sample can speak for one canary alone. The same count over pictures that were never trained on is the control.
    """
    return int((nearest(canaries, samples, 1)[0] < threshold).sum())
