"""What is sent to a server that speaks OpenAI's chat protocol, and what its reply must be to become a recorded answer."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.data.conversations import Conversation, Message, RowError, from_row, short

FINISH = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls", "eos_token": "stop", "stop_sequence": "stop"}
"""Reasons that servers give for the end of an answer (the last two are TGI's), and what is recorded."""
TOKEN_IDS = ("field", "logprobs", "off")
REASONING = ("keep", "off")


class BadReply(ValueError):
    """A reply that is no answer. Asking again may help."""


@dataclass(frozen=True)
class AnswerSettings:
    """How the target is to answer. Raises ValueError for values that no server takes.

    `reasoning`: "off" asks the template not to think, and an answer that thinks all the same is a bad reply. `token_ids`: from the reply's own `field`
    (vLLM's `return_token_ids`), out of `logprobs` (vLLM's `token_id:N` or llama-server's `id`), or `off`.
    """

    max_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    reasoning: str = "keep"
    token_ids: str = "field"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"), "temperature": (self.temperature >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"), "reasoning": (self.reasoning in REASONING, " or ".join(REASONING)),
            "token_ids": (self.token_ids in TOKEN_IDS, ", ".join(TOKEN_IDS)),
        }  # fmt: skip
        for name, (good, expected) in wanted.items():
            if not good:
                raise ValueError(f"{name} = {getattr(self, name)!r}: expected {expected}")

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template is given; families name their switch for thinking differently, and templates ignore what they do not know."""
        return ({"enable_thinking": False, "thinking": False} if self.reasoning == "off" else {}) | dict(self.template_kwargs)

    def seed_of(self, conversation: str, turn: int) -> int:
        """Another seed for each turn, the same one in a resumed run."""
        return zlib.crc32(f"{self.seed}/{conversation}/{turn}".encode()) & 0x7FFFFFFF


def request(model: str, asked: Conversation, turn: int, settings: AnswerSettings) -> dict[str, Any]:
    """Body of a request for the next message of `asked`."""
    body: dict[str, Any] = {
        "model": model, "messages": _on_the_wire(asked.messages), "max_tokens": settings.max_tokens, "temperature": settings.temperature,
        "top_p": settings.top_p, "seed": settings.seed_of(asked.id, turn),
    }  # fmt: skip
    if asked.tools:
        body["tools"] = [dict(tool) for tool in asked.tools]
    if settings.template_variables:
        body["chat_template_kwargs"] = settings.template_variables
    if settings.token_ids == "field":
        body["return_token_ids"] = True
    if settings.token_ids == "logprobs":
        body |= {"logprobs": True, "return_tokens_as_token_ids": True}
    return body


def reply(body: Any, settings: AnswerSettings, decode: Callable[[Sequence[int]], str] | None = None) -> tuple[Message, int]:
    """The answer in a reply, and its tokens by the server's count (0 where it does not count).

    With `decode`, ids of a plain answer must be its text. Raises BadReply, with a reason that is short enough to count by.
    """
    choices = body.get("choices") if isinstance(body, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise BadReply("a reply without `choices`")
    choice = choices[0]
    if not isinstance(choice.get("message"), Mapping):
        raise BadReply("a choice without `message`")
    reason = FINISH.get(str(choice.get("finish_reason")))
    if reason is None:
        raise BadReply(f"the finish reason {short(choice.get('finish_reason'))}")
    usage = body.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    ids = _ids(choice, counted if isinstance(counted, int) else None)
    answer = _message(choice["message"], reason, ids)
    require_thinking(answer, settings)
    if ids is not None and decode is not None and not (answer.tool_calls or answer.reasoning) and not _same_text(decode(ids), answer.content):
        raise BadReply("token ids that are another text under the target's tokenizer")
    return answer, counted if isinstance(counted, int) else len(ids or ())


def _same_text(decoded: str, content: str) -> bool:
    """A cut may fall inside a character: servers leave its first bytes out, decoding gives a replacement mark. Some servers trim blanks."""
    return decoded.rstrip("\ufffd").strip() == content.rstrip("\ufffd").strip()


def _message(row: Mapping[str, Any], reason: str, ids: tuple[int, ...] | None) -> Message:
    row = {**row, "role": "assistant", "content": "" if row.get("content") is None else row["content"], "token_ids": None, "finish_reason": reason}
    try:
        (answer,) = from_row({"messages": [{k: v for k, v in row.items() if k != "name"}]}, "reply").messages
    except RowError as error:
        raise BadReply(f"an answer {error.reason}") from error
    return Message(
        "assistant", answer.content, tool_calls=answer.tool_calls, reasoning=answer.reasoning or None, token_ids=ids, finish_reason=reason
    )  # fmt: skip


def _ids(choice: Mapping[str, Any], counted: int | None) -> tuple[int, ...] | None:
    """Token ids wherever the server put them; None where it gives none."""
    ids: Any = choice.get("token_ids")
    slack = 0
    logprobs = choice.get("logprobs")
    if ids is None and isinstance(logprobs, Mapping) and isinstance(logprobs.get("content"), list):
        ids, slack = [_id_of(token) for token in logprobs["content"]], 1  # llama-server counts the end token and does not list it
        if all(i is None for i in ids):
            return None
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise BadReply("token ids that are no integers of at least 0")
    if counted is not None and abs(len(ids) - counted) > slack:
        raise BadReply("another number of token ids than `usage` counts")
    return tuple(ids)


def _id_of(token: Any) -> int | None:
    if not isinstance(token, Mapping):
        return None
    if type(token.get("id")) is int:
        return token["id"]
    mark, _, number = str(token.get("token")).partition(":")
    return int(number) if mark == "token_id" and number.isdecimal() else None


def require_thinking(answer: Message, settings: AnswerSettings) -> None:
    """Raises BadReply for an answer that thinks although it should not."""
    if settings.reasoning == "off" and (answer.reasoning or "</think>" in answer.content):
        raise BadReply("thinking, with reasoning off: its template has another switch, give it with --template-kwargs")


def _on_the_wire(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the protocol wants them: arguments as text; calls and results with ids, the recorded ones or their places."""
    rows: list[dict[str, Any]] = []
    waiting: list[str] = []
    for m in messages:
        row: dict[str, Any] = {"role": m.role, "content": m.content}
        row |= {k: v for k, v in (("name", m.name), ("reasoning_content", m.reasoning)) if v is not None}
        if m.tool_calls:
            row["tool_calls"] = [_call(call, f"call_{len(rows)}_{n}") for n, call in enumerate(m.tool_calls)]
            waiting = [call["id"] for call in row["tool_calls"]]
        if m.role == "tool":
            first = waiting.pop(0) if waiting else f"call_{len(rows)}"
            row["tool_call_id"] = m.tool_call_id or first
        rows.append(row)
    return rows


def _call(call: Mapping[str, Any], default_id: str) -> dict[str, Any]:
    function = call.get("function", call)
    given = function.get("arguments")
    text = given if isinstance(given, str) and given else json.dumps(given or {}, ensure_ascii=False)
    return {"id": call.get("id") or default_id, "type": "function", "function": {"name": function["name"], "arguments": text}}
