"""The transcript: one JSON object a line, each carrying the hash of the line before and its own.

Spend before touch: `spend` returns only after the entry is on disk. What was not declared is refused. The
authoritative file lies in `private/`; `release/` gets a copy of the same lines, made good whenever the ledger opens,
so that moving or deleting what is published does not give a spent budget back.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from straightdp.errors import BadInput, BudgetRefused
from straightdp.files import sync_folder, write_durably
from straightdp.privacy.accountant import ADJACENCY, Declaration
from straightdp.privacy.workload import Certificate

VERSION = 1
START = "0" * 64


class TranscriptError(Exception):
    """The first line of a transcript that is wrong, and why."""

    def __init__(self, line: int, why: str):
        super().__init__(f"line {line}: {why}")
        self.line = line


def seal(body: dict[str, Any]) -> tuple[bytes, str]:
    """The bytes of one line, and its hash: canonical JSON, closed by the hash of what stands before it."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text[:-1]},"hash":"{digest}"}}\n'.encode(), digest


def read_chain(data: bytes) -> list[dict[str, Any]]:
    """All lines of a transcript, each checked to the byte against its own hash and the line before's."""
    entries: list[dict[str, Any]] = []
    previous = START
    lines = data.split(b"\n")
    if lines[-1] != b"":
        raise TranscriptError(len(lines), "is cut off (no line end)")
    for number, raw in enumerate(lines[:-1], start=1):
        try:
            body = json.loads(raw)
            del body["hash"]
            line, digest = seal(body)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise TranscriptError(number, "is not a transcript entry") from None
        if line != raw + b"\n":
            raise TranscriptError(number, "was changed: its hash does not match its content")
        if body.get("line") != number:
            raise TranscriptError(number, f"says it is line {body.get('line')}: lines were dropped, repeated or moved")
        if body.get("previous") != previous:
            raise TranscriptError(number, "does not follow the line before it")
        previous = digest
        entries.append(body)
    return entries


class Ledger:
    """The one writer of a run's transcript. Opened with `reads`, it only knows what was declared, and never writes."""

    def __init__(self, path: Path, copy: Path | None = None, *, reads: bool = False):
        self.path, self.copy, self.reads = path, copy, reads
        self.entries: list[dict[str, Any]] = []
        self.declared: dict[str, Declaration] = {}
        self.executed: set[tuple[str, int]] = set()
        self._previous = START
        self._session: set[tuple[str, int]] = set()
        if path.exists():
            self._reopen()

    def _reopen(self) -> None:
        """Take up an earlier session's transcript. A last line without its end was never relied on: it is removed."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            entries = read_chain(whole)
        except TranscriptError as error:
            raise BadInput(f"{self.path} is damaged at {error}; this run cannot go on, start another --out") from None
        if len(whole) != len(data) and not self.reads:
            with open(self.path, "r+b") as file:
                file.truncate(len(whole))
                os.fsync(file.fileno())
        for entry in entries:
            self._take(entry)
        if self.copy is not None:
            if self.copy.exists() and not whole.startswith(self.copy.read_bytes().rpartition(b"\n")[0]):
                raise BadInput(
                    f"{self.copy} is not a copy of {self.path}, which may be an older one; give another --out"
                )
            write_durably(self.copy, whole)

    def _take(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        self._previous = seal(entry)[1]
        if entry["kind"] == "declare":
            body = entry["mechanism"]
            fields = {k: body[k] for k in ("id", "what", "kind", "sensitivity", "sigma", "q", "count")}
            self.declared[body["id"]] = Declaration(**fields)
        elif entry["kind"] == "execute":
            self.executed.add((entry["id"], entry["step"]))

    def _append(self, kind: str, **body: Any) -> None:
        if self.reads:
            raise BudgetRefused(f"{self.path} was opened for reading; only the leading process spends")
        entry = {"line": len(self.entries) + 1, "kind": kind, "previous": self._previous, **body}
        fresh, line = not self.path.exists(), seal(entry)[0]
        with open(self.path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if fresh:
            sync_folder(self.path.parent)
        if self.copy is not None:
            with open(self.copy, "ab") as file:
                file.write(line)
        self._take(entry)

    def find(self, kind: str) -> dict[str, Any] | None:
        return next((entry for entry in self.entries if entry["kind"] == kind), None)

    @property
    def certified(self) -> bool:
        return self.find("certificate") is not None

    @property
    def closed(self) -> bool:
        return self.find("totals") is not None

    def declare(
        self,
        certificate: Certificate,
        *,
        budget: float,
        noise: str,
        mode: str,
        n: int,
        recipe: str,
        assumptions: list[dict[str, str]],
    ) -> None:
        """Write header, assumptions, every mechanism and the certificate. Nothing private was read before this."""
        if self.executed or self.certified:
            raise BudgetRefused(f"{self.path} is declared already; one folder holds one budget")
        for path in filter(None, (self.copy, self.path)):  # an unfinished declaration: nothing ran under it
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        self.entries, self.declared, self.executed, self._previous = [], {}, set(), START
        self._append(
            "header",
            version=VERSION,
            epsilon=budget,
            delta=certificate.delta,
            unit="one record",
            adjacency=ADJACENCY,
            n=n,
            mode=mode,
            noise=noise,
            accountant={"name": "pld", "interval": certificate.interval},
            recipe=recipe,
        )
        for assumption in assumptions:
            self._append("assumption", **assumption)
        for part in certificate.workload:
            self._append("declare", mechanism=part.to_json())
        self._append("certificate", epsilon=certificate.epsilon)

    def spend(self, id: str, step: int = 0, **details: Any) -> Declaration:
        """Record one execution and return its declaration; the entry is on disk when this returns.

        A step recorded by an earlier session is a resumed run repeating the same keyed draws: it is let through, once,
        and nothing is spent twice. A second time in one session is refused: the same noise on another sum would
        cancel.
        """
        part = self.declared.get(id)
        if part is None or not self.certified:
            raise BudgetRefused(f"mechanism {id!r} was not declared before the first private read")
        if not 0 <= step < part.count:
            raise BudgetRefused(f"step {step} of mechanism {id!r} is beyond the {part.count} declared")
        if self.closed:
            raise BudgetRefused(f"the budget of {self.path} is closed: mechanism {id!r} may not run again")
        if (id, step) in self._session:
            raise BudgetRefused(f"step {step} of mechanism {id!r} has run already")
        self._session.add((id, step))
        if (id, step) not in self.executed:
            self._append("execute", id=id, step=step, **details)
        return part

    def close(self, files: dict[str, str]) -> None:
        """The last line: how often each mechanism ran, what it all cost, and the hashes of what was released."""
        certificate = self.find("certificate")
        if certificate is None:
            raise BudgetRefused("a transcript without a certificate cannot be closed")
        executed = {id: sum(1 for name, _ in self.executed if name == id) for id in self.declared}
        self._append("totals", executed=executed, epsilon=certificate["epsilon"], files=files)
