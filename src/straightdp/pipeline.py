"""The story of a run: pretrain > calibrate > release > distill > plan > train > vote > sample > evaluate > report."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from straightdp import cache
from straightdp.errors import BadInput, BudgetRefused
from straightdp.files import file_hash
from straightdp.folder import AUDITED, NOT_PRIVATE, RunFolder
from straightdp.moments.field import MomentModel
from straightdp.moments.release import release_parts
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.noise import AuditNoise, Noise, open_noise
from straightdp.privacy.planted import Planted
from straightdp.privacy.vault import Vault
from straightdp.privacy.workload import Certificate
from straightdp.progress import say
from straightdp.recipe import RIVALS, Recipe, load
from straightdp.report.assemble import write_reports
from straightdp.stages import election, evaluate, private, rivals, sample
from straightdp.stages import public as prepare
from straightdp.stages.gather import assumptions, certificate_of, gather
from straightdp.stages.inputs import Inputs, public_key
from straightdp.team import Team, joined, pick_device


def run(recipe: Recipe, out: Path, *, resume: bool = False, noise: bool = True) -> RunFolder | None:
    """From two data sets to a release folder. Nothing is written before every input was found sound.

    Without noise nothing is private: an upper bound for those who hold the records. It has no `release/`, and its
    transcript says so. Started by torchrun, every process but the leading one only takes part in DP-SGD, and returns
    None.
    """
    device = pick_device(recipe.run.device)
    folder, leak = (RunFolder(out), None) if noise else (RunFolder(out, release=NOT_PRIVATE), 0.0)
    with joined(device) as team:
        if not team.leads:
            return _follow(recipe, folder, device, team, leak)
        try:
            return _lead(recipe, folder, device, team, leak, resume=resume)
        except (BadInput, BudgetRefused):
            team.dismiss()
            raise


def _lead(
    recipe: Recipe, folder: RunFolder, device: torch.device, team: Team, leak: float | None, *, resume: bool
) -> RunFolder:
    folder.check(recipe, resume=resume)
    cache.check()
    evaluate.check(recipe, device)
    certificate = certificate_of(recipe)  # of the uniform plan: refused before private files are opened
    inputs = gather(recipe, folder, device, team, leak=leak)
    rivals.check(inputs)
    election.check(inputs)
    sample.check(inputs)
    with folder.lock():
        folder.check(recipe, resume=resume)  # again: another process may have been here meanwhile
        folder.create(recipe, inputs.intake.fingerprint())
        (_spend_on_rival if recipe.run.method in RIVALS else _spend)(inputs, certificate)
        _use(inputs)
    return folder


def _follow(recipe: Recipe, folder: RunFolder, device: torch.device, team: Team, leak: float | None = None) -> None:
    """Wait for the leader to come to DP-SGD, and take part in it with the same records; nothing is written."""
    call = team.told()
    if call is None:
        return
    inputs = gather(recipe, folder, device, team, leak=leak)
    prepare.enter_space(inputs)
    start = Path(call["start"])
    if call != _call(inputs, start):
        raise BadInput(
            "this process found other records, weights, arithmetic or another recipe than the leading one; start again"
        )
    ledger = Ledger(folder.ledger, reads=True)
    vault = _vault(inputs, ledger, _noise(inputs, spent=True))
    private.private_steps(inputs, start, vault)


def _call(inputs: Inputs, start: Path) -> dict[str, str]:
    """What every process of a team must find alike before it takes part in DP-SGD."""
    return {
        "start": str(start),
        "point": private.starting_point(inputs, start),
        "recipe": inputs.recipe.digest(),
        "records": inputs.intake.fingerprint(),
    }


def _spend(inputs: Inputs, certificate: Certificate) -> None:
    """All that touches private records: declared first, then the release and DP-SGD, then the transcript is closed.

    `certificate` is the uniform plan's.
    """
    folder, recipe = inputs.folder, inputs.recipe
    pretrained = folder.checkpoints / "pretrained.safetensors"
    distilled = folder.checkpoints / "distilled.safetensors"

    stage = _stages(folder, _key(recipe.digest(), public_key(inputs, "autoencode")))
    if recipe.latent.d is not None:
        stage("autoencode", [folder.autoencoder], lambda: _shared(inputs, "autoencode", folder.autoencoder))
    if recipe.sd3.model:
        stage("prior", [folder.prior], lambda: _shared(inputs, "prior", folder.prior))
    prepare.enter_space(inputs)
    stage = _stages(folder, _later_key(inputs))
    stage("pretrain", [pretrained], lambda: _shared(inputs, "pretrain", pretrained))
    basis, tau = None, 0.0
    if len(inputs.public):
        stage("calibrate", [folder.calibration], lambda: prepare.calibrate(inputs, pretrained, folder.calibration))
        basis, tau = prepare.load_basis(folder.calibration), prepare.load_number(folder.calibration, "tau")
    if basis is not None and recipe.dpsgd.plan == "tha" and recipe.dpsgd.steps:
        stage("allocate", [folder.allocation], lambda: prepare.allocate(inputs, basis, tau, folder.allocation))
        certificate = certificate_of(recipe, prepare.load_shape(inputs))
    ledger, vault = _declare(inputs, certificate)
    start, moments = pretrained, None
    if basis is not None and release_parts(recipe):
        outputs = [folder.moments, *([folder.sums] if folder.is_audit else [])]
        stage("release", outputs, lambda: private.release(inputs, basis, vault, ledger, folder.moments))
        moments = MomentModel.load(folder.moments)
        if recipe.distill.steps:
            stage("distill", [distilled], lambda: private.distill(inputs, pretrained, moments, tau, distilled))
            start = distilled
    if recipe.dpsgd.steps:
        stage("plan", [folder.plan], lambda: private.plan(inputs, start, tau, folder.plan))

    def train() -> None:
        if recipe.dpsgd.steps:
            inputs.team.call(_call(inputs, start))
        private.dpsgd(inputs, start, vault, moments)

    stage("train", [folder.model, folder.model_card], train)
    if recipe.release.votes_share:
        stage("candidates", [folder.candidates], lambda: election.propose(inputs, folder.candidates))
        stage("vote", [folder.elected], lambda: election.vote(inputs, folder.candidates, vault, ledger, folder.elected))
    inputs.team.dismiss()
    _close(ledger, folder)


def _spend_on_rival(inputs: Inputs, certificate: Certificate) -> None:
    """The same story for a method with one mechanism."""
    folder, recipe = inputs.folder, inputs.recipe
    pretrained = folder.checkpoints / "pretrained.safetensors"
    prepare.enter_space(inputs)
    stage, models = _stages(folder, _later_key(inputs)), [folder.model, folder.model_card]
    if recipe.run.method == "private-evolution":
        stage("pretrain", [pretrained], lambda: _shared(inputs, "pretrain", pretrained))
        ledger, vault = _declare(inputs, certificate)
        stage("evolve", models, lambda: rivals.evolve(inputs, pretrained, vault, ledger))
    else:
        ledger, vault = _declare(inputs, certificate)
        stage("embed", [folder.embedding], lambda: rivals.embed(inputs, vault, folder.embedding))
        stage("match", models, lambda: rivals.match(inputs, folder.embedding))
    inputs.team.dismiss()
    _close(ledger, folder)


def _close(ledger: Ledger, folder: RunFolder) -> None:
    """The transcript's last line, with the hashes of what was released."""
    if not ledger.closed:
        every = (folder.moments, folder.elected, folder.embedding, folder.model, folder.model_card)
        ledger.close({path.name: file_hash(path) for path in every if path.exists()})


def _shared(inputs: Inputs, name: str, out: Path) -> None:
    """A stage that hangs on public records and few settings, so that runs may share it."""
    work = {"autoencode": prepare.autoencode, "prior": prepare.draw_prior, "pretrain": prepare.pretrain}[name]
    cache.shared(name, public_key(inputs, name), out, lambda: work(inputs, out))


def _use(inputs: Inputs) -> None:
    """Post-processing of what was released: may be repeated with other settings at no cost."""
    folder, recipe = inputs.folder, inputs.recipe
    key = _key(recipe.sample.model_dump_json(), file_hash(folder.model), str(recipe.run.seed))
    folder.stage("sample", key, [folder.synthetic], lambda: sample.run(inputs))
    say("sample: done")
    key = _key(recipe.evaluate.model_dump_json(), file_hash(folder.synthetic))
    folder.stage("evaluate", key, [folder.evaluation, folder.neighbours], lambda: evaluate.run(inputs))
    say("evaluate: done")
    write_reports(inputs)
    say(f"report: {folder.root / 'report.html'}")


def spend_on_audit(recipe: Recipe, out: Path, certificate: Certificate, planted: Planted, leak: float) -> Inputs:
    """A training run of an audit: with canaries among the records, and without a release/. Goes on where it was."""
    folder, device = RunFolder(out, release=AUDITED), pick_device(recipe.run.device)
    cache.check()
    inputs = gather(recipe, folder, device, planted=planted, leak=leak)
    election.check(inputs)
    with folder.lock():
        folder.check(recipe, resume=True)
        folder.create(recipe, inputs.intake.fingerprint())
        _spend(inputs, certificate)
    return inputs


def evaluate_again(out: Path, settings: tuple[str, ...] = ()) -> RunFolder:
    """Judge a finished run again, with other settings of `evaluate` perhaps, and write its pages again."""
    check_evaluate_settings(settings)
    return _again(out, settings, evaluate.run)


def check_evaluate_settings(settings: tuple[str, ...]) -> None:
    """Refuse settings that would change anything but the evaluation."""
    others = [setting for setting in settings if not setting.startswith("evaluate.")]
    if others:
        raise BadInput(f"{others[0]!r} does not concern evaluation; only evaluate.KEY=VALUE may be set here")


def report_again(out: Path) -> RunFolder:
    """Write the pages and cards of a finished run again."""
    return _again(out, (), lambda inputs: None)


def _again(out: Path, settings: tuple[str, ...], work: Callable[[Inputs], None]) -> RunFolder:
    folder = RunFolder(out)
    if not (folder.recipe.exists() and folder.private.is_dir()):
        raise BadInput(f"{out} is not a run's folder: recipe.toml or private is missing; give one that has both")
    recipe = load(folder.recipe, settings)
    if (folder.root / NOT_PRIVATE).exists():
        raise BadInput(f"{out} is a run without noise, which is judged once; run it again with another --out")
    evaluate.check(recipe, pick_device(recipe.run.device))
    with folder.lock():
        ledger = Ledger(folder.ledger)
        if not (folder.model.exists() and ledger.closed and folder.synthetic.exists()):
            raise BadInput(f"{out} is not finished; finish it with `straightdp run --resume`")
        if (ledger.find("header") or {})["recipe"] != recipe.digest():
            raise BadInput(f"{folder.recipe} is not the recipe that {out} was run with; put the first one back")
        inputs = gather(recipe, folder, pick_device(recipe.run.device))
        prepare.enter_space(inputs)
        folder.create(recipe, inputs.intake.fingerprint())
        work(inputs)
        write_reports(inputs)
    return folder


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
            assumptions=assumptions(inputs),
        )
    return ledger, _vault(inputs, ledger, noise)


def _vault(inputs: Inputs, ledger: Ledger, noise: Noise) -> Vault:
    return inputs.intake.vault(
        ledger,
        noise,
        inputs.folder.diagnostics,
        space=inputs.space,
        tokenizer=inputs.conditioning.tokenizer,
        featuriser=inputs.featuriser,
        team=inputs.team,
    )


def _noise(inputs: Inputs, *, spent: bool) -> Noise:
    context = f"{inputs.recipe.digest()}|{inputs.intake.fingerprint()}"
    pinned = inputs.recipe.privacy.pinned_key
    make = Noise if inputs.leak is None else partial(AuditNoise, leak=inputs.leak)
    return open_noise(inputs.folder.private, pinned, context=context, spent=spent, make=make)


def _stages(folder: RunFolder, key: str) -> Callable[[str, list[Path], Callable[[], None]], None]:
    """Runs stages that all hang on `key`, each unless it is done, and says which."""

    def stage(name: str, outputs: list[Path], work: Callable[[], None]) -> None:
        say(f"{name}: {'done' if folder.stage(name, key, outputs, work) else 'unchanged, skipped'}")

    return stage


def _later_key(inputs: Inputs) -> str:
    """Of every stage from pretraining on."""
    seen = [public_key(inputs, "pretrain"), repr(inputs.conditioning.tokenizer)]
    if inputs.recipe.latent.flow == "pixels":  # else the network's key has seen it
        seen.append(file_hash(inputs.folder.autoencoder))
    return _key(inputs.recipe.digest(), *seen, repr(inputs.leak))


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
