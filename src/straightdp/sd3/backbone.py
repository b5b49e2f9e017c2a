"""Adapters on a frozen Stable Diffusion 3, where a run would otherwise train a network of its own."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from straightdp.nets.velocity import VelocityNet
from straightdp.recipe import Sd3
from straightdp.sd3.loading import load_prior, read_prompts
from straightdp.sd3.lora import adapter_state, add_adapters, load_adapter_state
from straightdp.sd3.velocity import Velocity


@dataclass(frozen=True)
class PromptIds:
    """In the place of a tokenizer: a caption's id is its row in the prompt table, and the empty prompt has the last."""

    captions: tuple[str, ...]
    length: int = 1
    words: tuple[str, ...] = ()  # it knows captions as wholes

    @property
    def vocabulary(self) -> int:
        return len(self.captions) + 1

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {caption: k for k, caption in enumerate(self.captions)}

    def encode(self, captions: tuple[str, ...]) -> Tensor:
        """(n, 1). KeyError for a caption that has no row."""
        return torch.tensor([self._rows[caption] for caption in captions], dtype=torch.int64).reshape(-1, 1)

    def null(self) -> Tensor:
        return torch.tensor([len(self.captions)])


class Sd3Backbone:
    """The frozen model with adapters: networks share its weights, and each has adapters of its own."""

    def __init__(self, section: Sd3, captions: tuple[str, ...], size: int, seed: int, device: torch.device):
        self.section = section
        table = read_prompts(section, captions, device)  # first: the text encoders are dropped before the rest comes
        self.prior = load_prior(section, size, device)
        said = b"".join(part.float().cpu().numpy().tobytes() for part in (table.embeddings, table.pooled))
        self.digest = hashlib.sha256(self.prior.digest.encode() + said).hexdigest()  # of weights and prompts
        self._net = Velocity(self.prior, table).eval()
        add_adapters(self._net, section.rank, seed)

    def new_net(self, shape: tuple[int, int, int], seed: int) -> Velocity:
        """As it was loaded: the adapters' start hangs on the seed that this was made with."""
        frozen = [value for value in (*self._net.parameters(), *self._net.buffers()) if not value.requires_grad]
        return copy.deepcopy(self._net, {id(value): value for value in frozen})

    def state(self, net: VelocityNet) -> dict[str, Tensor]:
        return adapter_state(net)

    def restore(self, net: VelocityNet, state: dict[str, Tensor]) -> None:
        load_adapter_state(net, state)
