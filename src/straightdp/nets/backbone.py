"""What a run trains: a network of our own, or what is added to one that is frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from straightdp.nets.mmdit import MMDiT
from straightdp.nets.unet import UNet
from straightdp.nets.velocity import VelocityNet
from straightdp.recipe import Net


class Backbone(Protocol):
    """`digest` tells frozen weights, that it brings with it, from others; it is empty without any."""

    @property
    def digest(self) -> str: ...

    def new_net(self, shape: tuple[int, int, int], seed: int) -> VelocityNet:
        """The network before any training here, the same for the same seed."""
        ...

    def state(self, net: VelocityNet) -> dict[str, Tensor]:
        """All that is trained: what a checkpoint holds, and what is released."""
        ...

    def restore(self, net: VelocityNet, state: dict[str, Tensor]) -> None: ...


OwnVelocity = MMDiT | UNet
"""Networks of our own, which a release can hold whole."""


def own_net(section: Net, shape: tuple[int, int, int]) -> OwnVelocity:
    return UNet(section, shape) if section.kind == "unet" else MMDiT(section, shape)


@dataclass(frozen=True)
class OwnNet:
    """A network of our own, all of it trained."""

    section: Net
    digest: str = ""

    def new_net(self, shape: tuple[int, int, int], seed: int) -> OwnVelocity:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return own_net(self.section, shape)

    def state(self, net: nn.Module) -> dict[str, Tensor]:
        return net.state_dict()

    def restore(self, net: nn.Module, state: dict[str, Tensor]) -> None:
        net.load_state_dict(state)
