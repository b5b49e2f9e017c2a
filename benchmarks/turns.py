"""Processes that prepare side by side and measure one at a time: compilation takes minutes, a measurement seconds."""

from __future__ import annotations

import argparse
import fcntl
from contextlib import contextmanager
from pathlib import Path


def add_turns(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--turns", type=Path, metavar="FILE", help="prepare side by side; measure while holding this file's lock"
    )


@contextmanager
def turn(file: Path | None):
    """Waits until no other process measures under the same file."""
    if file is None:
        yield
        return
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
