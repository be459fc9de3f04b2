"""Conversations as files hold them: JSONL with OpenAI-style `messages`.

    {"id": "math-0001", "kind": "math", "messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}

`id` defaults to `line-<number>`, `kind` to `all`. A row may offer `tools`; an assistant message may have `tool_calls` and `reasoning_content`, a tool
message `name` and `tool_call_id`. An assistant message may carry the `token_ids` that the target itself produced and its `finish_reason`; they
are then used as they are, never tokenised again.

`read` is for files that must be right as a whole and refuses the first bad line. Training data is read by `sources.py`, which counts bad rows.
"""

from __future__ import annotations

import difflib
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool"}
"""Roles of OpenAI's messages: `developer` is its newer name of `system`, `function` its older one of `tool`."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields that servers and data sets give an answer's thinking in; the first is written."""


class RowError(ValueError):
    """A row that is no conversation. `reason` completes "3 conversations were dropped …" and is short enough to count by; the message teaches."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Message:
    """One turn. `tool_calls` are OpenAI's objects, their arguments as they were given (text or object). `reasoning` is an answer's thinking.
    `token_ids` (end-of-turn token included if it was produced) only on recorded answers of the target."""

    role: str
    content: str
    _: KW_ONLY
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    reasoning: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and the tools that were offered; `kind` groups figures in reports."""

    id: str
    kind: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    def users_only(self) -> Conversation:
        """The conversation without its answers: what is asked of a target."""
        return Conversation(self.id, self.kind, tuple(m for m in self.messages if m.role != "assistant"), self.tools)

    def to_row(self) -> dict[str, Any]:
        """The JSON object that `from_row` reads back."""
        row: dict[str, Any] = {"id": self.id, "kind": self.kind, "messages": [_message_row(m) for m in self.messages]}
        return row | {"tools": [dict(tool) for tool in self.tools]} if self.tools else row


@dataclass
class Counts:
    """read = kept + dropped, each drop with its reason and the first place where it happened."""

    read: int = 0
    kept: int = 0
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)

    def drop(self, reason: str, where: str, number: int = 1) -> None:
        """Count dropped conversations."""
        count, first = self.reasons.get(reason, (0, where))
        self.reasons[reason] = (count + number, first)

    @property
    def dropped(self) -> int:
        """Conversations dropped for any reason."""
        return sum(count for count, _ in self.reasons.values())

    def __add__(self, other: Counts) -> Counts:
        """Counts of both; the first places are those of the left one where it has any."""
        total = Counts(self.read + other.read, self.kept + other.kept, dict(self.reasons))
        for reason, (number, first) in other.reasons.items():
            total.drop(reason, first, number)
        return total

    def describe(self) -> str:
        """One line for people."""
        drops = "; ".join(f"{n} {reason} (first: {where})" for reason, (n, where) in self.reasons.items())
        return f"read {self.read:,} = kept {self.kept:,} + dropped {self.dropped:,}" + (f": {drops}" if drops else "")


def read(path: Path | str) -> list[Conversation]:
    """Read conversations from `.jsonl` or `.jsonl.gz`.

    Raises ValueError for a missing or empty file and for a line that is not a conversation, naming file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no conversations at {path}: expected a .jsonl file, one conversation a line")
    try:
        found = [_at(row, f"line-{number}", f"{path}:{number}") for number, row in _rows(path)]
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}): it is truncated or no gzip file") from error
    if not found:
        raise ValueError(f"{path} holds no conversation: it is empty")
    repeated = _first_repeated(c.id for c in found)
    if repeated is not None:
        raise ValueError(f"{path}: two conversations have the id {repeated!r}; ids must differ")
    return found


def from_row(row: Any, default_id: str) -> Conversation:
    """A conversation out of an object with OpenAI's `messages`. Raises RowError."""
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if not isinstance(messages, list):
        raise RowError("without a list `messages`", f"expected an object with a list `messages`, got {short(row)}")
    found = Conversation(
        id=str(default_id if row.get("id") is None else row["id"]),
        kind=str("all" if row.get("kind") is None else row["kind"]),
        messages=tuple(_message(m) for m in messages),
        tools=_objects(row, "tools") or tuple({"type": "function", "function": f} for f in _objects(row, "functions")),
    )
    _require_unicode(found)
    return found


def to_row(conversation: Conversation) -> dict[str, Any]:
    """The JSON object that `read` reads back."""
    return conversation.to_row()


def dumps(conversations: Sequence[Conversation]) -> str:
    """JSONL text."""
    return "".join(json.dumps(c.to_row(), ensure_ascii=False) + "\n" for c in conversations)


def unknown_role(role: str, known: Iterable[str], expected: str) -> RowError:
    """The error for a role that is none of `known`, with the closest one; `expected` lists the usual ones."""
    near = difflib.get_close_matches(role.lower(), tuple(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return RowError(f"with the unknown role {role[:40]!r}", f"unknown role {role!r}; expected {expected}{hint}")


def short(value: Any) -> str:
    """JSON of a value, cut to fit a message."""
    text = json.dumps(value, ensure_ascii=True, default=repr) if not isinstance(value, str) or len(value) < 200 else repr(value[:80])
    return text if len(text) <= 80 else text[:77] + "…"


def _message_row(m: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": m.role, "content": m.content}
    row |= {key: value for key, value in (("name", m.name), ("tool_call_id", m.tool_call_id), (REASONING[0], m.reasoning)) if value is not None}
    if m.tool_calls:
        row["tool_calls"] = [dict(call) for call in m.tool_calls]
    if m.token_ids is not None:
        row |= {"token_ids": list(m.token_ids)}
    if m.token_ids is not None or m.finish_reason is not None:
        row |= {"finish_reason": m.finish_reason}
    return row


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is not valid JSON in UTF-8 ({error}); expected one conversation a line") from error


def _at(row: Any, default_id: str, where: str) -> Conversation:
    try:
        return from_row(row, default_id)
    except RowError as error:
        raise ValueError(f"{where}: {error}") from error


def _message(row: Any) -> Message:
    if not isinstance(row, Mapping) or not isinstance(row.get("role"), str):
        raise RowError("with a message without `role`", f"a message needs `role` and `content` as text, got {short(row)}")
    role = ROLES.get(row["role"])
    if role is None:
        raise unknown_role(row["role"], ROLES, "system, user, assistant or tool")
    calls = _tool_calls(row)
    reasoning = next((row[key] for key in REASONING if row.get(key) is not None), None)
    if reasoning is not None and not isinstance(reasoning, str):
        raise RowError("with thinking that is no text", f"`{REASONING[0]}` must be text, got {short(reasoning)}")
    return Message(
        role,
        _content(row, may_lack=bool(calls)),
        tool_calls=calls,
        reasoning=reasoning,
        name=_optional_text(row, "name"),
        tool_call_id=_optional_text(row, "tool_call_id"),
        token_ids=_token_ids(row),
        finish_reason=_optional_text(row, "finish_reason"),
    )


def _content(row: Mapping[str, Any], may_lack: bool) -> str:
    """Text, or text parts one after the other; a message that calls tools may have none."""
    content = row.get("content")
    if isinstance(content, str):
        return content
    if content is None and may_lack:
        return ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
        other = next((part for part, text in zip(content, parts, strict=True) if not isinstance(text, str)), None)
        if other is None:
            return "".join(text for text in parts if text is not None)
        kind = other.get("type") if isinstance(other, Mapping) else None
        raise RowError(f"with content parts that are no text ({short(kind)})", f"content parts must be text, got {short(other)}")
    what = "null content" if content is None else "content that is no text"
    raise RowError(f"with {what}", f"a message needs `role` and `content` as text, got {short(row)}")


def _tool_calls(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    calls = _objects(row, "tool_calls")
    legacy = row.get("function_call")
    if not calls and isinstance(legacy, Mapping):
        calls = ({"type": "function", "function": legacy},)
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError("with a tool call without a function's name", f'a tool call needs {{"function": {{"name", "arguments"}}}}, got {short(call)}')
        arguments(function)
    return calls


def arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a called function as an object, whichever way they were written. Raises RowError."""
    given = function.get("arguments")
    if given is None or given == "":
        return {}
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = given
    if not isinstance(found, Mapping):
        raise RowError("with tool arguments that are no JSON object", f"the arguments of a tool call must be a JSON object, got {short(given)}")
    return found


def _objects(row: Mapping[str, Any], key: str) -> tuple[Mapping[str, Any], ...]:
    """A list of objects, or the same as JSON text, as tables keep it."""
    given = row.get(key)
    if given is None or given == "":
        return ()
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = given
    if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found):
        raise RowError(f"with `{key}` that are no list of objects", f"`{key}` must be a list of objects, got {short(given)}")
    return tuple(found)


def _optional_text(row: Mapping[str, Any], key: str) -> str | None:
    return None if row.get(key) is None else str(row[key])


def _token_ids(row: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = row.get("token_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)):
        raise RowError("with `token_ids` that are no ids", f"`token_ids` must be a list of integers of at least 0, got {short(ids)}")
    return None if ids is None else tuple(ids)


def _require_unicode(conversation: Conversation) -> None:
    """JSON can escape half of a surrogate pair, which is no character; a tokenizer would raise on it."""
    texts = [t for m in conversation.messages for t in (m.content, m.reasoning) if t and not t.isascii()]
    calls = [call for m in conversation.messages for call in m.tool_calls]
    nested = [*conversation.tools, *calls, *(arguments(call.get("function", call)) for call in calls)]
    try:
        for text in texts:
            text.encode()
        for value in nested:
            if value:
                json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RowError("with a lone surrogate", f"the text has half of a surrogate pair, which is no character: {error}") from error


def _first_repeated(values: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
