"""An audit of a recipe: train with canaries planted, attack what came out, and do the same to a run that leaks.

Everything found is computed from private records without noise: it is internal, and so is the whole folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from straightdp import cache, pipeline
from straightdp.audits import canaries, membership, one_run, sums
from straightdp.audits.findings import CONFIDENCE, Findings
from straightdp.audits.noise_check import noise_ratios
from straightdp.audits.one_run import OneRun
from straightdp.audits.replay import Verdict, replay
from straightdp.compiled import half
from straightdp.data.records import to_z
from straightdp.data.sources import load_together
from straightdp.errors import BadInput
from straightdp.files import write_durably
from straightdp.folder import RunFolder
from straightdp.generator import Generator
from straightdp.moments.release import COMPONENTS, MEANS
from straightdp.moments.statistics import class_moments, component_sums
from straightdp.nets.velocity import VelocityNet
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.planted import Planted, coins
from straightdp.privacy.workload import Certificate
from straightdp.progress import say, tracker
from straightdp.recipe import OWN_TEXT, RIVALS, Recipe
from straightdp.recipe import load as load_recipe
from straightdp.stages.gather import certificate_of
from straightdp.stages.inputs import Inputs
from straightdp.stages.public import load_basis

BETA = (1 - CONFIDENCE) / 2  # of each one-run audit: there are two, so both hold together with CONFIDENCE
HONEST, CONTROL = "honest", "leaky"

Scores = Callable[[Tensor, Tensor], np.ndarray]


def audit(recipe: Recipe, out: Path) -> dict[str, Findings]:
    """Train, attack, and keep the findings in `out`/private. What was done already is not done again."""
    section = recipe.audit
    _check(recipe, out)
    shape = load_together(recipe.public.sources, size=recipe.image.size, channels=recipe.image.channels).shape
    pictures = canaries.make(section.canaries + section.references, shape, section.kind, recipe.run.seed)
    runs = [(HONEST, 1.0, None), *((f"shadow-{k + 1}", 1.0, k) for k in range(section.shadows))]
    made: dict[str, tuple[Inputs, Planted]] = {}
    certificate = certificate_of(recipe)
    with cache.within(out / "public"):
        for name, leak, shadow in [*runs, (CONTROL, section.leak, None)]:
            say(f"--- {name}")
            made[name] = _trained(recipe, certificate, out / name, pictures, leak, shadow)
    shadows = [made[name][0].folder.release for name, _, shadow in runs if shadow is not None]
    found = {name: _attacked(*made[name], pictures, shadows) for name in (HONEST, CONTROL)}
    body = {name: asdict(one) | {"suspicions": one.suspicions} for name, one in found.items()}
    kept = RunFolder(out).audit
    kept.parent.mkdir(mode=0o700, exist_ok=True)
    write_durably(kept, json.dumps(body, indent=1).encode(), mode=0o600)
    return found


def _check(recipe: Recipe, out: Path) -> None:
    if recipe.run.method in RIVALS:
        raise BadInput(f"run.method = {recipe.run.method!r} trains no velocity field, which is what is attacked")
    if recipe.run.method == "from-scratch" or not recipe.public.data:
        raise BadInput("an audit measures canaries against the public network: name a public set")
    if recipe.sd3.model:
        raise BadInput("an audit trains a network several times over: it knows no frozen model; leave sd3.model out")
    if recipe.private.slots or recipe.private.caption == OWN_TEXT:
        raise BadInput("canaries have a class and no text: leave private.slots and {text} out of an audit")
    if recipe.audit.shadows == 1:
        raise BadInput("one shadow network has no spread: set audit.shadows to 0 or at least 2")
    if (out / "recipe.toml").exists():
        raise BadInput(f"{out} is a run's folder; an audit wants another --out")


def _trained(
    recipe: Recipe, certificate: Certificate, out: Path, pictures: np.ndarray, leak: float, shadow: int | None
) -> tuple[Inputs, Planted]:
    m = recipe.audit.canaries
    labels = np.random.default_rng(recipe.run.seed).integers(0, 2**31, m)
    included = coins(m, RunFolder(out).coins)
    planted = Planted(pictures[:m], labels, included, recipe.audit.shadows + 1, shadow)
    return pipeline.spend_on_audit(recipe, out, certificate, planted, leak), planted


def _attacked(inputs: Inputs, planted: Planted, pictures: np.ndarray, shadows: list[Path]) -> Findings:
    section, m = inputs.recipe.audit, inputs.recipe.audit.canaries
    generator = Generator.load(inputs.folder.release, inputs.device)
    probes = membership.probes(section.draws, inputs.flow.shape, inputs.recipe.run.seed, inputs.device)

    def scores_of(net: VelocityNet) -> Scores:
        def scores(z: Tensor, y: Tensor) -> np.ndarray:
            ids = inputs.conditioning.ids(torch.device("cpu"))[y]
            seen = half(net.eval()) if inputs.device.type == "cuda" else net.eval()  # rounding would hide a little
            return membership.residual_scores(seen, inputs.flow.encode(z), ids, probes)

        return scores

    attacked = scores_of(generator.net)
    z, y = to_z(pictures), torch.from_numpy(planted.labels % len(inputs.intake.classes))
    every = torch.cat([y, y[torch.arange(len(z) - m) % m]])  # references under the canaries' classes
    public = scores_of(inputs.load_net(inputs.folder.checkpoints / "pretrained.safetensors"))
    gain = attacked(z, every) - public(z, every)  # what private training made of each picture
    measures, most = inputs.intake.measures, section.records
    members, others = measures.scores(attacked, most)
    lira = None
    if shadows:
        nets = [Generator.load(release, inputs.device).net for release in shadows]
        pairs = [measures.scores(scores_of(net), most) for net in nets]
        sides = [
            membership.lira_offline(mine, np.stack(theirs))
            for mine, theirs in zip((members, others), zip(*pairs, strict=True), strict=True)
        ]
        lira = membership.roc(*sides)

    def guessed(scores: np.ndarray) -> OneRun:
        return one_run.audit(scores, planted.included, section.guesses, inputs.recipe.privacy.delta, BETA)

    exposures = canaries.exposure(gain[:m][planted.included], gain[m:])
    drawn = inputs.recipe.sample
    if not generator.learned_from:  # else the network alone draws nothing
        drawn = drawn.model_copy(update={"port": "weights"})
    samples = generator.draw(
        generator.prompts(section.samples, inputs.device),
        drawn,
        inputs.recipe.run.seed,
        tracker("sample"),
        speed=inputs.speed,
    )
    near = canaries.half_apart(z)
    verdict: Verdict = replay(inputs.folder.release)
    return Findings(
        claimed=verdict.epsilon,
        one_run=guessed(gain[:m]),
        from_sums=None if (found := _sum_scores(inputs, z[:m], y)) is None else guessed(found),
        loss=membership.roc(members, others),
        lira=lira,
        exposure=float(exposures.mean()),
        chance=float(canaries.exposure(gain[:m][~planted.included], gain[m:]).mean()),
        first=canaries.extracted(exposures, section.references + 1),
        included=int(planted.included.sum()),
        references=section.references,
        generated=canaries.found_in(samples, z[:m], near) if len(samples) else 0,
        noise=noise_ratios(inputs.folder),
        replayed=verdict.text,
    )


def _sum_scores(inputs: Inputs, z: Tensor, y: Tensor) -> np.ndarray | None:
    """Of canaries z under classes y, from the released sums of the class means and of their components, if any were."""
    from safetensors.torch import load_file

    kept = load_file(inputs.folder.sums) if inputs.folder.sums.exists() else {}
    if MEANS not in kept:
        return None
    folder, encode, basis = inputs.folder, inputs.space.encode, load_basis(inputs.folder.calibration)
    statistics = {MEANS: class_moments(basis, len(inputs.intake.classes))}
    rounds = [id for id in kept if id.startswith(COMPONENTS)]
    statistics |= {id: component_sums(basis, load_file(folder.centres(id))["centres"]) for id in rounds}
    declared, scores = Ledger(folder.ledger, reads=True).declared, np.zeros(len(z))
    for id, statistic in statistics.items():
        left = inputs.intake.measures.left_of(kept[id].numpy(), statistic, encode)
        vectors = statistic.vectors(encode(z).flatten(1).cpu().double(), y)
        std = declared[id].sigma * declared[id].sensitivity
        scores += sums.canary_scores(left, vectors.numpy(), y.numpy(), std)
    return scores


def check_report(recipe: Recipe, run: Path) -> None:
    """Refuse a run that is not finished, or not of this recipe."""
    folder = RunFolder(run)
    if not (folder.recipe.exists() and folder.evaluation.exists()):
        raise BadInput(f"{run} is not a finished run's folder; give one that `straightdp run` has made")
    if load_recipe(folder.recipe).digest() != recipe.digest():
        raise BadInput(f"{run} was run with another recipe than the one audited; audit {folder.recipe}")


def add_to_report(found: dict[str, Findings], run: Path) -> None:
    """Show the audit beside the claim on a run's internal page."""
    honest, control = found[HONEST], found[CONTROL]
    fact = {
        "claimed": honest.claimed,
        "lower_bound": honest.bound,
        "confidence": CONFIDENCE,
        "what": f"another training run of the recipe, with {honest.one_run.m} canaries",
        "positive_control": f"with noise that was not what was declared: {'; '.join(control.suspicions) or 'nothing'}",
    }
    write_durably(RunFolder(run).audit, json.dumps([fact], indent=1).encode(), mode=0o600)
    pipeline.report_again(run)
