"""Stages that use what was released: the synthetic set, and its scores, which stay inside."""

from __future__ import annotations

import json

import numpy as np
import torch
from torch import Tensor

from straightdp.data import synthetic
from straightdp.files import write_text
from straightdp.generator import Generator
from straightdp.metrics.probe import fit_probe
from straightdp.moments.field import MomentModel
from straightdp.progress import tracker
from straightdp.stages.inputs import Inputs
from straightdp.stages.public import settled_sample


def sample(inputs: Inputs) -> None:
    """The synthetic data set, drawn from `release/` alone."""
    generator = Generator.load(inputs.folder.release, inputs.device)
    section = settled_sample(inputs)
    y = generator.prompts(section.n, inputs.device)
    z = generator.draw(y, section, inputs.recipe.run.seed, tracker("sample"), compile=inputs.compile)
    synthetic.write(inputs.folder.synthetic, z, y, generator.conditioning.names, generator.conditioning.captions)


def evaluate(inputs: Inputs) -> None:
    """Accuracy on held-out real records, beside its references. Without noise: to `private/` only."""
    recipe, device, intake = inputs.recipe, inputs.device, inputs.intake
    classes = len(intake.classes)
    scores: list[dict] = []

    def score(name: str, note: str, run) -> None:
        values = [run(seed) for seed in range(recipe.evaluate.seeds)]
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        scores.append({"name": name, "mean": float(np.mean(values)), "std": std, "note": note, "values": values})

    if intake.holdout_n and inputs.public.shape[0] in (1, 3) and min(inputs.public.shape[1:]) >= 8:
        z, y = synthetic.read(inputs.folder.synthetic, inputs.public.shape, intake.classes)

        def probe(z: Tensor, y: Tensor, seed: int) -> float:
            return intake.accuracy(fit_probe(z, y, classes, recipe.evaluate, seed, device))

        score("synthetic data", f"{len(z)} images of this release", lambda s: probe(z, y, s))
        if inputs.folder.moments.exists() and recipe.sample.port != "release":
            moments = MomentModel.load(inputs.folder.moments)

            def release_alone(seed: int) -> float:
                generator = torch.Generator().manual_seed(seed)
                prompts = torch.multinomial(moments.prior, len(z), replacement=True, generator=generator)
                draw = moments.sample(prompts, generator).reshape(-1, *inputs.space.shape)
                return probe(inputs.space.decode(draw), torch.tensor(inputs.conditioning.labels)[prompts], seed)

            score("released moments alone", "Gaussian draws of the release, no network", release_alone)
        for slot, (name, words) in enumerate(intake.prompts.slots.items() if len(intake.prompts.slots) > 1 else ()):
            said = _slot_values(inputs, slot)

            def agreement(seed: int, slot=slot, words=words, said=said) -> float:
                fit = lambda a, b: fit_probe(a, b, len(words), recipe.evaluate, seed, device)  # noqa: E731
                return intake.agreement(fit, z, said, slot)

            score(
                f"captions' {name}", "found by a classifier trained on private records, as the caption says", agreement
            )
        if recipe.evaluate.real_reference:
            score(
                "real private data",
                "the probe trained on the private records themselves; not private",
                lambda s: intake.real_accuracy(lambda a, b: fit_probe(a, b, classes, recipe.evaluate, s, device)),
            )
        scores.append({"name": "chance", "mean": 1 / classes, "std": None, "note": "a guess", "values": []})
    body = {"holdout_n": intake.holdout_n, "scores": scores}
    write_text(inputs.folder.evaluation, json.dumps(body, indent=1))


def _slot_values(inputs: Inputs, slot: int) -> Tensor:
    """Which word of a slot each synthetic image's caption has."""
    from straightdp.data.sources import load

    texts = load(str(inputs.folder.synthetic), size=None, channels=inputs.public.shape[0]).texts or ()
    template = inputs.intake.prompts
    rows = [template.index(text) for text in texts]
    return torch.from_numpy(template.combinations()[np.array(rows, dtype=np.int64), slot])
