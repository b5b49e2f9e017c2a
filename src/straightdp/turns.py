"""Runs that share one device take turns at it.

Two processes that both fill a GPU get less done together than one after the other. With $STRAIGHTDP_TURNS set to a
file, a stage that fills the device waits until no other run is in one; starting, reading, planning and compiling of one
run go on beside another's training, and so do its sampling and evaluation, so that a run that has trained is done soon.
A process that dies gives its turn up.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from straightdp.errors import BadInput

VARIABLE = "STRAIGHTDP_TURNS"
FILLS = frozenset({"autoencode", "prior", "pretrain", "distill", "train", "match", "evolve"})


@dataclass
class Turn:
    """`waited`: seconds since it began that were spent waiting, for it or for what others make."""

    waited: float = 0.0


_held: list[tuple[IO, Turn]] = []  # this process's, while it has one


def of_this_device() -> str:
    """A file for all who use this machine's first visible GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").replace("/", "-")
    return str(Path(tempfile.gettempdir()) / f"straightdp-turns-{os.getuid()}-{socket.gethostname()}-{visible}")


@contextmanager
def turn(stage: str) -> Iterator[Turn]:
    """Wait for this stage's turn, and have it until the block ends."""
    path = os.environ.get(VARIABLE)
    if not path or stage not in FILLS:
        yield Turn()
        return
    try:
        file = open(path, "a")  # noqa: SIM115
    except OSError as error:
        raise BadInput(
            f"{VARIABLE} = {path} cannot be written ({error.strerror}); name a file, or leave it out"
        ) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _held.append((file, mine := Turn()))
        try:
            yield mine
        finally:
            _held.clear()
            fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def given_up(*, waits: bool = False) -> Iterator[None]:
    """Let others have the device while this block does other work, or `waits` for others', then wait for a turn."""
    begun = time.monotonic()
    for file, _ in _held:
        fcntl.flock(file, fcntl.LOCK_UN)
    try:
        yield
    finally:
        start = begun if waits else time.monotonic()
        for file, mine in _held:
            fcntl.flock(file, fcntl.LOCK_EX)
            mine.waited += time.monotonic() - start
