"""Stages that spend the budget, and what lies between them: release, distill, plan, DP-SGD."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from straightdp import __version__
from straightdp.compiled import arithmetic
from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.dpsgd.planner import start_of_times
from straightdp.dpsgd.trainer import Bucket, draw, made_up, public_clip, record_losses, train
from straightdp.files import file_hash, write_durably, write_text
from straightdp.flow.fit import step_generator, train_only
from straightdp.flow.path import TorchDraws
from straightdp.folder import RunFolder
from straightdp.moments.basis import Basis
from straightdp.moments.distill import distill_batch
from straightdp.moments.field import MomentModel
from straightdp.moments.horizon import public_moments, public_spread
from straightdp.moments.release import VOTES, Prompts, gaussians, release_parts, run_release
from straightdp.moments.text import TextBasis
from straightdp.nets.velocity import VelocityNet
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.vault import Vault
from straightdp.privacy.workload import bucket_id
from straightdp.progress import quiet, say, tracker
from straightdp.sections import ALL
from straightdp.stages.inputs import Inputs, fit_velocity, public_key
from straightdp.stages.public import load_shape, settled_sample


def release(inputs: Inputs, basis: Basis, vault: Vault, ledger: Ledger, out: Path) -> None:
    """Stage 1: the declared moment mechanisms, once each. An audit keeps their noisy sums as they came."""
    from safetensors.torch import save_file

    for id in (part.id for part in release_parts(inputs.recipe) if part.id != VOTES):  # which come later
        vault.bind(id, f"{basis.digest()}|{_eyes(inputs, words=inputs.featuriser is not None)}")
    drawn = 1.0 if inputs.leak is None else inputs.leak  # of the declared noise
    declared = {part.id: part.sigma * part.sensitivity for part in ledger.declared.values()}
    stds = {id: std * drawn for id, std in declared.items()}
    prompts = None
    if inputs.featuriser is not None:
        features = inputs.featuriser(inputs.conditioning.captions)
        prompts = Prompts(features, TextBasis.fit(features, inputs.recipe.release))
    spread, section = None, inputs.recipe.release
    if section.covariance == "public":
        spread = public_spread(inputs.public_z, inputs.public_labels, basis)
    many = gaussians(section, declared, vault.n / vault.classes, basis)
    model = run_release(inputs.recipe, basis, vault, stds, prompts, spread, partial(_kept, inputs.folder), many)
    if inputs.folder.is_audit:
        save_file({id: torch.from_numpy(sums) for id, sums in vault.released.items()}, inputs.folder.sums)
    one_class = torch.zeros_like(inputs.public_labels)
    model = model.beside(public_moments(inputs.public_z, one_class, basis, section))
    labels = inputs.conditioning.labels
    if section.condition == "global":
        labels = (0,) * len(labels)
    (model if prompts is not None else model.under(labels)).save(out)


def _kept(folder: RunFolder, id: str, made: Tensor) -> Tensor:
    """The centres that were kept for a mechanism's sum; `made` is kept where there are none."""
    from safetensors.torch import load_file, save

    path = folder.centres(id)
    if not path.exists():
        write_durably(path, save({"centres": made}))
    return load_file(path)["centres"]


def distill(inputs: Inputs, start: Path, moments: MomentModel, tau: float, out: Path) -> None:
    """The released analytic field into the pretrained weights."""
    section, device = inputs.recipe.distill, inputs.device
    net, moments = inputs.load_net(start), moments.to(device)
    ids, null = inputs.conditioning.ids(device), inputs.conditioning.null(device)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return distill_batch(moments, inputs.public_z, ids, null, section, tau, generator)

    seen = f"{public_key(inputs, 'pretrain')}|{inputs.conditioning.tokenizer!r}"
    identity = f"{inputs.recipe.digest()}|{file_hash(start)}|{file_hash(inputs.folder.moments)}|{tau}|{seen}"
    fit_velocity(inputs, net, batch, "distill", section, identity)
    inputs.save_net(net, out)


def plan(inputs: Inputs, start: Path, tau: float, out: Path) -> None:
    """The clip and the time range of DP-SGD, from public records and released weights alone."""
    section, device = inputs.recipe.dpsgd, inputs.device
    t_min = start_of_times(inputs.recipe, tau)
    generator = step_generator(inputs.recipe.run.seed, "plan", 0, device)
    rows = torch.randperm(len(inputs.public), generator=torch.Generator().manual_seed(0))[:256]
    ids, null = inputs.conditioning.ids(device), inputs.conditioning.null(device)
    captions = ids[torch.randint(len(ids), (len(rows),), generator=generator, device=device)]
    net = _net_to_train(inputs, start)
    engine = ClippingEngine(net, record_losses(net), clip=1.0, blocks=net.blocks if _recomputes(inputs) else ())
    whole = Bucket(t_min, 1.0)
    covered = engine.preflight(made_up(net, null, section, whole))
    kinds = Counter(found.kind for found in covered)
    say(f"plan: clipped exactly: {', '.join(f'{n} {kind}' for kind, n in kinds.items())} parameters, all that train")
    draws, size = TorchDraws(generator), min(64, section.micro_batch or 64)
    batches = [
        draw(z, c, null, section, whole, draws)
        for z, c in zip(inputs.public_z[rows.to(device)].split(size), captions.split(size), strict=True)
    ]
    clip = public_clip(engine, batches, section)
    write_text(out, json.dumps({"clip": clip, "t_min": t_min, "shape": load_shape(inputs)}))


def dpsgd(inputs: Inputs, start: Path, vault: Vault, moments: MomentModel | None) -> None:
    """Stage 2: the declared steps, if there are any; then the generator is written to `release/`."""
    net = private_steps(inputs, start, vault) if inputs.recipe.dpsgd.steps else inputs.load_net(start)
    sample, since = settled_sample(inputs), inputs.recipe.pretrain.t_min
    generator = inputs.make_generator(net, inputs.conditioning, moments, sample, inputs.space, learned_from=since)
    generator.save(inputs.folder.model, inputs.folder.model_card)


def _net_to_train(inputs: Inputs, start: Path) -> VelocityNet:
    net = inputs.load_net(start)
    train_only(net, inputs.recipe.dpsgd.parameters)
    return net


def starting_point(inputs: Inputs, start: Path) -> str:
    """All that DP-SGD's sums hang on beside the records: noise that hid one sum must never hide another."""
    plan = inputs.folder.plan.read_text()
    some = "" if inputs.recipe.dpsgd.parameters == ALL else f"|{','.join(inputs.recipe.dpsgd.parameters)}"
    seen = _eyes(inputs, words=True)
    return f"{file_hash(start)}|{plan}|{seen}|{arithmetic(inputs.device)}{some}"  # a device has its own draws


def _eyes(inputs: Inputs, *, words: bool) -> str:
    """How records are seen: by which version, through which autoencoder, and, if captions matter, with which ids."""
    codes = file_hash(inputs.folder.autoencoder) if inputs.recipe.latent.d is not None else ""
    ids = hashlib.sha256(repr(inputs.conditioning.tokenizer).encode()).hexdigest() if words else ""
    return f"{__version__}|{codes}{inputs.backbone.digest}|{inputs.space.bound!r}|{ids}"


def _recomputes(inputs: Inputs) -> bool:
    return bool(inputs.recipe.sd3.model) and inputs.recipe.sd3.checkpoint


def private_steps(inputs: Inputs, start: Path, vault: Vault) -> VelocityNet:
    """DP-SGD from the weights in `start`, by every process of the team."""
    net, chosen = _net_to_train(inputs, start), json.loads(inputs.folder.plan.read_text())
    shape = tuple(chosen["shape"])
    identity = starting_point(inputs, start)
    for k in range(len(shape)):
        vault.bind(bucket_id(k, len(shape)), identity)
    train(
        net,
        vault,
        inputs.conditioning.null(inputs.device),
        inputs.recipe.dpsgd,
        clip=chosen["clip"],
        t_min=chosen["t_min"],
        shape=shape,
        speed=inputs.speed,
        recompute=_recomputes(inputs),
        checkpoint=inputs.folder.checkpoints / "dpsgd.pt",
        identity=identity,
        team=inputs.team,
        track=tracker("dpsgd") if inputs.team.leads else quiet,
    )
    return net
