"""The stage that uses what was released: the synthetic set, drawn from `release/` alone."""

from __future__ import annotations

from straightdp.data import synthetic
from straightdp.errors import BadInput
from straightdp.generator import check_names, open_generator, synthesise
from straightdp.stages.inputs import Inputs
from straightdp.stages.public import settled_sample


def check(inputs: Inputs) -> None:
    """Refuse, before anything is spent, what could not be drawn."""
    if inputs.recipe.sample.port == "elected" and not inputs.recipe.release.votes_share:
        raise BadInput("sample.port = 'elected' needs votes: give release.votes_share")
    if inputs.recipe.sample.labels == "found":
        check_names(inputs.public.shape, inputs.conditioning)


def run(inputs: Inputs) -> None:
    """Write `release/synthetic`."""
    generator = open_generator(inputs.folder.release, inputs.device, inputs.backbone)
    section = settled_sample(inputs)
    z, y = synthesise(generator, section.n, section, inputs.recipe.run.seed, inputs.device, speed=inputs.speed)
    synthetic.write(inputs.folder.synthetic, z, y, generator.conditioning.names, generator.conditioning.captions)
