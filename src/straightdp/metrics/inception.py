"""Inception-V3's features of pictures, with either of two sets of weights.

Only the published weights of 2015-12-05 make a Frechet distance an FID; with the others it is called FD-slim.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from straightdp.compiled import half
from straightdp.data.catalogue import CATALOGUE, data_root
from straightdp.errors import BadInput
from straightdp.metrics.inception_net import SIZE, WIDTH, Convolution, Inception, average_pool, max_pool
from straightdp.progress import Track, quiet

(PUBLISHED,) = CATALOGUE["inception"]
SLIM = "inception_v3_slim_q8.safetensors"
SLIM_DIGEST = "sha256:f1d82ab672d6fde60c76946e9c45bf30e4aca2977e6ba98870a433ec2ebf4ede"
BATCH = {"cpu": 16, "cuda": 128}
EPSILON = 1e-3  # of the published batch norms
CURE = "run 'straightdp data get inception'"

# The published file's names of each block's convolutions, in the order of ours. Before the blocks, both agree.
_FIVE = ("branch1x1", "branch5x5_1", "branch5x5_2", "branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3", "branch_pool")
_SIX = (
    "branch1x1",
    *(f"branch7x7_{k}" for k in (1, 2, 3)),
    *(f"branch7x7dbl_{k}" for k in (1, 2, 3, 4, 5)),
    "branch_pool",
)
_SEVEN = (
    "branch1x1",
    *(f"branch3x3_{k}" for k in ("1", "2a", "2b")),
    *(f"branch3x3dbl_{k}" for k in ("1", "2", "3a", "3b")),
    "branch_pool",
)
PUBLISHED_NAMES = {
    **dict.fromkeys(("Mixed_5b", "Mixed_5c", "Mixed_5d"), _FIVE),
    "Mixed_6a": ("branch3x3", "branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3"),
    **dict.fromkeys(("Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"), _SIX),
    "Mixed_7a": ("branch3x3_1", "branch3x3_2", *(f"branch7x7x3_{k}" for k in (1, 2, 3, 4))),
    **dict.fromkeys(("Mixed_7b", "Mixed_7c"), _SEVEN),
}


@dataclass(frozen=True)
class Features:
    """A named feature map of pictures.

    `name` is what a Frechet distance in these features may be called, `digest` the sha256 of the weights' file,
    `resize` how a picture comes to 299 x 299. Pictures are taken as they are: what should be rounded to whole pixels
    first is the caller's to round.
    """

    name: str
    digest: str
    net: nn.Module = field(repr=False)
    resize: str = "bilinear, corners not aligned"

    def __call__(self, z: Tensor, track: Track | None = None) -> Tensor:
        """z (n, 1 or 3, H, W) in [-1, 1] to (n, 2048) float32 where the net lies; n may be 0. Grey is repeated to
        colour."""
        found = list(self.batches(z, track))
        return torch.cat(found) if found else torch.zeros(0, WIDTH, device=self.device)

    @property
    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    def batches(self, z: Tensor, track: Track | None = None) -> Iterator[Tensor]:
        """The same, batch by batch. A record's features depend on its batch by float32 rounding only."""
        if z.ndim != 4 or z.shape[1] not in (1, 3):
            raise ValueError(f"pictures should be (n, 1 or 3, H, W) but are {tuple(z.shape)}")
        size = BATCH["cuda" if self.device.type == "cuda" else "cpu"]
        starts = range(0, len(z), size)
        for k in (track or quiet)(range(len(starts)), 0, len(starts)):
            yield self.on_device(z[starts[k] : starts[k] + size].to(self.device, torch.float32))

    @torch.no_grad()
    def on_device(self, z: Tensor, size: int = SIZE) -> Tensor:
        """One batch, where it lies: (n, 1 or 3, H, W) to (n, 2048). A `size` that is not the network's own gives other
        features, of which no distance is an FID."""
        x = F.interpolate(z, (size, size), mode="bilinear", align_corners=False).expand(-1, 3, -1, -1)
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            return self.net(x.contiguous(memory_format=torch.channels_last))


def quick(features: Features, device: torch.device, size: int = SIZE) -> Callable[[Tensor], Tensor]:
    """The features of any number of pictures, wherever they are, with the network in bfloat16 where that is faster."""
    see, rows = half(partial(features.on_device, size=size)), BATCH[device.type]
    return lambda z: torch.cat([see(part.to(device)) for part in z.split(rows)])


def find(device: torch.device, root: Path | None = None) -> Features | None:
    """The published weights if `root` (the data root) has them, else the slim ones, else None."""
    root = data_root() if root is None else root
    if (published := root / "inception" / PUBLISHED.name).is_file():
        return load_published(published, device)
    slim = root / "weights" / SLIM
    return load_slim(slim, device) if slim.is_file() else None


def load_published(path: Path, device: torch.device) -> Features:
    """The weights of 2015-12-05 in their PyTorch port. BadInput for any other content: it gives no FID."""
    data, digest = _read(path, PUBLISHED.digest)
    net = _empty(max_pool())
    return Features("FID", digest, _filled(net, _folded(net, data), device))


def load_slim(path: Path, device: torch.device) -> Features:
    """TF-slim's ImageNet weights as 8-bit codes. BadInput for any other content."""
    data, digest = _read(path, SLIM_DIGEST)
    return Features("FD-slim", digest, _filled(_empty(average_pool()), _decoded(data), device))


def _read(path: Path, expected: str) -> tuple[bytes, str]:
    """A file's content and its sha256, if that is the expected one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} could not be read ({error.strerror}); {CURE}") from None
    digest = hashlib.sha256(data).hexdigest()
    if f"sha256:{digest}" != expected:
        raise BadInput(f"{path} should have {expected} but has sha256:{digest}; {CURE}")
    return data, digest


def _empty(last_pool: nn.Module) -> Inception:
    with torch.device("meta"):
        return Inception(last_pool)


def _filled(net: Inception, state: dict[str, Tensor], device: torch.device) -> Inception:
    net.load_state_dict(state, assign=True)
    net = net.eval().requires_grad_(False).to(device)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _folded(net: Inception, data: bytes) -> dict[str, Tensor]:
    """Each batch norm folded into the convolution before it, in float64."""
    stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    state = {}
    for ours, theirs in _pairs(net):
        weight, mean, variance, gain, shift = (
            stored[f"{theirs}.{name}"].double()
            for name in ("conv.weight", "bn.running_mean", "bn.running_var", "bn.weight", "bn.bias")
        )
        factor = gain / (variance + EPSILON).sqrt()
        state[f"{ours}.weight"] = (weight * factor[:, None, None, None]).float()
        state[f"{ours}.bias"] = (shift - mean * factor).float()
    return state


def _pairs(net: Inception) -> Iterator[tuple[str, str]]:
    """Our name and the published one of every convolution."""
    for top, member in net.named_children():
        if isinstance(member, Convolution):
            yield top, top
        names = [name for name, inner in member.named_modules() if name and isinstance(inner, Convolution)]
        for ours, theirs in zip(names, PUBLISHED_NAMES.get(top, ()), strict=True):
            yield f"{top}.{ours}", f"{top}.{theirs}"


def _decoded(data: bytes) -> dict[str, Tensor]:
    """weight = codes * scale + min; and the first convolution, made to take z instead of (pixel - 128) / 128."""
    from safetensors.torch import load

    stored = {name.replace("/", "."): value for name, value in load(data).items()}
    state = {name: value for name, value in stored.items() if name.endswith(".bias")}
    for name in [name.removesuffix("bias") + "weight" for name in state]:
        state[name] = stored[f"{name}.codes"].float() * stored[f"{name}.scale"] + stored[f"{name}.min"]
    # (pixel - 128) / 128 = (127.5 z - 0.5) / 128, and no padding comes before this convolution.
    first = state["Conv2d_1a_3x3.weight"]
    state["Conv2d_1a_3x3.bias"] = state["Conv2d_1a_3x3.bias"] - first.sum(dim=(1, 2, 3)) * (0.5 / 128)
    state["Conv2d_1a_3x3.weight"] = first * (127.5 / 128)
    return state
