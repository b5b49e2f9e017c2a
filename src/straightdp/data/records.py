"""A set of labelled records, as plain arrays. Rooms outside `privacy/` only ever hold public or synthetic ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Records:
    """`x` is (N, C, H, W): uint8 pixels, or float32 values already in [-1, 1]. `texts` are captions, if given."""

    x: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    texts: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one record."""
        return tuple(self.x.shape[1:])  # type: ignore[return-value]

    def z(self, index: np.ndarray | slice | None = None) -> torch.Tensor:
        """The records as float32 z in [-1, 1], (n, C, H, W)."""
        x = self.x if index is None else self.x[index]
        return to_z(x)

    def subset(self, index: np.ndarray) -> Records:
        texts = (
            None
            if self.texts is None
            else tuple(self.texts[i] for i in np.flatnonzero(index))
            if index.dtype == bool
            else tuple(self.texts[i] for i in index)
        )
        return Records(self.x[index], self.labels[index], self.classes, texts)


def to_z(x: np.ndarray | torch.Tensor) -> torch.Tensor:
    """uint8 pixels to [-1, 1]; floats are taken as they are. On the device that x is on."""
    x = torch.as_tensor(x)
    return x.float() / 127.5 - 1.0 if x.dtype == torch.uint8 else x.float()


def to_pixels(z: torch.Tensor) -> np.ndarray:
    """z in [-1, 1] to uint8 pixels, rounding to nearest: the inverse of `to_z` on its image."""
    return ((z.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu().numpy()
