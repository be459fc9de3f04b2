"""`draftsmith prepare` killed in the middle, then called again: whole chunks are kept, halves are not read, the samples are those of an undisturbed call.

So are those of two calls at the same time, and of a call after one of whose processes was killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import Fault, contents, execute

SMALL, LARGE = 1000, 40
"""Rows of a chunk (`sources.CHUNK_ROWS`), and rows at the end that make a larger file than a whole chunk of small ones."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(5 * SMALL)]
    rows += [{"prompt": f"question {n}", "completion": "long " * 2000} for n in range(LARGE)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chunks(cache: Path) -> dict[str, int]:
    """Whole chunks by name, with what changes when their Arrow file is made again."""
    return {p.stem: p.with_suffix(".arrow").stat().st_ino for p in cache.glob("samples/*/?????.json")}


def begin(arguments: list[str]) -> subprocess.Popen[str]:
    """The command in a fresh interpreter."""
    code = "from draftsmith.cli import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def await_chunks(process: subprocess.Popen[str], cache: Path, whole: int) -> None:
    """Until so many chunks are whole."""
    deadline = time.monotonic() + 300
    while len(chunks(cache)) < whole:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.002)


def kill(arguments: list[str], cache: Path, whole: int) -> None:
    """Start the command, and SIGKILL it once so many chunks are whole."""
    with begin(arguments) as process:
        await_chunks(process, cache, whole)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("processes", [1, 2])
def test_the_same_command_after_a_kill_goes_on(tmp_path: Path, tiny_target: Path, file: Path, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["prepare", str(file), "--target", str(tiny_target), "--processes", str(processes), "data.max_length=20000"]
    caches = {name: tmp_path / name for name in ("undisturbed", "killed")}
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(caches["undisturbed"]))
    assert execute([*arguments, "--out", tmp_path / "expected.jsonl"])[0] == 0
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(caches["killed"]))
    kill(arguments, caches["killed"], 2)
    kept = chunks(caches["killed"])
    assert 2 <= len(kept) < 6
    assert not list(caches["killed"].glob("samples/*/done.json"))
    if processes == 1:  # dies while it writes the largest chunk
        code, _ = execute(arguments, Fault(file_limit=1_000_000, fatal=True))
        assert code == -signal.SIGXFSZ
        (half,) = caches["killed"].glob("samples/*/*.partial")
        assert half.name.startswith("00005.arrow")
        assert 0 < half.stat().st_size <= 1_000_000
    code, text = execute([*arguments, "--out", tmp_path / "found.jsonl"])
    assert code == 0, text
    assert kept.items() <= chunks(caches["killed"]).items()
    assert contents(caches["killed"]) == contents(caches["undisturbed"])
    assert (tmp_path / "found.jsonl").read_bytes() == (tmp_path / "expected.jsonl").read_bytes()


def test_processes_end_with_the_call_that_started_them(tmp_path: Path, tiny_target: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, they would wait for work forever, or write into files of the next call."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DRAFTSMITH_TEST_MARK", str(tmp_path))
    kill(["prepare", str(file), "--target", str(tiny_target), "--processes", "2"], tmp_path / "cache", 1)
    deadline = time.monotonic() + 60
    while left := with_mark(str(tmp_path)):
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.05)


@pytest.mark.parametrize("ends", [signal.SIGCONT, signal.SIGKILL], ids=["finishes", "is killed"])
def test_of_two_calls_at_the_same_time_one_waits(tmp_path: Path, tiny_target: Path, file: Path, ends: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    arguments = ["prepare", str(file), "--target", str(tiny_target), "data.max_length=20000", "--processes"]
    with begin([*arguments, "1", "--out", str(tmp_path / "a.jsonl")]) as first:
        await_chunks(first, tmp_path / "cache", 1)
        os.kill(first.pid, signal.SIGSTOP)
        with begin([*arguments, "2", "--out", str(tmp_path / "b.jsonl")]) as second:
            assert second.stdout is not None
            assert "another call makes the same samples" in second.stdout.readline()
            made = chunks(tmp_path / "cache")
            os.kill(first.pid, ends)
            texts = [process.communicate(timeout=300)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0 if ends == signal.SIGCONT else -ends, 0), texts
    assert made.items() <= chunks(tmp_path / "cache").items()
    assert len((tmp_path / "b.jsonl").read_text().splitlines()) == 5 * SMALL + LARGE
    if ends == signal.SIGCONT:
        assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_a_killed_process_is_told_and_what_is_finished_is_kept(tmp_path: Path, tiny_target: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does when memory runs out."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DRAFTSMITH_TEST_MARK", str(tmp_path))
    arguments = ["prepare", str(file), "--target", str(tiny_target), "data.max_length=20000", "--processes"]
    with begin([*arguments, "2"]) as process:
        await_chunks(process, tmp_path / "cache", 2)
        os.kill(worker(str(tmp_path)), signal.SIGKILL)
        text = process.communicate(timeout=300)[0]
    assert process.returncode == 2, text
    assert "error: one of 2 processes was killed, most often because memory ran out" in text
    assert "Traceback" not in text
    kept = chunks(tmp_path / "cache")
    assert 2 <= len(kept) < 6
    code, text = execute([*arguments, "1"])
    assert code == 0, text
    assert kept.items() <= chunks(tmp_path / "cache").items()
    assert f"{5 * SMALL + LARGE:,}" in text


def worker(value: str) -> int:
    """A process that tokenizes: one whose parent is neither this test nor the command."""
    marked = with_mark(value)
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in marked}
    return next(pid for pid, parent in parents.items() if parents.get(parent) in marked)


def with_mark(value: str) -> list[int]:
    """Other processes that have this value in their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            held = f"DRAFTSMITH_TEST_MARK={value}".encode() in place.read_bytes().split(b"\0")
        except OSError:
            continue
        if held and int(place.parent.name) != os.getpid():
            found.append(int(place.parent.name))
    return found
