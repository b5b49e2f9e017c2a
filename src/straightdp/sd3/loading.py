"""From a folder or a hub id to a frozen Stable Diffusion 3, and from prompts to a table of what it is told.

diffusers and transformers come with an extra and take seconds to import, so they are imported where they are used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from straightdp.errors import BadInput
from straightdp.files import file_hash
from straightdp.hub import HUB_ID, fetched, one_line
from straightdp.recipe import Sd3

WEIGHTS = "diffusion_pytorch_model.safetensors"
TEXT = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
T5 = ("text_encoder_3", "tokenizer_3")
NOT_FETCHED = ["*.fp16*", "*.bin", "*.msgpack", "*.onnx*"]  # other copies of the same weights
EXPECTED = "give a folder that diffusers' save_pretrained wrote of a Stable Diffusion 3, or a hub id OWNER/NAME of one"


@dataclass(frozen=True)
class Prior:
    """A frozen Stable Diffusion 3 without its text encoders. Guarantee: no weight of it can be trained.

    The VAE is float32 whatever `sd3.dtype` is: it is small, and private records pass through it.
    """

    transformer: Any  # diffusers' SD3Transformer2DModel
    vae: Any  # diffusers' AutoencoderKL
    name: str  # as the recipe has it
    digest: str  # of the weight and config files
    image: tuple[int, int, int]
    shape: tuple[int, int, int]  # of a code of such an image


@dataclass(frozen=True)
class PromptTable:
    """What the transformer is told for each prompt; the last row is the empty prompt."""

    embeddings: Tensor  # (M + 1, length, width)
    pooled: Tensor  # (M + 1, pooled width)


def load_prior(section: Sd3, size: int, device: torch.device) -> Prior:
    """The frozen transformer, on the device, and VAE for images of `size` x `size` pixels.

    A size that does not fit is refused before any weights are read. With `sd3.offload` the VAE stays in main memory.
    """
    diffusers, folder = _diffusers(), _folder(section.model, ("transformer", "vae"))
    with _explained(section.model):
        shape = _code_shape(folder, size)
        transformer = _frozen(diffusers.SD3Transformer2DModel, folder, "transformer", _dtype(section, device))
        vae = _frozen(diffusers.AutoencoderKL, folder, "vae", torch.float32)
        transformer, vae = transformer.to(device), vae.to("cpu" if section.offload else device)
        return Prior(transformer, vae, section.model, _digest(folder), (3, size, size), shape)


def read_prompts(section: Sd3, prompts: Sequence[str], device: torch.device) -> PromptTable:
    """The prompts and, last, the empty one, as diffusers' own pipeline encodes them, each alone.

    The text encoders are loaded for this and dropped again. Without `sd3.t5` zeros stand for the third one's vectors.
    """
    diffusers, folder = _diffusers(), _folder(section.model, (*TEXT, *T5) if section.t5 else TEXT)
    left_out = dict.fromkeys(("transformer", "vae", "scheduler", *(() if section.t5 else T5)))
    with _explained(section.model), torch.no_grad():
        pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(
            folder, dtype=_dtype(section, device), use_safetensors=True, **left_out
        ).to(device)
        if not section.t5:  # the pipeline asks the transformer how wide the zeros are
            pipeline.transformer = SimpleNamespace(config=SimpleNamespace(**_config(folder, "transformer")))
        rows = [
            pipeline.encode_prompt(
                prompt=[prompt],
                prompt_2=None,  # the same
                prompt_3=None,
                device=device,
                do_classifier_free_guidance=False,
                max_sequence_length=section.tokens,
            )
            for prompt in (*prompts, "")
        ]
    table = PromptTable(torch.cat([row[0] for row in rows]), torch.cat([row[2] for row in rows]))
    del pipeline
    torch.cuda.empty_cache()  # does nothing where there is no GPU
    return table


def _diffusers() -> Any:
    try:
        import diffusers  # pyright: ignore[reportMissingImports]
        import transformers  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BadInput(
            f"sd3.model needs packages that are not here ({one_line(error)}); run pip install 'straightdp[sd3]'"
        ) from None
    return diffusers


def _folder(name: str, parts: Sequence[str]) -> Path:
    """Where the model lies; one that is not a folder here is taken from the hub, or its cache. Has all `parts`."""
    folder = Path(name).expanduser()
    if not folder.exists() and HUB_ID.fullmatch(name):
        wanted = ["model_index.json", "transformer/config.json", *(f"{part}/*" for part in parts)]
        folder = fetched(name, wanted, NOT_FETCHED)
    if not folder.is_dir():
        raise BadInput(f"sd3.model = {name!r} is not a folder; {EXPECTED}")
    try:
        kind = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"sd3.model = {name!r} has no model_index.json that can be read; {EXPECTED}") from None
    if not str(kind).startswith("StableDiffusion3"):
        raise BadInput(f"sd3.model = {name!r} is a {kind}, not a Stable Diffusion 3; {EXPECTED}")
    missing = [part for part in parts if not (folder / part).is_dir()]
    if missing:
        raise BadInput(f"sd3.model = {name!r} lacks {', '.join(missing)}; fetch or copy the whole model again")
    return folder


def _code_shape(folder: Path, size: int) -> tuple[int, int, int]:
    """(C, h, w): the VAE halves an image's side at every level but one, and the transformer takes it by patches."""
    vae, transformer = _config(folder, "vae"), _config(folder, "transformer")
    scale, patch = 2 ** (len(vae["block_out_channels"]) - 1), transformer["patch_size"]
    largest = scale * patch * transformer["pos_embed_max_size"]
    if size % (scale * patch) or size > largest:
        raise BadInput(
            f"images of {size} x {size} pixels do not fit this Stable Diffusion 3; set image.size to a multiple of "
            f"{scale * patch}, at most {largest}"
        )
    return transformer["in_channels"], size // scale, size // scale


def _config(folder: Path, part: str) -> dict[str, Any]:
    return json.loads((folder / part / "config.json").read_text(encoding="utf-8"))


def _frozen(kind: Any, folder: Path, part: str, dtype: torch.dtype) -> Any:
    """One part with all its weights from the file: diffusers would only warn of those that are not there."""
    model, found = kind.from_pretrained(
        folder, subfolder=part, dtype=dtype, use_safetensors=True, output_loading_info=True
    )
    if found["missing_keys"]:
        raise ValueError(f"{part} has no weights {', '.join(sorted(found['missing_keys'])[:3])}")
    return model.requires_grad_(False).eval()


def _digest(folder: Path) -> str:
    """sha256 of the names and contents of the weight and config files that are loaded, in the order of their names."""
    digest = hashlib.sha256()
    for part in ("transformer", "vae"):
        digest.update(f"{part}/config\0{json.dumps(_config(folder, part), sort_keys=True)}\n".encode())
        shards = folder / part / f"{WEIGHTS}.index.json"
        names = set(json.loads(shards.read_text(encoding="utf-8"))["weight_map"].values()) if shards.exists() else ()
        for name in sorted(names or (WEIGHTS,)):
            digest.update(f"{part}/{name}\0{file_hash(folder / part / name)}\n".encode())
    return digest.hexdigest()


def _dtype(section: Sd3, device: torch.device) -> torch.dtype:
    """On a CPU weights stay float32; where it multiplies bfloat16, `half` rounds them as they are used."""
    return torch.float32 if device.type == "cpu" else getattr(torch, section.dtype)


@contextmanager
def _explained(name: str):
    """What goes wrong in loading is the model's or the machine's fault, and said in one sentence."""
    try:
        yield
    except BadInput:
        raise
    except torch.OutOfMemoryError:
        raise BadInput(
            f"{name} does not fit the device's memory; set sd3.dtype = 'bfloat16', sd3.offload = true (the VAE waits "
            "in main memory) or sd3.t5 = false (no third text encoder)"
        ) from None
    except Exception as error:
        raise BadInput(
            f"sd3.model = {name!r} could not be loaded ({one_line(error)}); fetch or copy the whole model again"
        ) from None
