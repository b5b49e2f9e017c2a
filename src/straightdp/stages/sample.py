"""The stage that uses what was released: the synthetic set, drawn from `release/` alone."""

from __future__ import annotations

from straightdp.data import synthetic
from straightdp.generator import check_names, open_generator
from straightdp.progress import tracker
from straightdp.stages.inputs import Inputs
from straightdp.stages.public import settled_sample


def check(inputs: Inputs) -> None:
    """Refuse, before anything is spent, what could not be drawn."""
    if inputs.recipe.sample.labels == "found":
        check_names(inputs.public.shape, inputs.conditioning)


def run(inputs: Inputs) -> None:
    """Write `release/synthetic`."""
    generator = open_generator(inputs.folder.release, inputs.device, inputs.backbone)
    section = settled_sample(inputs)
    y = generator.prompts(section.n, inputs.device)
    z = generator.draw(y, section, inputs.recipe.run.seed, tracker("sample"), compile=inputs.compile)
    y = generator.named(z, y, section, inputs.recipe.run.seed)
    synthetic.write(inputs.folder.synthetic, z, y, generator.conditioning.names, generator.conditioning.captions)
