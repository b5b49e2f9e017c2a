"""Pictures that private records voted for, and what is left of their noisy votes: post-processing of a release."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from straightdp.data.records import to_z


@dataclass(frozen=True)
class Elected:
    """Pictures of each class, uint8 (classes, m, C, H, W), and how often each is to be taken, (classes, m)."""

    images: Tensor
    weights: Tensor

    def state(self) -> dict[str, Tensor]:
        return {"images": self.images.contiguous(), "weights": self.weights.contiguous()}

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Elected:
        from safetensors.torch import load_file

        state = load_file(path)
        return cls(state["images"], state["weights"].to(device))

    def draw(self, y: Tensor, generator: torch.Generator, unelected: float = 0.0) -> Tensor:
        """One picture for every class of y, in [-1, 1], where y is; a part of them by no one's vote."""
        shares = self.weights / self.weights.sum(dim=1, keepdim=True)
        shares = (1 - unelected) * shares + unelected / shares.shape[1]
        chosen = torch.multinomial(shares[y], 1, generator=generator)[:, 0]
        return to_z(self.images[y.cpu(), chosen.cpu()].numpy()).to(y.device)


def above_noise(votes: Tensor, least: float) -> Tensor:
    """What is left of noisy votes (classes, m) when `least` is taken off each, and not below 0."""
    return (votes.double() - least).clamp_min(0)
