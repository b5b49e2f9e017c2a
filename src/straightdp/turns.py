"""Runs that share one device take turns at it.

Two processes that both fill a GPU get less done together than one after the other. With $STRAIGHTDP_TURNS set to a
file, a stage that fills the device waits until no other run is in one; starting, reading and planning of one run go on
beside another's training. A process that dies gives its turn up.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from straightdp.errors import BadInput

VARIABLE = "STRAIGHTDP_TURNS"
FILLS = frozenset({"autoencode", "prior", "pretrain", "distill", "train", "match", "evolve", "sample", "evaluate"})


def of_this_device() -> str:
    """A file for all who use this machine's first visible GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").replace("/", "-")
    return str(Path(tempfile.gettempdir()) / f"straightdp-turns-{os.getuid()}-{socket.gethostname()}-{visible}")


@contextmanager
def turn(stage: str) -> Iterator[None]:
    """Wait for this stage's turn, and have it until the block ends."""
    path = os.environ.get(VARIABLE)
    if not path or stage not in FILLS:
        yield
        return
    try:
        file = open(path, "a")  # noqa: SIM115
    except OSError as error:
        raise BadInput(
            f"{VARIABLE} = {path} cannot be written ({error.strerror}); name a file, or leave it out"
        ) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
