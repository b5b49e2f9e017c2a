"""The moment release: which mechanisms it declares, and how their noisy sums become a moment model.

residual: counts and means; then, around the released means, one second moment a class and one trace.
shared:   counts and means; then one second moment for all, in the public basis (paper mode: of whole records).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from straightdp.moments import statistics
from straightdp.moments.basis import Basis
from straightdp.moments.covariance import per_class, project_psd
from straightdp.moments.field import MomentModel
from straightdp.privacy.vault import Vault
from straightdp.privacy.workload import ReleasePart
from straightdp.recipe import Recipe, Release

MEANS, COVARIANCE, TRACE = "release/means", "release/covariance", "release/trace"
TRACE_PART = 0.01


def release_parts(recipe: Recipe) -> tuple[ReleasePart, ...]:
    """The mechanisms a recipe's release consists of. In paper mode the paper's constants are declared: 2 and 2."""
    section, paper = recipe.release, recipe.privacy.mode == "paper"
    if section.weight == 0 and section.sigma is None:
        return ()
    means, rest = section.means_share, 1 - section.means_share
    parts = [ReleasePart(MEANS, "class counts and feature sums", 2.0 if paper else statistics.PAIR_BOUND, means)]
    if residual(recipe):
        parts.append(ReleasePart(COVARIANCE, "second moments around the class means", 1.0, rest * (1 - TRACE_PART)))
        parts.append(ReleasePart(TRACE, "mean squared distance from the class means", 1.0, rest * TRACE_PART))
    else:
        parts.append(ReleasePart(COVARIANCE, "shared second moment", 2.0 if paper else 1.0, rest))
    return tuple(parts)


def residual(recipe: Recipe) -> bool:
    """Paper mode knows only the shared covariance."""
    return recipe.release.covariance == "residual" and recipe.privacy.mode == "tight"


@dataclass(frozen=True)
class Means:
    counts: Tensor  # (Y,) clamped at 1
    features: Tensor  # (Y, p)


def run_release(recipe: Recipe, basis: Basis, vault: Vault, stds: dict[str, float]) -> MomentModel:
    """Execute every declared mechanism of the release, once each. `stds` are the declared noise deviations."""
    section = recipe.release
    noisy = torch.from_numpy(vault.gaussian_sum(MEANS, statistics.class_moments(basis, vault.classes)))
    means = class_means(noisy, basis, section, stds[MEANS], shrink=recipe.privacy.mode == "tight")
    if residual(recipe):
        covariance = _residual_covariance(vault, basis, means, section, stds)
    elif recipe.privacy.mode == "tight":
        second = torch.from_numpy(vault.gaussian_sum(COVARIANCE, statistics.shared_second_moment(basis)))[0]
        covariance = _within(second / vault.n, means)
    else:
        second = vault.gaussian_sum(COVARIANCE, statistics.shared_second_moment_of_records(basis))[0]
        whole = torch.from_numpy(second) / vault.n
        centres = means.features @ basis.P
        prior = means.counts / means.counts.sum()
        within = whole - torch.einsum("y,yi,yj->ij", prior, centres, centres)
        return MomentModel.from_full(basis, means.features, within, means.counts, section.rank, section.floor)
    return MomentModel.from_features(basis, means.features, covariance, means.counts, section.rank, section.floor)


def class_means(noisy: Tensor, basis: Basis, section: Release, std: float, *, shrink: bool) -> Means:
    """Counts clamped at 1, means = sums / counts; a class with a small released count takes the global mean.

    `shrink` (tight mode): each feature's deviation from the global mean keeps the share of its between-class power
    that is not noise.
    """
    counts = noisy[:, 0].clamp_min(1.0)
    sums = noisy[:, 1:] * 2 * basis.radius
    overall = sums.sum(dim=0) / counts.sum()
    means = sums / counts[:, None]
    small = counts < section.min_count
    means[small] = overall
    if shrink and int((~small).sum()) > 1:
        deviation = means - overall
        noise = (2 * basis.radius * std / counts[~small]).square().mean()
        power = deviation[~small].square().mean(dim=0)
        means = overall + deviation * (1 - noise / power.clamp_min(1e-300)).clamp(0.0, 1.0)
    return Means(counts, means)


def _residual_covariance(vault: Vault, basis: Basis, means: Means, section: Release, stds: dict[str, float]) -> Tensor:
    moments = vault.gaussian_sum(COVARIANCE, statistics.residual_second_moments(basis, means.features))
    trace = vault.gaussian_sum(TRACE, statistics.residual_trace(basis, means.features))[0, 0]
    moments = torch.from_numpy(moments)
    clipped_trace = float(moments.diagonal(dim1=1, dim2=2).sum().clamp_min(1e-12))
    scale = max(trace * basis.widest_residual**2 / clipped_trace, 1.0)
    noise_std = stds[COVARIANCE] * basis.residual_radius**2
    return per_class(moments, means.counts, noise_std, scale, section.floor, section.min_count)


def _within(second: Tensor, means: Means) -> Tensor:
    """Shared within-class covariance: E[f f^T] - sum_y pi_y mu_y mu_y^T, symmetrised and PSD-projected."""
    prior = means.counts / means.counts.sum()
    between = torch.einsum("y,yi,yj->ij", prior, means.features, means.features)
    return project_psd(second - between).unsqueeze(0)
