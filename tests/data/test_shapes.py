"""Rows of every usual shape become the conversation that they mean; rows of none, or broken ones, say what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.data.conversations import Conversation, Message, RowError
from draftsmith.data.samples import Text, Tokens
from draftsmith.data.shapes import ALIASES, SHAPES, detect

HI = (Message("user", "hi"), Message("assistant", "yes"))
TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
OPENAI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
ROWS: list[tuple[str, dict[str, Any], tuple[Message, ...]]] = [
    ("messages", {"messages": OPENAI}, HI),
    ("messages", {"messages": OPENAI, "prompt": "hi", "prompt_id": "p"}, HI),
    ("sharegpt", {"conversations": TURNS}, HI),
    ("sharegpt", {"messages": TURNS}, HI),
    ("sharegpt", {"conversations": OPENAI}, HI),
    ("sharegpt", {"conversations": TURNS, "system": "s"}, (Message("system", "s"), *HI)),
    ("sharegpt", {"conversations": [{"from": "system", "value": "t"}, *TURNS], "system": "s"}, (Message("system", "t"), *HI)),
    ("sharegpt", {"instruction": "hi", "response": "yes", "conversations": TURNS}, HI),
    ("alpaca", {"instruction": "hi", "input": "", "output": "yes"}, HI),
    ("alpaca", {"instruction": "hi", "input": None, "output": "yes"}, HI),
    ("alpaca", {"instruction": "hi", "response": "yes"}, HI),
    ("alpaca", {"instruction": "add", "input": "1 2", "output": "3"}, (Message("user", "add\n\n1 2"), Message("assistant", "3"))),
    ("prompt", {"prompt": "hi", "completion": "yes"}, HI),
    ("prompt", {"prompt": [OPENAI[0]], "completion": [OPENAI[1]]}, HI),
    ("prompt", {"question": "hi", "answer": "yes"}, HI),
    ("prompt", {"problem": "hi", "solution": "yes"}, HI),
    ("prompt", {"input": [OPENAI[0]], "output": "yes"}, HI),
    ("prompt", {"prompt": "hi"}, HI[:1]),
]


@pytest.mark.parametrize(("shape", "row", "expected"), ROWS)
def test_a_row_is_detected_and_means(shape: str, row: dict[str, Any], expected: tuple[Message, ...]) -> None:
    assert detect(row) == shape
    name, item = SHAPES[shape].convert(row, "line-3")  # type: ignore[index]
    assert isinstance(item, Conversation)
    assert item.messages == expected
    assert item.id == name == row.get("prompt_id", "line-3")


@pytest.mark.parametrize(("given", "meant"), [(a, m) for alias, m in ALIASES.items() if m != "call" for a in (alias, alias.upper(), f" {alias}")])
def test_every_role_alias(given: str, meant: str) -> None:
    _, item = SHAPES["sharegpt"].convert({"conversations": [{"from": given, "value": "x"}]}, "i")
    assert isinstance(item, Conversation)
    assert [m.role for m in item.messages] == [meant]


@pytest.mark.parametrize(
    "value", ['{"name": "add", "arguments": {"a": 1}}', '[{"name": "add", "arguments": {"a": 1}}]', {"name": "add", "arguments": {"a": 1}}]
)
def test_a_function_call_and_its_response(value: Any) -> None:
    row = {"conversations": [TURNS[0], {"from": "function_call", "value": value}, {"from": "observation", "value": "3"}], "tools": '[{"type": "function"}]'}
    _, item = SHAPES["sharegpt"].convert(row, "i")
    assert isinstance(item, Conversation)
    assert item.messages[1] == Message("assistant", "", tool_calls=({"type": "function", "function": {"name": "add", "arguments": {"a": 1}}},))
    assert item.messages[2] == Message("tool", "3")
    assert item.tools == ({"type": "function"},)


def test_text_and_tokens() -> None:
    assert SHAPES[detect({"text": "abc"})].convert({"text": "abc"}, "i") == ("i", Text("i", "abc"))
    for mask in ({"loss_mask": [0, 1, 1, 0, 1]}, {"labels": [-100, 6, 7, -100, 9]}, {"assistant_masks": [0, 1, 1, 0, 1]}):
        row = {"input_ids": [5, 6, 7, 8, 9], **mask}
        assert detect(row) == "tokens"
        _, item = SHAPES["tokens"].convert(row, "i")
        assert isinstance(item, Tokens)
        assert (item.ids.tolist(), item.spans) == ([5, 6, 7, 8, 9], ((1, 3), (4, 5)))


@pytest.mark.parametrize(
    ("shape", "row", "reason", "said"),
    [
        ("sharegpt", {"conversations": [{"from": "humann", "value": "x"}]}, "with the unknown role 'humann'", "did you mean 'human'?"),
        ("sharegpt", {"conversations": [{"value": "x"}]}, "with a turn without `from`", ""),
        ("sharegpt", {"conversations": ["x"]}, "with a turn that is no object", "`from` and `value`"),
        ("sharegpt", {"conversations": [{"from": "human", "value": None}]}, "with null content", ""),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "add(1)"}]}, "with a function call that is no JSON object", "add(1)"),
        ("sharegpt", {"x": 1}, "without a list `conversations`", ""),
        ("messages", {"messages": None}, "without a list `messages`", ""),
        ("alpaca", {"instruction": None, "output": "x"}, "with null content", ""),
        ("prompt", {"prompt": 3}, "with content that is no text", ""),
        ("text", {"text": "\ud800"}, "with a lone surrogate", ""),
        ("tokens", {"input_ids": [1, 2], "loss_mask": [1]}, "with a mask of another length than `input_ids`", ""),
        ("tokens", {"input_ids": ["a"], "loss_mask": [1]}, "with `input_ids` or a mask that are no lists of integers", ""),
        ("tokens", {"input_ids": [-1], "loss_mask": [1]}, "with `input_ids` that are no token ids", ""),
        ("tokens", {"input_ids": [1]}, "with `input_ids` or a mask that are no lists of integers", ""),
    ],
)
def test_a_broken_row_has_a_reason(shape: str, row: dict[str, Any], reason: str, said: str) -> None:
    with pytest.raises(RowError) as raised:
        SHAPES[shape].convert(row, "i")  # type: ignore[index]
    assert raised.value.reason == reason
    assert said in str(raised.value)


@pytest.mark.parametrize("row", [{}, {"foo": 1}, [], "x", None, 3])
def test_a_row_of_no_shape_is_refused(row: Any) -> None:
    with pytest.raises(RowError) as raised:
        detect(row)
    assert raised.value.reason == "of no known shape"
