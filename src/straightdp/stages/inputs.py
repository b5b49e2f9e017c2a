"""What the stages share: their inputs, and how a network is fitted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from straightdp import __version__
from straightdp.compiled import Compiled, Speed, fastest, half, halves
from straightdp.data.records import Records
from straightdp.files import file_hash
from straightdp.flow.fit import StepGradients, fit, step_generator, trainable
from straightdp.flow.loss import squared_error
from straightdp.flow.sampler import Network
from straightdp.folder import RunFolder
from straightdp.generator import Conditioning, Generator
from straightdp.moments.text import Featuriser
from straightdp.nets.backbone import Backbone, OwnNet
from straightdp.nets.spaces import Pixels, Space, flow_of
from straightdp.nets.velocity import VelocityNet
from straightdp.privacy.intake import Intake
from straightdp.progress import say, tracker
from straightdp.recipe import Recipe
from straightdp.team import ALONE, Team


@dataclass
class Inputs:
    """What every stage may use. Private records are behind `intake` and `vault`, which give out none."""

    recipe: Recipe
    folder: RunFolder
    device: torch.device
    public: Records
    public_ids: Tensor  # (N, length), the public records' captions
    conditioning: Conditioning
    intake: Intake
    featuriser: Featuriser | None = None  # what captions are to cross moments, if the release takes any
    team: Team = ALONE
    leak: float | None = None  # of an audit: its noise, as a part of what is declared; None is no audit
    backbone: Backbone = field(default=None)  # type: ignore[assignment]  # left out, a network of our own
    make_generator: Callable[..., Generator] = Generator
    space: Space = field(init=False)  # what is released is of its z
    _public_z: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.space = Pixels(self.public.shape)
        self.public_ids = self.public_ids.to(self.device)
        self.backbone = self.backbone or OwnNet(self.recipe.net)

    def enter(self, space: Space) -> None:
        """From here on records are seen there, and the flow lives there unless it stays in pixels."""
        self.space = space
        self._public_z.clear()

    @property
    def flow(self) -> Space:
        """Where the network works."""
        return flow_of(self.space)

    @property
    def public_z(self) -> Tensor:
        """Public records as private ones are seen, on the device, kept there."""
        return self._kept("space", self.space)

    @property
    def public_flow(self) -> Tensor:
        """Public records where the network works, on the device, kept there."""
        return self.public_z if self.flow is self.space else self._kept("flow", self.flow)

    def _kept(self, name: str, space: Space) -> Tensor:
        if name not in self._public_z:
            self._public_z[name] = space.encode(self.public.z()).to(self.device)
        return self._public_z[name]

    @property
    def public_labels(self) -> Tensor:
        """Classes that public records have, as 0, 1, ... on the CPU."""
        return torch.from_numpy(self.public.labels).unique(return_inverse=True)[1]

    def new_net(self) -> VelocityNet:
        return self.backbone.new_net(self.flow.shape, self.recipe.run.seed).to(self.device)

    def load_net(self, path: Path) -> VelocityNet:
        from safetensors.torch import load_file

        net = self.new_net()
        self.backbone.restore(net, load_file(path))
        return net

    def save_net(self, net: VelocityNet, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.backbone.state(net), path)

    @property
    def thorough(self) -> bool:
        """Whether evaluation takes its time."""
        return self.recipe.evaluate.is_thorough(self.device.type)

    @property
    def speed(self) -> Speed:
        speeds: dict[str, Speed] = {"auto": fastest(self.device), "on": "compiled", "captured": "captured"}
        return speeds.get(self.recipe.run.compile, "plain")


def public_key(inputs: Inputs, name: str) -> str:
    """Of all that the stages `autoencode`, `prior` and `pretrain` hang on: public records and a few settings."""
    recipe, public = inputs.recipe, inputs.public
    sections = {"autoencode": ("latent",), "prior": ("sd3", "sample"), "pretrain": ("net", "pretrain")}[name]
    settings: dict[str, Any] = {part: getattr(recipe, part).model_dump(mode="json") for part in sections}
    if name == "pretrain":
        settings |= {"net": recipe.net.while_pretraining.identity(), "pretrain": recipe.pretrain.identity()}
    if name == "autoencode":
        del settings["latent"]["flow"]  # which comes after it
    settings["seed"] = recipe.run.seed
    codes = file_hash(inputs.folder.autoencoder) if name == "pretrain" and recipe.latent.is_flow else ""
    about = (
        __version__,
        json.dumps(settings, sort_keys=True),
        codes,
        inputs.backbone.digest,
        inputs.conditioning.captions if name == "prior" else (),
        public.x.shape,
        public.x.dtype.str,
        public.classes,
    )
    digest = hashlib.sha256(repr(about).encode())
    for part in (public.x, public.labels, inputs.public_ids.cpu().numpy()):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


MakeBatch = Callable[[torch.Generator], tuple[Tensor, Tensor, Tensor, Tensor]]
"""Public randomness to (x_t, t, captions, target velocity)."""


def fit_velocity(inputs: Inputs, net: VelocityNet, batch: MakeBatch, name: str, section, identity: str) -> None:
    """Regress the network on the batches' velocities.

    The fast ways to a gradient are compared with the plain one in float32 now and then, and left when they go wrong.
    """
    parameters = trainable(net)

    def gradient_of(network: Network):
        def loss_gradient(x: Tensor, t: Tensor, captions: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(squared_error(network(x, t, captions), target).mean(), parameters)

        return loss_gradient

    plain = gradient_of(net)
    fast = gradient_of(half(net))
    ways: dict[str, Callable[..., tuple[Tensor, ...]]] = {}
    if inputs.speed == "compiled":
        ways["compiled"] = Compiled(fast, speed="compiled")
    if inputs.speed != "plain" and inputs.device.type == "cuda":
        ways["captured"] = Compiled(fast, speed="captured")
    if halves(inputs.device):
        ways["bfloat16"] = fast
    ways["float32"] = plain
    checked = {0, 10, 100, *range(0, section.steps, max(50, section.steps // 20))}

    def gradients(step: int) -> None:
        given = batch(step_generator(inputs.recipe.run.seed, name, step, inputs.device))
        if step in checked and len(ways) > 1:
            reference = [g.clone() for g in plain(*given)]
            while len(ways) > 1 and (found := _cosine(next(iter(ways.values()))(*given), reference)) < 0.9:
                say(
                    f"{name}: the {next(iter(ways))} gradient of step {step} is wrong (cosine {found:.3f}); "
                    "going on without it"
                )
                del ways[next(iter(ways))]
        for parameter, gradient in zip(parameters, next(iter(ways.values()))(*given), strict=True):
            parameter.grad = gradient

    checkpoint = inputs.folder.checkpoints / f"{name}.pt"
    follow_gradients(net, gradients, name, section, section.ema, checkpoint, identity)


def _cosine(one: tuple[Tensor, ...], two: list[Tensor]) -> float:
    """Of two gradients; 1 where both are zero, 0 where one is not finite."""
    a, b = (torch.cat([g.detach().double().flatten() for g in of]) for of in (one, two))
    lengths = a.norm() * b.norm()
    if not torch.isfinite(lengths):
        return 0.0
    return float(a @ b / lengths) if lengths > 0 else float(a.norm() == b.norm())


def follow_gradients(
    net: nn.Module, gradients: StepGradients, name: str, section, ema: float, checkpoint: Path, identity: str
) -> None:
    fit(
        net,
        gradients,
        steps=section.steps,
        lr=section.lr,
        ema=ema,
        checkpoint=checkpoint,
        identity=identity,
        every=max(50, section.steps // 20),
        track=tracker(name),
    )
