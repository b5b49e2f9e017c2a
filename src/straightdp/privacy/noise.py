"""Where privacy noise comes from: a key of the operating system's, never the experiment's seed.

Release noise is OpenDP's exact discrete Gaussian on integers. Gradient noise is the sum of four normals from
counter-based generators, each with its own subkey of (key, stream, step). Summing four draws defends against
attacks that read the low bits of one floating-point draw (Mironov 2012); it is not a proof against every such
attack, and Philox is a statistical generator, not a cryptographic one: without the key its output is not
known to be predictable, but nobody has proved that. On CUDA a subkey has 64 bits, on the CPU 128.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch

from straightdp.errors import BadInput

SUMMANDS = 4


class Noise:
    """Draws keyed by (key, stream, step): the same call gives the same draw, so a resumed run repeats itself."""

    def __init__(self, key: bytes, *, pinned: bool, folder: Path):
        if len(key) != 32:
            raise BadInput(f"the noise key must have 32 bytes, it has {len(key)}; restore private/noise.key")
        self._key = key
        self.pinned = pinned
        self._folder = folder

    @property
    def label(self) -> str:
        """What the transcript says of the noise."""
        return "pinned" if self.pinned else "os"

    def integer_gaussian(self, name: str, scale: float, size: int) -> np.ndarray:
        """`size` discrete Gaussian integers of standard deviation `scale` (in grid units, >> 1).

        Drawn before the mechanism reads a record, and kept in `private/noise/`, so that a crash between the draw
        and the release never leads to a second draw on the same records.
        """
        path = self._folder / f"{name.replace('/', '-')}.npy"
        if path.exists():
            stored = np.load(path)
            if stored.shape != (size,):
                raise BadInput(f"{path} does not belong to this recipe; give another --out")
            return stored
        draw = self._pinned_integers(name, scale, size) if self.pinned else _opendp_integers(scale, size)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            np.save(file, draw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        return draw

    def _pinned_integers(self, name: str, scale: float, size: int) -> np.ndarray:
        return np.rint(self._philox(name, 0, 0).standard_normal(size) * scale).astype(np.int64)

    def normal(self, stream: str, step: int, size: int, device: torch.device) -> torch.Tensor:
        """`size` standard normals as the scaled sum of four draws, float32, on `device`."""
        total = torch.zeros(size, device=device)
        for j in range(SUMMANDS):
            if device.type == "cuda":
                total += torch.randn(size, generator=self.generator(stream, step, device, j), device=device)
            else:
                draw = self._philox(stream, step, j).standard_normal(size, dtype=np.float32)
                total += torch.from_numpy(draw)
        return total / SUMMANDS**0.5

    def members(self, stream: str, step: int, q: float, size: int) -> np.ndarray:
        """Poisson sampling for real: each of `size` records on its own coin of probability q, as sorted indices."""
        coins = self._philox(stream, step, 0).integers(0, 2**63, size=size, dtype=np.int64)
        return np.flatnonzero(coins < int(q * 2**63))

    def generator(self, stream: str, step: int, device: torch.device, j: int = 0) -> torch.Generator:
        """A torch generator for secret draws that are not the noise itself (which t and xi a record meets)."""
        seed = int.from_bytes(self._subkey(stream, step, j)[:8], "little") & (2**63 - 1)
        return torch.Generator(device).manual_seed(seed)

    def _philox(self, stream: str, step: int, j: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self._subkey(stream, step, j), "little")))

    def _subkey(self, stream: str, step: int, j: int) -> bytes:
        return hashlib.blake2b(f"{stream}|{step}|{j}".encode(), key=self._key, digest_size=16).digest()


def open_noise(private: Path, pinned_key: str | None) -> Noise:
    """The run's noise: the pinned key of a test or experiment, else `private/noise.key`, made once from the OS."""
    folder = private / "noise"
    if pinned_key is not None:
        return Noise(bytes.fromhex(pinned_key), pinned=True, folder=folder)
    path = private / "noise.key"
    if not path.exists():
        partial = path.with_suffix(".partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(32))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    return Noise(path.read_bytes(), pinned=False, folder=folder)


def _opendp_integers(scale: float, size: int) -> np.ndarray:
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T="f64")
    measurement = dp.m.make_gaussian(*space, scale=float(scale))
    return np.asarray(measurement([0] * size), dtype=np.int64)
