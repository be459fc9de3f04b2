"""Answering a recorded conversation anew: where turns are due, what later turns see, and when the recording no longer fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.replay import Replay, stopped_early

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def conversation(roles: str) -> Conversation:
    """Messages by the first letters of their roles; contents are their places."""
    return Conversation("c", "k", tuple(Message(ROLES[r], f"{r}{i}") for i, r in enumerate(roles)))


def run(asked: Conversation, answer: Callable[[int], Message] = lambda n: Message("assistant", f"new{n}")) -> tuple[Conversation, list[str]]:
    """The conversation answered anew, and what each turn saw."""
    replay, seen = Replay.start(asked), []
    while replay.waiting:
        seen.append(" ".join(m.content for m in replay.messages))
        replay = replay.answered(answer(replay.turn))
    return replay.conversation, seen


@pytest.mark.parametrize(
    ("roles", "seen", "result"),
    [
        ("u", ["u0"], "u0 new0"),
        ("ua", ["u0"], "u0 new0"),
        ("suaua", ["s0 u1", "s0 u1 new0 u3"], "s0 u1 new0 u3 new1"),
        ("uuu", ["u0", "u0 new0 u1", "u0 new0 u1 new1 u2"], "u0 new0 u1 new1 u2 new2"),
        ("uaau", ["u0", "u0 new0 u3"], "u0 new0 u3 new1"),
        ("uau", ["u0", "u0 new0 u2"], "u0 new0 u2 new1"),
        ("sau", ["s0 u2"], "s0 u2 new0"),
        ("au", ["u1"], "u1 new0"),
        ("sa", [], "s0"),
        ("", [], ""),
    ],
)
def test_every_user_turn_is_answered_and_sees_the_new_answers(roles: str, seen: list[str], result: str) -> None:
    found, saw = run(conversation(roles))
    assert saw == seen
    assert " ".join(m.content for m in found.messages) == result


@given(st.text("suat", max_size=12))
def test_what_the_target_did_not_write_stays_in_order(roles: str) -> None:
    asked = conversation(roles)
    found, seen = run(asked)
    others = found.users_only().messages
    assert others == asked.users_only().messages[: len(others)]
    assert stopped_early(asked, found) == (len(others) < len(asked.users_only().messages))
    assert stopped_early(asked, found) <= ("t" in roles)
    turns = "".join(m.role[0] for m in found.messages)
    assert "aa" not in turns
    assert turns.count("a") == len(seen)
    assert not turns.endswith(("u", "t"))
    assert not [i for i, m in enumerate(found.messages) if m.role == "assistant" and found.messages[i - 1].role not in ("user", "tool")]


def call(name: str = "tides", identity: str | None = None, **arguments: Any) -> dict[str, Any]:
    return ({} if identity is None else {"id": identity}) | {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


RECORDED = Conversation(
    "c",
    "tools",
    (
        Message("user", "when?"),
        Message("assistant", "", tool_calls=(call(identity="old1", port="Brest", day=1), call(identity="old2", port="Vigo", day=1))),
        Message("tool", "at 7", tool_call_id="old1"),
        Message("tool", "at 8", tool_call_id="old2"),
        Message("assistant", "at 7 and 8"),
        Message("user", "thanks"),
        Message("assistant", "welcome"),
    ),
)


def with_calls(*calls: dict[str, Any]) -> Callable[[int], Message]:
    """Calls in the first answer, text in the others."""
    return lambda n: Message("assistant", f"new{n}", tool_calls=calls if n == 0 else (), finish_reason="stop")


def test_the_same_calls_get_the_recorded_results_under_the_recorded_ids() -> None:
    same = {"id": "x9", "type": "function", "function": {"name": "tides", "arguments": '{"day":1,  "port":"Brest"}'}}
    found, seen = run(RECORDED, with_calls(same, call(identity="x10", day=1, port="Vigo")))
    assert seen == ["when?", "when? new0 at 7 at 8", "when? new0 at 7 at 8 new1 thanks"]
    assert [c["id"] for c in found.messages[1].tool_calls] == ["old1", "old2"]
    assert found.messages[1].tool_calls[0]["function"] == same["function"]
    assert not stopped_early(RECORDED, found)


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [call(port="Brest", day=1)],
        [call(port="Brest", day=1), call(port="Vigo", day=2)],
        [call(port="Vigo", day=1), call(port="Brest", day=1)],
        [call("times", port="Brest", day=1), call(port="Vigo", day=1)],
        [call(port="Brest", day=1), call(port="Vigo", day=1), call(port="Faro", day=1)],
    ],
)
def test_other_calls_end_the_conversation_at_that_answer(calls: list[dict[str, Any]]) -> None:
    found, seen = run(RECORDED, with_calls(*calls))
    assert seen == ["when?"]
    assert found.messages == (RECORDED.messages[0], Message("assistant", "new0", tool_calls=tuple(calls), finish_reason="stop"))
    assert stopped_early(RECORDED, found)


def test_a_call_where_the_recording_has_an_answer_ends_the_conversation() -> None:
    asked = conversation("uaua")
    found, _ = run(asked, with_calls(call(port="Brest")))
    assert [m.content for m in found.messages] == ["u0", "new0"]
    assert stopped_early(asked, found)


def test_a_last_answer_may_call_freely() -> None:
    found, _ = run(conversation("ua"), with_calls(call(port="Brest")))
    assert found.messages[-1].tool_calls == (call(port="Brest"),)
    assert not stopped_early(conversation("ua"), found)


@pytest.mark.parametrize(("text", "length"), [("a1", 4), ("a2", 2)])
def test_a_call_written_into_the_text_fits_when_the_text_is_the_same(text: str, length: int) -> None:
    found, _ = run(conversation("uata"), lambda n: Message("assistant", text if n == 0 else "done"))
    assert len(found.messages) == length


def test_an_answer_instead_of_a_call_without_results_goes_on() -> None:
    asked = Conversation("c", "k", (Message("user", "a"), Message("assistant", "", tool_calls=(call(port="Brest"),)), Message("user", "b")))
    assert [m.content for m in run(asked)[0].messages] == ["a", "new0", "b", "new1"]
