"""From a run's folder to facts, pages and cards. Reads released values and public records."""

from __future__ import annotations

import json

import numpy as np

from straightdp import __version__
from straightdp.data import synthetic
from straightdp.data.records import to_pixels
from straightdp.errors import BadInput
from straightdp.files import write_durably, write_text
from straightdp.folder import RunFolder
from straightdp.moments.field import MomentModel
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.workload import alone
from straightdp.report.cards import dataset_card, model_card
from straightdp.report.croissant import croissant
from straightdp.report.facts import (
    GRADIENT_KEYS,
    AssumptionFact,
    AuditFact,
    ClassDistance,
    ClassPictures,
    LabelAware,
    MechanismFact,
    Neighbour,
    Neighbours,
    PrivateFacts,
    PublicFacts,
    Quality,
    Score,
)
from straightdp.report.page import render
from straightdp.stages.inputs import Inputs

PICTURES = 10
TIMED = (
    "pretrain",
    "calibrate",
    "distill",
    "sample",
)  # times of stages that read private records stay inside
NOT_YET = {"holdout_n": 0, "scores": [], "left_out": ["Nothing was measured yet: `straightdp evaluate RUN` does so."]}
FILES = {
    "transcript.jsonl": "every mechanism, declared and executed; recompute epsilon from it",
    "moments.safetensors": "the released class moments, and the public set's as one Gaussian",
    "elected.safetensors": "draws that the records voted on, and what is left of each one's noisy votes",
    "embedding.safetensors": "the released sums of every class's features",
    "model.safetensors": "the generator's weights",
    "model.json": "the generator's shape, captions and sampling settings",
    "synthetic": "the synthetic data set: images and metadata.csv",
}


def write_reports(inputs: Inputs) -> None:
    """Both editions, the cards and the data set's metadata."""
    folder = inputs.folder
    public = public_facts(inputs)
    write_text(folder.release / "README.md", dataset_card(public))
    write_text(folder.release / "model_card.md", model_card(public))
    metadata = croissant(public, folder.synthetic)
    write_text(folder.release / "croissant.json", json.dumps(metadata, ensure_ascii=False, indent=1))
    write_text(folder.release / "report.html", render(public, None))
    write_durably(folder.root / "report.html", render(public, private_facts(folder)).encode(), mode=0o600)


WHY_NOT = {
    "os": "",
    "pinned": "the noise key was pinned, so whoever knows it can remove the noise",
    "audit": "it is an audit, with made-up records among the private ones",
    "leaky": "the noise was not what was declared: nothing here is private",
}
"""By where the noise came from, as the transcript's header has it."""


def public_facts(inputs: Inputs) -> PublicFacts:
    folder, recipe = inputs.folder, inputs.recipe
    ledger = Ledger(folder.ledger)
    header, totals = ledger.find("header"), ledger.find("totals")
    if header is None or totals is None:
        raise BadInput(f"the transcript of {folder.root} is not closed; finish it with `straightdp run --resume`")
    interval = header["accountant"]["interval"]
    mechanisms = tuple(
        MechanismFact(
            part.id,
            part.what,
            part.kind,
            part.sensitivity,
            part.sigma,
            part.q,
            part.count,
            totals["executed"][part.id],
            alone(part, header["delta"], interval),
        )
        for part in ledger.declared.values()
    )
    assumptions = tuple(
        AssumptionFact(entry["name"], entry["value"], entry["source"])
        for entry in ledger.entries
        if entry["kind"] == "assumption"
    )
    stamps = folder.read_stamps()
    pictures = inputs.public.shape[0] in (1, 3)
    return PublicFacts(
        title=recipe.run.title,
        version=__version__,
        epsilon_budget=header["epsilon"],
        epsilon=totals["epsilon"],
        delta=header["delta"],
        unit=header["unit"],
        adjacency={"add_or_remove_one": "adding or removing one record"}[header["adjacency"]],
        n=header["n"],
        mode=header["mode"],
        accountant=f"privacy loss distributions, interval {interval:g}",
        releasable=header["noise"] == "os",
        why_not=WHY_NOT[header["noise"]],
        mechanisms=mechanisms,
        assumptions=assumptions,
        classes=inputs.conditioning.classes,
        synthetic=_synthetic_pictures(inputs) if pictures else (),
        public=_public_pictures(inputs) if pictures else (),
        moments=_moment_pictures(inputs) if pictures else (),
        n_synthetic=recipe.sample.n,
        stages=tuple((name, stamps[name]["seconds"]) for name in TIMED if name in stamps),
        files=_files(folder),
    )


def private_facts(folder: RunFolder) -> PrivateFacts:
    """What was computed from private records without noise. The internal edition alone shows it."""
    body = json.loads(folder.evaluation.read_text()) if folder.evaluation.exists() else NOT_YET
    quality = body.get("quality")
    return PrivateFacts(
        scores=tuple(Score(s["name"], s["mean"], s["std"], s["note"], s.get("probe", "LeNet")) for s in body["scores"]),
        gradient_norms=_gradient_norms(folder),
        holdout_n=body["holdout_n"],
        notes=tuple(body.get("left_out", ())),
        quality=tuple(Quality(**one) for one in quality["sets"]) if quality else (),
        distance_name=quality["features"] if quality else "FD-slim",
        features_note=_about_features(quality) if quality else "",
        label_aware=tuple(LabelAware(**one) for one in body.get("label_aware", ())),
        class_distances=tuple(ClassDistance(**one) for one in body.get("class_distances", ())),
        neighbours=_neighbours(folder),
        audit=tuple(AuditFact(**one) for one in json.loads(folder.audit.read_text())) if folder.audit.exists() else (),
    )


def _about_features(quality: dict) -> str:
    weights = {"FID": "the weights published on 2015-12-05"}.get(quality["features"], "TF-slim's ImageNet weights")
    return f"Inception-V3 with {weights} (sha256 {quality['digest'][:12]}…), images resized {quality['resize']}."


def _neighbours(folder: RunFolder) -> Neighbours | None:
    from safetensors.numpy import load_file

    if not folder.neighbours.exists():
        return None
    found = load_file(folder.neighbours)
    classes = json.loads(folder.model_card.read_text(encoding="utf-8"))["classes"]
    samples, nearest = (np.moveaxis(found[name], -3, -1) for name in ("samples", "nearest"))
    rows = zip(found["labels"], samples, nearest, found["distances"].tolist(), strict=True)
    shown = tuple(Neighbour(classes[label], one, others, tuple(far)) for label, one, others, far in rows)
    images, heldout = found["images"].tolist(), found["heldout"].tolist()
    return Neighbours(shown, images, heldout, "pixels from 0 to 1, Euclidean")


def _gradient_norms(folder: RunFolder) -> dict[str, list[float]]:
    """One row a step; a step that a resumed run repeated is taken once."""
    if not folder.diagnostics.exists():
        return {}
    rows = {}
    for line in folder.diagnostics.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # a line that a crash cut off; its step was repeated
        rows[row["step"], row["id"]] = row
    steps = [rows[at] | {"step": k} for k, at in enumerate(sorted(rows))]  # time buckets take turns
    return {key: [np.nan if row[key] is None else row[key] for row in steps] for key in GRADIENT_KEYS} if steps else {}


def _by_class(x: np.ndarray, labels: np.ndarray, names: tuple[str, ...]) -> tuple[ClassPictures, ...]:
    """The first pictures of each class; x is (n, C, H, W) pixels."""
    x = np.moveaxis(x, 1, -1)
    return tuple(ClassPictures(name, x[labels == k][:PICTURES]) for k, name in enumerate(names))


def _synthetic_pictures(inputs: Inputs) -> tuple[ClassPictures, ...]:
    z, y = synthetic.read(inputs.folder.synthetic, inputs.public.shape, inputs.conditioning.classes)
    return _by_class(to_pixels(z), y.numpy(), inputs.conditioning.classes)


def _public_pictures(inputs: Inputs) -> tuple[ClassPictures, ...]:
    names = inputs.public.classes[: max(10, len(inputs.conditioning.classes))]
    return _by_class(inputs.public.x, inputs.public.labels, names)


def _moment_pictures(inputs: Inputs) -> tuple[ClassPictures, ...]:
    if not inputs.folder.moments.exists():
        return ()
    means, conditioning = MomentModel.load(inputs.folder.moments).means, inputs.conditioning
    labels = np.repeat(conditioning.labels, means.shape[1])
    images = to_pixels(inputs.space.decode(means.reshape(-1, *inputs.space.shape)))
    return _by_class(images, labels, conditioning.classes)


def _files(folder: RunFolder) -> tuple[tuple[str, int, str], ...]:
    rows = []
    for name, what in FILES.items():
        path = folder.release / name
        if path.is_dir():
            rows.append((name + "/", sum(p.stat().st_size for p in path.rglob("*") if p.is_file()), what))
        elif path.exists():
            rows.append((name, path.stat().st_size, what))
    return tuple(rows)
