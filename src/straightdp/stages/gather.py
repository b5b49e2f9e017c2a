"""Before the first stage: the workload certified, both data sets read and checked, and what is assumed to be public."""

from __future__ import annotations

import json

import numpy as np
import torch

from straightdp.data.captions import from_template
from straightdp.data.records import Records
from straightdp.data.sources import load_together
from straightdp.errors import BadInput
from straightdp.flow.fit import train_only
from straightdp.folder import RunFolder
from straightdp.generator import Conditioning
from straightdp.moments.basis import check_features
from straightdp.moments.release import release_parts
from straightdp.moments.text import featuriser
from straightdp.nets.autoencoder import code_shape
from straightdp.nets.captions import Tokenizer
from straightdp.privacy.intake import Intake
from straightdp.privacy.planted import Planted
from straightdp.privacy.workload import UNIFORM, Certificate, Shape, certify, certify_one
from straightdp.recipe import OWN_TEXT, RIVALS, Image, Recipe, model_name
from straightdp.stages import rivals
from straightdp.stages.inputs import Inputs
from straightdp.team import ALONE, Team


def certificate_of(recipe: Recipe, shape: Shape = UNIFORM) -> Certificate:
    """Of the whole workload, with DP-SGD's time buckets of this shape if there is any. Opens nothing private."""
    if recipe.run.method in RIVALS:
        return certify_one(recipe.privacy, rivals.mechanism(recipe))
    return certify(recipe, release_parts(recipe), shape)


def gather(
    recipe: Recipe,
    folder: RunFolder,
    device: torch.device,
    team: Team = ALONE,
    *,
    planted: Planted | None = None,
    leak: float | None = None,
) -> Inputs:
    """Read and check both data sets. Private records go straight into the intake, canaries of an audit among them."""
    alone = recipe.run.method == "from-scratch" or bool(recipe.sd3.model)
    for section in ("private",) if alone else ("private", "public"):
        if not getattr(recipe, section).data:
            raise BadInput(f"no {section} data was named; give --{section} or set {section}.data in the recipe")
    image = recipe.image
    public = (
        _nothing(image) if alone else load_together(recipe.public.sources, size=image.size, channels=image.channels)
    )
    if not recipe.sd3.model:
        _check_shape(recipe, public)
    intake = Intake(recipe, public.shape[1], planted)
    intake.refuse_overlap(public)
    for name in intake.classes:
        if name != name.strip() or not name:
            raise BadInput(f"class name {name!r} begins or ends with a space, or is empty; rename it")
    captions = intake.prompts.captions()
    labels = tuple(intake.prompts.combinations()[:, 0].tolist())
    if recipe.sd3.model:
        from straightdp.stages import sd3

        return sd3.inputs_of(recipe, folder, device, public, intake, captions, labels, team, leak)
    own = recipe.public.caption == OWN_TEXT
    if own and public.texts is None:
        raise BadInput("public.caption is {text} but the records have none; give a template over {label}")
    public_captions = () if own else from_template(recipe.public.caption, public.classes)
    texts = public.texts if own else ()
    length, vocabulary = recipe.net.caption_length, recipe.net.vocabulary
    tokenizer = Tokenizer.from_captions(captions + public_captions, length, vocabulary, texts=texts or ())
    public_ids = tokenizer.encode(texts or public_captions)
    conditioning = Conditioning(intake.classes, captions, tokenizer, labels)
    if not own:
        public_ids = public_ids[torch.from_numpy(public.labels)]
    features_of = None
    if recipe.release.condition not in ("class", "global") and release_parts(recipe):
        features_of = featuriser(recipe.release.condition, intake.prompts, tokenizer, recipe.net.caption_width)
    inputs = Inputs(recipe, folder, device, public, public_ids, conditioning, intake, features_of, team, leak)
    train_only(inputs.new_net(), recipe.dpsgd.parameters)  # to refuse a wrong name now, not after a release
    return inputs


def _check_shape(recipe: Recipe, public: Records) -> None:
    """Refuse images that the network or the release cannot work with."""
    side, shape = public.shape[1], public.shape
    if recipe.latent.d is not None:
        shape = code_shape(recipe.latent.d, side)
    in_codes = recipe.latent.is_flow
    if recipe.net.kind == "mmdit" and (shape[1] if in_codes else side) % recipe.net.patch:
        where = f"codes of {shape[1]} x {shape[1]}" if in_codes else f"images of {side} pixels"
        raise BadInput(f"{where} do not divide into patches of {recipe.net.patch}; set net.patch")
    if release_parts(recipe) and recipe.release.project:
        check_features(recipe.release.features, len(public), int(np.prod(shape)))


def _nothing(image: Image) -> Records:
    """The public set of a method that sees none."""
    side = image.size or 0
    return Records(np.zeros((0, image.channels, side, side), np.uint8), np.zeros(0, np.int64), ())


def assumptions(inputs: Inputs) -> list[dict[str, str]]:
    """Everything treated as public knowledge, and where it came from."""
    recipe, intake = inputs.recipe, inputs.intake
    channels, height, width = inputs.public.shape
    rows = [
        ("N", str(intake.n), intake.n_source),
        ("class list", json.dumps(intake.classes, ensure_ascii=False), intake.classes_source),
        (
            "image range",
            f"{channels} x {height} x {width} values in [-1, 1]",
            "declared; every record is made to fit",
        ),
        ("captions", *_about_captions(recipe)),
        ("public data", f"{len(inputs.public)} records", "taken to hold nothing about private records"),
        *_public_models(recipe),
        ("one person, one record", "yes", "the unit protected is one record; several by one person add up"),
    ]
    return [{"name": name, "value": value, "source": source} for name, value, source in rows]


def _public_models(recipe: Recipe) -> list[tuple[str, str, str]]:
    """Networks that saw other data, taken to hold nothing about private records either."""
    source, found = "published weights, taken to hold nothing about private records", []
    if recipe.release.condition == "minilm" and release_parts(recipe):
        found.append(("sentence encoder", "all-MiniLM-L6-v2", source))
    if recipe.sd3.model:
        found.append(("frozen generator", f"{model_name(recipe.sd3.model)}, a Stable Diffusion 3", source))
    if recipe.run.method == "private-evolution" or recipe.release.votes_share:
        found.append(("image features", "Inception-V3", source))
    return found


def _about_captions(recipe: Recipe) -> tuple[str, str]:
    section = recipe.private
    if section.caption == OWN_TEXT:
        return section.prompt, "a public template to generate under; the records' own texts are private"
    if section.slots:
        words = json.dumps(section.slots, ensure_ascii=False)
        return f"{section.caption} {words}", "a public template filled with the class list and the slots' words"
    return section.caption, "a public template filled with the class list"
