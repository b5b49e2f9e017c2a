"""Fetch the catalogue's files, check them, and never leave a half-written one behind."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from straightdp.data.arrays import present
from straightdp.data.catalogue import File, find
from straightdp.errors import BadInput

TIMEOUT = 30.0
_BLOCK = 1 << 16
_OUTCOME = {"ok": "already there", "missing": "fetched", "wrong content": "replaced"}

# Called with (file name, bytes so far, bytes in all or None if the server does not say).
Report = Callable[[str, int, int | None], None]


def get(name: str, root: Path, progress: Report | None = None) -> list[tuple[str, str]]:
    """Fetch every file of a catalogue entry into root/NAME.

    Returns (file, "already there" | "fetched" | "replaced") for each.

    Guarantee: a file appears under its own name only after its digest was checked, by an atomic rename;
    whatever fails, the temporary file is gone and a file that was there before is untouched. A file that is
    there with the right content is not fetched again; one with the wrong content is replaced. Without
    `progress`, a bar is shown on a terminal and plain lines elsewhere, both on stderr.
    """
    files = find(name)
    folder = _folder(name, root)
    results: list[tuple[str, str]] = []
    with _display() if progress is None else nullcontext(progress) as report:
        for file in files:
            status = _status(file, folder)
            if status != "ok":
                _fetch(name, file, folder / file.name, report)
            results.append((file.name, _OUTCOME[status]))
    return results


def check(name: str, root: Path) -> list[tuple[str, str]]:
    """(file, "ok" | "missing" | "wrong content") for every file of a catalogue entry; nothing is written."""
    folder = _folder(name, root)
    return [(file.name, _status(file, folder)) for file in find(name)]


def _status(file: File, folder: Path) -> str:
    path = folder / file.name
    there = present(path) if file.gunzip else path if path.is_file() else None
    if there is None:
        return "missing"
    return "ok" if digest_of(there, file) == file.digest else "wrong content"


def digest_of(path: Path, file: File) -> str:
    """The digest of a file's content in the form of `file.digest`; text that says why if there is none.

    No more than `file.size` bytes are unpacked, so a hostile gzip cannot fill the memory or stall the check.
    """
    algorithm = file.digest.partition(":")[0]
    total, digest = 0, hashlib.new(algorithm)
    try:
        with path.open("rb") as raw:
            packed = file.gunzip and raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            while block := stream.read(_BLOCK):
                digest.update(block)
                total += len(block)
                if total > file.size:
                    return f"more than {file.size:,} bytes"
    except (OSError, EOFError, zlib.error) as error:
        return f"unreadable content ({error})"
    return f"{algorithm}:{digest.hexdigest()}" if total == file.size else f"only {total:,} bytes"


def _folder(name: str, root: Path) -> Path:
    return Path(root) / name.partition(":")[0]


def _fetch(name: str, file: File, target: Path, report: Report) -> None:
    part = target.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as out:
            for block in _blocks(name, file, target, report):
                out.write(block)
        if (came := digest_of(part, file)) != file.digest:
            raise BadInput(
                f"{file.url} should hold {file.size:,} bytes with {file.digest} but gave {came}; "
                f"try again later, or {_by_hand(name, target)}"
            )
        os.replace(part, target)
    except OSError as error:
        raise BadInput(
            f"{target} could not be written ({error.strerror or error}); "
            "mend the folder or set STRAIGHTDP_DATA to another"
        ) from None
    finally:
        with suppress(OSError):
            part.unlink()


def _blocks(name: str, file: File, target: Path, report: Report) -> Iterator[bytes]:
    """The body of the file's URL, block by block; every failure of the network becomes one sentence."""
    request = urllib.request.Request(file.url, headers={"User-Agent": "straightdp"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
            done = 0
            report(file.name, done, total)
            while block := response.read(_BLOCK):
                done += len(block)
                report(file.name, done, total)
                yield block
        if total is not None and done != total:
            raise http.client.IncompleteRead(b"", total - done)
    except (OSError, http.client.HTTPException) as error:
        raise BadInput(
            f"{file.url} could not be fetched ({_reason(error)}); try again, or {_by_hand(name, target)}"
        ) from None


def _reason(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "the connection broke off before the end"
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code} {error.reason}"
    return str(getattr(error, "reason", error)) or type(error).__name__


def _by_hand(name: str, target: Path) -> str:
    plain = name.partition(":")[0]
    return f"fetch it elsewhere, put it at {target} and run 'straightdp data check {plain}'"


@contextmanager
def _display() -> Iterator[Report]:
    """A bar per file on a terminal; elsewhere a line when a file begins and at each quarter of it."""
    if not sys.stderr.isatty():
        yield _plain_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def report(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=done)

        yield report


def _plain_lines() -> Report:
    quarters: dict[str, int] = {}

    def report(file: str, done: int, total: int | None) -> None:
        quarter = 4 * done // total if total else 0
        if quarters.get(file) == quarter:
            return
        quarters[file] = quarter
        size = f"{total:,} bytes" if total else "a size the server does not say"
        print(f"{file}: {25 * quarter}% of {size}", file=sys.stderr)

    return report
