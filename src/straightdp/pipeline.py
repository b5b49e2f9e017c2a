"""The story of a run: pretrain > calibrate > release > distill > plan > train > sample > evaluate > report."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

from straightdp import stages
from straightdp.data.captions import from_template
from straightdp.data.sources import load as load_records
from straightdp.errors import BadInput, BudgetRefused
from straightdp.files import file_hash
from straightdp.folder import RunFolder
from straightdp.generator import Conditioning
from straightdp.moments.basis import check_features
from straightdp.moments.field import MomentModel
from straightdp.moments.release import release_parts
from straightdp.nets.captions import Tokenizer
from straightdp.privacy.intake import Intake
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.noise import Noise, open_noise
from straightdp.privacy.vault import Vault
from straightdp.privacy.workload import Certificate, certify
from straightdp.progress import say
from straightdp.recipe import Recipe, load
from straightdp.report.assemble import write_reports
from straightdp.stages import Inputs
from straightdp.team import ALONE, Team, joined, pick_device


def run(recipe: Recipe, out: Path, *, resume: bool = False) -> RunFolder | None:
    """From two data sets to a release folder. Nothing is written before every input was found sound.

    Started by torchrun, every process but the leading one only takes part in DP-SGD, and returns None.
    """
    device = pick_device(recipe.run.device)
    with joined(device) as team:
        if not team.leads:
            return _follow(recipe, RunFolder(out), device, team)
        try:
            return _lead(recipe, RunFolder(out), device, team, resume=resume)
        except (BadInput, BudgetRefused):
            team.dismiss()
            raise


def _lead(recipe: Recipe, folder: RunFolder, device: torch.device, team: Team, *, resume: bool) -> RunFolder:
    folder.check(recipe, resume=resume)
    certificate = certify(recipe, release_parts(recipe))  # before the first private read
    inputs = gather(recipe, folder, device, team)
    with folder.lock():
        folder.check(recipe, resume=resume)  # again: another process may have been here meanwhile
        folder.create(recipe, inputs.intake.fingerprint())
        _spend(inputs, certificate)
        _use(inputs)
    return folder


def _follow(recipe: Recipe, folder: RunFolder, device: torch.device, team: Team) -> None:
    """Wait for the leader to come to DP-SGD, and take part in it with the same records; nothing is written."""
    call = team.told()
    if call is None:
        return
    inputs = gather(recipe, folder, device, team)
    start = Path(call["start"])
    if call != _call(inputs, start):
        raise BadInput("this process found other records, weights or another recipe than the leading one; start again")
    ledger = Ledger(folder.ledger, reads=True)
    vault = inputs.intake.vault(ledger, _noise(inputs, spent=True), folder.diagnostics, team)
    stages.private_steps(inputs, start, vault)


def _call(inputs: Inputs, start: Path) -> dict[str, str]:
    """What every process of a team must find alike before it takes part in DP-SGD."""
    return {
        "start": str(start),
        "weights": file_hash(start),
        "plan": inputs.folder.plan.read_text(),
        "recipe": inputs.recipe.digest(),
        "records": inputs.intake.fingerprint(),
    }


def _spend(inputs: Inputs, certificate: Certificate) -> None:
    """All that touches private records: declared first, then the release and DP-SGD, then the transcript is closed."""
    folder, recipe = inputs.folder, inputs.recipe
    pretrained = folder.checkpoints / "pretrained.safetensors"
    calibration = folder.checkpoints / "calibration.safetensors"
    distilled = folder.checkpoints / "distilled.safetensors"
    key = _key(recipe.digest(), hashlib.sha256(np.ascontiguousarray(inputs.public.x).tobytes()).hexdigest())

    def stage(name: str, outputs: list[Path], work) -> None:
        say(f"{name}: {'done' if folder.stage(name, key, outputs, work) else 'unchanged, skipped'}")

    stage("pretrain", [pretrained], lambda: stages.pretrain(inputs, pretrained))
    stage("calibrate", [calibration], lambda: stages.calibrate(inputs, calibration))
    tau = stages.load_tau(calibration)
    ledger, vault = _declare(inputs, certificate)
    start, moments = pretrained, None
    if release_parts(recipe):
        basis = stages.load_basis(calibration)
        stage("release", [folder.moments], lambda: stages.release(inputs, basis, vault, ledger, folder.moments))
        moments = MomentModel.load(folder.moments)
        stage("distill", [distilled], lambda: stages.distill(inputs, pretrained, moments, tau, distilled))
        start = distilled
    stage("plan", [folder.plan], lambda: stages.plan(inputs, start, tau, folder.plan))

    def train() -> None:
        if recipe.dpsgd.steps:
            inputs.team.call(_call(inputs, start))
        stages.dpsgd(inputs, start, vault, moments)

    stage("train", [folder.model, folder.model_card], train)
    inputs.team.dismiss()
    if not ledger.closed:
        released = [path for path in (folder.moments, folder.model, folder.model_card) if path.exists()]
        ledger.close({path.name: file_hash(path) for path in released})


def _use(inputs: Inputs) -> None:
    """Post-processing of what was released: may be repeated with other settings at no cost."""
    folder, recipe = inputs.folder, inputs.recipe
    key = _key(recipe.sample.model_dump_json(), file_hash(folder.model), str(recipe.run.seed))
    folder.stage("sample", key, [folder.synthetic], lambda: stages.sample(inputs))
    say("sample: done")
    key = _key(recipe.evaluate.model_dump_json(), file_hash(folder.synthetic))
    folder.stage("evaluate", key, [folder.evaluation], lambda: stages.evaluate(inputs))
    say("evaluate: done")
    write_reports(inputs)
    say(f"report: {folder.root / 'report.html'}")


def again(out: Path, stage: str) -> RunFolder:
    """Redo `evaluate` or `report` of a finished run."""
    folder = RunFolder(out)
    if not folder.recipe.exists():
        raise BadInput(f"{out} is not a run's folder: recipe.toml is missing")
    recipe = load(folder.recipe)
    with folder.lock():
        if not (folder.model.exists() and Ledger(folder.ledger).closed and folder.synthetic.exists()):
            raise BadInput(f"{out} is not finished; finish it with `straightdp run --resume`")
        inputs = gather(recipe, folder, pick_device(recipe.run.device))
        folder.create(recipe, inputs.intake.fingerprint())
        if stage == "evaluate":
            stages.evaluate(inputs)
        write_reports(inputs)
    return folder


def gather(recipe: Recipe, folder: RunFolder, device: torch.device, team: Team = ALONE) -> Inputs:
    """Read and check both data sets. Private records go straight into the intake."""
    for section in ("private", "public"):
        if not getattr(recipe, section).data:
            raise BadInput(f"no {section} data was named; give --{section} or set {section}.data in the recipe")
    image = recipe.image
    public = load_records(recipe.public.data, size=image.size, channels=image.channels)
    side = public.shape[1]
    if side % recipe.net.patch:
        raise BadInput(f"images of {side} pixels do not divide into patches of {recipe.net.patch}; set net.patch")
    if release_parts(recipe):
        check_features(recipe.release.features, len(public), int(np.prod(public.shape)))
    intake = Intake(recipe, side)
    intake.refuse_overlap(public)
    for name in intake.classes:
        if name != name.strip() or not name:
            raise BadInput(f"class name {name!r} begins or ends with a space, or is empty; rename it")
    private_captions = from_template(recipe.private.caption, intake.classes)
    public_captions = from_template(recipe.public.caption, public.classes)
    tokenizer = Tokenizer.from_captions(
        private_captions + public_captions, recipe.net.caption_length, recipe.net.vocabulary
    )
    conditioning = Conditioning(intake.classes, private_captions, tokenizer)
    return Inputs(recipe, folder, device, public, public_captions, conditioning, intake, team)


def _declare(inputs: Inputs, certificate: Certificate) -> tuple[Ledger, Vault]:
    """Open the transcript, declaring the whole workload if that was not done yet, and put the records behind it."""
    recipe, folder, intake = inputs.recipe, inputs.folder, inputs.intake
    ledger = Ledger(folder.ledger, folder.transcript)
    noise = _noise(inputs, spent=bool(ledger.executed))
    header = ledger.find("header")
    if header is not None and ledger.certified:
        if (header["recipe"], header["noise"], header["n"]) != (recipe.digest(), noise.label, intake.n):
            raise BadInput(f"the transcript of {folder.root} was declared for another recipe; give another --out")
    else:
        ledger.declare(
            certificate,
            budget=recipe.privacy.epsilon,
            noise=noise.label,
            mode=recipe.privacy.mode,
            n=intake.n,
            recipe=recipe.digest(),
            assumptions=_assumptions(inputs),
        )
    return ledger, intake.vault(ledger, noise, folder.diagnostics, inputs.team)


def _noise(inputs: Inputs, *, spent: bool) -> Noise:
    context = f"{inputs.recipe.digest()}|{inputs.intake.fingerprint()}"
    pinned = inputs.recipe.privacy.pinned_key
    return open_noise(inputs.folder.private, pinned, context=context, spent=spent)


def _assumptions(inputs: Inputs) -> list[dict[str, str]]:
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
        ("captions", recipe.private.caption, "a public template filled with the class list"),
        ("public data", f"{len(inputs.public)} records", "taken to hold nothing about private records"),
        ("one person, one record", "yes", "the unit protected is one record; several by one person add up"),
    ]
    return [{"name": name, "value": value, "source": source} for name, value, source in rows]


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
