"""A small generator whose class sums of phi match the released ones: the second half of every one-shot rival."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from straightdp.compiled import Compiled, Speed
from straightdp.flow.fit import fit, step_generator, trainable
from straightdp.progress import Track
from straightdp.rivals.embedding import Embedding


class Generator(nn.Module):
    """A normal code and a class, through two hidden layers, to an image in [-1, 1]."""

    def __init__(self, shape: tuple[int, int, int], classes: int, *, hidden: int = 512, code: int = 100):
        super().__init__()
        self.shape, self.classes, self.code = shape, classes, code
        self.layers = nn.Sequential(
            nn.Linear(code + classes, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, math.prod(shape)),
            nn.Tanh(),
        )

    def forward(self, code: Tensor, y: Tensor) -> Tensor:
        """Codes (n, code) and classes (n,) to images (n, C, H, W)."""
        one_hot = (y[:, None] == torch.arange(self.classes, device=y.device)).to(code.dtype)  # can be traced
        return self.layers(torch.cat([code, one_hot], dim=1)).reshape(-1, *self.shape)


def match(
    embedding: Embedding,
    target: Tensor,
    shape: tuple[int, int, int],
    *,
    hidden: int = 512,
    code: int = 100,
    steps: int = 6_000,
    batch: int = 500,
    lr: float = 1e-3,
    seed: int,
    checkpoint: Path,
    track: Track,
    speed: Speed = "plain",
) -> Generator:
    """Fit a generator to `target` (classes, width), the released sums over the declared n; work where target is.

    Each step of Adam lowers |target - (1/B) sum_i phi(G(code_i, y_i)) e_{y_i}|^2 over fresh codes. The labels y are
    uniform, as the paper has them: every class has an equal part of the batch, which is rounded up for that. A class's
    share of the private records is not released apart from its sum, so in a set of unequal classes the match of a
    class is to its mean embedding times classes x share: images of a rare class come out too varied, of a common one
    too alike.

    Deterministic in its arguments; a run that was stopped goes on from `checkpoint`, if that is of the same work.
    """
    device, classes = target.device, len(target)
    target = target.float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Generator(shape, classes, hidden=hidden, code=code).to(device)
    y = torch.arange(classes, device=device).repeat_interleave(-(-batch // classes))
    parameters = trainable(net)

    def loss_gradient(drawn: Tensor) -> tuple[Tensor, ...]:
        sums = embedding.class_sums(net(drawn, y).reshape(classes, -1, math.prod(shape)))
        return torch.autograd.grad((target - sums / len(y)).square().sum(), parameters)

    def codes(step: int) -> Tensor:
        return torch.randn(len(y), code, generator=step_generator(seed, "match", step, device), device=device)

    fast = Compiled(loss_gradient, speed=speed)
    if speed != "plain":
        loss_gradient(codes(0))  # what phi keeps on the device must be there before the step is traced

    def gradients(step: int) -> None:
        for parameter, gradient in zip(parameters, fast(codes(step)), strict=True):
            parameter.grad = gradient

    about = (embedding.digest(), shape, hidden, code, steps, batch, lr, seed, device.type)
    identity = hashlib.sha256(repr(about).encode() + target.cpu().numpy().tobytes()).hexdigest()
    every = max(50, steps // 20)
    fit(net, gradients, steps=steps, lr=lr, ema=0.0, checkpoint=checkpoint, identity=identity, every=every, track=track)
    return net.requires_grad_(False).eval()


@torch.no_grad()
def draw(net: Generator, y: Tensor, generator: torch.Generator) -> Tensor:
    """Images in [-1, 1] for classes y, (n, C, H, W), where y is. The net and the generator must be there too."""
    return net(torch.randn(len(y), net.code, generator=generator, device=y.device), y)
