"""The stations of a run. Each takes what earlier ones left, does one thing, and writes its artefact."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from straightdp.compiled import Compiled, half
from straightdp.data import synthetic
from straightdp.data.records import Records
from straightdp.dpsgd.clipping import ClippingEngine
from straightdp.dpsgd.trainer import draw, made_up, public_clip, record_losses, train
from straightdp.files import file_hash, write_text
from straightdp.flow.fit import fit, step_generator, trainable
from straightdp.flow.loss import squared_error
from straightdp.flow.path import TorchDraws, interpolate, noise_like, uniform_times, velocity
from straightdp.folder import RunFolder
from straightdp.generator import Conditioning, Generator
from straightdp.metrics.probe import fit_probe
from straightdp.moments.basis import Basis, fit_basis
from straightdp.moments.distill import distill_batch
from straightdp.moments.field import MomentModel
from straightdp.moments.horizon import Horizon, horizon, public_moments
from straightdp.moments.release import run_release
from straightdp.nets.mmdit import MMDiT
from straightdp.privacy.intake import Intake
from straightdp.privacy.ledger import Ledger
from straightdp.privacy.vault import Vault
from straightdp.privacy.workload import GRADIENTS
from straightdp.progress import quiet, say, tracker
from straightdp.recipe import Recipe
from straightdp.team import ALONE, Team


@dataclass
class Inputs:
    """What every stage may use. Private records are behind `intake` and `vault`, which give out none."""

    recipe: Recipe
    folder: RunFolder
    device: torch.device
    public: Records
    public_captions: tuple[str, ...]  # one a public class
    conditioning: Conditioning
    intake: Intake
    team: Team = ALONE
    _public_z: Tensor | None = field(default=None, repr=False)

    @property
    def public_z(self) -> Tensor:
        """Public records on the device, kept there."""
        if self._public_z is None:
            self._public_z = self.public.z().to(self.device)
        return self._public_z

    def new_net(self) -> MMDiT:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.run.seed)
            return MMDiT(self.recipe.net, self.public.shape).to(self.device)

    def load_net(self, path: Path) -> MMDiT:
        from safetensors.torch import load_file

        net = self.new_net()
        net.load_state_dict(load_file(path))
        return net

    @property
    def compile(self) -> bool:
        choice = self.recipe.run.compile
        return self.device.type == "cuda" if choice == "auto" else choice == "on"


def save_net(net: MMDiT, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(net.state_dict(), path)


MakeBatch = Callable[[torch.Generator], tuple[Tensor, Tensor, Tensor, Tensor]]
"""Public randomness to (x_t, t, captions, target velocity)."""


def pretrain(inputs: Inputs, out: Path) -> None:
    """Flow matching, equation (1), on public images under captions of their own."""
    section, device = inputs.recipe.pretrain, inputs.device
    net, z = inputs.new_net(), inputs.public_z
    net.constrained = not inputs.recipe.net.post_hoc
    labels = torch.from_numpy(inputs.public.labels).to(device)
    ids = inputs.conditioning.tokenizer.encode(inputs.public_captions).to(device)
    null = inputs.conditioning.null(device)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = torch.randint(len(z), (section.batch,), generator=generator, device=device)
        t = uniform_times(section.batch, 0.0, 1.0, generator, device)
        xi = noise_like(z[rows], generator)
        dropped = torch.rand(section.batch, generator=generator, device=device) < section.p_uncond
        captions = torch.where(dropped[:, None], null, ids[labels[rows]])
        return interpolate(z[rows], xi, t), t, captions, velocity(z[rows], xi)

    _fit(inputs, net, batch, "pretrain", section)
    save_net(net, out)


def _fit(inputs: Inputs, net: MMDiT, batch: MakeBatch, name: str, section) -> None:
    """Regress the network on the batches' velocities."""
    parameters, network = trainable(net), half(net)

    def loss_gradient(x: Tensor, t: Tensor, captions: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(squared_error(network(x, t, captions), target).mean(), parameters)

    compiled = Compiled(loss_gradient, enabled=inputs.compile)

    def gradients(step: int) -> None:
        generator = step_generator(inputs.recipe.run.seed, name, step, inputs.device)
        for parameter, gradient in zip(parameters, compiled(*batch(generator)), strict=True):
            parameter.grad = gradient

    fit(
        net,
        gradients,
        steps=section.steps,
        lr=section.lr,
        ema=section.ema,
        checkpoint=inputs.folder.checkpoints / f"{name}.pt",
        every=max(50, section.steps // 20),
        track=tracker(name),
    )


def calibrate(inputs: Inputs, out: Path) -> None:
    """Every public calibration of the release: PCA basis, radii, and the horizon tau."""
    from safetensors.torch import save_file

    recipe, labels = inputs.recipe, torch.from_numpy(inputs.public.labels)
    basis = fit_basis(inputs.public.z(), labels, recipe.release)
    numbers = {k: repr(getattr(basis, k)) for k in RADII}
    if recipe.distill.tau == "knee":
        found = _horizon(inputs, basis, labels)
        numbers["tau"] = repr(found.tau)
        say(
            f"calibrate: tau = {found.tau:.3f} (knee at {found.knee:.3f}); up to it the fields' cosine is at least "
            f"{float(found.worst_class[found.times <= found.tau].min()):.3f} in the worst class; drift bound "
            f"{found.drift:.3g} with the largest gap and slope seen ({found.lipschitz:.3g})"
        )
    else:
        numbers["tau"] = repr(recipe.distill.tau)
    save_file({"mean": basis.mean, "P": basis.P}, out, metadata=numbers)


def _horizon(inputs: Inputs, basis: Basis, labels: Tensor) -> Horizon:
    model = public_moments(inputs.public.z(), labels, basis, inputs.recipe.release).to(inputs.device)
    generator = step_generator(inputs.recipe.run.seed, "horizon", 0, inputs.device)
    y = labels.unique(return_inverse=True)[1].to(inputs.device)
    return horizon(model, inputs.public_z, y, generator, cap=inputs.recipe.distill.tau_cap)


RADII = ("radius", "residual_radius", "widest_residual", "image_radius")


def load_basis(path: Path) -> Basis:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        radii = {k: float(file.metadata()[k]) for k in RADII}
        return Basis(file.get_tensor("mean"), file.get_tensor("P"), **radii)


def load_tau(path: Path) -> float:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return float(file.metadata()["tau"])


def release(inputs: Inputs, basis: Basis, vault: Vault, ledger: Ledger, out: Path) -> None:
    """Stage 1: the declared moment mechanisms, once each."""
    stds = {part.id: part.sigma * part.sensitivity for part in ledger.declared.values()}
    run_release(inputs.recipe, basis, vault, stds).save(out)


def distill(inputs: Inputs, start: Path, moments: MomentModel, tau: float, out: Path) -> None:
    """The released analytic field into the pretrained weights."""
    section, device = inputs.recipe.distill, inputs.device
    net, moments = inputs.load_net(start), moments.to(device)
    ids, null = inputs.conditioning.ids(device), inputs.conditioning.null(device)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return distill_batch(moments, inputs.public_z, ids, null, section, tau, generator)

    _fit(inputs, net, batch, "distill", section)
    save_net(net, out)


def plan(inputs: Inputs, start: Path, tau: float, out: Path) -> None:
    """The clip and the time range of DP-SGD, from public records and released weights alone."""
    section, device = inputs.recipe.dpsgd, inputs.device
    t_min = tau if section.t_min is None else section.t_min
    generator = step_generator(inputs.recipe.run.seed, "plan", 0, device)
    rows = torch.randperm(len(inputs.public), generator=torch.Generator().manual_seed(0))[:256]
    ids, null = inputs.conditioning.ids(device), inputs.conditioning.null(device)
    captions = ids[torch.randint(len(ids), (len(rows),), generator=generator, device=device)]
    net = inputs.load_net(start)
    engine = ClippingEngine(net, record_losses(net), clip=1.0)
    covered = engine.preflight(made_up(net, ids, null, section, t_min))
    kinds = Counter(found.kind for found in covered)
    say(f"plan: clipped exactly: {', '.join(f'{n} {kind}' for kind, n in kinds.items())} parameters, all that train")
    draws = TorchDraws(generator)
    batches = [
        draw(z, c, null, section, t_min, draws)
        for z, c in zip(inputs.public_z[rows.to(device)].split(64), captions.split(64), strict=True)
    ]
    write_text(out, json.dumps({"clip": public_clip(engine, batches, section), "t_min": t_min}))


def dpsgd(inputs: Inputs, start: Path, vault: Vault, moments: MomentModel | None) -> None:
    """Stage 2: the declared steps, if there are any; then the generator is written to `release/`."""
    net = private_steps(inputs, start, vault) if inputs.recipe.dpsgd.steps else inputs.load_net(start)
    generator = Generator(net, inputs.conditioning, moments, inputs.recipe.sample)
    generator.save(inputs.folder.model, inputs.folder.model_card)


def private_steps(inputs: Inputs, start: Path, vault: Vault) -> MMDiT:
    """DP-SGD from the weights in `start`, by every process of the team."""
    net, chosen = inputs.load_net(start), json.loads(inputs.folder.plan.read_text())
    vault.bind(GRADIENTS, f"{file_hash(start)}|{chosen}|{inputs.device.type}")  # a device has draws of its own
    train(
        net,
        vault,
        inputs.conditioning.ids(inputs.device),
        inputs.conditioning.null(inputs.device),
        inputs.recipe.dpsgd,
        clip=chosen["clip"],
        t_min=chosen["t_min"],
        compile=inputs.compile,
        checkpoint=inputs.folder.checkpoints / "dpsgd.pt",
        team=inputs.team,
        track=tracker("dpsgd") if inputs.team.leads else quiet,
    )
    return net


def sample(inputs: Inputs) -> None:
    """The synthetic data set, drawn from `release/` alone."""
    generator = Generator.load(inputs.folder.release, inputs.device)
    section = inputs.recipe.sample
    y = generator.labels(section.n, inputs.device)
    z = generator.draw(y, section, inputs.recipe.run.seed, tracker("sample"), compile=inputs.compile)
    conditioning = generator.conditioning
    synthetic.write(inputs.folder.synthetic, z, y, conditioning.classes, conditioning.captions)


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
                draw = moments.sample(y, torch.Generator().manual_seed(seed)).clamp(-1, 1)
                return probe(draw.reshape(z.shape), y, seed)

            score("released moments alone", "Gaussian draws of the release, no network", release_alone)
        if recipe.evaluate.real_reference:
            score(
                "real private data",
                "the probe trained on the private records themselves; not private",
                lambda s: intake.real_accuracy(lambda a, b: fit_probe(a, b, classes, recipe.evaluate, s, device)),
            )
        scores.append({"name": "chance", "mean": 1 / classes, "std": None, "note": "a guess", "values": []})
    body = {"holdout_n": intake.holdout_n, "scores": scores}
    write_text(inputs.folder.evaluation, json.dumps(body, indent=1))
