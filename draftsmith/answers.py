"""`draftsmith answers`: record the target's own greedy answers to a file of conversations, resumable.

Finished groups are appended to `<out>.unfinished`; a stopped call goes on behind its last whole line. The result is in the order of the input.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

from draftsmith.core.disk import write_bytes
from draftsmith.core.log import progress, say
from draftsmith.data import conversations
from draftsmith.data.conversations import Conversation
from draftsmith.data.template import ChatTemplate
from draftsmith.eval.answers import answer
from draftsmith.eval.decode import Decoder

UNFINISHED = ".unfinished"
GROUP = 8
"""Batches between two appends."""


def record(asked: Sequence[Conversation], decoder: Decoder, template: ChatTemplate, out: Path, max_new: int, batch: int) -> list[Conversation]:
    """Answer everything that `out` or its partial file does not hold yet, and write `out` whole."""
    if out.exists():
        say(f"{out} exists: its answers are kept")
        return conversations.read(out)
    partial = out.with_name(out.name + UNFINISHED)
    done = _finished(partial)
    left = [c.users_only() for c in asked if c.id not in done]
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("a", encoding="utf-8") as file, progress("answer", len(asked), "answers") as advance:
        advance(len(done))
        for start in range(0, len(left), GROUP * batch):
            group = left[start : start + GROUP * batch]
            for conversation in answer(group, decoder, template, max_new, batch, lambda _tokens: None):
                done[conversation.id] = conversation
                file.write(conversations.dumps([conversation]))
            file.flush()
            advance(len(group))
    answered = [done[c.id] for c in asked]
    data = conversations.dumps(answered).encode()
    write_bytes(out, gzip.compress(data, mtime=0) if out.suffix == ".gz" else data)
    partial.unlink()
    return answered


def _finished(partial: Path) -> dict[str, Conversation]:
    """Whole lines of a stopped call; a torn last line is cut off."""
    if not partial.exists():
        return {}
    whole = partial.read_bytes().rpartition(b"\n")[0]
    write_bytes(partial, whole + b"\n" if whole else b"")
    return {c.id: c for c in conversations.read(partial)} if whole else {}
