"""Conversations to samples: token ids and which of them the assistant wrote.

One rule for every template. Walk the assistant turns; the prompt of a turn is the rendering of everything before it plus the assistant's header,
the answer is what follows (recorded token ids as they are, else the difference of two renderings, cut after the end-of-turn token).
While a prompt repeats the sample so far, the sample grows; when the template rewrote history, a new sample starts. So the ids are
always exactly what a server would see, and only what the assistant wrote is supervised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftsmith.core.config import Config, Positive
from draftsmith.core.types import Sample
from draftsmith.data.conversations import Conversation, Counts, Message
from draftsmith.data.template import ChatTemplate, TemplateError


class DataConfig(Config):
    """Which conversations to learn from, and which to hold out."""

    train: str = "bundled"
    """JSONL file of conversations; `bundled` is the set that ships with Draftsmith."""
    held_out: str = "bundled"
    """JSONL file of other conversations for evaluation; `bundled` likewise."""
    held_out_features: Positive | None = None
    """Capture this many of the held-out conversations, evenly spread, to choose the best checkpoint; all when absent. Decoding uses all."""
    max_length: Positive = 2048
    """Longest sample in tokens; longer ones are cut at this length (the cut tokens are counted)."""
    limit: Positive | None = None
    """Capture and train on this many training conversations, evenly spread over the file; all when absent. The draft vocabulary is
    counted on all of them in any case."""
    max_answer: Positive = 160
    """Longest answer in tokens when the target's own answers are recorded."""


@dataclass(frozen=True)
class Prepared:
    """Samples and what became of every conversation."""

    samples: list[Sample]
    counts: Counts
    cut_tokens: int

    @property
    def tokens(self) -> int:
        """All tokens."""
        return sum(len(s) for s in self.samples)

    @property
    def supervised(self) -> int:
        """Tokens that the assistant wrote."""
        return sum(int(s.loss_mask.sum()) for s in self.samples)

    def describe(self) -> str:
        """One line for people."""
        share = self.supervised / max(self.tokens, 1)
        cut = f", {self.cut_tokens:,} tokens cut at the maximum length" if self.cut_tokens else ""
        return f"{self.counts.describe()}; {len(self.samples):,} samples, {self.tokens:,} tokens, {share:.0%} supervised{cut}"


def prepare(conversations: Sequence[Conversation], template: ChatTemplate, max_length: int) -> Prepared:
    """Render every conversation; count what is dropped and why.

    Raises ValueError when nothing is left to train on.
    """
    counts = Counts(read=len(conversations))
    samples: list[Sample] = []
    cut = 0
    for conversation in conversations:
        try:
            found = samples_of(conversation, template)
        except TemplateError as error:
            counts.drop(str(error), conversation.id)
            continue
        short = [_cut(sample, max_length) for sample in found]
        cut += sum(map(len, found)) - sum(map(len, short))
        kept = [s for s in short if supervised_pairs(s)]
        samples += kept
        if kept:
            counts.kept += 1
        else:
            counts.drop(_why_nothing(conversation, found), conversation.id)
    if not samples:
        raise ValueError(f"nothing left to train on: {counts.describe()}")
    return Prepared(samples, counts, cut)


def samples_of(conversation: Conversation, template: ChatTemplate) -> list[Sample]:
    """The samples of one conversation, usually one."""
    grown: list[tuple[list[int], list[bool]]] = []
    messages = conversation.messages
    for i, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt = template.ids(messages[:i], prompt=True)
        answer = _recorded(message, template) if message.token_ids is not None else _rendered(messages[: i + 1], prompt, template)
        ids, mask = grown[-1] if grown else ([], [])
        if not grown or prompt[: len(ids)] != ids:
            ids, mask = [], []
            grown.append((ids, mask))
        fresh = prompt[len(ids) :]
        ids += fresh + answer
        mask += [False] * len(fresh) + [True] * len(answer)
    names = [conversation.id] if len(grown) == 1 else [f"{conversation.id}/{n}" for n in range(len(grown))]
    return [Sample(name, torch.tensor(ids), torch.tensor(mask)) for name, (ids, mask) in zip(names, grown, strict=True)]


def supervised_pairs(sample: Sample) -> int:
    """Places where a draft can be asked and judged: two neighbouring tokens that the assistant wrote."""
    return int((sample.loss_mask[1:] & sample.loss_mask[:-1]).sum())


def _recorded(message: Message, template: ChatTemplate) -> list[int]:
    """Recorded ids as they are, if this tokenizer wrote them."""
    ids = list(message.token_ids or ())
    if ids and not (min(ids) >= 0 and max(ids) < len(template.tokenizer)):
        raise TemplateError("with recorded token ids outside the target's vocabulary")
    if template.text(ids) != message.content:
        raise TemplateError("with recorded token ids that are another text under the target's tokenizer")
    return ids


def _rendered(messages: Sequence[Message], prompt: list[int], template: ChatTemplate) -> list[int]:
    """The answer up to and including its end mark."""
    answer = template.answer(messages, prompt)
    ends = [n for n, token in enumerate(answer) if token in template.end_ids]
    return answer[: ends[-1] + 1] if ends else answer


def _cut(sample: Sample, length: int) -> Sample:
    return sample if len(sample) <= length else Sample(sample.id, sample.input_ids[:length], sample.loss_mask[:length])


def _why_nothing(conversation: Conversation, found: Sequence[Sample]) -> str:
    if not any(m.role == "assistant" for m in conversation.messages):
        return "without an assistant turn"
    if not any(supervised_pairs(s) for s in found):
        return "with answers of fewer than two tokens"
    return "with no answer within the maximum length"
