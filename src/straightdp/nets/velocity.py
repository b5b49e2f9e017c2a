"""What every network here is: v_theta(x, t, c)."""

from __future__ import annotations

from torch import Tensor, nn


class VelocityNet(nn.Module):
    """Records x of `shape`, times t (n,) and caption ids (n, length), below `vocabulary`, to velocities.

    `work` is the tokens of a record times the channels and blocks they go through: what its memory grows with.
    `blocks` may be run again in a backward pass, instead of being remembered.
    """

    shape: tuple[int, int, int]
    vocabulary: int
    work: int
    blocks: nn.ModuleList

    def forward(self, x: Tensor, t: Tensor, captions: Tensor) -> Tensor:
        raise NotImplementedError
