"""Conversations as files hold them: JSONL with OpenAI-style `messages`.

    {"id": "math-0001", "kind": "math", "messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}

`id` defaults to `line-<number>`, `kind` to `all`. An assistant message may carry the `token_ids` that the target itself produced and its
`finish_reason`; they are then used as they are, never tokenised again.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Message:
    """One turn. `token_ids` (end-of-turn token included if it was produced) only on recorded answers of the target."""

    role: str
    content: str
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class Conversation:
    """Messages in order; `kind` groups figures in reports."""

    id: str
    kind: str
    messages: tuple[Message, ...]

    def users_only(self) -> Conversation:
        """The conversation without its answers: what is asked of a target."""
        return Conversation(self.id, self.kind, tuple(m for m in self.messages if m.role != "assistant"))


@dataclass
class Counts:
    """read = kept + dropped, each drop with its reason and the first place where it happened."""

    read: int = 0
    kept: int = 0
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        """Count one dropped conversation."""
        count, first = self.reasons.get(reason, (0, where))
        self.reasons[reason] = (count + 1, first)

    @property
    def dropped(self) -> int:
        """Conversations dropped for any reason."""
        return sum(count for count, _ in self.reasons.values())

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
        found = [_conversation(row, where, number) for number, where, row in _rows(path)]
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}): it is truncated or no gzip file") from error
    if not found:
        raise ValueError(f"{path} holds no conversation: it is empty")
    repeated = _first_repeated(c.id for c in found)
    if repeated is not None:
        raise ValueError(f"{path}: two conversations have the id {repeated!r}; ids must differ")
    return found


def to_row(conversation: Conversation) -> dict[str, Any]:
    """The JSON object that `read` reads back."""
    messages: list[dict[str, Any]] = []
    for m in conversation.messages:
        row: dict[str, Any] = {"role": m.role, "content": m.content}
        if m.token_ids is not None:
            row |= {"token_ids": list(m.token_ids), "finish_reason": m.finish_reason}
        messages.append(row)
    return {"id": conversation.id, "kind": conversation.kind, "messages": messages}


def dumps(conversations: Sequence[Conversation]) -> str:
    """JSONL text."""
    return "".join(json.dumps(to_row(c), ensure_ascii=False) + "\n" for c in conversations)


def _rows(path: Path) -> Iterator[tuple[int, str, Any]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is not valid JSON in UTF-8 ({error}); expected one conversation a line") from error


def _conversation(row: Any, where: str, number: int) -> Conversation:
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if not isinstance(messages, list):
        raise ValueError(f"{where}: expected an object with a list `messages`, got {_short(row)}")
    return Conversation(
        id=str(row.get("id", f"line-{number}")),
        kind=str(row.get("kind", "all")),
        messages=tuple(_message(m, where) for m in messages),
    )


def _message(row: Any, where: str) -> Message:
    if not isinstance(row, Mapping) or not isinstance(row.get("role"), str) or not isinstance(row.get("content"), str):
        raise ValueError(f"{where}: a message needs `role` and `content` as text, got {_short(row)}")
    if row["role"] not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"{where}: unknown role {row['role']!r}; expected system, user, assistant or tool")
    ids = row.get("token_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)):
        raise ValueError(f"{where}: `token_ids` must be a list of integers of at least 0, got {_short(ids)}")
    return Message(row["role"], row["content"], None if ids is None else tuple(ids), row.get("finish_reason"))


def _first_repeated(values: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"
