"""The conversations that ship with Draftsmith: prompts written for it, and SmolLM2-135M-Instruct's recorded greedy answers.

    bundled/prompts.jsonl      {"id", "kind", "split": "train" or "held-out", "messages": [user turns, perhaps a system message]}
    bundled/answers.jsonl.gz   {"id", "answers": [{"token_ids", "finish_reason", "text"} for each user turn]}
    bundled/README.md          who made them and how, with the command that records the answers again
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.data.conversations import Conversation, Message

FOLDER = Path(__file__).parent / "bundled"


def prompts(split: str) -> list[Conversation]:
    """Conversations without answers: `split` is train or held-out."""
    rows = (json.loads(line) for line in (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines())
    return [
        Conversation(r["id"], r["kind"], tuple(Message(m["role"], m["content"]) for m in r["messages"])) for r in rows if r["split"] == split
    ]


def conversations(split: str) -> list[Conversation]:
    """With the recorded answers of SmolLM2-135M-Instruct."""
    with gzip.open(FOLDER / "answers.jsonl.gz", "rt", encoding="utf-8") as file:
        answers = {row["id"]: row["answers"] for row in map(json.loads, file)}
    return [with_answers(c, answers[c.id]) for c in prompts(split)]


def with_answers(conversation: Conversation, answers: Sequence[Mapping[str, Any]]) -> Conversation:
    """Put one answer behind each user turn (the first ones, if there are fewer answers)."""
    messages: list[Message] = []
    left = iter(answers)
    for message in conversation.messages:
        messages.append(message)
        if message.role == "user":
            answer = next(left, None)
            if answer is None:
                break
            messages.append(Message("assistant", answer["text"], tuple(answer["token_ids"]), answer["finish_reason"]))
    return Conversation(conversation.id, conversation.kind, tuple(messages))
