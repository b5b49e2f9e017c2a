"""Small classifiers of pictures, and how they learn."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from straightdp.compiled import Compiled

SMALLEST = 8  # pixels that they need each way

Predict = Callable[[Tensor], Tensor]
"""Images in [-1, 1] to labels."""

Shares = Callable[[Tensor], Tensor]
"""Images in [-1, 1] to how likely each label is, (n, labels)."""

Batch = Callable[[torch.Generator], tuple[Tensor, Tensor]]
"""Some pictures and their labels, by a generator's draws."""


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling, for any record of at least 8 x 8 pixels."""

    def __init__(self, shape: tuple[int, int, int], classes: int):
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.hidden1 = nn.Linear(32 * (height // 4) * (width // 4), 120)
        self.hidden2 = nn.Linear(120, 84)
        self.out = nn.Linear(84, classes)

    def forward(self, z: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(z)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.hidden1(x.flatten(1)))
        return self.out(F.relu(self.hidden2(x)))


class ResidualNet(nn.Module):
    """A small residual network: a halving convolution, then one block each of 32, 64 and 128 channels, and their mean.

    For any record of at least 8 x 8 pixels. Group norms see one record at a time, so it does in use what it did in
    training, also on records unlike those it was trained on.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int):
        super().__init__()
        self.stem = nn.Conv2d(shape[0], 32, 3, stride=2, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, 32)
        self.blocks = nn.Sequential(_Residual(32, 32, 1), _Residual(32, 64, 2), _Residual(64, 128, 2))
        self.out = nn.Linear(128, classes)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, z: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(z.contiguous(memory_format=torch.channels_last))))
        return self.out(self.blocks(x).mean(dim=(2, 3)))


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + inner)


def fit_classifier(make: Callable[[], nn.Module], batch: Batch, steps: int, seed: int, device: torch.device) -> Predict:
    """Train a new network on pictures as they are made, and take the label that it finds likeliest."""
    find = fit_shares(make, batch, steps, seed, device)
    return lambda images: find(images).argmax(dim=1)


def fit_shares(make: Callable[[], nn.Module], batch: Batch, steps: int, seed: int, device: torch.device) -> Shares:
    """Train a new network on pictures as they are made. One fixed recipe: Adam 1e-3, cosine decay."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        net = make().to(device)
    parameters = list(net.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    gradients = Compiled(
        lambda z, y: torch.autograd.grad(F.cross_entropy(net(z), y), parameters), speed="captured"
    )  # so small a network is done before a processor has named its operations
    for _ in range(steps):
        for parameter, gradient in zip(parameters, gradients(*batch(generator)), strict=True):
            parameter.grad = gradient
        optimizer.step()
        schedule.step()
    net.eval()

    @torch.no_grad()
    def find(images: Tensor) -> Tensor:
        return net(images.to(device)).softmax(dim=1)

    return find
