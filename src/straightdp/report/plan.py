"""What `straightdp plan` prints: the resolved workload, its certificate, and what joint calibration buys."""

from __future__ import annotations

from straightdp.moments.release import release_parts
from straightdp.privacy.workload import alone, alternatives, certify
from straightdp.recipe import Recipe


def describe_plan(recipe: Recipe) -> str:
    """Touches no data: everything follows from the recipe."""
    privacy, dpsgd = recipe.privacy, recipe.dpsgd
    certificate = certify(recipe, release_parts(recipe))
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
    rows = alternatives(recipe)
    if rows:
        lines += [
            "",
            "the release taken as one mechanism:",
            f"{'':<60}{'release':>9}{'dp-sgd':>9}{'epsilon':>9}",
        ]
        for name, release, gradient, total in rows:
            lines.append(f"{name:<60}{release:>9.4g}{gradient:>9.4g}{total:>9.4f}")
    lines += ["", "cost"]
    for stage in ("pretrain", "distill"):
        section = getattr(recipe, stage)
        lines.append(f"  {stage:<9}{section.steps:>8,} steps of {section.batch:,} rows")
    batch = "q N" if privacy.n is None else f"{dpsgd.q * privacy.n:,.0f}"
    lines.append(f"  dp-sgd   {dpsgd.steps:>8,} steps of {batch} records (expected) x {dpsgd.draws} draws")
    lines.append(f"  sample   {recipe.sample.n:>8,} records, {recipe.sample.steps} Euler steps")
    return "\n".join(lines)
