"""The target's own answers on this machine, turn by turn, many conversations in a batch: `draftsmith regenerate --local`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from draftsmith.core.log import progress, say
from draftsmith.data.chat import AnswerSettings, require_thinking
from draftsmith.data.conversations import Conversation, Counts, Message
from draftsmith.data.journal import Journal, digest, finished
from draftsmith.data.regenerate import NO_TURN, Work
from draftsmith.data.replay import Replay
from draftsmith.data.template import ChatTemplate, TemplateError
from draftsmith.eval.decode import Decoder

GROUP = 8
"""Batches between two writes to disk."""


def answer(
    conversations: Sequence[Conversation], decoder: Decoder, template: ChatTemplate, max_new: int, batch: int, done: Callable[[int], None]
) -> list[Conversation | TemplateError]:
    """Answer every turn anew, earlier answers being part of the prompt; where the template refuses a conversation its error stands in the result.

    Prompts of similar length are decoded together; the result is in the order of the conversations. `done` is told the new tokens of each batch. Answers
    are text as decoded: there is no parser of tool calls, so a conversation ends where recorded tool results follow.
    """
    states: list[Replay | TemplateError] = [Replay.start(c) for c in conversations]
    while asked := _prompts(states, template):
        for start in range(0, len(asked), batch):
            rows = asked[start : start + batch]
            decoded = decoder.decode([ids for _, _, ids in rows], max_new)
            for (i, state, _), d in zip(rows, decoded, strict=True):
                message = Message("assistant", template.text(d.token_ids), token_ids=tuple(d.token_ids), finish_reason=d.finish_reason)
                states[i] = state.answered(message)
            done(sum(len(d.token_ids) for d in decoded))
    return [s.conversation if isinstance(s, Replay) else s for s in states]


def record(
    asked: Sequence[Conversation], decoder: Decoder, template: ChatTemplate, out: Path, settings: AnswerSettings, batch: int, rows: Counts | None = None
) -> None:
    """Answer everything that `out` or its unfinished file does not hold yet, and write `out` whole, in the order of `asked`.

    `rows`: counts of the rows that `asked` was read from.

    Raises ValueError when `out` or its unfinished file is of other settings, or nothing could be answered; DiskError.
    """
    about = {"model": decoder.target.fingerprint, "by": "local", "conversations": digest(asked)} | asdict(settings)
    if finished(out, about):
        say(f"{out} exists: its answers are kept")
        return
    with Journal(out, about, asked) as journal:
        with progress("answer", len(asked), "rows") as advance:
            work = Work(journal, advance, rows)
            left = list(work.left)
            for start in range(0, len(left), GROUP * batch):
                group = left[start : start + GROUP * batch]
                if decoder.sampling.generator is not None:
                    decoder.sampling.generator.manual_seed(zlib.crc32(f"{settings.seed}/{group[0].id}".encode()))
                for conversation, found in zip(group, answer(group, decoder, template, settings.max_tokens, batch, work.wrote), strict=True):
                    try:
                        work.answered(_checked(found, settings))
                    except ValueError as error:
                        work.fail(conversation, str(error))
        work.finish()


def _checked(found: Conversation | TemplateError, settings: AnswerSettings) -> Conversation:
    """The conversation, if it counts as answered. Raises ValueError with the reason if not."""
    if isinstance(found, TemplateError):
        raise found
    turns = [m for m in found.messages if m.role == "assistant"]
    if not turns:
        raise ValueError(NO_TURN)
    for turn in turns:
        require_thinking(turn, settings)
    return found


def _prompts(states: list[Replay | TemplateError], template: ChatTemplate) -> list[tuple[int, Replay, list[int]]]:
    """What is asked next, short prompts first; states whose template refuses are replaced by its error."""
    asked: list[tuple[int, Replay, list[int]]] = []
    for i, state in enumerate(states):
        if isinstance(state, Replay) and state.waiting:
            try:
                asked.append((i, state, template.ids(state.messages, True, state.asked.tools)))
            except TemplateError as error:
                states[i] = error
    return sorted(asked, key=lambda row: len(row[2]))
