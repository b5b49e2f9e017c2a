"""The frozen caption encoder: words to ids, ids to fixed vectors. It has no trainable parameter.

Words come from the public templates and the public class lists, so the vocabulary says nothing about records.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from straightdp.errors import BadInput

PAD = 0


class CaptionIds(Protocol):
    """What turns captions into a network's ids: a tokenizer, or the rows of a prompt table."""

    @property
    def length(self) -> int: ...

    @property
    def words(self) -> tuple[str, ...]: ...

    @property
    def vocabulary(self) -> int: ...

    def encode(self, captions: tuple[str, ...]) -> Tensor:
        """(n, length)."""
        ...

    def null(self) -> Tensor:
        """(length,), of no caption."""
        ...


@dataclass(frozen=True)
class Tokenizer:
    """A word has an id of its own while the vocabulary lasts; further words share ids by hash. Id 0 is padding."""

    words: tuple[str, ...]
    length: int
    vocabulary: int

    @classmethod
    def from_captions(
        cls, captions: tuple[str, ...], length: int, vocabulary: int, *, texts: tuple[str, ...] = ()
    ) -> Tokenizer:
        """Words of the captions, and of public texts. Refuses captions that are different but have the same ids."""
        first = {word for caption in captions for word in split_words(caption)}
        further = {word for text in texts for word in split_words(text)} - first
        tokenizer = cls((*sorted(first), *sorted(further))[: vocabulary - 1], length, vocabulary)
        seen: dict[tuple[int, ...], str] = {}
        for caption in captions:
            ids = tuple(tokenizer.ids(caption))
            if not any(ids):
                raise BadInput(f"caption {caption!r} has no word to the encoder; use letters or digits in it")
            if seen.setdefault(ids, caption) != caption:
                raise BadInput(
                    f"captions {seen[ids]!r} and {caption!r} are the same to the encoder (its first {length} words, "
                    f"{vocabulary} ids); shorten the template or raise net.caption_length or net.vocabulary"
                )
        return tokenizer

    @cached_property
    def _index(self) -> dict[str, int]:
        return {word: k for k, word in enumerate(self.words, start=1)}

    def ids(self, caption: str) -> list[int]:
        found = [self._id(word) for word in split_words(caption)][: self.length]
        return found + [PAD] * (self.length - len(found))

    def _id(self, word: str) -> int:
        if (index := self._index.get(word, self.vocabulary)) < self.vocabulary:
            return index
        digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
        return 1 + int.from_bytes(digest, "little") % (self.vocabulary - 1)

    def encode(self, captions: tuple[str, ...]) -> Tensor:
        """(len(captions), length) int64."""
        return torch.tensor([self.ids(caption) for caption in captions], dtype=torch.int64)

    def null(self) -> Tensor:
        """The empty caption of the classifier-free branch, (length,)."""
        return torch.full((self.length,), PAD, dtype=torch.int64)


def split_words(caption: str) -> list[str]:
    return re.findall(r"\w+", caption.lower())


class CaptionEncoder(nn.Module):
    """Fixed random vectors per id plus fixed positions; padding is the zero vector. Frozen: buffers only."""

    def __init__(self, vocabulary: int, length: int, width: int):
        super().__init__()
        generator = torch.Generator().manual_seed(20270215)
        table = torch.randn(vocabulary, width, generator=generator)
        table[PAD] = 0
        positions = torch.randn(length, width, generator=generator) * 0.5
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(n, length) ids to (n, length, width)."""
        present = (ids != PAD).unsqueeze(-1)
        return self.table[ids] + self.positions * present  # type: ignore[index]
