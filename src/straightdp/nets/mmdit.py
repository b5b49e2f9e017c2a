"""The dual-stream MM-DiT: image tokens h and caption tokens e, own weights each, joined by attention in every block.

Every trainable parameter sits in a linear map (norms have no affine part, positions are fixed), so per-record
gradient norms need no per-record gradients. The caption stream's last block feeds only keys and values, so no
parameter is without a gradient.

Its constraints (section 3.3) are off unless the recipe asks for them: tokens kept within B0 between blocks, captions
flowing into images in the last l0 blocks alone, a softmax of their own (`decoupled`), and a cap s on the map they flow
in by.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from straightdp.nets.captions import CaptionEncoder
from straightdp.nets.constraints import cap, within
from straightdp.nets.velocity import VelocityNet
from straightdp.nets.waves import waves
from straightdp.recipe import Net


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm without parameters, then the time's shift and scale."""
    x = F.layer_norm(x, x.shape[-1:])
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Stream(nn.Module):
    """One modality's half of a block. `keys_only`: it is attended to, but not itself updated."""

    def __init__(self, width: int, mlp_ratio: int, *, keys_only: bool = False):
        super().__init__()
        self.keys_only = keys_only
        self.modulation = nn.Linear(width, (2 if keys_only else 6) * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        self.qkv = nn.Linear(width, (2 if keys_only else 3) * width)
        if not keys_only:
            self.out = nn.Linear(width, width)
            self.mlp_in = nn.Linear(width, mlp_ratio * width)
            self.mlp_out = nn.Linear(mlp_ratio * width, width)

    def project(self, x: Tensor, condition: Tensor, s: float | None = None) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """(queries unless keys_only, keys, values) and the modulation's parts; `s` caps the projection."""
        parts = self.modulation(condition).chunk(2 if self.keys_only else 6, dim=-1)
        qkv = self.qkv(modulate(x, parts[0], parts[1]))
        if s is not None:
            qkv = qkv * cap(self.qkv.weight, s).to(qkv.dtype)
        return list(qkv.chunk(2 if self.keys_only else 3, dim=-1)), parts

    def update(self, x: Tensor, attended: Tensor, parts: tuple[Tensor, ...], inflow: Tensor | None = None) -> Tensor:
        """The stream after attention and MLP. A separate `inflow` is added past the MLP: F(x) + G(x, inflow)."""
        tokens = x.shape[1]
        joined = self.out(attended if inflow is None else torch.cat([attended, inflow], dim=1)) * parts[2].unsqueeze(1)
        x = x + joined[:, :tokens]
        hidden = F.gelu(self.mlp_in(modulate(x, parts[3], parts[4])), approximate="tanh")
        x = x + parts[5].unsqueeze(1) * self.mlp_out(hidden)
        return x if inflow is None else x + joined[:, tokens:]


class Block(nn.Module):
    """One block. `injects`: captions and images attend to each other; else each stream only to itself."""

    def __init__(self, section: Net, *, injects: bool, last: bool):
        super().__init__()
        self.heads, self.injects, self.decoupled = section.heads, injects, section.decoupled
        self.image = Stream(section.width, section.mlp_ratio)
        self.caption = Stream(section.width, section.mlp_ratio, keys_only=last)

    def forward(self, h: Tensor, e: Tensor, condition: Tensor, s: float | None = None) -> tuple[Tensor, Tensor]:
        (hq, hk, hv), h_parts = self.image.project(h, condition)
        (*eq, ek, ev), e_parts = self.caption.project(e, condition, s if self.injects else None)
        inflow: list[Tensor | None] = [None, None]
        if self.injects and not self.decoupled:
            keys, values = torch.cat([hk, ek], dim=1), torch.cat([hv, ev], dim=1)
            attended = self._attend(torch.cat([hq, *eq], dim=1), keys, values)
            attended_h, attended_e = attended[:, : h.shape[1]], attended[:, h.shape[1] :]
        else:
            attended_h = self._attend(hq, hk, hv)
            attended_e = self._attend(eq[0], ek, ev) if eq else attended_h[:, :0]
            if self.injects:
                inflow = [self._attend(hq, ek, ev), self._attend(eq[0], hk, hv) if eq else None]
        h = self.image.update(h, attended_h, h_parts, inflow[0])
        if not self.caption.keys_only:
            e = self.caption.update(e, attended_e, e_parts, inflow[1])
        return h, e

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(q), split(k), split(v)
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class MMDiT(VelocityNet):
    """v_theta(x, t, c) for records of shape (C, H, W); caption ids of shape (n, length)."""

    def __init__(self, section: Net, shape: tuple[int, int, int]):
        super().__init__()
        channels, height, width_px = shape
        self.section, self.shape = section, shape
        self.grid = (height // section.patch, width_px // section.patch)
        self.vocabulary = section.vocabulary
        self.work = (math.prod(self.grid) + section.caption_length) * section.width * section.depth
        self.caption_encoder = CaptionEncoder(section.vocabulary, section.caption_length, section.caption_width)
        width, values = section.width, channels * section.patch**2
        self.patch_in = nn.Linear(values, width)
        self.caption_in = nn.Linear(section.caption_width, width)
        self.time_in = nn.Linear(width, width)
        self.time_out = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            Block(
                section,
                injects=section.l0 is None or k >= section.depth - section.l0,
                last=k == section.depth - 1,
            )
            for k in range(section.depth)
        )
        self.final_modulation = nn.Linear(width, 2 * width)
        self.patch_out = nn.Linear(width, values)
        for layer in (self.final_modulation, self.patch_out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.register_buffer("positions", grid_positions(*self.grid, width), persistent=False)

    def forward(self, x: Tensor, t: Tensor, captions: Tensor) -> Tensor:
        h = self.patch_in(self._to_patches(x)) + self.positions  # type: ignore[operator]
        e = self.caption_in(self.caption_encoder(captions))
        time = waves(t * 1000, self.section.width)
        condition = F.silu(self.time_out(F.silu(self.time_in(time))))
        B0, s = self.section.B0, self.section.s
        for k, block in enumerate(self.blocks):
            if k:
                h, e = within(h, B0), within(e, B0)
            h, e = block(h, e, condition, s)
        shift, scale = self.final_modulation(condition).chunk(2, dim=-1)
        return self._from_patches(self.patch_out(modulate(h, shift, scale)))

    def _to_patches(self, x: Tensor) -> Tensor:
        p, (rows, columns) = self.section.patch, self.grid
        x = x.reshape(len(x), self.shape[0], rows, p, columns, p)
        return x.permute(0, 2, 4, 1, 3, 5).reshape(len(x), rows * columns, -1)

    def _from_patches(self, tokens: Tensor) -> Tensor:
        p, (rows, columns) = self.section.patch, self.grid
        x = tokens.reshape(len(tokens), rows, columns, self.shape[0], p, p)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), *self.shape)


def grid_positions(rows: int, columns: int, width: int) -> Tensor:
    """Fixed two-dimensional positions, (rows * columns, width): one half tells the row, the other the column."""
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    half = width // 2
    return torch.cat([waves(y.flatten().float(), half), waves(x.flatten().float(), half)], dim=-1)
