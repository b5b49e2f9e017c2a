"""What is learned from public records alone can be shared between runs: it is made once and copied from then on.

Off unless $STRAIGHTDP_CACHE names a folder. Nothing that saw a private record comes here.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from straightdp import turns
from straightdp.errors import BadInput
from straightdp.files import write_durably


def check() -> None:
    """Refuse a cache that cannot be one, before anything is done."""
    if root := os.environ.get("STRAIGHTDP_CACHE"):
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            usable = os.access(root, os.W_OK | os.X_OK)
        except OSError:
            usable = False
        if not usable:
            raise BadInput(f"STRAIGHTDP_CACHE names {root}, which is no folder to write to; name another, or unset it")


@contextmanager
def within(root: Path):
    """A cache at `root` for a while, unless there is one already."""
    ours = not os.environ.get("STRAIGHTDP_CACHE")
    if ours:
        os.environ["STRAIGHTDP_CACHE"] = str(root)
    try:
        yield
    finally:
        if ours:
            del os.environ["STRAIGHTDP_CACHE"]


def folder(name: str) -> Path | None:
    """Where a kind of public statistics is kept between runs, if anywhere."""
    root = os.environ.get("STRAIGHTDP_CACHE")
    return Path(root) / name if root else None


def shared(name: str, key: str, out: Path, work: Callable[[], None]) -> None:
    """Leave at `out` what `work` would write there. Of several runs that want it at once, one works and others wait."""
    root = os.environ.get("STRAIGHTDP_CACHE")
    if not root:
        work()
        return
    place = Path(root) / f"{name}-{key}{out.suffix}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        with turns.given_up(waits=True):  # whoever works on it may be waiting for a turn
            fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            write_durably(out, place.read_bytes())
        else:
            work()
            write_durably(place, out.read_bytes())
