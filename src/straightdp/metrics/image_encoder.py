"""The frozen image encoder that a linear probe stands on: CLIP if one is named, else Inception under its own name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from straightdp.errors import BadInput
from straightdp.hub import HUB_ID, fetched, one_line
from straightdp.metrics import inception
from straightdp.progress import Track, quiet

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of CLIP's own training images, red, green and blue in [0, 1]
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
ROOM = 2**15  # pictures whose features are remembered: 256 MB of Inception's
KINDS = ("clip", "clip_vision_model")
EXPECTED = "give a folder that transformers' save_pretrained wrote of a CLIP, or a hub id OWNER/NAME of one"
NEEDS = "CLIP needs packages that are not here; run pip install 'straightdp[sd3]'"


@dataclass(frozen=True)
class ImageEncoder:
    """A frozen map of pictures to features. `name` and `digest` (sha256) say which weights it has.

    Pictures are taken as they are: what should be rounded to whole pixels first is the caller's to round.
    """

    name: str
    digest: str
    width: int
    device: torch.device
    on_device: Callable[[Tensor], Tensor] = field(repr=False)  # one batch, where it lies

    def __call__(self, z: Tensor, track: Track | None = None) -> Tensor:
        """z (n, 1 or 3, H, W) in [-1, 1] to (n, width) float32 on its device; n may be 0. Grey is repeated to colour.

        A record's features depend on its batch by float32 rounding only.
        """
        if z.ndim != 4 or z.shape[1] not in (1, 3):
            raise ValueError(f"pictures should be (n, 1 or 3, H, W) but are {tuple(z.shape)}")
        size = inception.BATCH["cuda" if self.device.type == "cuda" else "cpu"]
        starts = range(0, len(z), size)
        found = [torch.zeros(0, self.width, device=self.device)]
        for k in (track or quiet)(range(len(starts)), 0, len(starts)):
            batch = z[starts[k] : starts[k] + size].to(self.device, torch.float32)
            found.append(self.on_device(batch))
        return torch.cat(found)


def find_encoder(clip: str, device: torch.device) -> ImageEncoder | None:
    """The CLIP that `clip` names, a folder or a hub id; if it is empty the Inception weights at hand, else None.

    BadInput where `clip` names what is not to be had, or is no CLIP with an image side: nothing takes its place.
    """
    if clip:
        return _clip(clip, device)
    if (found := inception.find(device)) is None:
        return None
    name = "Inception-V3" if found.name == "FID" else "Inception-V3 (slim)"
    return ImageEncoder(name, found.digest, inception.WIDTH, device, found.on_device)


class Remembered:
    """An encoder that looks at no picture twice, as far as there is `room` for what it saw."""

    def __init__(self, encoder: ImageEncoder, track: Track | None = None, room: int = ROOM):
        self.encoder, self._track, self._room = encoder, track, room
        self._kept: dict[bytes, Tensor] = {}

    def __call__(self, z: Tensor) -> Tensor:
        keys = [hashlib.blake2b(picture.tobytes(), digest_size=16).digest() for picture in z.cpu().numpy()]
        new = {key: row for row, key in enumerate(keys) if key not in self._kept}
        found = self.encoder(z[list(new.values())], self._track)
        if not keys:
            return found
        fresh = dict(zip(new, found, strict=True))
        features = torch.stack([fresh[key] if key in fresh else self._kept[key] for key in keys])
        for key in list(fresh)[: max(0, self._room - len(self._kept))]:
            self._kept[key] = fresh[key]
        return features


def clip_pixels(z: Tensor, size: int) -> Tensor:
    """z (n, 1 or 3, H, W) in [-1, 1] to what CLIP sees, (n, 3, size, size), as its image processor does it.

    The shorter side is brought to `size` by bicubic interpolation, as PIL's is: antialiased, along rows and then along
    columns, overshoots cut off after each. The middle is cropped, and colours are normalised by CLIP's mean and
    deviation. Unlike PIL's, nothing is rounded to 8 bits.
    """
    height, width = z.shape[2:]
    tall, wide = (size * side // min(height, width) for side in (height, width))
    for sides in ((height, wide), (tall, wide)):
        z = F.interpolate(z, sides, mode="bicubic", align_corners=False, antialias=True).clamp(-1, 1)
    top, left = (tall - size) // 2, (wide - size) // 2
    z = z[:, :, top : top + size, left : left + size]
    mean, deviation = (torch.tensor(values, device=z.device).reshape(3, 1, 1) for values in (MEAN, DEVIATION))
    return ((z + 1) / 2 - mean) / deviation


def _clip(clip: str, device: torch.device) -> ImageEncoder:
    folder = Path(clip).expanduser()
    name = folder.resolve().name if folder.is_dir() else clip
    net = _load(clip, folder if folder.is_dir() else _fetched(clip)).to(device)
    size = net.config.image_size

    @torch.no_grad()
    def on_device(z: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            return net(pixel_values=clip_pixels(z, size)).image_embeds

    return ImageEncoder(f"CLIP {name}", _digest(net), net.visual_projection.out_features, device, on_device)


def _fetched(clip: str) -> Path:
    if not HUB_ID.fullmatch(clip):
        raise BadInput(f"{clip} is not a folder; {EXPECTED}")
    return fetched(clip, ["config.json", "model*.safetensors*"])


def _load(clip: str, folder: Path) -> Any:
    """CLIP's image side with its projection, in float32 and frozen."""
    try:
        from transformers import AutoConfig, CLIPVisionModelWithProjection  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise BadInput(NEEDS) from None
    try:
        kind = AutoConfig.from_pretrained(folder).model_type
        if kind not in KINDS:
            raise BadInput(f"{clip} is a model of kind {kind}, without CLIP's image side; {EXPECTED}")
        with _quietly():
            loaded: Any = CLIPVisionModelWithProjection.from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{clip} could not be loaded as a CLIP ({one_line(error)}); {EXPECTED}") from None
    net, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers has drawn them at random
        raise BadInput(f"{clip} lacks weights of CLIP's image side ({missing[0]} for one); {EXPECTED}")
    return net.eval().requires_grad_(False)


@contextmanager
def _quietly():
    """transformers would list every weight of CLIP's text side, which is not loaded."""
    from transformers.utils import logging  # pyright: ignore[reportMissingImports]

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _digest(net: Any) -> str:
    """sha256 of the weights, and of the settings that they do not show."""
    config, digest = net.config, hashlib.sha256()
    digest.update(f"{config.num_attention_heads} {config.hidden_act} {config.layer_norm_eps}\n".encode())
    for name, value in sorted(net.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
