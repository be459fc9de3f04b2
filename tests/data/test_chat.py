"""What goes to a server, and which replies are answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_server import completion

from draftsmith.data.chat import AnswerSettings, BadReply, reply, request
from draftsmith.data.conversations import Conversation, Message

SETTINGS = AnswerSettings(max_tokens=9, temperature=0.5, top_p=0.9, seed=4)
TOOL = {"type": "function", "function": {"name": "tides", "parameters": {}}}


def test_a_request_holds_messages_tools_and_sampling() -> None:
    calls = ({"id": "x", "function": {"name": "tides", "arguments": {"port": "Nîmes"}}}, {"function": {"name": "now"}})
    messages = (
        Message("system", "be brief"), Message("user", "when?"), Message("assistant", "", tool_calls=calls, reasoning="hm", token_ids=(1,)),
        Message("tool", "7", tool_call_id="x"), Message("tool", "8", name="now"),
    )  # fmt: skip
    body = request("tiny", Conversation("c", "k", messages, (TOOL,)), 1, SETTINGS)
    assert json.loads(json.dumps(body)) == body
    found = body["messages"]
    assert found[:2] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "when?"}]
    assert found[2]["reasoning_content"] == "hm"
    assert found[2]["tool_calls"] == [
        {"id": "x", "type": "function", "function": {"name": "tides", "arguments": '{"port": "Nîmes"}'}},
        {"id": "call_2_1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    assert [m["tool_call_id"] for m in found[3:]] == ["x", "call_2_1"]
    assert found[4]["name"] == "now"
    assert body["tools"] == [TOOL]
    assert {k: body[k] for k in ("model", "max_tokens", "temperature", "top_p", "return_token_ids")} == {
        "model": "tiny", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "return_token_ids": True,
    }  # fmt: skip
    assert "logprobs" not in body
    assert "chat_template_kwargs" not in body


def test_seeds_differ_by_conversation_and_turn_and_repeat() -> None:
    places = [(seed, c, turn) for seed in (0, 1) for c in ("a", "b") for turn in (0, 1)]
    seeds = [AnswerSettings(seed=seed).seed_of(c, turn) for seed, c, turn in places]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [AnswerSettings(seed=seed).seed_of(c, turn) for seed, c, turn in places]
    assert all(0 <= s < 2**31 for s in seeds)


def test_options_change_the_request() -> None:
    asked = Conversation("c", "k", (Message("user", "a"),))
    off = request("m", asked, 0, AnswerSettings(reasoning="off", token_ids="logprobs", template_kwargs={"thinking": 0, "x": 1}))
    assert off["chat_template_kwargs"] == {"enable_thinking": False, "thinking": 0, "x": 1}
    assert (off["logprobs"], off["return_tokens_as_token_ids"], "return_token_ids" in off) == (True, True, False)
    none = request("m", asked, 0, AnswerSettings(token_ids="off"))
    assert not {"logprobs", "return_token_ids", "tools"} & set(none)


@pytest.mark.parametrize(
    ("setting", "value"), [("max_tokens", 0), ("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("reasoning", "on"), ("token_ids", "yes")]
)
def test_settings_that_no_server_takes(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{setting} = {value!r}: expected "):
        AnswerSettings(**{setting: value})


def logprobs(*tokens: Any) -> dict[str, Any]:
    body = completion(ids=None, counted=2)
    body["choices"][0]["logprobs"] = {"content": list(tokens)}
    return body


def answered(content: str = "yes", finish: str = "stop", **fields: Any) -> Message:
    return Message("assistant", content, finish_reason=finish, **({"token_ids": (5, 2)} | fields))


CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("body", "answer", "tokens"),
    [
        (completion(), answered(), 2),
        (completion(finish="length"), answered(finish="length"), 2),
        (completion(ids=None, counted=7), answered(token_ids=None), 7),
        (completion(finish="eos_token", ids=None, counted=0), answered(token_ids=None), 0),
        (completion(content=None, tool_calls=[CALL], finish="tool_calls"), answered("", "tool_calls", tool_calls=(CALL,)), 2),
        (completion(reasoning_content="hm"), answered(reasoning="hm"), 2),
        (completion(reasoning="hm"), answered(reasoning="hm"), 2),
        (completion(content=None, reasoning="hm", finish="length"), answered("", "length", reasoning="hm"), 2),
        (completion(content="", ids=[2]), answered("", token_ids=(2,)), 1),
        (logprobs({"token": "token_id:7"}, {"token": "token_id:2"}), answered("yes", token_ids=(7, 2)), 2),
        (logprobs({"token": "y", "id": 7}), answered("yes", token_ids=(7,)), 2),
        (logprobs({"token": "y"}, {"token": "es"}), answered(token_ids=None), 2),
    ],
)
def test_replies_that_are_answers(body: dict[str, Any], answer: Message, tokens: int) -> None:
    assert reply(json.loads(json.dumps(body)), AnswerSettings()) == (answer, tokens)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([], "a reply without `choices`"),
        ({}, "a reply without `choices`"),
        ({"choices": []}, "a reply without `choices`"),
        ({"choices": ["x"]}, "a reply without `choices`"),
        ({"choices": [{"finish_reason": "stop"}]}, "a choice without `message`"),
        (completion(finish=None), "the finish reason null"),
        (completion(finish="abort"), 'the finish reason "abort"'),
        (completion(content=7), "an answer with content that is no text"),
        (completion(content="\ud800"), "an answer with a lone surrogate"),
        (completion(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "an answer with tool arguments that are no JSON object"),
        (completion(tool_calls="f"), "an answer with `tool_calls` that are no list of objects"),
        (completion(ids=["5"]), "token ids that are no integers"),
        (completion(ids=[-1]), "token ids that are no integers"),
        (completion(ids=[True]), "token ids that are no integers"),
        (completion(ids={"5": 2}, counted=1), "token ids that are no integers"),
        (completion(counted=3), "another number of token ids than `usage` counts"),
        (logprobs({"token": "token_id:7"}, {"token": "y"}), "token ids that are no integers"),
        (logprobs(*[{"token": "token_id:7"}] * 4), "another number of token ids than `usage` counts"),
    ],
)
def test_replies_that_are_none(body: Any, reason: str) -> None:
    with pytest.raises(BadReply) as found:
        reply(body, AnswerSettings())
    assert str(found.value).startswith(reason)


@pytest.mark.parametrize("body", [completion(reasoning="hm"), completion(content="<think>\nhm</think>yes")])
def test_thinking_with_reasoning_off_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(BadReply, match=r"thinking, with reasoning off: .* --template-kwargs"):
        reply(body, AnswerSettings(reasoning="off"))
    assert reply(body, AnswerSettings())


def test_ids_must_be_the_text_where_the_tokenizer_is_known() -> None:
    texts = {(5, 2): "yes", (6, 2): "no", (5, 9): "yes\ufffd"}
    assert reply(completion(), AnswerSettings(), texts.__getitem__)
    assert reply(completion(ids=(5, 9)), AnswerSettings(), texts.__getitem__)
    with pytest.raises(BadReply, match="another text"):
        reply(completion(ids=(6, 2)), AnswerSettings(), texts.__getitem__)
    assert reply(completion(ids=(6, 2), tool_calls=[CALL]), AnswerSettings(), texts.__getitem__)
