"""Shapes of rows: how a data set writes a conversation down, and one converter for each.

messages    {"messages": [{"role", "content", "tool_calls", …}], "tools": […]}                    OpenAI's
sharegpt    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}    also with role and content
alpaca      {"instruction", "input", "output"}                                                    also `response` for `output`
prompt      {"prompt", "completion"}: text, or lists of messages                                  also question and answer, problem and solution, …
text        {"text"}: rendered by the target's chat template already
tokens      {"input_ids", "loss_mask"}: or `labels` with -100, or `assistant_masks`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.data.config import ShapeName
from draftsmith.data.conversations import Conversation, RowError, from_row, short, unknown_role
from draftsmith.data.samples import Text, Tokens

Item = Conversation | Text | Tokens
Converter = Callable[[Mapping[str, Any], str], tuple[str, Item]]
"""A row and the id that it gets if it has none, to its id and what it holds. Raises RowError."""

ALIASES = {
    **dict.fromkeys(("human", "user", "prompter", "customer"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot", "ai", "claude", "gemini", "llm"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "function-response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "function-call", "tool_call"), "call"),
}
"""Roles that ShareGPT-like sets use, in lower case; `call` is an assistant that calls a tool."""
TALKS = ("conversations", "conversation", "dialog", "dialogue", "messages")
ASKED = ("prompt", "question", "problem", "query", "instruction", "input", "user")
ANSWERED = ("completion", "response", "answer", "solution", "output", "assistant")
IDS = ("id", "uuid", "conversation_id", "prompt_id")


@dataclass(frozen=True)
class Shape:
    """`describes`: what a row of it has, for people; `fits` tells a row of it by its keys."""

    describes: str
    fits: Callable[[Mapping[str, Any]], bool]
    convert: Converter


def detect(row: Any) -> ShapeName:
    """The shape of a row. Raises RowError when it is none of them."""
    if isinstance(row, Mapping):
        for name, shape in SHAPES.items():
            if shape.fits(row):
                return name
    keys = ", ".join(list(map(str, row))[:8]) if isinstance(row, Mapping) else short(row)
    raise RowError("of no known shape", f"a row of no known shape, with {keys}; known are {', '.join(SHAPES)}")


def row_id(row: Mapping[str, Any], default: str) -> str:
    """What a row calls itself."""
    return next((str(row[key]) for key in IDS if row.get(key) not in (None, "")), default)


def talk(row: Mapping[str, Any], default: str, messages: object) -> tuple[str, Item]:
    """A conversation of OpenAI messages, with id, kind and tools of its row."""
    name = row_id(row, default)
    kept = {key: row[key] for key in ("kind", "tools", "functions") if key in row}
    return name, from_row({**kept, "id": name, "messages": messages}, name)


def pair(row: Mapping[str, Any], default: str, asked: Any, answered: Any, system: Any = None) -> tuple[str, Item]:
    """A question and its answer, each text or a list of messages; without an answer only the question."""
    first = [{"role": "system", "content": system}] if system else []
    question = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    answer = answered if isinstance(answered, list) else [{"role": "assistant", "content": answered}] if answered is not None else []
    return talk(row, default, [*first, *question, *answer])


def _messages(row: Mapping[str, Any], default: str) -> tuple[str, Item]:
    return talk(row, default, row.get("messages"))


def _sharegpt(row: Mapping[str, Any], default: str) -> tuple[str, Item]:
    turns = next((row[key] for key in TALKS if isinstance(row.get(key), list)), None)
    if turns is None:
        raise RowError("without a list `conversations`", f"expected a list `conversations`, got {short(dict(row))}")
    messages = [_turn(turn) for turn in turns]
    system = row.get("system") or row.get("system_prompt")
    if isinstance(system, str) and system and not any(m["role"] == "system" for m in messages[:1]):
        messages.insert(0, {"role": "system", "content": system})
    return talk(row, default, messages)


def _turn(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise RowError("with a turn that is no object", f"a turn needs `from` and `value`, got {short(turn)}")
    given = turn.get("from", turn.get("role"))
    role = ALIASES.get(given.strip().lower()) if isinstance(given, str) else None
    if role is None:
        raise (
            unknown_role(given, ALIASES, "human, gpt, system, tool, function_call or another name of these")
            if isinstance(given, str)
            else RowError("with a turn without `from`", f"got {short(dict(turn))}")
        )
    content = turn.get("value", turn.get("content"))
    if role == "call":
        return {"role": "assistant", "content": "", "tool_calls": _calls(content)}
    return {**{key: value for key, value in turn.items() if key not in ("from", "value", "role", "content")}, "role": role, "content": content}


def _calls(text: Any) -> list[dict[str, Any]]:
    try:
        found: Any = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        found = None
    calls: list[Any] = found if isinstance(found, list) else [found]
    if not all(isinstance(call, Mapping) for call in calls):
        raise RowError("with a function call that is no JSON object", f"a function call must be a JSON object with `name` and `arguments`, got {short(text)}")
    return [{"type": "function", "function": call.get("function", call)} for call in calls]


def _alpaca(row: Mapping[str, Any], default: str) -> tuple[str, Item]:
    asked, given = row.get("instruction"), row.get("input")
    if isinstance(asked, str) and isinstance(given, str) and given.strip():
        asked = f"{asked}\n\n{given}"
    return pair(row, default, asked, row.get("output", row.get("response")), row.get("system"))


def _prompt(row: Mapping[str, Any], default: str) -> tuple[str, Item]:
    asked = next((row[key] for key in ASKED if key in row), None)
    answered = next((row[key] for key in ANSWERED if key in row), None)
    return pair(row, default, asked, answered, row.get("system") or row.get("system_prompt"))


def _text(row: Mapping[str, Any], default: str) -> tuple[str, Item]:
    text = row.get("text")
    if not isinstance(text, str):
        raise RowError("with `text` that is no text", f"`text` must be text, got {short(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError("with a lone surrogate", f"the text has half of a surrogate pair, which is no character: {error}") from error
    name = row_id(row, default)
    return name, Text(name, text)


def _tokens(row: Mapping[str, Any], default: str) -> tuple[str, Item]:
    try:
        ids = np.asarray(row["input_ids"], np.int64)
        given = next(row[key] for key in ("loss_mask", "labels", "assistant_masks") if key in row)
        mask = np.asarray(given, np.int64) >= 0 if "loss_mask" not in row and "labels" in row else np.asarray(given, np.int64) != 0
    except (TypeError, ValueError, OverflowError, StopIteration) as error:
        raise RowError("with `input_ids` or a mask that are no lists of integers", f"`input_ids` and its mask must be lists of integers: {error}") from error
    if ids.ndim != 1 or ids.shape != mask.shape or not len(ids):
        raise RowError("with a mask of another length than `input_ids`", f"{ids.shape} token ids but {mask.shape} mask values")
    if ids.min() < 0 or ids.max() >= 2**31:
        raise RowError("with `input_ids` that are no token ids", f"token ids must be from 0 to 2**31 - 1, got {ids.min()} to {ids.max()}")
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))).tolist()
    spans = tuple(zip(edges[::2], edges[1::2], strict=True))
    return row_id(row, default), Tokens(ids.astype(np.int32), spans)


def _has(row: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    return any(key in row for key in keys)


def _speaks(row: Mapping[str, Any], keys: tuple[str, ...], mark: str) -> bool:
    """One of the keys holds a list whose first entry, if any, has `mark`."""
    lists = [row[key] for key in keys if isinstance(row.get(key), list)]
    return any(not turns or (isinstance(turns[0], Mapping) and mark in turns[0]) for turns in lists)


SHAPES: dict[ShapeName, Shape] = {
    "tokens": Shape(
        "`input_ids` and `loss_mask`, `labels` or `assistant_masks`",
        lambda row: "input_ids" in row and _has(row, ("loss_mask", "labels", "assistant_masks")),
        _tokens,
    ),
    "messages": Shape(
        "`messages` with role and content", lambda row: isinstance(row.get("messages"), list) and not _speaks(row, ("messages",), "from"), _messages
    ),
    "sharegpt": Shape("`conversations` with from and value", lambda row: any(isinstance(row.get(key), list) for key in TALKS), _sharegpt),
    "alpaca": Shape("`instruction` and `output`", lambda row: "instruction" in row and _has(row, ("output", "response")), _alpaca),
    "prompt": Shape("`prompt` and `completion`, or question and answer", lambda row: _has(row, ASKED), _prompt),
    "text": Shape("`text`, rendered already", lambda row: "text" in row, _text),
}
"""In the order in which a row is tried."""
