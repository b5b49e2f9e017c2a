"""From noisy second moments to covariances: post-processing of released values, nothing private."""

from __future__ import annotations

import torch
from torch import Tensor


def project_psd(matrix: Tensor, floor: float = 0.0) -> Tensor:
    """The nearest symmetric matrix with no eigenvalue below `floor`."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return vectors @ torch.diag_embed(values.clamp_min(floor)) @ vectors.mT


def denoise_pooled(pooled: Tensor, noise_std: float, scale: float) -> tuple[Tensor, Tensor]:
    """(eigenvalues, eigenvectors) of a noisy covariance: below the noise edge the mean of what is left stands in.

    `noise_std` is that of one off-diagonal entry times sqrt 2 (the diagonal's). A symmetric Gaussian matrix with it
    has its spectrum within +- noise_std sqrt(2 p) (semicircle). `scale` undoes the residual clip.
    """
    values, vectors = torch.linalg.eigh((pooled + pooled.mT) / 2)
    edge = noise_std * (2 * len(values)) ** 0.5
    signal = values > edge
    rest = values[~signal].mean().clamp_min(0.0) if (~signal).any() else values.new_zeros(())
    return torch.where(signal, values, rest) * scale, vectors


def per_class(
    moments: Tensor, counts: Tensor, noise_std: float, scale: float, floor: float, min_count: float = 1.0
) -> Tensor:
    """(Y, p, p) covariances from per-class sums of r r^T with noise of `noise_std` on each diagonal entry.

    The classes' pooled matrix is cut at the noise edge; each class's deviation from it is shrunk entry by entry in
    the pooled eigenbasis by the share of its power that is not noise (Wiener). Powers are averages over the
    classes, weighted by how little noise they carry; with few classes an average is itself uncertain, so some noise
    passes (a stricter rule lost accuracy on Fashion-MNIST). A class below `min_count` gets the pooled matrix and has
    no say in this.
    """
    total = counts.sum()
    average = moments.sum(dim=0) / total
    values, vectors = denoise_pooled(average, noise_std * len(moments) ** 0.5 / float(total), scale)
    pooled = torch.diag(values)
    used = counts >= min_count
    covariance = pooled.repeat(len(moments), 1, 1)
    if int(used.sum()) > 1:
        deviation = vectors.T @ (moments[used] / counts[used, None, None] - average) @ vectors
        weight = (counts[used].square() / counts[used].square().sum())[:, None, None]
        diagonal = torch.eye(len(values), dtype=torch.bool)
        noise = torch.where(diagonal, 1.0, 0.5) * (weight * (noise_std / counts[used, None, None]) ** 2).sum(dim=0)
        power = (weight * deviation.square()).sum(dim=0)
        keep = (1 - noise / power.clamp_min(1e-300)).clamp(0.0, 1.0)
        covariance[used] += keep * deviation * scale
    return project_psd(vectors @ covariance @ vectors.T, floor)
