"""Files of conversations: what is read, what is refused and where, and the counts of what was dropped."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.conversations import Conversation, Counts, Message, arguments, dumps, from_row, read, to_row

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}
GOOD = json.dumps({"id": "a", "kind": "chat", "messages": [USER, ANSWER]})


def written(folder: Path, *lines: str, name: str = "talks.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def refused(path: Path) -> str:
    with pytest.raises(ValueError, match=re.escape(str(path))) as raised:
        read(path)
    return str(raised.value)


def test_a_file_is_read_in_order_with_defaults_by_line(tmp_path: Path) -> None:
    plain = json.dumps({"messages": [{"role": "system", "content": "s"}, USER]})
    found = read(written(tmp_path, GOOD, "", "   ", plain))
    assert found[0] == Conversation("a", "chat", (Message("user", "hello"), Message("assistant", "hi")))
    assert (found[1].id, found[1].kind) == ("line-4", "all")
    assert [m.role for m in found[1].messages] == ["system", "user"]


def test_recorded_answers_carry_their_ids_and_reason(tmp_path: Path) -> None:
    row = {"id": "a", "messages": [USER, {**ANSWER, "token_ids": [5, 6, 2], "finish_reason": "stop"}]}
    assert read(written(tmp_path, json.dumps(row)))[0].messages[1] == Message("assistant", "hi", token_ids=(5, 6, 2), finish_reason="stop")


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def only(row: dict[str, Any]) -> Conversation:
    return from_row(row, "x")


def test_tools_calls_results_and_thinking_are_kept() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows = [
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    ]
    found = only({"messages": rows, "tools": tools})
    assert found.messages[0] == Message("assistant", "", tool_calls=(CALL,), reasoning="hm")
    assert found.messages[1] == Message("tool", "2", tool_call_id="c1", name="add")
    assert found.tools == tuple(tools)
    assert only({"messages": rows, "tools": json.dumps(tools)}).tools == tuple(tools)
    assert only({"messages": rows, "functions": [tools[0]["function"]]}).tools == tuple(tools)


def test_older_names_mean_the_same() -> None:
    legacy = {"role": "assistant", "content": None, "function_call": CALL["function"], "thinking": "hm"}
    found = only({"messages": [{"role": "developer", "content": "s"}, legacy, {"role": "function", "name": "add", "content": "2"}]}).messages
    assert [m.role for m in found] == ["system", "assistant", "tool"]
    assert found[1] == Message("assistant", "", tool_calls=({"type": "function", "function": CALL["function"]},), reasoning="hm")


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "\nb"}]
    assert only({"messages": [{"role": "user", "content": parts}]}).messages == (Message("user", "a\nb"),)
    assert only({"messages": [{"role": "user", "content": []}]}).messages == (Message("user", ""),)


@pytest.mark.parametrize(("given", "meant"), [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("{}", {})])
def test_arguments_are_an_object_however_written(given: Any, meant: dict[str, int]) -> None:
    assert arguments({"name": "f", "arguments": given}) == meant


def test_a_null_id_or_kind_is_the_default() -> None:
    assert only({"id": None, "kind": None, "messages": []}) == Conversation("x", "all", ())


def test_a_compressed_file_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl.gz"
    path.write_bytes(gzip.compress((GOOD + "\n").encode()))
    assert read(path) == read(written(tmp_path, GOOD))


@pytest.mark.parametrize("lines", [(), ("",), ("  ", "", "\t")])
def test_an_empty_file_is_refused(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert "empty" in refused(written(tmp_path, *lines))


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    assert "no conversations at" in refused(tmp_path / name)


@pytest.mark.parametrize("broken", ["{", '{"messages": [}', GOOD[:-1], "hello", GOOD + GOOD])
def test_invalid_json_is_named_with_its_line(tmp_path: Path, broken: str) -> None:
    path = written(tmp_path, GOOD, "", broken, GOOD)
    assert refused(path).startswith(f"{path}:3 is not valid JSON")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([], "an object with a list `messages`"),
        (3, "an object with a list `messages`"),
        ({"id": "x"}, "an object with a list `messages`"),
        ({"messages": "hello"}, "an object with a list `messages`"),
        ({"messages": ["hello"]}, "`role` and `content` as text"),
        ({"messages": [{"role": "user"}]}, "`role` and `content` as text"),
        ({"messages": [{"content": "x"}]}, "`role` and `content` as text"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "`role` and `content` as text"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "`role` and `content` as text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": "u"}]}]}, "content parts must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "content parts must be text"),
        ({"messages": [USER, {**ANSWER, "tool_calls": "none"}]}, "`tool_calls` must be a list of objects"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"function": {"arguments": {}}}]}]}, "a tool call needs"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "arguments of a tool call must be a JSON object"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]}, "arguments of a tool call must be a JSON object"),
        ({"messages": [USER, {**ANSWER, "reasoning_content": ["x"]}]}, "`reasoning_content` must be text"),
        ({"messages": [USER], "tools": {"type": "function"}}, "`tools` must be a list of objects"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "half of a surrogate pair"),
        ({"messages": [{**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\udc00"}'}}]}]}, "half of a surrogate pair"),
        ({"messages": [{"role": 3, "content": "x"}]}, "`role` and `content` as text"),
        ({"messages": [{"role": "human", "content": "x"}]}, "unknown role 'human'; expected system, user, assistant or tool"),
        ({"messages": [{"role": "asistant", "content": "x"}]}, "did you mean 'assistant'?"),
        ({"messages": [{"role": "Assistant", "content": "x"}]}, "unknown role 'Assistant'"),
        ({"messages": [{**ANSWER, "token_ids": "5"}]}, "`token_ids` must be a list of integers"),
        ({"messages": [{**ANSWER, "token_ids": [1, 2.5]}]}, "`token_ids` must be a list of integers"),
        ({"messages": [{**ANSWER, "token_ids": [1, True]}]}, "`token_ids` must be a list of integers"),
        ({"messages": [{**ANSWER, "token_ids": [1, -1]}]}, "`token_ids`"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, row: Any, said: str) -> None:
    path = written(tmp_path, GOOD, json.dumps(row))
    found = refused(path)
    assert found.startswith(f"{path}:2: ")
    assert said in found
    assert len(found) < 400


def test_a_long_line_is_not_repeated_whole(tmp_path: Path) -> None:
    assert len(refused(written(tmp_path, json.dumps({"message": "x" * 10_000})))) < 300


def test_two_conversations_of_one_id_are_refused(tmp_path: Path) -> None:
    other = json.dumps({"id": "b", "messages": [USER]})
    assert "two conversations have the id 'a'" in refused(written(tmp_path, GOOD, other, GOOD))


def test_an_id_that_is_a_default_of_another_line_is_refused(tmp_path: Path) -> None:
    nameless = json.dumps({"messages": [USER]})
    assert "'line-2'" in refused(written(tmp_path, json.dumps({"id": "line-2", "messages": [USER]}), nameless))


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"messages": [{"role": "user", "content": "d\u00e9j\u00e0"}]}\n'.encode("latin-1"))
    refused(path)


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_compressed_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "talks.jsonl.gz"
    whole = gzip.compress((GOOD + "\n").encode() * 50)
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else GOOD.encode())
    refused(path)


# Separators that str.splitlines breaks at, but a line of a file does not end with.
awkward = st.text(st.one_of(st.sampled_from('\n\r\u2028\u2029\x85\x0b\x0c\x1c"\\\u00e9\U0001f600'), st.characters(codec="utf-8")), max_size=8)
values = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | awkward, lambda v: st.lists(v, max_size=2) | st.dictionaries(awkward, v, max_size=2))
objects = st.dictionaries(awkward, values, max_size=3)
calls = st.lists(st.fixed_dictionaries({"id": awkward, "function": st.fixed_dictionaries({"name": awkward, "arguments": objects | objects.map(json.dumps)})}))
ids = st.lists(st.integers(0, 10**6), max_size=4).map(tuple)
messages = st.one_of(
    st.builds(Message, st.sampled_from(["system", "user"]), awkward, name=st.none() | awkward),
    st.builds(Message, st.just("tool"), awkward, tool_call_id=st.none() | awkward, name=st.none() | awkward),
    st.builds(Message, st.just("assistant"), awkward, token_ids=ids, finish_reason=st.sampled_from(["stop", "length", None])),
    st.builds(Message, st.just("assistant"), awkward, tool_calls=calls.map(tuple), reasoning=st.none() | awkward),
)
talk = st.builds(Conversation, awkward, awkward, st.lists(messages, max_size=4).map(tuple), st.lists(objects, max_size=2).map(tuple))
talks = st.lists(talk, min_size=1, max_size=5, unique_by=lambda c: c.id)


@settings(deadline=None)
@given(talks)
def test_what_was_dumped_reads_back(tmp_path_factory: pytest.TempPathFactory, found: list[Conversation]) -> None:
    path = tmp_path_factory.getbasetemp() / "round.jsonl"
    path.write_text(dumps(found), encoding="utf-8", newline="")
    assert read(path) == found


@settings(deadline=None)
@given(talks)
def test_a_row_is_plain_json(found: list[Conversation]) -> None:
    for conversation in found:
        assert json.loads(json.dumps(to_row(conversation))) == to_row(conversation)


def test_users_only_keeps_everything_but_the_answers() -> None:
    tools = ({"type": "function", "function": {"name": "f"}},)
    turns = (
        Message("system", "s"),
        Message("user", "u"),
        Message("assistant", "a", token_ids=(1,), finish_reason="stop"),
        Message("tool", "t"),
        Message("user", "v"),
    )
    assert Conversation("i", "k", turns, tools).users_only() == Conversation("i", "k", (*turns[:2], *turns[3:]), tools)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["kept", "no answer", "refused", "too long"]), max_size=40))
def test_read_is_kept_plus_dropped_and_each_reason_has_its_first_place(fates: list[str]) -> None:
    counts = Counts(read=len(fates))
    for i, fate in enumerate(fates):
        if fate == "kept":
            counts.kept += 1
        else:
            counts.drop(fate, f"line-{i}")
    assert counts.read == counts.kept + counts.dropped
    reasons = {f for f in fates if f != "kept"}
    assert counts.reasons == {r: (fates.count(r), f"line-{fates.index(r)}") for r in reasons}
    text = counts.describe()
    assert text.startswith(f"read {len(fates)} = kept {fates.count('kept')} + dropped {len(fates) - fates.count('kept')}")
    assert all(f"{fates.count(r)} {r} (first: line-{fates.index(r)})" in text for r in reasons)


def test_counts_add_up_and_keep_the_first_place() -> None:
    left, right = Counts(read=3, kept=1), Counts(read=4, kept=1)
    left.drop("a", "left:1", 2)
    right.drop("a", "right:9")
    right.drop("b", "right:4", 2)
    total = left + right
    assert (total.read, total.kept, total.dropped) == (7, 2, 5)
    assert total.reasons == {"a": (3, "left:1"), "b": (2, "right:4")}
    assert left.reasons == {"a": (2, "left:1")}
