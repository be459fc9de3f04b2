"""A file of conversations that are finished in any order, over any number of stopped runs, and come out whole and in the order of the input.

`OUT.unfinished` holds a line about the run (its settings) and one line a finished conversation. A killed run leaves a torn last line at worst, which is cut
off. The same input and settings continue it; others are refused.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from draftsmith.core.disk import explained, new_file, write_text
from draftsmith.data.conversations import Conversation, from_row

UNFINISHED, REPORT, FAILED = ".unfinished", ".report.json", ".failed.jsonl"


def digest(asked: Sequence[Conversation]) -> str:
    """Identity of what is asked."""
    found = hashlib.sha256()
    for conversation in asked:
        found.update(json.dumps(conversation.to_row()).encode() + b"\n")
    return found.hexdigest()[:16]


def finished(out: Path, about: Mapping[str, Any]) -> bool:
    """Whether `out` holds what these settings would make. Raises ValueError when it was made otherwise."""
    if not out.exists():
        return False
    report = sibling(out, REPORT)
    if not report.exists():
        raise ValueError(f"{out} exists, and no {report.name} says how it was made: name another file, or delete it")
    _require_same(f"{out} exists and", json.loads(report.read_text(encoding="utf-8"))["settings"], about, "name another file, or delete it")
    sibling(out, UNFINISHED).unlink(missing_ok=True)
    return True


class Journal:
    """Finished conversations of a run, on disk. A context manager; one process at a time."""

    def __init__(self, out: Path, about: Mapping[str, Any], asked: Sequence[Conversation]) -> None:
        """Raises ValueError when the unfinished file is of other settings, is damaged, or is being written by another process."""
        self.out, self.about, self.asked = out, about, asked
        self.path = sibling(out, UNFINISHED)
        with explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = cast(BinaryIO, self.path.open("a+b"))
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.places = self._recover()
        except BlockingIOError:
            self.file.close()
            raise ValueError(f"{self.path} is being written by another process: wait for it, or name another file") from None
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __contains__(self, conversation: Conversation) -> bool:
        return conversation.id in self.places

    def add(self, conversation: Conversation) -> None:
        """Keep a finished conversation. After this returns, killing the process does not lose it. Raises DiskError."""
        assert conversation.id not in self.places
        place = self.file.seek(0, 2)
        self._append(conversation.to_row())
        self.places[conversation.id] = place

    def read(self) -> Iterator[tuple[Conversation, Conversation]]:
        """What was asked and what came out, in the order of the input, without what failed."""
        for asked in self.asked:
            if asked in self:
                yield asked, from_row(json.loads(self._line(asked)), asked.id)

    def finish(self, report: Mapping[str, Any], failed: Sequence[tuple[Conversation, str]]) -> None:
        """Write `out` whole with its report; conversations that failed go to a file of their own, with the reason, which can be asked again."""
        rows = "".join(json.dumps(c.to_row() | {"error": reason}, ensure_ascii=False) + "\n" for c, reason in failed)
        failures = sibling(self.out, FAILED)
        if failed:
            write_text(failures, rows)
        else:
            failures.unlink(missing_ok=True)
        write_text(sibling(self.out, REPORT), json.dumps({"settings": self.about} | dict(report), indent=1) + "\n")
        with new_file(self.out) as file:
            if self.out.suffix == ".gz":
                with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                    packed.writelines(self._line(c) for c in self.asked if c in self)
            else:
                file.writelines(self._line(c) for c in self.asked if c in self)
        self.discard()

    def discard(self) -> None:
        """Forget the run."""
        self.path.unlink()

    def _line(self, asked: Conversation) -> bytes:
        self.file.seek(self.places[asked.id])
        return self.file.readline()

    def _append(self, row: Mapping[str, Any]) -> None:
        with explained(self.path):
            self.file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            self.file.flush()

    def _recover(self) -> dict[str, int]:
        self.file.seek(0)
        first = self.file.readline()
        if not first.endswith(b"\n"):
            self.file.truncate(0)
            self._append({"settings": self.about})
            return {}
        _require_same(f"{self.path} was begun and", _parsed(first, f"{self.path}:1")["settings"], self.about, "give the same settings, or delete it")
        known = {c.id for c in self.asked}
        places: dict[str, int] = {}
        place = self.file.tell()
        for number, line in enumerate(iter(self.file.readline, b""), start=2):
            if not line.endswith(b"\n"):
                self.file.truncate(place)
                break
            name = _parsed(line, f"{self.path}:{number}").get("id")
            if name not in known or name in places:
                raise ValueError(f"{self.path}:{number}: {name!r} was not asked, or stands there twice: the file is damaged; delete it")
            places[name] = place
            place += len(line)
        return places


def sibling(out: Path, ending: str) -> Path:
    """A file beside `out` that belongs to it."""
    return out.with_name(out.name + ending)


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is damaged ({error}): delete the file to begin again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} is damaged (no object): delete the file to begin again")
    return found


def _require_same(what: str, old: Mapping[str, Any], new: Mapping[str, Any], advice: str) -> None:
    for key in new:
        if old.get(key) != new[key]:
            raise ValueError(f"{what} has {key} = {old.get(key)!r}, asked for now is {new[key]!r}: {advice}")
