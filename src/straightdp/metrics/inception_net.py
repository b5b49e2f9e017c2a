"""The graph of Inception-V3 up to its pool, with TF-slim's names. Every convolution has a bias and ends in a ReLU."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

SIZE, WIDTH = 299, 2048


class Convolution(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu_()


class Forked(nn.Sequential):
    """A sequence whose last two members see the same input; their outputs stand side by side."""

    def forward(self, x: Tensor) -> Tensor:
        *first, left, right = self
        for member in first:
            x = member(x)
        return torch.cat((left(x), right(x)), dim=1)


class Block(nn.Sequential):
    """Branches that see the same input; their outputs stand side by side."""

    def __init__(self, *branches: nn.Module):
        super().__init__(OrderedDict((f"Branch_{k}", branch) for k, branch in enumerate(branches)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], dim=1)


class Inception(nn.Sequential):
    """Pictures (n, 3, 299, 299) to features (n, 2048).

    The average pools inside blocks do not count the padding. `last_pool` belongs to the fourth branch of the last
    block: an average in plain Inception-V3, a maximum in the graph of the published FID weights.
    """

    def __init__(self, last_pool: nn.Module):
        super().__init__(
            OrderedDict(
                Conv2d_1a_3x3=Convolution(3, 32, 3, stride=2),
                Conv2d_2a_3x3=Convolution(32, 32, 3),
                Conv2d_2b_3x3=Convolution(32, 64, 3, padding=1),
                MaxPool_3a_3x3=nn.MaxPool2d(3, 2),
                Conv2d_3b_1x1=Convolution(64, 80, 1),
                Conv2d_4a_3x3=Convolution(80, 192, 3),
                MaxPool_5a_3x3=nn.MaxPool2d(3, 2),
                Mixed_5b=_block_5(192, 32),
                Mixed_5c=_block_5(256, 64, ("Conv2d_0b_1x1", "Conv_1_0c_5x5")),
                Mixed_5d=_block_5(288, 64),
                Mixed_6a=_block_6a(),
                Mixed_6b=_block_6(128),
                Mixed_6c=_block_6(160),
                Mixed_6d=_block_6(160),
                Mixed_6e=_block_6(192),
                Mixed_7a=_block_7a(),
                Mixed_7b=_block_7(1280, "Conv2d_0b_3x1", average_pool()),
                Mixed_7c=_block_7(2048, "Conv2d_0c_3x1", last_pool),
                Pool=nn.AdaptiveAvgPool2d(1),
                Flat=nn.Flatten(),
            )
        )


def average_pool() -> nn.Module:
    return nn.AvgPool2d(3, 1, padding=1, count_include_pad=False)


def max_pool() -> nn.Module:
    return nn.MaxPool2d(3, 1, padding=1)


def _same(inputs: int, outputs: int, height: int, width: int) -> Convolution:
    """A convolution that keeps the picture's size."""
    return Convolution(inputs, outputs, (height, width), padding=(height // 2, width // 2))


def _halving(inputs: int, outputs: int) -> Convolution:
    return Convolution(inputs, outputs, 3, stride=2)


def _block_5(inputs: int, pooled: int, five: tuple[str, str] = ("Conv2d_0a_1x1", "Conv2d_0b_5x5")) -> Block:
    """On 35 x 35. `five` are the names in the branch of the 5 x 5 kernel: one block has its own."""
    return Block(
        _branch(Conv2d_0a_1x1=_same(inputs, 64, 1, 1)),
        _branch(**{five[0]: _same(inputs, 48, 1, 1), five[1]: _same(48, 64, 5, 5)}),
        _branch(
            Conv2d_0a_1x1=_same(inputs, 64, 1, 1),
            Conv2d_0b_3x3=_same(64, 96, 3, 3),
            Conv2d_0c_3x3=_same(96, 96, 3, 3),
        ),
        _branch(AvgPool_0a_3x3=average_pool(), Conv2d_0b_1x1=_same(inputs, pooled, 1, 1)),
    )


def _block_6a() -> Block:
    """From 35 x 35 to 17 x 17. The names of the halving convolutions say 1x1, but their kernels are 3 x 3."""
    return Block(
        _branch(Conv2d_1a_1x1=_halving(288, 384)),
        _branch(Conv2d_0a_1x1=_same(288, 64, 1, 1), Conv2d_0b_3x3=_same(64, 96, 3, 3), Conv2d_1a_1x1=_halving(96, 96)),
        _branch(MaxPool_1a_3x3=nn.MaxPool2d(3, 2)),
    )


def _block_6(width: int) -> Block:
    """On 17 x 17."""
    return Block(
        _branch(Conv2d_0a_1x1=_same(768, 192, 1, 1)),
        _branch(
            Conv2d_0a_1x1=_same(768, width, 1, 1),
            Conv2d_0b_1x7=_same(width, width, 1, 7),
            Conv2d_0c_7x1=_same(width, 192, 7, 1),
        ),
        _branch(
            Conv2d_0a_1x1=_same(768, width, 1, 1),
            Conv2d_0b_7x1=_same(width, width, 7, 1),
            Conv2d_0c_1x7=_same(width, width, 1, 7),
            Conv2d_0d_7x1=_same(width, width, 7, 1),
            Conv2d_0e_1x7=_same(width, 192, 1, 7),
        ),
        _branch(AvgPool_0a_3x3=average_pool(), Conv2d_0b_1x1=_same(768, 192, 1, 1)),
    )


def _block_7a() -> Block:
    """From 17 x 17 to 8 x 8."""
    return Block(
        _branch(Conv2d_0a_1x1=_same(768, 192, 1, 1), Conv2d_1a_3x3=_halving(192, 320)),
        _branch(
            Conv2d_0a_1x1=_same(768, 192, 1, 1),
            Conv2d_0b_1x7=_same(192, 192, 1, 7),
            Conv2d_0c_7x1=_same(192, 192, 7, 1),
            Conv2d_1a_3x3=_halving(192, 192),
        ),
        _branch(MaxPool_1a_3x3=nn.MaxPool2d(3, 2)),
    )


def _block_7(inputs: int, right: str, pool: nn.Module) -> Block:
    """On 8 x 8. `right` is the name of the right prong of the first fork: the two blocks differ in it."""
    return Block(
        _branch(Conv2d_0a_1x1=_same(inputs, 320, 1, 1)),
        _fork(
            Conv2d_0a_1x1=_same(inputs, 384, 1, 1),
            Conv2d_0b_1x3=_same(384, 384, 1, 3),
            **{right: _same(384, 384, 3, 1)},
        ),
        _fork(
            Conv2d_0a_1x1=_same(inputs, 448, 1, 1),
            Conv2d_0b_3x3=_same(448, 384, 3, 3),
            Conv2d_0c_1x3=_same(384, 384, 1, 3),
            Conv2d_0d_3x1=_same(384, 384, 3, 1),
        ),
        _branch(Pool_0a_3x3=pool, Conv2d_0b_1x1=_same(inputs, 192, 1, 1)),
    )


def _branch(**members: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(members))


def _fork(**members: nn.Module) -> nn.Sequential:
    return Forked(OrderedDict(members))
