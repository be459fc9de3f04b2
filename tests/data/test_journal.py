"""Finished in any order, stopped anywhere, and whole and in order at the end."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftsmith.data.conversations import Conversation, Message, read
from draftsmith.data.journal import FAILED, REPORT, UNFINISHED, Journal, digest, finished, sibling

ASKED = [Conversation(f"c{i}", "k", (Message("user", f"question {i} é\u2028\n"),)) for i in range(7)]
ABOUT = {"model": "m", "conversations": digest(ASKED), "temperature": 0.0}


def answered(i: int) -> Conversation:
    return Conversation(f"c{i}", "k", (*ASKED[i].messages, Message("assistant", f"answer {i} 日", token_ids=(i, 2), finish_reason="stop")))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(order=st.permutations(range(7)), cuts=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 400)), max_size=3))
def test_any_order_and_any_torn_end_gives_the_same_file(tmp_path: Path, order: list[int], cuts: list[tuple[int, int]]) -> None:
    """Stopped after some conversations, with the last bytes of the file lost: what is lost is asked again, nothing twice."""
    out = tmp_path / "out.jsonl"
    out.unlink(missing_ok=True)
    sibling(out, REPORT).unlink(missing_ok=True)
    for stop, lost in [*cuts, (7, 0)]:
        with Journal(out, ABOUT, ASKED) as journal:
            for i in [i for i in order if ASKED[i] not in journal][:stop]:
                journal.add(answered(i))
        data = journal.path.read_bytes()
        journal.path.write_bytes(data[: len(data) - lost] if lost else data)
    with Journal(out, ABOUT, ASKED) as journal:
        assert list(journal.read()) == [(ASKED[i], answered(i)) for i in range(7)]
        journal.finish({}, [])
    assert read(out) == [answered(i) for i in range(7)]
    assert not journal.path.exists()
    assert finished(out, ABOUT)


def test_failures_go_beside_it_and_can_be_asked_again(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.jsonl.gz"
    with Journal(out, ABOUT, ASKED) as journal:
        for i in (6, 0, 3):
            journal.add(answered(i))
        journal.finish({"turns": 3}, [(ASKED[i], f"reason {i}") for i in (1, 2, 4, 5)])
    assert read(out) == [answered(i) for i in (0, 3, 6)]
    failed = sibling(out, FAILED)
    assert read(failed) == [ASKED[i] for i in (1, 2, 4, 5)]
    assert [json.loads(line)["error"] for line in failed.read_text().split("\n")[:-1]] == [f"reason {i}" for i in (1, 2, 4, 5)]
    assert json.loads(sibling(out, REPORT).read_text()) == {"settings": ABOUT, "turns": 3}
    first = out.read_bytes()
    out.unlink()
    with Journal(out, ABOUT, ASKED) as journal:
        for i in (3, 6, 0):
            journal.add(answered(i))
        journal.finish({}, [])
    assert out.read_bytes() == first
    assert gzip.decompress(first).count(b"\n") == 3
    assert sorted(p.name for p in out.parent.iterdir()) == ["out.jsonl.gz", "out.jsonl.gz.report.json"]


@pytest.mark.parametrize(("key", "value"), [("model", "n"), ("temperature", 0.5), ("conversations", digest(ASKED[1:]))])
def test_other_settings_are_refused_and_named(tmp_path: Path, key: str, value: object) -> None:
    out = tmp_path / "out.jsonl"
    other = ABOUT | {key: value}
    with Journal(out, ABOUT, ASKED) as journal:
        journal.add(answered(1))
    with pytest.raises(ValueError, match=rf"out.jsonl.unfinished was begun and has {key} = {ABOUT[key]!r}, asked for now is {value!r}"):
        Journal(out, other, ASKED)
    with Journal(out, ABOUT, ASKED) as journal:
        journal.finish({}, [])
    with pytest.raises(ValueError, match=rf"out.jsonl exists and has {key} = {ABOUT[key]!r}, asked for now is {value!r}"):
        finished(out, other)


def test_what_is_asked_is_identified_by_all_of_it() -> None:
    tool = ({"type": "function", "function": {"name": "f"}},)
    variants = [ASKED, ASKED[::-1], ASKED[:-1], [*ASKED[:-1], Conversation("c6", "k", ASKED[6].messages, tool)], [answered(0), *ASKED[1:]]]
    assert len({digest(v) for v in variants}) == len(variants)


def test_a_file_that_says_nothing_about_itself_is_not_taken_over(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert not finished(out, ABOUT)
    out.write_text("precious")
    with pytest.raises(ValueError, match=r"out.jsonl exists, and no out.jsonl.report.json says how it was made"):
        finished(out, ABOUT)
    assert out.read_text() == "precious"


def test_killed_between_the_result_and_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Journal(out, ABOUT, ASKED) as journal:
        journal.add(answered(1))
        left = journal.path.read_bytes()
        journal.finish({}, [])
    journal.path.write_bytes(left)
    assert finished(out, ABOUT)
    assert not journal.path.exists()


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.jsonl", ABOUT, ASKED), pytest.raises(ValueError, match="being written by another process"):
        Journal(tmp_path / "out.jsonl", ABOUT, ASKED)
    Journal(tmp_path / "out.jsonl", ABOUT, ASKED).__exit__()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: [lines[0], b"{torn}\n", lines[2]], r"unfinished:2 is damaged"),
        (lambda lines: [b"[]\n", *lines[1:]], r"unfinished:1 is damaged \(no object\)"),
        (lambda lines: [*lines, lines[1]], r"unfinished:4: 'c1' was not asked, or stands there twice"),
        (lambda lines: [lines[0], lines[1].replace(b'"c1"', b'"c9"')], r"unfinished:2: 'c9' was not asked"),
    ],
)
def test_damage_is_named_with_its_line(tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]], said: str) -> None:
    out = tmp_path / "out.jsonl"
    with Journal(out, ABOUT, ASKED) as journal:
        journal.add(answered(1))
        journal.add(answered(2))
    path = sibling(out, UNFINISHED)
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=said):
        Journal(out, ABOUT, ASKED)
