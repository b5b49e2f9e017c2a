"""The stage that judges a release on held-out real records, each number beside its references.

All of it is computed without noise and goes to `private/` alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from straightdp.data import synthetic
from straightdp.data.records import to_pixels, to_z
from straightdp.files import write_durably, write_text
from straightdp.metrics import inception
from straightdp.metrics.image_encoder import Remembered, find_encoder
from straightdp.metrics.label_aware import mean_of
from straightdp.metrics.linear_probe import fit_linear
from straightdp.metrics.probe import PROBES, fit_probe
from straightdp.moments.field import MomentModel
from straightdp.nets.classifiers import SMALLEST, Predict
from straightdp.progress import tracker
from straightdp.recipe import Recipe
from straightdp.stages.inputs import Inputs

TRAINING = "real private training records"
SHOWN, NEAREST = 12, 4  # synthetic images beside their nearest training records, and how many of these
NOT_THOROUGH = (
    "Fréchet distance, precision and recall, label-aware measures and the second classifier were not run; "
    "`straightdp evaluate RUN --set evaluate.thorough=on` runs them."
)
LATE = "The public model alone was not drawn from: it learned late times only, and cannot begin at noise."
NO_WEIGHTS = (
    "Fréchet distance, precision and recall were not run: no Inception weights were found; "
    "`straightdp data get inception` fetches them."
)
NO_ENCODER = (
    "No frozen image encoder was found for the linear probe, so a network of our own took its place; name a CLIP in "
    "evaluate.clip, or fetch Inception with `straightdp data get inception`."
)
TOO_FEW = "Fréchet distance, precision and recall were not run: they need at least two synthetic images."
NO_HOLDOUT = (
    "Nothing was measured: fewer than two real records are held out or were trained on, or the records are no images "
    "of at least 8 pixels."
)


FitClassifier = Callable[[Tensor, Tensor, int, int], Predict]
"""(images, labels, number of classes, seed) to a classifier."""


@dataclass(frozen=True)
class ImageSet:
    """Images in [-1, 1], rounded to whole pixels, the class of each, and where they come from."""

    name: str
    note: str
    z: Tensor
    y: Tensor


def check(recipe: Recipe, device: torch.device) -> None:
    """Refuse, before anything is spent, an encoder that is not to be had."""
    if recipe.evaluate.probe == "linear" and recipe.evaluate.clip:
        find_encoder(recipe.evaluate.clip, device)


def run(inputs: Inputs) -> None:
    """Write `private/evaluation.json` and, of images, `private/neighbours.safetensors`."""
    folder, measures = inputs.folder, inputs.intake.measures
    body: dict = {"holdout_n": measures.holdout_n, "scores": [], "left_out": []}
    if not measures.enough or inputs.public.shape[0] not in (1, 3) or min(inputs.public.shape[1:]) < SMALLEST:
        folder.neighbours.unlink(missing_ok=True)
        body["left_out"].append(NO_HOLDOUT)
        write_text(folder.evaluation, json.dumps(body, indent=1))
        return
    sets, eyes = list(_image_sets(inputs)), _eyes(inputs)
    classifiers = _classifiers(inputs, eyes)
    body["scores"] = [*_scores(inputs, sets, classifiers), *_slot_scores(inputs, sets[0], classifiers)]
    if inputs.recipe.evaluate.probe == "linear" and len(classifiers.keys() & PROBES.keys()):
        body["left_out"].append(NO_ENCODER)
    _write_closeness(inputs, sets[0])
    if inputs.thorough:
        if inputs.recipe.evaluate.references and inputs.recipe.pretrain.t_min:
            body["left_out"].append(LATE)
        body["label_aware"] = _label_aware(inputs, sets, next(iter(classifiers.values())))
        features = inception.find(inputs.device)
        if features is None:
            body["left_out"].append(NO_WEIGHTS)
        elif len(sets[0].z) < 2:
            body["left_out"].append(TOO_FEW)
        else:
            body |= _quality(inputs, sets, features, eyes)
    else:
        body["left_out"].append(NOT_THOROUGH)
    write_text(folder.evaluation, json.dumps(body, indent=1))


def _image_sets(inputs: Inputs) -> Iterator[ImageSet]:
    """The synthetic set, then what it is compared with, as many images each."""
    folder, recipe, space = inputs.folder, inputs.recipe, inputs.space
    z, y = synthetic.read(folder.synthetic, inputs.public.shape, inputs.intake.classes)
    yield ImageSet("synthetic data", f"{len(z)} images of this release", z, y)
    if inputs.thorough and not recipe.evaluate.references:
        return
    labels = torch.tensor(inputs.conditioning.labels)
    moments = MomentModel.load(folder.moments) if folder.moments.exists() else None
    if moments is not None and recipe.sample.port != "release":
        generator = torch.Generator().manual_seed(recipe.run.seed)
        prompts = torch.multinomial(moments.prior, len(z), replacement=True, generator=generator)
        draws = space.decode(moments.sample(prompts, generator).reshape(-1, *space.shape))
        note = "draws of the released moments, no network"
        yield ImageSet("released moments alone", note, _on_grid(draws), labels[prompts])
    pretrained = folder.checkpoints / "pretrained.safetensors"
    late = recipe.pretrain.t_min > 0  # and could not draw from noise
    if inputs.thorough and pretrained.exists() and len(inputs.public) and not late:
        net = inputs.load_net(pretrained)
        model = inputs.make_generator(net.eval(), inputs.conditioning, moments, recipe.sample, space)
        prompts = model.prompts(len(z), inputs.device)
        section = recipe.sample.model_copy(update={"port": "weights"})
        draws = model.draw(prompts, section, recipe.run.seed, tracker("public model"), speed=inputs.speed)
        note = "the network before it met anything private, under the same captions as often"
        yield ImageSet("public model only", note, _on_grid(draws), labels[prompts.cpu()])


def _eyes(inputs: Inputs) -> Remembered | None:
    """The linear probe's encoder, if one is wanted and to be had."""
    section = inputs.recipe.evaluate
    encoder = find_encoder(section.clip, inputs.device) if section.probe == "linear" else None
    return None if encoder is None else Remembered(encoder, tracker("features"))


def _classifiers(inputs: Inputs, eyes: Remembered | None) -> dict[str, FitClassifier]:
    """What is trained on images and labels, by name: our own networks, or a linear map of frozen features."""
    section, device = inputs.recipe.evaluate, inputs.device
    if eyes is not None:

        def linear(z: Tensor, y: Tensor, classes: int, seed: int) -> Predict:
            predict = fit_linear(eyes(z), y, classes)
            return lambda images: predict(eyes(images))

        return {f"linear probe on {eyes.encoder.name}": linear}

    def network(probe: str) -> FitClassifier:
        return lambda z, y, classes, seed: fit_probe(z, y, classes, section, seed, device, probe)

    return {probe: network(probe) for probe in (PROBES if inputs.thorough else list(PROBES)[:1])}


def _scores(inputs: Inputs, sets: list[ImageSet], classifiers: dict[str, FitClassifier]) -> Iterator[dict]:
    """Accuracy on held-out records of each classifier trained on each set, of the first one first."""
    measures, classes, section = inputs.intake.measures, len(inputs.intake.classes), inputs.recipe.evaluate
    for probe, classifier in classifiers.items():

        def fit(z: Tensor, y: Tensor, seed: int, classifier: FitClassifier = classifier):
            return classifier(z, y, classes, seed)

        def score(name: str, note: str, run: Callable[[int], float], probe: str = probe) -> dict:
            return _summary(name, probe, note, [run(seed) for seed in range(section.seeds)])

        for one in sets:
            yield score(one.name, one.note, lambda s, one=one, fit=fit: measures.accuracy(fit(one.z, one.y, s)))
        if section.real_reference or (inputs.thorough and section.references):
            note = "the classifier trained on the private records themselves; not private"
            yield score("real private data", note, lambda s, fit=fit: measures.real_accuracy(lambda a, b: fit(a, b, s)))


def _slot_scores(inputs: Inputs, synthetic_set: ImageSet, classifiers: dict[str, FitClassifier]) -> Iterator[dict]:
    """How often the words of captions with several slots are found in the images made under them."""
    slots = inputs.intake.prompts.slots
    probe, classifier = next(iter(classifiers.items()))
    for slot, (name, words) in enumerate(slots.items() if len(slots) > 1 else ()):
        said = _slot_values(inputs, slot)

        def fit(seed: int, words=words):
            return lambda a, b: classifier(a, b, len(words), seed)

        values = [
            inputs.intake.measures.agreement(fit(seed), [(synthetic_set.z, said)], slot)[0]
            for seed in range(inputs.recipe.evaluate.seeds)
        ]
        note = "found by a classifier trained on private records, as the caption says"
        yield _summary(f"captions' {name}", probe, note, values)


def _label_aware(inputs: Inputs, sets: list[ImageSet], classifier: FitClassifier) -> list[dict]:
    """Label consistency and domain rate of each set, then of held-out records and of public images."""
    measures = inputs.intake.measures

    def fit_of(classes: int):
        return lambda a, b: classifier(a, b, classes, 0)

    public, classes = inputs.public.z(), len(inputs.intake.classes)
    found = measures.consistency(fit_of(classes), [(one.z, one.y) for one in sets])
    rates: list[float | None] = [None] * (len(sets) + 1)
    names = [*(one.name for one in sets), "held-out real records"]
    if len(public):
        *found_rates, of_public, heldout = measures.domain_rates(fit_of(2), public, [*(one.z for one in sets), public])
        rates = [*found_rates, heldout, of_public]
        names.append("public images")
    return [
        {"name": name, "consistency": consistency, "domain_rate": rate}
        for name, consistency, rate in zip(names, [*found, None], rates, strict=False)
    ]


def _quality(inputs: Inputs, sets: list[ImageSet], features: inception.Features, eyes: Remembered | None) -> dict:
    """Distances in Inception's features, of at most `evaluate.images` images of each set; the probe's eyes may have
    seen them already."""
    measures, most = inputs.intake.measures, inputs.recipe.evaluate.images

    def of(z: Tensor) -> Tensor:
        if eyes is not None and eyes.encoder.digest == features.digest:
            return eyes(z)
        return features(z, tracker("features"))

    rows, within = [], {}
    public = ImageSet("public images", "the public set itself", inputs.public.z(), torch.zeros(0))
    wanted = inputs.recipe.evaluate.references
    for one in [*sets, *([public] if wanted and len(public.z) >= 2 else ())]:
        chosen = torch.randperm(len(one.z), generator=torch.Generator().manual_seed(0))[:most]
        y = None if one is public else one.y[chosen]
        rows.append({"name": one.name, "note": one.note} | measures.quality(of, of(one.z[chosen]), y, most))
    if wanted:
        note = "as many of the records that were trained on"
        real = measures.quality_of_training(of, min(most, len(sets[0].z)), most)
        rows.append({"name": TRAINING, "note": note} | real)
    for row in rows:
        distances = row.pop("classes")
        within[row["name"]] = distances
        row["per_class"] = None if distances is None else mean_of(distances)
    return {
        "quality": {"features": features.name, "digest": features.digest, "resize": features.resize, "sets": rows},
        "class_distances": [
            {"label": label, "distance": distance, "reference": reference}
            for label, distance, reference in zip(
                inputs.intake.classes,
                within["synthetic data"],
                within.get(TRAINING) or [None] * len(inputs.intake.classes),
                strict=True,
            )
        ],
    }


def _write_closeness(inputs: Inputs, synthetic_set: ImageSet) -> None:
    """Some synthetic images beside the training records nearest to them."""
    from safetensors.torch import save

    z, y = synthetic_set.z, synthetic_set.y
    found = inputs.intake.measures.closeness(z.to(inputs.device), y, shown=SHOWN, k=NEAREST)
    tensors = {
        "images": torch.tensor(found.images),
        "heldout": torch.tensor(found.heldout),
        "labels": y[found.shown],
        "samples": torch.from_numpy(to_pixels(z[found.shown])),
        "nearest": torch.from_numpy(found.nearest),
        "distances": torch.from_numpy(found.distances),
    }
    write_durably(inputs.folder.neighbours, save(tensors), mode=0o600)


def _summary(name: str, probe: str, note: str, values: list[float]) -> dict:
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"name": name, "probe": probe, "mean": float(np.mean(values)), "std": std, "note": note, "values": values}


def _on_grid(z: Tensor) -> Tensor:
    """Whole pixels, as a file would hold them."""
    return to_z(to_pixels(z))


def _slot_values(inputs: Inputs, slot: int) -> Tensor:
    """Which word of a slot each synthetic image's caption has."""
    from straightdp.data.sources import load

    texts = load(str(inputs.folder.synthetic), size=None, channels=inputs.public.shape[0]).texts or ()
    template = inputs.intake.prompts
    rows = [template.index(text) for text in texts]
    return torch.from_numpy(template.combinations()[np.array(rows, dtype=np.int64), slot])
