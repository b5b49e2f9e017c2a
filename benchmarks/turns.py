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
def preparing(file: Path | None):
    """Holds off every measurement under the same file."""
    with _locked(file, fcntl.LOCK_SH):
        yield


@contextmanager
def turn(file: Path | None):
    """Waits until nobody prepares or measures under the same file."""
    with _locked(file, fcntl.LOCK_EX):
        yield


@contextmanager
def _locked(file: Path | None, kind: int):
    if file is None:
        yield
        return
    with open(file, "w") as lock:
        fcntl.flock(lock, kind)
        yield
