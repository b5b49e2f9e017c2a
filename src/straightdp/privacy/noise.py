"""Where privacy noise comes from: a key of the operating system's, never the experiment's seed.

Release noise is OpenDP's exact discrete Gaussian on integers. Gradient noise is the sum of four normals from
counter-based generators, each with its own subkey of (key, stream, step). Summing four draws defends against
attacks that read the low bits of one floating-point draw (Mironov 2012); it is not a proof against every such
attack, and Philox is a statistical generator, not a cryptographic one: without the key its output is not
known to be predictable, but nobody has proved that. On CUDA a subkey has 63 bits, on the CPU 128.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from straightdp.errors import BadInput, BudgetRefused
from straightdp.files import write_durably
from straightdp.flow.path import Draws

SUMMANDS = 4


class Noise:
    """Draws keyed by (key, context, stream, step): the same call gives the same draw, so a resumed run repeats itself.

    `context` stands for the recipe and the private records. It enters every subkey and every stored draw, so that
    no noise is ever used again on other sums.
    """

    def __init__(self, key: bytes, *, pinned: bool, folder: Path, context: str = ""):
        if len(key) != 32:
            raise BadInput(f"the noise key must have 32 bytes, it has {len(key)}; restore private/noise.key")
        self._key = hashlib.blake2b(context.encode(), key=key, digest_size=32).digest()
        self.pinned = pinned
        self._folder = folder

    @property
    def label(self) -> str:
        """What the transcript says of the noise."""
        return "pinned" if self.pinned else "os"

    def integer_gaussian(self, name: str, scale: float, size: int, *, drawn_before: bool = False) -> np.ndarray:
        """`size` discrete Gaussian integers of standard deviation `scale` (in grid units, >> 1).

        Drawn before the mechanism reads a record, and kept in `private/noise/`, so that a crash between the draw
        and the release never leads to a second draw on the same records. A stored draw of another key, context,
        scale or size is refused, and so is a missing one when `drawn_before` says that there was one.
        """
        path = self._folder / f"{name.replace('/', '-')}.npz"
        tag = hashlib.blake2b(f"{name}|{scale!r}|{size}|{self.label}".encode(), key=self._key).hexdigest()
        if path.exists():
            with np.load(path) as stored:
                if str(stored["tag"]) != tag:
                    raise BadInput(f"{path} was drawn for another run; give another --out")
                return stored["draw"]
        if drawn_before:
            raise BadInput(f"{path} is lost, and drawing it anew would spend twice; start again with another --out")
        draw = self._integers(name, scale, size)
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.savez(buffer, draw=draw, tag=np.array(tag), scale=np.array(scale))
        write_durably(path, buffer.getvalue())
        return draw

    def bind(self, name: str, value: bytes, *, bound_before: bool = False) -> None:
        """Tie a mechanism's noise to what it hides: another value under the same name is refused, in any session."""
        path = self._folder / f"{name.replace('/', '-')}.bound"
        tag = hashlib.blake2b(name.encode() + b"|" + value, key=self._key).hexdigest()
        if path.exists():
            if path.read_text() != tag:
                raise BudgetRefused(
                    f"the noise of {name} was used for another value before: its budget is spent, unless the run goes "
                    "on as it began (its data, version and kind of device, and STRAIGHTDP_BFLOAT16)"
                )
            return
        if bound_before:
            raise BudgetRefused(f"{path} is lost, so it is not known what the noise of {name} was used for")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, tag.encode(), mode=0o600)

    def _integers(self, name: str, scale: float, size: int) -> np.ndarray:
        return self._pinned_integers(name, scale, size) if self.pinned else _opendp_integers(scale, size)

    def _pinned_integers(self, name: str, scale: float, size: int) -> np.ndarray:
        return np.rint(self._philox(name, 0, 0).standard_normal(size) * scale).astype(np.int64)

    def normal(self, stream: str, step: int, size: int, device: torch.device) -> torch.Tensor:
        """`size` standard normals as the scaled sum of four draws, float32, on `device`."""
        total = torch.zeros(size, device=device)
        for j in range(SUMMANDS):
            if device.type == "cuda":
                total += torch.randn(size, generator=self._cuda_generator(stream, step, j, device), device=device)
            else:
                draw = self._philox(stream, step, j).standard_normal(size, dtype=np.float32)
                total += torch.from_numpy(draw)
        return total / SUMMANDS**0.5

    def members(self, stream: str, step: int, q: float, size: int) -> np.ndarray:
        """Poisson sampling for real: each of `size` records on its own coin of probability q, as sorted indices."""
        coins = self._philox(stream, step, 0).integers(0, 2**63, size=size, dtype=np.int64)
        return np.flatnonzero(coins < int(q * 2**63))

    def draws(self, stream: str, step: int, places: np.ndarray, device: torch.device) -> Draws:
        """Secret draws that are not the noise itself: which t and xi the records at `places` of the batch meet."""
        return PlacedDraws(self, f"{stream}/{step}", places, device)

    def block(self, stream: str, j: int, call: int, size: int, kind: str, device: torch.device) -> torch.Tensor:
        """`size` uniform or normal float32 values of one block of places."""
        if device.type == "cuda":
            generator = self._cuda_generator(stream, j, call, device)
            draw = torch.rand if kind == "uniform" else torch.randn
            return draw(size, generator=generator, device=device)
        source = self._philox(stream, j, call)
        draw = source.random if kind == "uniform" else source.standard_normal
        return torch.from_numpy(draw(size, dtype=np.float32))

    def _cuda_generator(self, stream: str, step: int, j: int, device: torch.device) -> torch.Generator:
        seed = int.from_bytes(self._subkey(stream, step, j)[:8], "little") & (2**63 - 1)
        return torch.Generator(device).manual_seed(seed)

    def _philox(self, stream: str, step: int, j: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self._subkey(stream, step, j), "little")))

    def _subkey(self, stream: str, step: int, j: int) -> bytes:
        return hashlib.blake2b(f"{stream}|{step}|{j}".encode(), key=self._key, digest_size=16).digest()


class PlacedDraws:
    """Draws for the records at some places of a batch. A place's values do not depend on which others are asked for.

    They are made in blocks of BLOCK places, each with a subkey of its own.
    """

    BLOCK = 256

    def __init__(self, noise: Noise, stream: str, places: np.ndarray, device: torch.device):
        self._noise, self._stream, self._device = noise, stream, device
        blocks, inverse = np.unique(places // self.BLOCK, return_inverse=True)
        self._blocks = [int(j) for j in blocks]
        self._rows = torch.from_numpy(inverse * self.BLOCK + places % self.BLOCK).to(device, non_blocking=True)
        self._calls = 0

    def uniform(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._draw("uniform", shape)

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._draw("normal", shape)

    def _draw(self, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        if shape[0] != len(self._rows):
            raise ValueError(f"draws for {len(self._rows)} records were asked for {shape[0]}")
        size = self.BLOCK * math.prod(shape[1:])
        parts = [self._noise.block(self._stream, j, self._calls, size, kind, self._device) for j in self._blocks]
        self._calls += 1
        return torch.cat(parts).reshape(-1, *shape[1:])[self._rows]


class AuditNoise(Noise):
    """Noise of a run that is an audit, and says so in its transcript. A control's noise is `leak` times what was
    declared: such a run must be caught."""

    def __init__(self, key: bytes, *, pinned: bool, folder: Path, context: str = "", leak: float = 1.0):
        super().__init__(key, pinned=pinned, folder=folder, context=f"{context}|audit|{leak!r}")
        self.leak = leak

    @property
    def label(self) -> str:
        return "audit" if self.leak == 1 else "leaky"

    def _integers(self, name: str, scale: float, size: int) -> np.ndarray:
        return np.rint(super()._integers(name, scale, size) * self.leak).astype(np.int64)

    def normal(self, stream: str, step: int, size: int, device: torch.device) -> torch.Tensor:
        return super().normal(stream, step, size, device) * self.leak


def open_noise(
    private: Path, pinned_key: str | None, *, context: str, spent: bool, make: Callable[..., Noise] = Noise
) -> Noise:
    """The run's noise: the pinned key of a test or experiment, else `private/noise.key`, made once from the OS.

    `spent` says that mechanisms have run already: then a key that is gone is not replaced, but refused.
    """
    folder = private / "noise"
    if pinned_key is not None:
        return make(bytes.fromhex(pinned_key), pinned=True, folder=folder, context=context)
    path = private / "noise.key"
    if not path.exists():
        if spent:
            raise BadInput(f"{path} is lost, and another key would spend twice; start again with another --out")
        write_durably(path, os.urandom(32), mode=0o600)
    return make(path.read_bytes(), pinned=False, folder=folder, context=context)


def _opendp_integers(scale: float, size: int) -> np.ndarray:
    from opendp.domains import atom_domain, vector_domain
    from opendp.measurements import make_gaussian
    from opendp.metrics import l2_distance
    from opendp.mod import enable_features

    enable_features("contrib")
    measurement = make_gaussian(vector_domain(atom_domain(T="i64")), l2_distance(T="f64"), scale=float(scale))
    return np.asarray(measurement([0] * size), dtype=np.int64)
