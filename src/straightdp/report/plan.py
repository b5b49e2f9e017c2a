"""What `straightdp plan` prints: the resolved workload, its certificate, and what joint calibration buys.

Private data is never opened. Public data is, when DP-SGD is to be planned over time buckets.
"""

from __future__ import annotations

import torch

from straightdp.dpsgd import planner
from straightdp.moments.basis import fit_basis
from straightdp.privacy.workload import UNIFORM, Shape, alone, alternatives
from straightdp.recipe import RIVALS, Recipe
from straightdp.stages.election import DRAWN
from straightdp.stages.gather import certificate_of
from straightdp.stages.public import measured_candidates, measured_horizon, tau_of


def describe_plan(recipe: Recipe) -> str:
    privacy, rival = recipe.privacy, recipe.run.method in RIVALS
    shape, candidates = (UNIFORM, []) if rival else _time_buckets(recipe)
    certificate = certificate_of(recipe, shape)
    n = "counted at run time" if privacy.n is None else f"{privacy.n:,}"
    lines = [
        f"budget     epsilon = {privacy.epsilon:g}, delta = {privacy.delta:g}, add/remove of one record, N = {n}",
        f"mode       {privacy.mode}",
        f"certified  epsilon = {certificate.epsilon:.4f} (PLD, interval {certificate.interval:g})",
        "",
        f"{'mechanism':<22}{'sensitivity':>12}{'sigma':>10}{'q':>8}{'times':>8}{'eps alone':>11}",
    ]
    for part in certificate.workload:
        rate = "" if part.q is None else f"{part.q:g}"
        cost = alone(part, privacy.delta, privacy.interval)
        lines.append(f"{part.id:<22}{part.sensitivity:>12.4g}{part.sigma:>10.4g}{rate:>8}{part.count:>8}{cost:>11.4f}")
    lines += candidates
    rows = [] if rival else alternatives(recipe)
    if rows:
        lines += [
            "",
            "the release taken as one mechanism:",
            f"{'':<60}{'release':>9}{'dp-sgd':>9}{'epsilon':>9}",
        ]
        for name, release, gradient, total in rows:
            lines.append(f"{name:<60}{release:>9.4g}{gradient:>9.4g}{total:>9.4f}")
    if rival:
        return "\n".join(lines)
    return "\n".join([*lines, "", "cost", *_cost(recipe)])


def _cost(recipe: Recipe) -> list[str]:
    """A line for every stage that runs and takes time."""
    dpsgd, sample = recipe.dpsgd, recipe.sample
    batch = "q N" if recipe.privacy.n is None else f"{dpsgd.q * recipe.privacy.n:,.0f}"
    stages = []
    if recipe.latent.d is not None:
        stages.append(("autoencode", recipe.latent.steps, f"steps of {recipe.latent.batch:,} images"))
    if recipe.sd3.model:
        stages.append(("prior", recipe.sd3.prior, f"images a caption, drawn from {recipe.sd3.model}"))
    else:
        stages.append(("pretrain", recipe.pretrain.steps, f"steps of {recipe.pretrain.batch:,} rows"))
    stages.append(("distill", recipe.distill.steps, f"steps of {recipe.distill.batch:,} rows"))
    stages.append(("dp-sgd", dpsgd.steps, f"steps of {batch} records (expected) x {dpsgd.draws} draws"))
    if recipe.release.votes_share:
        stages.append(("vote", recipe.release.candidates, f"candidates a class, of {DRAWN} times as many draws"))
    steps = "drawn from the release alone" if sample.port == "release" else f"{sample.steps} Euler steps"
    stages.append(("sample", sample.n, f"records, {steps}"))
    return [f"  {name:<11}{number:>8,} {what}" for name, number, what in stages if number]


def _time_buckets(recipe: Recipe) -> tuple[Shape, list[str]]:
    """The planner's choice, and every candidate with its score."""
    if recipe.dpsgd.plan == "uniform" or not recipe.dpsgd.steps:
        return UNIFORM, []
    if recipe.latent.d is not None or not recipe.public.data:
        why = "public.data is not named" if not recipe.public.data else "they are scored in the code of an autoencoder"
        return UNIFORM, [
            "",
            f"time buckets: {why}, so `run` prints the candidates; the figures here are the uniform plan's",
        ]
    from straightdp.data.sources import load_together

    public = load_together(recipe.public.sources, size=recipe.image.size, channels=recipe.image.channels)
    z, labels = public.z(), torch.from_numpy(public.labels).unique(return_inverse=True)[1]
    basis = fit_basis(z, labels, recipe.release)
    tau = tau_of(recipe, measured_horizon(recipe, basis, z, labels))
    found = measured_candidates(recipe, basis, z, labels, tau)
    head = f"candidates for time buckets on [{planner.start_of_times(recipe, tau):g}, 1], scored on public data:"
    return planner.best(found).shape, ["", head, *planner.describe(found).splitlines()]
