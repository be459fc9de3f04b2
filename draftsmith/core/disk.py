"""Files and folders that are whole or absent: written aside, flushed, renamed.

A killed process leaves a `.partial` sibling at worst, which the next run removes; a full disk leaves nothing and says so.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"


class DiskError(OSError):
    """A write that did not fit or was refused; whatever was whole before still is."""


@contextmanager
def explained(path: Path, size: int | None = None) -> Iterator[None]:
    """Turns an OSError into a DiskError that names the file, its size in bytes and the free space."""
    try:
        yield
    except OSError as error:
        existing = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        need = f", which needs {size / 1e6:.1f} MB" if size is not None else ""
        raise DiskError(
            f"could not write {path}{need} ({error.strerror or error}; {free / 1e6:.1f} MB free). Nothing half-written was left "
            "behind; make room and run the same command again: it continues from the last whole state."
        ) from error


@contextmanager
def new_file(path: Path | str, size: int | None = None, writer: str = "") -> Iterator[BinaryIO]:
    """Fill a file aside, flush it and rename it into place at the end. On any error nothing is left. Raises DiskError.

    `writer` becomes part of the name aside, for files that several processes may write at once.
    """
    path = Path(path)
    aside = path.with_name(path.name + writer + PARTIAL)
    with explained(path, size):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def write_bytes(path: Path | str, data: bytes, writer: str = "") -> None:
    """Write a file whole or not at all. Raises DiskError."""
    with new_file(path, len(data), writer) as file:
        file.write(data)


def append_text(path: Path | str, text: str) -> None:
    """Append to a log. Raises DiskError."""
    path = Path(path)
    with explained(path, len(text)), path.open("a", encoding="utf-8") as file:
        file.write(text)


def write_text(path: Path | str, text: str) -> None:
    """`write_bytes` for text."""
    write_bytes(path, text.encode("utf-8"))


@contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Fill a folder aside and rename it into place at the end; replaces an older one. On any error nothing is left."""
    path = Path(path)
    aside = path.with_name(path.name + PARTIAL)
    shutil.rmtree(aside, ignore_errors=True)
    with explained(path):
        aside.mkdir(parents=True)
    try:
        yield aside
        with explained(path):
            if path.exists():
                shutil.rmtree(path)
            aside.replace(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sha256(path: Path | str) -> str:
    """Hex digest of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
