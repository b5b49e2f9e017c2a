"""The public stage of a run on a frozen Stable Diffusion 3, whose own samples are the public set."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from straightdp.data.records import Records, to_pixels
from straightdp.folder import RunFolder
from straightdp.generator import Conditioning
from straightdp.moments.basis import check_features
from straightdp.moments.release import release_parts
from straightdp.privacy.intake import Intake
from straightdp.progress import tracker
from straightdp.recipe import Recipe
from straightdp.sd3.backbone import PromptIds, Sd3Backbone
from straightdp.sd3.codes import VaeCodes
from straightdp.sd3.generator import Sd3Generator
from straightdp.stages.inputs import Inputs
from straightdp.team import Team


def inputs_of(
    recipe: Recipe,
    folder: RunFolder,
    device: torch.device,
    public: Records,
    intake: Intake,
    captions: tuple[str, ...],
    labels: tuple[int, ...],
    team: Team,
    leak: float | None,
) -> Inputs:
    """What the stages of a run on a frozen model share; `public` is still empty."""
    backbone = Sd3Backbone(recipe.sd3, captions, public.shape[1], recipe.run.seed, device)
    if release_parts(recipe):
        check_features(recipe.release.features, recipe.sd3.prior * len(captions), math.prod(backbone.prior.shape))
    ids = PromptIds(captions)
    return Inputs(
        recipe,
        folder,
        device,
        public,
        ids.encode(()),
        Conditioning(intake.classes, captions, ids, labels),
        intake,
        team=team,
        leak=leak,
        backbone=backbone,
        make_generator=partial(Sd3Generator, backbone=backbone),
    )


def draw_prior(inputs: Inputs, out: Path) -> None:
    """`sd3.prior` images a caption from the frozen model, and R from their codes."""
    recipe = inputs.recipe
    y = torch.arange(len(inputs.conditioning.captions)).repeat_interleave(recipe.sd3.prior).to(inputs.device)
    space = _space(inputs)
    generator = inputs.make_generator(inputs.new_net().eval(), inputs.conditioning, None, recipe.sample, space)
    section = recipe.sample.model_copy(update={"port": "weights"})
    images = torch.from_numpy(to_pixels(generator.draw(y, section, recipe.run.seed, tracker("prior"))))
    space.settle(space.encode(_records(inputs, images, y.cpu()).z()), recipe.sd3.radius_quantile)
    save_file({"images": images.contiguous(), "captions": y.cpu()}, out, metadata={"radius": json.dumps(space.radius)})


def enter_prior(inputs: Inputs) -> None:
    """Take the images that were drawn for the public set, and work in the code of the frozen VAE, within R."""
    with safe_open(inputs.folder.prior, framework="pt") as file:
        images, y = file.get_tensor("images"), file.get_tensor("captions")
        radius = float(json.loads(file.metadata()["radius"]))
    inputs.public = _records(inputs, images, y)
    inputs.public_ids = inputs.conditioning.ids(inputs.device)[y.to(inputs.device)]
    inputs.enter(_space(inputs, radius))


def enter_codes(inputs: Inputs) -> None:
    """Work in the code of the frozen VAE as it is: where nothing is summed over private codes, none need be bounded."""
    inputs.enter(_space(inputs))


def _space(inputs: Inputs, radius: float = float("inf")) -> VaeCodes:
    assert isinstance(inputs.backbone, Sd3Backbone)
    return VaeCodes(inputs.backbone.prior, inputs.device, radius, offload=inputs.recipe.sd3.offload)


def _records(inputs: Inputs, images: torch.Tensor, y: torch.Tensor) -> Records:
    labels = torch.tensor(inputs.conditioning.labels)[y]
    return Records(images.numpy(), labels.numpy(), inputs.conditioning.classes)
