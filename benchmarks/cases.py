"""What contenders work on: a network, a batch of made-up records, an optimiser and an EMA, the same for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from straightdp.dpsgd.trainer import Bucket, draw, record_losses
from straightdp.flow.path import TorchDraws
from straightdp.nets.mmdit import MMDiT
from straightdp.recipe import DpSgd, Net, load


@dataclass(frozen=True)
class Case:
    """A network and a batch. Non-private contenders take the batch at once, private ones `micro_batch` records."""

    net: Net
    shape: tuple[int, int, int]
    records: int
    draws: int
    micro_batch: int
    device: str = "cpu"
    clip: float = 1.0
    sigma: float = 1.0
    lr: float = 1e-4
    ema: float = 0.999

    def __post_init__(self):
        if self.records % self.micro_batch:
            raise ValueError(f"{self.records} records do not split into micro-batches of {self.micro_batch}")


def paper() -> Case:
    """The network of the paper's last table and its batch on MNIST: q N = 0.02 x 60,000 records, 4 draws."""
    return Case(Net(), (1, 28, 28), records=1200, draws=4, micro_batch=1200)


def demo() -> Case:
    """The built-in demonstration's network and one of its micro-batches."""
    recipe = load("demo")
    size, section = recipe.image.size, recipe.dpsgd
    assert size is not None
    shape = (recipe.image.channels, size, size)
    return Case(recipe.net, shape, section.micro_batch, section.draws, section.micro_batch)


CASES = {"paper": paper, "demo": demo}


class Work:
    """A case made concrete, the same for each contender: network, batch, optimiser, EMA."""

    def __init__(self, case: Case):
        self.case, self.device = case, torch.device(case.device)
        torch.manual_seed(0)
        self.net = MMDiT(case.net, case.shape)
        with torch.no_grad():
            for p in self.net.parameters():
                p.add_(torch.randn_like(p) * 0.05)  # some layers start at zero, and have no gradient there
        self.net.to(self.device)
        self.losses = record_losses(self.net)
        self.batch = tuple(x.to(self.device) for x in made_up(case))
        self.parameters = list(self.net.parameters())
        self.average = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=case.lr, weight_decay=0.0, fused=self.device.type == "cuda"
        )

    def parts(self, size: int) -> list[tuple[Tensor, ...]]:
        return list(zip(*(x.split(size) for x in self.batch), strict=True))

    def update(self, gradients: list[Tensor]) -> None:
        for p, g in zip(self.parameters, gradients, strict=True):
            p.grad = g
        self.optimizer.step()
        self.move_average()

    def move_average(self) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.parameters, 1 - self.case.ema)

    def noised(self, sums: list[Tensor]) -> list[Tensor]:
        """In place: noise, and the division by the number of records."""
        for value in sums:
            value.add_(torch.randn_like(value), alpha=self.case.sigma * self.case.clip).div_(self.case.records)
        return sums


def made_up(case: Case) -> tuple[Tensor, ...]:
    """Random records, captions, t and xi, on the CPU so that every device gets the same."""
    generator = torch.Generator().manual_seed(1)
    z = torch.rand(case.records, *case.shape, generator=generator) * 2 - 1
    captions = torch.randint(1, case.net.vocabulary, (case.records, case.net.caption_length), generator=generator)
    null = torch.zeros(case.net.caption_length, dtype=torch.int64)
    return draw(z, captions, null, DpSgd(draws=case.draws), Bucket(0.0, 1.0), TorchDraws(generator))
