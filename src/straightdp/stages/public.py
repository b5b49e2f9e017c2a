"""Stages that see public records alone: the space, the network before private training, every calibration."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from straightdp.compiled import Compiled, Speed, half
from straightdp.dpsgd import planner
from straightdp.files import write_text
from straightdp.flow.fit import step_generator, trainable
from straightdp.flow.loss import squared_error
from straightdp.flow.path import interpolate, noise_like, uniform_times, velocity
from straightdp.moments.basis import Basis, fit_basis
from straightdp.moments.horizon import Horizon, horizon, public_moments
from straightdp.moments.plateau import plateau
from straightdp.moments.release import release_parts
from straightdp.nets.autoencoder import Autoencoder
from straightdp.nets.backbone import OwnNet
from straightdp.nets.spaces import Codes
from straightdp.nets.velocity import VelocityNet
from straightdp.privacy.workload import UNIFORM, Shape
from straightdp.progress import say
from straightdp.recipe import Recipe, Sample
from straightdp.stages.inputs import Inputs, fit_velocity, follow_gradients, public_key


def autoencode(inputs: Inputs, out: Path) -> None:
    """The public autoencoder, for a latent run; frozen from here on."""
    from safetensors.torch import save_file

    net = fit_autoencoder(
        inputs.recipe,
        inputs.public.z().to(inputs.device),
        speed=inputs.speed,
        checkpoint=inputs.folder.checkpoints / "autoencode.pt",
        identity=public_key(inputs, "autoencode"),
    )
    save_file(net.state_dict(), out)


def fit_autoencoder(recipe: Recipe, x: Tensor, *, speed: Speed, checkpoint: Path, identity: str = "") -> Autoencoder:
    """Trained on the images x, (n, C, H, W), where they are."""
    section, seed, device = recipe.latent, recipe.run.seed, x.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Autoencoder(section, (x.shape[1], x.shape[2], x.shape[3])).to(device)
    parameters = trainable(net)
    compiled = Compiled(lambda x, noise: torch.autograd.grad(net.loss(x, noise), parameters), speed=speed)

    def gradients(step: int) -> None:
        generator = step_generator(seed, "autoencode", step, device)
        rows = torch.randint(len(x), (section.batch,), generator=generator, device=device)
        noise = torch.randn(section.batch, *net.shape, generator=generator, device=device)
        for parameter, gradient in zip(parameters, compiled(x[rows], noise), strict=True):
            parameter.grad = gradient

    follow_gradients(net, gradients, "autoencode", section, 0.99, checkpoint, identity)
    net.settle(x)
    return net


def enter_space(inputs: Inputs) -> None:
    """Work in the code of the autoencoder that was trained, or of a frozen model, if the recipe asks for one."""
    if inputs.recipe.sd3.model:
        from straightdp.stages import sd3

        return sd3.enter_prior(inputs) if inputs.folder.prior.exists() else sd3.enter_codes(inputs)
    if inputs.recipe.latent.d is None:
        return None
    from safetensors.torch import load_file

    net = Autoencoder(inputs.recipe.latent, inputs.public.shape)
    net.load_state_dict(load_file(inputs.folder.autoencoder))
    inputs.enter(Codes(net, inputs.device))


def draw_prior(inputs: Inputs, out: Path) -> None:
    """The public set of a run on a frozen model."""
    from straightdp.stages import sd3  # which imports libraries that other runs do not need

    sd3.draw_prior(inputs, out)


def pretrain(inputs: Inputs, out: Path) -> None:
    """Flow matching, equation (1), on public images under captions of their own; a frozen model needs none."""
    section = inputs.recipe.pretrain
    if inputs.recipe.sd3.model:
        inputs.save_net(inputs.new_net(), out)
        return
    net = _pretrained_net(inputs)
    identity = public_key(inputs, "pretrain")

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _public_batch(inputs, section.batch, generator)

    fit_velocity(inputs, net, batch, "pretrain", section, identity)
    inputs.save_net(net, out)


def _pretrained_net(inputs: Inputs) -> VelocityNet:
    """As it is while it pretrains; its parameters are those of the network that goes on from it."""
    return (
        OwnNet(inputs.recipe.net.while_pretraining).new_net(inputs.flow.shape, inputs.recipe.run.seed).to(inputs.device)
    )


def _public_batch(inputs: Inputs, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x_t, t, captions, target velocity) of n public records; a caption is dropped with p_uncond."""
    z, device, section = inputs.public_flow, inputs.device, inputs.recipe.pretrain
    rows = torch.randint(len(z), (n,), generator=generator, device=device)
    t = uniform_times(n, section.t_min, 1.0, generator, device)
    xi = noise_like(z[rows], generator)
    dropped = torch.rand(n, generator=generator, device=device) < section.p_uncond
    captions = torch.where(dropped[:, None], inputs.conditioning.null(device), inputs.public_ids[rows])
    return interpolate(z[rows], xi, t), t, captions, velocity(z[rows], xi)


@torch.no_grad()
def public_loss(inputs: Inputs, start: Path, batches: int = 8, n: int = 128) -> float:
    """The pretrained network's loss on public records: the same draws for every network of one space and t_min."""
    from safetensors.torch import load_file

    net = _pretrained_net(inputs).eval()
    net.load_state_dict(load_file(start))
    losses = []
    for k in range(batches):
        x, t, captions, target = _public_batch(inputs, n, step_generator(0, "public loss", k, inputs.device))
        losses.append(squared_error(half(net)(x, t, captions), target).mean())
    return float(torch.stack(losses).mean())


def calibrate(inputs: Inputs, pretrained: Path, out: Path) -> None:
    """Every public calibration of the release: PCA basis, radii, and the horizon tau; and the pretrained net's loss."""
    from safetensors.torch import save_file

    recipe, z = inputs.recipe, inputs.public_z
    basis = fit_basis(z.cpu(), inputs.public_labels, recipe.release, inputs.space.bound)
    numbers = {k: repr(getattr(basis, k)) for k in RADII}
    found = measured_horizon(recipe, basis, z, inputs.public_labels)
    if found is not None:
        write_text(inputs.folder.horizon, json.dumps({"knee": found.knee, "tau": found.tau} | found.curves()))
        say(
            f"calibrate: tau = {found.tau:.3f} (knee at {found.knee:.3f}); up to it the fields' cosine is at least "
            f"{float(found.worst_class[found.times <= found.tau].min()):.3f} in the worst class; drift bound "
            f"{found.drift:.3g} with the largest gap and slope seen ({found.lipschitz:.3g})"
        )
    numbers |= {"tau": repr(tau_of(recipe, found))}
    if not recipe.sd3.model:
        numbers |= {"pretrain_loss": repr(public_loss(inputs, pretrained))}
    save_file({"mean": basis.mean, "P": basis.P}, out, metadata=numbers)


def measured_horizon(recipe: Recipe, basis: Basis, z: Tensor, labels: Tensor) -> Horizon | None:
    """How far the moments of public records reach, if the recipe asks for that to be measured."""
    if recipe.distill.tau != "knee" or not distils(recipe):
        return None
    generator = step_generator(recipe.run.seed, "horizon", 0, z.device)
    model = public_moments(z, labels, basis, recipe.release).to(z.device)
    return horizon(model, z, labels.to(z.device), generator, cap=recipe.distill.tau_cap)


def distils(recipe: Recipe) -> bool:
    return bool(release_parts(recipe)) and recipe.distill.steps > 0


def tau_of(recipe: Recipe, found: Horizon | None) -> float:
    """Where nothing is distilled the moments lead nowhere."""
    if found is not None:
        return found.tau
    return float(recipe.distill.tau) if distils(recipe) else 0.0


def allocate(inputs: Inputs, basis: Basis, tau: float, out: Path) -> None:
    """The planner's choice among its candidates, from public records alone."""
    found = measured_candidates(inputs.recipe, basis, inputs.public_z, inputs.public_labels, tau)
    say("allocate: candidates for DP-SGD's time buckets\n" + planner.describe(found))
    body = {"shape": planner.best(found).shape, "candidates": [candidate.to_json() for candidate in found]}
    write_text(out, json.dumps(body, indent=1))


def measured_candidates(recipe: Recipe, basis: Basis, z: Tensor, labels: Tensor, tau: float) -> list[planner.Candidate]:
    generator = step_generator(recipe.run.seed, "allocate", 0, z.device)
    model = public_moments(z, labels, basis, recipe.release).to(z.device)
    return planner.planned(recipe, model, z, labels.to(z.device), tau, generator)


def load_shape(inputs: Inputs) -> Shape:
    if inputs.recipe.dpsgd.plan == "uniform" or not inputs.recipe.dpsgd.steps:
        return UNIFORM
    return tuple(json.loads(inputs.folder.allocation.read_text())["shape"])


RADII = ("radius", "residual_radius", "widest_residual", "image_radius")


def load_basis(path: Path) -> Basis:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        radii = {k: float(file.metadata()[k]) for k in RADII}
        return Basis(file.get_tensor("mean"), file.get_tensor("P"), **radii)


def load_number(path: Path, name: str) -> float:
    """`tau` or `pretrain_loss` of a calibration."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return float(file.metadata()[name])


def settled_sample(inputs: Inputs) -> Sample:
    """How to draw, with t0 a number: where the recipe says plateau, the pretrained net shows it on public records."""
    section, folder = inputs.recipe.sample, inputs.folder
    if section.t0 != "plateau":
        return section
    if section.port != "guide":
        return section.model_copy(update={"t0": Sample().t0})
    settings = [section.steps, section.guidance, section.batch, public_key(inputs, "pretrain")]
    known = json.loads(folder.plateau.read_text()) if folder.plateau.exists() else {}
    if known.get("settings") != settings:
        basis = load_basis(folder.calibration)
        net = inputs.load_net(folder.checkpoints / "pretrained.safetensors").eval()
        found = plateau(
            net,
            public_moments(inputs.public_z, inputs.public_labels, basis, inputs.recipe.release).to(inputs.device),
            basis,
            inputs.public_z,
            inputs.public_labels.to(inputs.device),
            inputs.public_ids,
            inputs.conditioning.null(inputs.device),
            section,
            step_generator(inputs.recipe.run.seed, "plateau", 0, inputs.device),
        )
        known = {"t0": found.t0, "times": found.times, "distances": found.distances, "settings": settings}
        write_text(folder.plateau, json.dumps(known))
        say(
            f"sample: t0 = {found.t0:g}, the latest that keeps the public pictures' distance within a tenth of t0 = 0's"
        )
    return section.model_copy(update={"t0": known["t0"]})
