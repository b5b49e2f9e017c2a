"""The Frechet distance between two sets of features, each taken as a Gaussian, in float64."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from straightdp.files import write_durably
from straightdp.metrics.inception import Features
from straightdp.progress import Track

Moments = tuple[Tensor, Tensor]
"""Mean (p,) and covariance (p, p), float64."""


def moments(features: Tensor) -> Moments:
    """Mean and unbiased covariance of (n, p) features, n >= 2."""
    x = features.double()
    mean = x.mean(dim=0)
    centred = x - mean
    return mean, centred.T @ centred / (len(x) - 1)


class Streamed:
    """The moments of features that come batch by batch, in whatever order and sizes; only (p, p) is kept.

    Batches are merged by their means and centred sums of products, so that no large squares are subtracted.
    """

    def __init__(self) -> None:
        self.n = 0
        self._mean, self._products = torch.zeros(0), torch.zeros(0)

    def add(self, batch: Tensor) -> None:
        """(m, p) features; m may be 0."""
        if not len(batch):
            return
        x = batch.double()
        mean = x.mean(dim=0)
        centred = x - mean
        if not self.n:
            self.n, self._mean, self._products = len(x), mean, centred.T @ centred
            return
        gap, total = mean - self._mean, self.n + len(x)
        self._products.addmm_(centred.T, centred).addr_(gap, gap, alpha=self.n * len(x) / total)
        self._mean += gap * (len(x) / total)
        self.n = total

    def moments(self) -> Moments:
        """Mean and unbiased covariance of all that came."""
        if self.n < 2:
            raise ValueError(f"a covariance needs at least 2 records but {self.n} came")
        return self._mean.clone(), self._products / (self.n - 1)


def frechet(one: Moments, two: Moments) -> float:
    """|m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)).

    The trace of the root is the sum of the singular values of sqrt(S1) sqrt(S2), which loses no digits to a root.
    """
    (m1, s1), (m2, s2) = one, (part.to(one[0].device) for part in two)
    cross = torch.linalg.svdvals(_root(s1) @ _root(s2)).sum()
    return float((m1 - m2).square().sum() + s1.trace() + s2.trace() - 2 * cross)


def frechet_between(one: Tensor, two: Tensor) -> float:
    """The same distance straight from features (n1, p) and (n2, p), n1 and n2 >= 2: far cheaper where they are few.

    With X the centred features over sqrt(n - 1), S = X'X, and the trace of the root is the sum of the singular
    values of X1 X2'.
    """
    (m1, x1), (m2, x2) = _factor(one), _factor(two)
    cross = torch.linalg.svdvals(x1 @ x2.T).sum()
    return float((m1 - m2).square().sum() + x1.square().sum() + x2.square().sum() - 2 * cross)


def reference(features: Features, z: Tensor, folder: Path | None, track: Track | None = None) -> Moments:
    """The moments of the features of PUBLIC pictures z (n >= 2), kept in `folder` for the next time; None keeps none.

    Private records must never come here: what is kept lies outside private/, and exact moments are no release.
    A file is used only for the same weights, resizing and pictures; one that is damaged is computed and written again.
    """
    if folder is None:
        return _through(features, z, track)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_key(features, z)}.safetensors"
    if (kept := _kept(path)) is not None:
        return kept
    mean, covariance = (part.cpu() for part in _through(features, z, track))
    write_durably(path, _packed(mean, covariance))
    return mean, covariance


def _through(features: Features, z: Tensor, track: Track | None) -> Moments:
    streamed = Streamed()
    for batch in features.batches(z, track):
        streamed.add(batch)
    return streamed.moments()


def _key(features: Features, z: Tensor) -> str:
    header = f"{features.digest}\0{features.resize}\0{tuple(z.shape)}\0{z.dtype}\0"
    digest = hashlib.sha256(header.encode())
    digest.update(z.contiguous().cpu().numpy().data)
    return digest.hexdigest()


def _packed(mean: Tensor, covariance: Tensor) -> bytes:
    from safetensors.torch import save

    return save({"mean": mean, "covariance": covariance}, {"sum": _sum(mean, covariance)})


def _kept(path: Path) -> Moments | None:
    """What a file holds; None if there is none or it is not as it was written."""
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            mean, covariance, written = file.get_tensor("mean"), file.get_tensor("covariance"), file.metadata()["sum"]
    except Exception:  # missing, cut short, or of another kind
        return None
    return (mean, covariance) if _sum(mean, covariance) == written else None


def _sum(mean: Tensor, covariance: Tensor) -> str:
    digest = hashlib.sha256(mean.contiguous().numpy().data)
    digest.update(covariance.contiguous().numpy().data)
    return digest.hexdigest()


def _factor(features: Tensor) -> tuple[Tensor, Tensor]:
    """The mean, and a matrix X of no more than p rows with X'X the covariance."""
    x = features.double()
    mean = x.mean(dim=0)
    factor = (x - mean) / (len(x) - 1) ** 0.5
    return mean, factor if len(x) <= x.shape[1] else torch.linalg.qr(factor, mode="r").R


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp_min(0).sqrt()) @ vectors.T
