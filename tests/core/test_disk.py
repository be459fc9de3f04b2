from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftsmith.core.disk import DiskError, new_folder, sha256, write_bytes, write_text


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """What a full disk does, done by the kernel: writing beyond `size` bytes of a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def test_a_file_is_written_with_its_folders_and_replaces_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.bin"
    write_bytes(path, b"first, and longer")
    write_bytes(str(path), b"second")
    assert tree(tmp_path) == {"a": None, "a/b.bin": b"second"}


def test_text_is_utf8_with_its_line_ends_kept(tmp_path: Path) -> None:
    write_text(tmp_path / "x", "ü\r\n→\n")
    assert (tmp_path / "x").read_bytes() == "ü\r\n→\n".encode()


@pytest.mark.parametrize("older", [None, b"older"])
def test_a_file_that_does_not_fit_leaves_the_older_one_and_nothing_else(tmp_path: Path, older: bytes | None) -> None:
    path = tmp_path / "weights.bin"
    if older is not None:
        path.write_bytes(older)
    with largest_file(1000), pytest.raises(DiskError, match=r"weights\.bin.*0\.0 MB.*make room"):
        write_bytes(path, b"x" * 5000)
    assert tree(tmp_path) == ({} if older is None else {"weights.bin": older})
    write_bytes(path, b"x" * 5000)
    assert path.stat().st_size == 5000


def test_the_error_is_an_os_error_that_says_why(tmp_path: Path) -> None:
    with largest_file(10), pytest.raises(OSError, match="File too large"):
        write_bytes(tmp_path / "x", b"y" * 100)


def test_a_stale_partial_file_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.partial").write_bytes(b"much longer than the new content")
    write_bytes(tmp_path / "x", b"new")
    assert tree(tmp_path) == {"x": b"new"}


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError, match="could not write"):
        write_bytes(tmp_path / "file" / "below" / "x", b"1")
    with pytest.raises(DiskError, match="could not write"), new_folder(tmp_path / "file" / "below"):
        raise AssertionError("the body must not run")
    assert tree(tmp_path) == {"file": b""}


def test_a_failing_rename_leaves_nothing(tmp_path: Path) -> None:
    """The place is taken by a folder with something in it."""
    (tmp_path / "x" / "inside").mkdir(parents=True)
    with pytest.raises(DiskError):
        write_bytes(tmp_path / "x", b"1")
    assert tree(tmp_path) == {"x": None, "x/inside": None}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_write_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    """A second Ctrl-C strikes anywhere."""

    def struck(_file: int) -> None:
        raise error

    (tmp_path / "x").write_bytes(b"older")
    monkeypatch.setattr(os, "fsync", struck)
    with pytest.raises(error):
        write_bytes(tmp_path / "x", b"new")
    assert tree(tmp_path) == {"x": b"older"}


def test_content_is_flushed_before_it_gets_its_name(tmp_path: Path) -> None:
    """The order of system calls, as the kernel's tracer of Python sees them: open aside, fsync, rename."""
    code = (
        "import os, sys\nfrom draftsmith.core import disk\nreal, seen = os.fsync, []\n"
        "def fsync(n):\n    seen.append(('fsync', os.fstat(n).st_size)); real(n)\nos.fsync = fsync\n"
        "sys.addaudithook(lambda e, a: seen.append((e, os.path.basename(a[1]))) if e == 'os.rename' else None)\n"
        "disk.write_bytes(sys.argv[1], b'12345')\nprint(seen)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[('fsync', 5), ('os.rename', 'x')]"


def test_a_folder_appears_only_when_it_is_full(tmp_path: Path) -> None:
    with new_folder(tmp_path / "deep" / "step") as aside:
        (aside / "1").write_text("one")
        assert not (tmp_path / "deep" / "step").exists()
    assert tree(tmp_path) == {"deep": None, "deep/step": None, "deep/step/1": b"one"}


def test_a_folder_replaces_an_older_one_entirely(tmp_path: Path) -> None:
    (tmp_path / "step" / "sub").mkdir(parents=True)
    (tmp_path / "step" / "sub" / "old").write_text("old")
    with new_folder(tmp_path / "step") as aside:
        (aside / "new").write_text("new")
        assert (tmp_path / "step" / "sub" / "old").exists()
    assert tree(tmp_path) == {"step": None, "step/new": b"new"}


@pytest.mark.parametrize("error", [ValueError("body"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_in_the_body_leaves_the_older_folder_and_passes_through(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "old").write_text("old")

    def fill() -> None:
        with new_folder(tmp_path / "step") as aside:
            (aside / "half").write_text("half")
            raise error

    with pytest.raises(type(error)) as caught:
        fill()
    assert caught.value is error
    assert tree(tmp_path) == {"step": None, "step/old": b"old"}


def test_a_full_disk_in_the_body_leaves_the_older_folder(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "old").write_text("old")

    def fill() -> None:
        with new_folder(tmp_path / "step") as aside:
            write_bytes(aside / "first", b"x" * 900)
            write_bytes(aside / "second", b"x" * 2000)

    with largest_file(1000), pytest.raises(DiskError, match="second"):
        fill()
    assert tree(tmp_path) == {"step": None, "step/old": b"old"}


def test_what_a_killed_process_left_does_not_get_into_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "step.partial").mkdir()
    (tmp_path / "step.partial" / "stale").write_text("stale")
    with new_folder(tmp_path / "step") as aside:
        (aside / "new").write_text("new")
    assert tree(tmp_path) == {"step": None, "step/new": b"new"}


def test_the_digest_is_sha256_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc" * 100_000)
    assert sha256(tmp_path / "x") == hashlib.sha256(b"abc" * 100_000).hexdigest()
