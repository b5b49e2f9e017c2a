"""Progress of long work: a bar with the time left on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator

Track = Callable[[Iterable[int], int, int], Iterable[int]]
"""(the steps still to do, how many are done, how many there are in all) to the same steps, shown."""

LINE_EVERY_SECONDS = 15.0


def say(text: str) -> None:
    print(text, flush=True)


def tracker(name: str) -> Track:
    """A tracker for one stage."""
    return _bar(name) if sys.stderr.isatty() else _lines(name)


def quiet(steps: Iterable[int], done: int, total: int) -> Iterable[int]:
    return steps


def _bar(name: str) -> Track:
    def track(steps: Iterable[int], done: int, total: int) -> Iterator[int]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(f"{name:<10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(name, total=total, completed=done)
            for step in steps:
                yield step
                progress.advance(task)

    return track


def _lines(name: str) -> Track:
    def track(steps: Iterable[int], done: int, total: int) -> Iterator[int]:
        start = last = time.monotonic()
        for count, step in enumerate(steps, start=1):
            yield step
            now = time.monotonic()
            if now - last >= LINE_EVERY_SECONDS:
                last = now
                left = (now - start) / count * (total - done - count)
                print(f"{name}: {done + count}/{total}, about {left:.0f} s left", file=sys.stderr, flush=True)

    return track
