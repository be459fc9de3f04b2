"""A conversation answered anew, turn by turn: what is asked next, and what becomes of the recording behind a new answer.

Every user turn, and every run of tool results, is answered. A recorded answer only marks a turn: the new one takes its place, and later turns see the new
one. Recorded tool results belong to recorded calls. Where a new answer calls otherwise, what follows would answer a question that nobody asked, so the
conversation ends there, with that answer as its last message. A recorded answer to nothing (an opening greeting) is left out: nothing in the result was
written by anybody else than the target, its users and its tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.data.conversations import Conversation, Message, arguments


@dataclass(frozen=True)
class Replay:
    """How far a conversation has been answered: messages so far, and recorded ones not reached yet."""

    asked: Conversation
    messages: tuple[Message, ...]
    left: tuple[Message, ...]

    @staticmethod
    def start(conversation: Conversation) -> Replay:
        """Before the first answer."""
        return Replay(conversation, (), conversation.messages)._reach()

    @property
    def waiting(self) -> bool:
        """Whether a turn of the target is due behind `messages`."""
        return _due(self.messages, self.left)

    @property
    def turn(self) -> int:
        """How many turns were answered."""
        return sum(m.role == "assistant" for m in self.messages)

    @property
    def conversation(self) -> Conversation:
        """The conversation with the new answers, as far as it goes."""
        return replace(self.asked, messages=self.messages)

    def answered(self, answer: Message) -> Replay:
        """With the answer to the turn that was due, up to the next one; at the end when the recorded rest does not fit the answer."""
        assert self.waiting
        count = next((n for n, m in enumerate(self.left) if m.role != "assistant"), len(self.left))
        recorded, rest = self.left[:count], self.left[count:]
        calls = [call for m in recorded for call in m.tool_calls]
        same = bool(calls) and _meaning(answer.tool_calls) == _meaning(calls)
        if same:
            answer = replace(answer, tool_calls=tuple(_with_id_of(new, old) for new, old in zip(answer.tool_calls, calls, strict=True)))
        if rest and rest[0].role == "tool":
            written = not calls and not answer.tool_calls and answer.content == "".join(m.content for m in recorded)
            fits = same or written  # some data sets write calls into the text
        else:
            fits = same or not answer.tool_calls
        return Replay(self.asked, (*self.messages, answer), rest if fits else ())._reach()

    def _reach(self) -> Replay:
        messages, left = self.messages, self.left
        while left and not _due(messages, left):
            messages, left = (messages if left[0].role == "assistant" else (*messages, left[0])), left[1:]
        return Replay(self.asked, messages, left)


def stopped_early(asked: Conversation, answered: Conversation) -> bool:
    """Whether the conversation ended at a call that the recorded results do not answer."""
    return len(asked.users_only().messages) > len(answered.users_only().messages)


def _due(messages: Sequence[Message], left: Sequence[Message]) -> bool:
    if not messages:
        return False
    if messages[-1].role == "tool":
        return not (left and left[0].role == "tool")
    return messages[-1].role == "user"


def _meaning(calls: Sequence[Any]) -> list[tuple[str, Any]]:
    """What is called, apart from ids and the spelling of JSON."""
    functions = [call.get("function", call) for call in calls]
    return [(f["name"], arguments(f)) for f in functions]


def _with_id_of(new: Any, old: Any) -> Any:
    """The recorded results name the recorded id."""
    return {**new, "id": old["id"]} if "id" in old else new
