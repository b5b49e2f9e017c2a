"""Which canaries are in a noisy sum? For an auditor who knows every other record, and the canaries' vectors."""

from __future__ import annotations

import numpy as np

LOOKS_FOR = 0.01  # noise so many times smaller than declared is what the scores are best at finding


def canary_scores(left: np.ndarray, vectors: np.ndarray, y: np.ndarray, std: float) -> np.ndarray:
    """How much each canary seems to be in, (m,): higher for one that is.

    `left` (classes, w) is what is left of the released sum without the known records; `vectors` (m, w) what each canary
    would add to the block of its class y. Half of every canary subtracted, a block is a sum of the vectors with signs
    +-1/2 and noise; ridge regression on the vectors finds the signs. All canaries have much in common, so that their
    number in a class says little of any one: scores are compared within a class. `std` is the declared noise of a
    coordinate.
    """
    scores = np.zeros(len(vectors))
    for c in np.unique(y):
        mine = np.flatnonzero(y == c)
        v = vectors[mine]
        ridge = 4 * (LOOKS_FOR * std) ** 2 * np.eye(len(v))
        found = np.linalg.solve(v @ v.T + ridge, v @ (left[c] - v.sum(axis=0) / 2))
        scores[mine] = found - found.mean()
    return scores
