"""The moment release: which mechanisms it declares, and how their noisy sums become a moment model.

First the means: per class (counts and sums), one for all records, or as a linear function of caption features (cross
moments, equation 5). Then the spread:
residual: around the released means, second moments (one a class; one for all captions) and one trace.
shared:   one second moment for all, in the public basis (paper mode: of whole records);
public:   that of public records around their classes' means, which costs nothing.
With `components`, a class is then split into several Gaussians, moved by rounds of noisy sums. With `votes_share`,
records vote last, among draws that the released moments guide (`stages.election`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from straightdp.moments import components, statistics
from straightdp.moments.basis import Basis
from straightdp.moments.covariance import per_class, project_psd
from straightdp.moments.field import MomentModel
from straightdp.moments.regression import Regression, regress
from straightdp.moments.statistics import MeanOf
from straightdp.moments.text import TextBasis
from straightdp.privacy.mechanisms import Condition
from straightdp.privacy.vault import Vault
from straightdp.privacy.workload import ReleasePart
from straightdp.recipe import RIVALS, Recipe, Release

Keep = Callable[[str, Tensor], Tensor]
"""A mechanism's id and the centres that its sum hangs on to those that were kept for it first, be it these."""

MEANS, MEAN, CROSS = "release/means", "release/mean", "release/cross"
COVARIANCE, TRACE = "release/covariance", "release/trace"
COMPONENTS = "release/components"
VOTES = "release/votes"
TRACE_PART = 0.01
VOTED = "votes of records for the nearest candidate of their class"


def round_id(k: int) -> str:
    """The mechanism of the components' round k, from 1."""
    return f"{COMPONENTS}/{k}"


def release_parts(recipe: Recipe) -> tuple[ReleasePart, ...]:
    """The mechanisms a recipe's release consists of. In paper mode the paper's constants are declared."""
    section, paper = recipe.release, recipe.privacy.mode == "paper"
    if recipe.run.method in RIVALS or (section.weight == 0 and section.sigma is None):
        return ()
    whole = 1 - section.votes_share
    spread = whole * (1 - section.components_share if section.splits else 1.0)
    means = spread if section.covariance == "public" else spread * section.means_share
    rest = spread - means
    if section.condition == "global":
        parts = [ReleasePart(MEAN, "sum of all records' features", 2.0 if paper else 1.0, means)]
    elif section.condition == "class":
        bound = 2.0 if paper else statistics.PAIR_BOUND
        parts = [ReleasePart(MEANS, "class counts and feature sums", bound, means)]
    else:
        bound = statistics.CROSS_REPLACE_BOUND if paper else statistics.CROSS_BOUND
        parts = [ReleasePart(CROSS, "cross moments of features and captions", bound, means)]
    if section.votes_share:
        parts.append(ReleasePart(VOTES, VOTED, 1.0, section.votes_share))
    if section.covariance == "public":
        return tuple(parts)
    if residual(recipe):
        parts.append(ReleasePart(COVARIANCE, "second moments around the released means", 1.0, rest * (1 - TRACE_PART)))
        parts.append(ReleasePart(TRACE, "mean squared distance from the released means", 1.0, rest * TRACE_PART))
    else:
        parts.append(ReleasePart(COVARIANCE, "shared second moment", 2.0 if paper else 1.0, rest))
    if section.splits:
        what = "counts and sums around the released centres, round {} of {}"
        for k in range(1, section.rounds + 1):
            said, part = what.format(k, section.rounds), whole * section.components_share / section.rounds
            parts.append(ReleasePart(round_id(k), said, statistics.COMPONENT_BOUND, part))
    return tuple(parts)


def residual(recipe: Recipe) -> bool:
    """Paper mode knows only the shared covariance."""
    return recipe.release.covariance == "residual" and recipe.privacy.mode == "tight"


@dataclass(frozen=True)
class Prompts:
    """The captions to be generated, as the release sees them: their features, and the geometry of those."""

    features: Tensor  # (M, m)
    text: TextBasis


@dataclass(frozen=True)
class Means:
    """Released means: of each component, between components, and for whatever a record is conditioned on."""

    counts: Tensor  # (Y,) clamped at 1
    features: Tensor  # (Y, p)
    between: Tensor  # (p, p), the second moment of the means
    of: MeanOf
    condition: Condition = "class"

    @property
    def blocks(self) -> int:
        return len(self.features) if self.condition == "class" else 1


def run_release(
    recipe: Recipe,
    basis: Basis,
    vault: Vault,
    stds: dict[str, float],
    prompts: Prompts | None = None,
    public: Tensor | None = None,
    keep: Keep = lambda id, made: made,
    many: int | None = None,
) -> MomentModel:
    """Execute every declared mechanism of the release, once each. `stds` are the noise's deviations; `public` is the
    spread of public records, (1, p, p), where no other is released; `keep` remembers what later sums hang on; `many` is
    `gaussians` of what was declared, where the noise is not that."""
    section, tight = recipe.release, recipe.privacy.mode == "tight"
    if section.condition == "global":
        means = one_mean(torch.from_numpy(vault.gaussian_sum(MEAN, statistics.global_mean(basis)))[0], basis, vault.n)
    elif prompts is None:
        noisy = torch.from_numpy(vault.gaussian_sum(MEANS, statistics.class_moments(basis, vault.classes)))
        means = class_means(noisy, basis, section, stds[MEANS], shrink=tight)
    else:
        width = prompts.text.design(prompts.features).shape[1]
        noisy = torch.from_numpy(vault.gaussian_sum(CROSS, statistics.cross_moments(basis, prompts.text, width)))[0]
        edge = stds[CROSS] / vault.n if tight else 0.0
        means = caption_means(regress(noisy / vault.n, basis, prompts.text, section.ridge, edge), prompts)
    if public is not None:
        covariance = public
    elif residual(recipe):
        covariance = _residual_covariance(vault, basis, means, section, stds)
    elif tight:
        second = torch.from_numpy(vault.gaussian_sum(COVARIANCE, statistics.shared_second_moment(basis)))[0]
        covariance = project_psd(second / vault.n - means.between).unsqueeze(0)
    else:
        second = vault.gaussian_sum(COVARIANCE, statistics.shared_second_moment_of_records(basis))[0]
        within = torch.from_numpy(second) / vault.n - basis.P.T @ means.between @ basis.P
        return MomentModel.from_full(basis, means.features, within, means.counts, section.rank, section.floor)
    if section.splits:
        many = many or gaussians(section, stds, vault.n / vault.classes, basis)
        return _split(vault, basis, means, covariance, section, many, stds, keep)
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
    between = torch.einsum("y,yi,yj->ij", counts / counts.sum(), means, means)
    return Means(counts, means, between, means.__getitem__)


def one_mean(noisy: Tensor, basis: Basis, n: int) -> Means:
    """The mean of all records, which is then every class's."""
    mean = (noisy * basis.radius / n)[None]
    return Means(torch.tensor([float(n)]).double(), mean, mean.T @ mean, lambda y: mean.expand(len(y), -1))


def caption_means(regression: Regression, prompts: Prompts) -> Means:
    """One component a prompt, all equally likely: cross moments say nothing of how often a caption occurs."""
    means = regression(prompts.features)
    return Means(torch.ones(len(means)).double(), means, regression.between, regression, "caption")


def _residual_covariance(vault: Vault, basis: Basis, means: Means, section: Release, stds: dict[str, float]) -> Tensor:
    statistic = statistics.residual_second_moments(basis, means.of, means.blocks, means.condition)
    moments = torch.from_numpy(vault.gaussian_sum(COVARIANCE, statistic))
    trace = vault.gaussian_sum(TRACE, statistics.residual_trace(basis, means.of, means.condition))[0, 0]
    clipped_trace = float(moments.diagonal(dim1=1, dim2=2).sum().clamp_min(1e-12))
    scale = max(trace * basis.widest_residual**2 / clipped_trace, 1.0)
    noise_std = stds[COVARIANCE] * basis.residual_radius**2
    counts = means.counts if means.condition == "class" else torch.tensor([float(vault.n)]).double()
    return per_class(moments, counts, noise_std, scale, section.floor, section.min_count)


def gaussians(section: Release, stds: dict[str, float], records: float, basis: Basis) -> int:
    """How many a class of so many records is released as, by the declared deviations of the noise."""
    if section.components != "auto":
        return section.components
    return components.as_many(stds[round_id(1)], records, len(basis.P), section.min_count)


def _split(
    vault: Vault,
    basis: Basis,
    means: Means,
    covariance: Tensor,
    section: Release,
    many: int,
    stds: dict[str, float],
    keep: Keep,
) -> MomentModel:
    """Every round's declared mechanism, and the model of the components that come of them. The centres of a round are
    kept before its sum: computed again, by another number of threads, they would differ in the last bits."""
    centres = components.split(means.features, covariance, many)
    weights, off = centres.new_full(centres.shape[:2], 1 / many), torch.zeros_like(centres)
    for k in range(1, section.rounds + 1):
        centres = keep(round_id(k), centres)
        noisy = torch.from_numpy(vault.gaussian_sum(round_id(k), statistics.component_sums(basis, centres)))
        noisy = noisy.reshape(*centres.shape[:2], -1)
        centres, weights, off = components.moved(centres, noisy, basis.residual_radius, stds[round_id(k)])
    within = components.within(covariance, means.features, centres, weights, off, section.floor)
    return MomentModel.from_features(basis, centres, within, means.counts, section.rank, section.floor, weights)
