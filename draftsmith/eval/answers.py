"""The target's own greedy answers to conversations, turn by turn: what a draft should learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.template import ChatTemplate
from draftsmith.eval.decode import Decoder


def answer(
    conversations: Sequence[Conversation], decoder: Decoder, template: ChatTemplate, max_new: int, batch: int, done: Callable[[int], None]
) -> list[Conversation]:
    """Answer every user turn, earlier answers being part of the prompt; recorded answers are kept.

    Conversations of similar length are decoded together; the result is in their order. `done` is told the new tokens of each batch.
    """
    states = list(conversations)
    while True:
        asked = [(i, template.ids(m, prompt=True)) for i, c in enumerate(states) if (m := _unanswered(c)) is not None]
        if not asked:
            return states
        asked.sort(key=lambda pair: len(pair[1]))
        for start in range(0, len(asked), batch):
            rows = asked[start : start + batch]
            decoded = decoder.decode([ids for _, ids in rows], max_new)
            for (i, _), d in zip(rows, decoded, strict=True):
                ids = d.token_ids
                text = template.text(ids)
                states[i] = _insert(states[i], Message("assistant", text, token_ids=tuple(ids), finish_reason=d.finish_reason))
            done(sum(len(d.token_ids) for d in decoded))


def _unanswered(conversation: Conversation) -> Sequence[Message] | None:
    """Messages up to and including the first user turn without an answer."""
    messages = conversation.messages
    for i, message in enumerate(messages):
        if message.role == "user" and (i + 1 == len(messages) or messages[i + 1].role != "assistant"):
            return messages[: i + 1]
    return None


def _insert(conversation: Conversation, message: Message) -> Conversation:
    before = _unanswered(conversation)
    assert before is not None
    after = conversation.messages[len(before) :]
    return Conversation(conversation.id, conversation.kind, (*before, message, *after))
