"""Functions of rows, made to see one row at a time in their arithmetic too."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

SLOTS = 256  # rows at once; always this many, so that a row's result hangs on nothing else


class RowWise:
    """Guarantee: a row's result is the same to the bit whatever the other rows are, and however many.

    `function` maps rows of `shape` to rows. It is called on full batches of one size, whose places were seen to be
    alike to the bit; where they are not, on one row at a time.
    """

    def __init__(
        self, function: Callable[[Tensor], Tensor], shape: tuple[int, ...], device: torch.device, slots: int = SLOTS
    ):
        self._function, self._shape, self._device = function, shape, device
        self._slots = slots if self._places_are_alike(slots) else 1

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> Tensor:
        """(n, *shape) to the results, float32, on the CPU; n may be 0."""
        parts = rows.split(self._slots) if len(rows) else (torch.zeros(0, *self._shape),)
        return torch.cat([self._of(part) for part in parts])

    def _of(self, part: Tensor) -> Tensor:
        missing = self._slots - len(part)
        padded = F.pad(part, (*(0, 0) * len(self._shape), 0, missing)).to(self._device)
        return self._function(padded)[: len(part)].float().cpu()

    @torch.no_grad()
    def _places_are_alike(self, slots: int) -> bool:
        """Whether copies of one row, whatever it holds, have the same result to the bit in every place of a batch."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            row = torch.rand(1, *self._shape, generator=generator) * 2 - 1
            results = self._function(row.expand(slots, *self._shape).contiguous().to(self._device))
            if not torch.equal(results, results[:1].expand_as(results)):
                return False
        return True


def row_sum(x: Tensor) -> Tensor:
    """Sums along the last dimension, which stays, with length 1.

    It is halved by elementwise additions until one number is left: their order is the same for every row, whatever
    the number of rows, which a reduction does not promise.
    """
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        x = x[..., :half] + F.pad(x[..., half:], (0, x.shape[-1] % 2))
    return x
