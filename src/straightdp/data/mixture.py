"""A two-dimensional Gaussian mixture whose truth is known: eight modes on a ring, the mode is the label."""

from __future__ import annotations

import numpy as np

from straightdp.data.records import Records

MODES = 8
RADIUS = 0.6
ALONG, ACROSS = 0.09, 0.04  # standard deviations along the ring and across it


def truth() -> tuple[np.ndarray, np.ndarray]:
    """The true means (8, 2) and covariances (8, 2, 2), float64; every mode has weight 1/8.

    Each mode is longer along the ring than across it, so the covariances differ from class to class.
    """
    angle = 2 * np.pi * np.arange(MODES) / MODES
    outward = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    onward = np.stack([-np.sin(angle), np.cos(angle)], axis=1)
    covariances = ACROSS**2 * _outer(outward) + ALONG**2 * _outer(onward)
    return RADIUS * outward, covariances


def sample(n: int = 4_000, seed: int = 0) -> Records:
    """n independent draws as float32 (n, 2, 1, 1); classes "mode 0" to "mode 7".

    Deterministic in (n, seed). A value outside [-1, 1] lies eight standard deviations out; it would be
    clipped.
    """
    rng = np.random.default_rng(seed)
    means, covariances = truth()
    labels = rng.integers(MODES, size=n)
    roots = np.linalg.cholesky(covariances)
    points = means[labels] + np.einsum("nij,nj->ni", roots[labels], rng.standard_normal((n, 2)))
    x = np.clip(points, -1, 1).astype(np.float32).reshape(n, 2, 1, 1)
    return Records(x, labels.astype(np.int64), tuple(f"mode {i}" for i in range(MODES)))


def public(n: int = 4_000, seed: int = 1) -> Records:
    """A public set for it that knows nothing of the ring: one broad Gaussian, the quadrant is the label."""
    rng = np.random.default_rng(seed)
    points = np.clip(rng.standard_normal((n, 2)) * RADIUS / 2, -1, 1)
    labels = 2 * (points[:, 0] > 0) + (points[:, 1] > 0)
    names = tuple(f"quadrant {i}" for i in range(4))
    return Records(points.astype(np.float32).reshape(n, 2, 1, 1), labels.astype(np.int64), names)


def _outer(v: np.ndarray) -> np.ndarray:
    return v[:, :, None] * v[:, None, :]
