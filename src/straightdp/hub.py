"""Public models that are fetched from the hub by an id OWNER/NAME, or taken from its cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from straightdp.errors import BadInput

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def fetched(name: str, wanted: Sequence[str], left_out: Sequence[str] = ()) -> Path:
    """The folder with the files of these patterns. BadInput, with its cure, where the hub does not give them."""
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise BadInput(f"fetching {name} needs packages that are not here; run pip install 'straightdp[sd3]'") from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(wanted), ignore_patterns=list(left_out)))
    except Exception as error:
        answers = [getattr(getattr(e, "response", None), "status_code", None) for e in (error, error.__cause__)]
        if any(answer in (401, 403, 404) for answer in answers):
            raise BadInput(
                f"{name} is not a folder here, and the hub does not hand it out to you; if the name is right, accept "
                "the licence on the model's page, then log in with `hf auth login` or set HF_TOKEN"
            ) from None
        raise BadInput(
            f"{name} is not a folder here and could not be fetched from the hub ({one_line(error)}); check the "
            "connection, or copy the model here and give its folder"
        ) from None


def one_line(error: Exception) -> str:
    """What an error says, short enough for one sentence."""
    return " ".join(str(error).split())[:200] or type(error).__name__
