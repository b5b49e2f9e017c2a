"""Files that are whole or not there, and their hashes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def file_hash(path: Path) -> str:
    """sha256 of a file, or of a folder's file names and contents in sorted order."""
    digest = hashlib.sha256()
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(path)}\0{file_hash(file)}\n".encode())
    else:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def write_text(path: Path, text: str) -> None:
    write_durably(path, text.encode())


def write_durably(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Whole or not at all, and on disk when this returns, its name included."""
    partial = path.with_name(path.name + ".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
