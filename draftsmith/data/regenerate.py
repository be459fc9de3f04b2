"""`draftsmith regenerate`: the target's own answers to a file of conversations, from inference servers.

A draft should learn from what its target says, not from what somebody else said. Conversations run side by side, the turns of one after another. Each finished
one is on disk before it counts (journal.py), so a killed run loses at most the answers that were on their way.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.core.log import Advance, progress, say
from draftsmith.data.chat import AnswerSettings, reply, request
from draftsmith.data.conversations import Conversation, Counts
from draftsmith.data.journal import FAILED, Journal, digest, finished, sibling
from draftsmith.data.replay import Replay, stopped_early
from draftsmith.data.servers import Refused, Servers

FAILURES_BEFORE_STOP = 20
"""When this many conversations failed and none was answered, the reason is not in the conversations."""


NO_TURN = "nothing in it to answer: no turn of a user"


@dataclass(frozen=True)
class Service:
    """Where to ask, and how insistently: requests running on one server, tries of a request, seconds for a reply, seconds without any server."""

    urls: tuple[str, ...]
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    concurrency: int = 32
    tries: int = 6
    timeout: float = 600.0
    patience: float = 120.0


class Work:
    """Conversations finished and failed so far, with their progress bar; writes the result and its report at the end."""

    def __init__(self, journal: Journal, advance: Advance, rows: Counts | None = None) -> None:
        """`rows`: how the conversations were read; rows that are no conversation are among the failed."""
        self.journal, self.advance = journal, advance
        self.rows = rows or Counts(read=len(journal.asked))
        self.failed: dict[str, str] = {}
        self.tokens, self.began = 0, time.perf_counter()
        advance(len(journal.places))

    @property
    def left(self) -> Iterator[Conversation]:
        """What is not finished, in order. What failed in a stopped run is asked again."""
        return (c for c in self.journal.asked if c not in self.journal)

    @property
    def rate(self) -> float:
        """Tokens per second of this run."""
        return self.tokens / max(time.perf_counter() - self.began, 1e-9)

    def answered(self, conversation: Conversation, note: str = "") -> None:
        """Keep a finished conversation."""
        self.journal.add(conversation)
        self._note(1, note)

    def fail(self, conversation: Conversation, reason: str) -> None:
        """Count a conversation that gets no answer. Raises ValueError when nothing else has happened for some time."""
        self.failed[conversation.id] = reason
        self._note(1, "")
        if len(self.failed) >= FAILURES_BEFORE_STOP and not self.journal.places:
            raise ValueError(f"the first {len(self.failed)} conversations all failed, the last with: {reason}")

    def wrote(self, tokens: int, note: str = "") -> None:
        """Count tokens that the target wrote."""
        self.tokens += tokens
        self._note(0, note)

    def finish(self) -> dict[str, Any]:
        """Write the result, what failed, and the report, which is returned. Raises ValueError when nothing was answered."""
        counts = Counts(self.rows.read, len(self.journal.places), dict(self.rows.reasons))
        failed = [(c, self.failed[c.id]) for c in self.journal.asked if c.id in self.failed]
        for conversation, reason in failed:
            counts.drop(f"with {_kind_of(reason)}", conversation.id)
        assert counts.read == counts.kept + counts.dropped
        if not counts.kept:
            self.journal.discard()
            raise ValueError(f"nothing was answered: {describe(counts)}")
        report = tally(self.journal.read()) | {"counts": describe(counts)}
        self.journal.finish(report, failed)
        out = self.journal.out
        say(f"{out}: {describe(counts)}" + (f"; what failed is in {sibling(out, FAILED)}, with the reasons, to be asked again" if failed else ""))
        say(", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in report.items() if name != "counts" and (value or name in _ALWAYS)))
        if self.tokens:
            say(f"{self.tokens:,} tokens in {time.perf_counter() - self.began:,.0f} s: {self.rate:,.0f} tokens/s")
        return report

    def _note(self, rows: int, note: str) -> None:
        parts = [f"{self.rate:,.0f} tokens/s", f"{len(self.failed):,} failed" if self.failed else "", note]
        self.advance(rows, ", ".join(p for p in parts if p))


_ALWAYS = ("turns", "token_ids", "turns_cut_by_length")


def regenerate(
    asked: Sequence[Conversation],
    out: Path,
    service: Service,
    settings: AnswerSettings,
    decode: Callable[[Sequence[int]], str] | None = None,
    rows: Counts | None = None,
) -> None:
    """Answer every turn anew and write `out` in the order of `asked`, with `out`.report.json and perhaps `out`.failed.jsonl.

    `decode`: the target's tokenizer, to check token ids with. `rows`: counts of the rows that `asked` was read from.

    Raises ValueError for settings that do not fit a stopped run, an existing file or the servers, ServersGone when all servers are gone for
    `service.patience` seconds, DiskError. After any of them the same call continues.
    """
    asyncio.run(_regenerate(asked, out, service, settings, decode, rows))


async def _regenerate(
    asked: Sequence[Conversation],
    out: Path,
    service: Service,
    settings: AnswerSettings,
    decode: Callable[[Sequence[int]], str] | None,
    rows: Counts | None,
) -> None:
    pool = Servers(service.urls, service.model, service.key, service.concurrency, service.tries, service.timeout, service.patience)
    async with pool as servers:
        about = {"model": servers.model, "by": "server", "conversations": digest(asked)} | asdict(settings)
        if finished(out, about):
            say(f"{out} is finished; delete it to ask again")
            return
        with Journal(out, about, asked) as journal:
            with progress("answer", len(asked), "rows") as advance:
                work = Work(journal, advance, rows)
                left = work.left
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(min(service.concurrency * len(servers.servers), len(asked))):
                            group.create_task(_answer_all(left, work, servers, settings, decode))
                except BaseExceptionGroup as failures:
                    raise failures.exceptions[0] from None
            work.finish()


async def _answer_all(left: Iterator[Conversation], work: Work, servers: Servers, settings: AnswerSettings, decode: Any) -> None:
    """Take the next conversation, answer it, until none is left."""
    for conversation in left:
        replay = Replay.start(conversation)
        try:
            while replay.waiting:
                body = request(servers.model, replay.conversation, replay.turn, settings)
                answer, tokens = await servers.post(body, lambda found: reply(found, settings, decode))
                work.wrote(tokens, f"{servers.working} of {len(servers.servers)} servers")
                replay = replay.answered(answer)
        except Refused as refused:
            work.fail(conversation, str(refused))
        else:
            if replay.turn:
                work.answered(replay.conversation)
            else:
                work.fail(conversation, NO_TURN)


def tally(pairs: Iterator[tuple[Conversation, Conversation]]) -> dict[str, int]:
    """Figures of a result, from what was asked and what came out."""
    names = ("turns", "token_ids", "turns_cut_by_length", "turns_without_token_ids", "turns_with_tool_calls", "turns_with_reasoning")
    found: dict[str, int] = dict.fromkeys((*names, "conversations_stopped_at_another_tool_call", "conversations_with_openings_left_out"), 0)
    for asked, answered in pairs:
        turns = [m for m in answered.messages if m.role == "assistant"]
        found["turns"] += len(turns)
        found["token_ids"] += sum(len(m.token_ids or ()) for m in turns)
        found["turns_cut_by_length"] += sum(m.finish_reason == "length" for m in turns)
        found["turns_without_token_ids"] += sum(m.token_ids is None for m in turns)
        found["turns_with_tool_calls"] += sum(bool(m.tool_calls) for m in turns)
        found["turns_with_reasoning"] += sum(bool(m.reasoning) or "</think>" in m.content for m in turns)
        found["conversations_stopped_at_another_tool_call"] += stopped_early(asked, answered)
        found["conversations_with_openings_left_out"] += next((m.role for m in asked.messages if m.role != "system"), "") == "assistant"
    return found


def describe(counts: Counts) -> str:
    """One line: what was read, answered, and failed with reasons."""
    why = "; ".join(f"{n} {reason} (first: {where})" for reason, (n, where) in counts.reasons.items())
    return f"read {counts.read:,} = answered {counts.kept:,} + failed {counts.dropped:,}" + (f": {why}" if why else "")


def _kind_of(reason: str) -> str:
    """Reasons that differ in numbers alone are counted together."""
    return re.sub(r"(?<!HTTP )\b\d+", "#", reason)
