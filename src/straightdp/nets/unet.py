"""A convolutional U-Net in the MM-DiT's place: on small pictures it learns crisp strokes much sooner.

Residual blocks at every resolution, attention at the coarsest, and what a resolution held before it was halved beside
what comes up to it again. Every operation is of one record alone (group norm, no batch statistics), and every trainable
parameter sits in a layer that the clipping engine knows.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from straightdp.nets.autoencoder import sides
from straightdp.nets.captions import CaptionEncoder
from straightdp.nets.velocity import VelocityNet
from straightdp.nets.waves import waves
from straightdp.recipe import Net

COARSEST = 8  # side, in pixels, that is not halved any more
GROUPS = 8  # of a group norm
TIME = 4  # numbers of the condition, in parts of the width


class Residual(nn.Module):
    """Two convolutions beside the identity, or beside a linear map where the channels change; the condition shifts and
    scales between them. It begins as what it stands beside."""

    def __init__(self, before: int, after: int, condition: int):
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, before)
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.modulation = nn.Linear(condition, 2 * after)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.beside = nn.Identity() if before == after else nn.Conv2d(before, after, 1)
        for layer in (self.modulation, self.second):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition)[:, :, None, None].chunk(2, dim=1)
        h = F.group_norm(self.first(F.silu(self.norm(x))), GROUPS) * (1 + scale) + shift
        return self.beside(x) + self.second(F.silu(h))


class Attention(nn.Module):
    """Of all positions to all, beside the identity, which it begins as."""

    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(tokens).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(attended).transpose(1, 2).reshape(x.shape)


class UNet(VelocityNet):
    """v_theta(x, t, c) for records of shape (C, H, W); caption ids of shape (n, length).

    `width` channels at full resolution, twice as many after each halving; `depth` blocks on the way down and on the way
    up at each, and as many and one more at the coarsest, where attention comes before each of these.
    """

    def __init__(self, section: Net, shape: tuple[int, int, int]):
        super().__init__()
        self.section, self.shape, self.vocabulary = section, shape, section.vocabulary
        channels, side, depth = shape[0], shape[1], section.depth
        self.sides = sides(side, COARSEST)
        widths = [section.width * 2**k for k in range(len(self.sides))]
        condition = TIME * section.width
        self.caption_encoder = CaptionEncoder(section.vocabulary, section.caption_length, section.caption_width)
        self.caption_in = nn.Linear(section.caption_length * section.caption_width, condition)
        self.time_in = nn.Linear(condition, condition)
        self.time_out = nn.Linear(condition, condition)
        self.first = nn.Conv2d(channels, widths[0], 3, padding=1)
        plan = [
            *((k, w, w) for k, w in enumerate(widths) for _ in range(depth)),
            *((len(widths) - 1, widths[-1], widths[-1]) for _ in range(depth + 1)),
            *((k, 2 * w if b == 0 else w, w) for k, w in reversed(list(enumerate(widths[:-1]))) for b in range(depth)),
        ]
        self.blocks = nn.ModuleList(Residual(before, after, condition) for _, before, after in plan)
        self.attention = nn.ModuleList(Attention(widths[-1], section.heads) for _ in range(depth + 1))
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.Conv2d(b, a, 1) for a, b in reversed(list(pairwise(widths))))
        self.norm = nn.GroupNorm(GROUPS, widths[0])
        self.last = nn.Conv2d(widths[0], channels, 3, padding=1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)  # type: ignore[arg-type]
        # The engine keeps of a block what 3 x 3 windows see, and maps; of an MM-DiT's, 16 values a token and channel.
        self.work = sum(self.sides[k] ** 2 * (9 * before + 17 * after) // 16 for k, before, after in plan)

    def forward(self, x: Tensor, t: Tensor, captions: Tensor) -> Tensor:
        condition = self._condition(t, captions)
        blocks, depth = iter(self.blocks), self.section.depth

        def through(h: Tensor) -> Tensor:
            for _ in range(depth):
                h = next(blocks)(h, condition)
            return h

        h, held = self.first(x.contiguous(memory_format=torch.channels_last)), []
        for halve in self.down:
            held.append(through(h))
            h = halve(held[-1])
        h = through(h)
        for attend in self.attention:
            h = next(blocks)(attend(h), condition)
        for widen, side in zip(self.up, reversed(self.sides[:-1]), strict=True):
            h = F.interpolate(widen(h), size=(side, side), mode="nearest")
            h = through(torch.cat([h, held.pop()], dim=1))
        return self.last(F.silu(self.norm(h)))

    def _condition(self, t: Tensor, captions: Tensor) -> Tensor:
        time = self.time_out(F.silu(self.time_in(waves(t * 1000, TIME * self.section.width))))
        return F.silu(time + self.caption_in(self.caption_encoder(captions).flatten(1)))
