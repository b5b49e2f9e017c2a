"""Runs that share one device take turns at it.

Two processes that both fill a GPU get less done together than one after the other. With $STRAIGHTDP_TURNS set to a
file, a stage that fills the device waits until no other run is in one; starting, reading, planning and compiling of one
run go on beside another's training. A process that dies gives its turn up.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "STRAIGHTDP_TURNS"
FILLS = frozenset({"autoencode", "prior", "pretrain", "distill", "train", "match", "evolve", "sample", "evaluate"})


@contextmanager
def turn(stage: str) -> Iterator[None]:
    """Wait for this stage's turn, and have it until the block ends."""
    path = os.environ.get(VARIABLE)
    if not path or stage not in FILLS:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
