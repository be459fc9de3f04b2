"""Conversations to samples: token ids and which of them the assistant wrote.

The ids are always exactly what a server would see: it tokenizes the prompt, the target then writes token by token. Each text of `turns.py` is tokenized
once; a turn stands in it as a server would see it iff the ids of its prompt alone are the ids that the text has there. Where they are not (the answer's first
characters merge with the header), the answer is tokenized by itself, and what follows becomes another sample. Recorded token ids are used as they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from draftsmith.data.config import DataConfig
from draftsmith.data.conversations import Conversation, Counts
from draftsmith.data.template import ChatTemplate, TemplateError
from draftsmith.data.turns import Turn, groups_of, of_text, preformatted

if TYPE_CHECKING:
    from draftsmith.core.types import Sample


@dataclass(frozen=True)
class Tokens:
    """Token ids, and the ranges `[start, end)` of them to learn from: ascending, not empty, one or more for each answer."""

    ids: np.ndarray
    spans: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def supervised(self) -> int:
        """Tokens to learn from."""
        return sum(b - a for a, b in self.spans)

    @property
    def pairs(self) -> int:
        """Places where a draft can be asked and judged: two neighbouring tokens to learn from."""
        joined = sum(a == b for (_, a), (b, _) in pairwise(self.spans))
        return sum(b - a - 1 for a, b in self.spans) + joined

    def cut(self, length: int) -> Tokens:
        """The first `length` tokens."""
        return self if len(self) <= length else Tokens(self.ids[:length], tuple((a, min(b, length)) for a, b in self.spans if a < length))

    def sample(self, name: str) -> Sample:
        """The same as tensors."""
        import torch  # not above: processes that only tokenize start three times as fast without it

        from draftsmith.core.types import Sample

        mask = np.zeros(len(self.ids), bool)
        for a, b in self.spans:
            mask[a:b] = True
        return Sample(name, torch.from_numpy(self.ids.astype(np.int64)), torch.from_numpy(mask))


@dataclass(frozen=True)
class Text:
    """Text that is rendered already."""

    id: str
    text: str


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
    """Render conversations in memory; count what is dropped and why.

    Raises ValueError when nothing is left to train on.
    """
    config = DataConfig(max_length=max_length)
    counts = Counts(read=len(conversations))
    samples: list[Sample] = []
    cut = 0
    for conversation, found in zip(conversations, tokenize(conversations, template, config), strict=True):
        kept, lost, reason = ([], 0, found.reason) if isinstance(found, TemplateError) else fit(found, config)
        if kept:
            cut += lost
            counts.kept += 1
            samples += [tokens.sample(name) for name, tokens in kept_names(conversation.id, kept, found)]
        else:
            counts.drop(reason, conversation.id)
    if not samples:
        raise ValueError(f"nothing left to train on: {counts.describe()}")
    return Prepared(samples, counts, cut)


def samples_of(conversation: Conversation, template: ChatTemplate) -> list[Sample]:
    """The samples of one conversation, usually one. Raises TemplateError when it cannot be rendered."""
    (found,) = tokenize([conversation], template, DataConfig())
    if isinstance(found, TemplateError):
        raise found
    return [tokens.sample(name) for name, tokens in kept_names(conversation.id, list(enumerate(found)), found)]


def supervised_pairs(sample: Sample) -> int:
    """Places where a draft can be asked and judged: two neighbouring tokens that the assistant wrote."""
    return int((sample.loss_mask[1:] & sample.loss_mask[:-1]).sum())


def kept_names(name: str, kept: Sequence[tuple[int, Tokens]], found: Sequence[Tokens] | TemplateError) -> list[tuple[str, Tokens]]:
    """A conversation that needs several samples numbers them, whichever of them were kept."""
    several = not isinstance(found, TemplateError) and len(found) > 1
    return [(f"{name}/{n}" if several else name, tokens) for n, tokens in kept]


def fit(found: Sequence[Tokens], config: DataConfig) -> tuple[list[tuple[int, Tokens]], int, str]:
    """Samples within the maximum length with their places among `found`, the tokens that were cut off, and why nothing is left if so."""
    short = [_shorten(tokens, config) for tokens in found]
    lost = sum(map(len, found)) - sum(map(len, short))
    kept = [(n, tokens) for n, tokens in enumerate(short) if tokens.pairs and tokens.supervised >= config.min_supervised]
    if kept:
        return kept, lost, ""
    if not any(tokens.pairs for tokens in found):
        return [], lost, "with answers of fewer than two tokens"
    if not any(tokens.pairs for tokens in short):
        return [], lost, "longer than the maximum length" if config.too_long == "drop" else "with no answer within the maximum length"
    return [], lost, f"with fewer than {config.min_supervised} supervised tokens"


def _shorten(tokens: Tokens, config: DataConfig) -> Tokens:
    if len(tokens) <= config.max_length:
        return tokens
    if config.too_long == "token":
        return tokens.cut(config.max_length)
    ends = [b for _, b in tokens.spans if b <= config.max_length] if config.too_long == "turn" else []
    return tokens.cut(ends[-1] if ends else 0)


def tokenize(found: Sequence[Conversation | Text | Tokens], template: ChatTemplate, config: DataConfig) -> list[list[Tokens] | TemplateError]:
    """The samples of each conversation, or why there are none. Texts of all of them are tokenized in one call."""
    answers: list[list[Tokens] | TemplateError] = [[] for _ in found]
    waiting: dict[tuple[int, ...], list[Turn]] = {}
    for n, item in enumerate(found):
        try:
            if isinstance(item, Tokens):
                answers[n] = [item]
                continue
            groups = of_text(item.text, preformatted(item.text, template, config)) if isinstance(item, Text) else groups_of(item, template, config)
            waiting |= {(n, place): group for place, group in enumerate(groups)}
        except TemplateError as error:
            answers[n] = error
    done: dict[tuple[int, ...], Tokens] = {}
    while waiting:
        texts = {key: _Text(group) for key, group in waiting.items()}
        table = template.table([part for text in texts.values() for part in text.cut(template)])
        waiting = {}
        for key, text in texts.items():
            try:
                tokens = text.resolve(table, template)
            except TemplateError as error:
                answers[key[0]] = error
                continue
            if isinstance(tokens, Tokens):
                done[key] = tokens
            else:
                waiting |= {(*key, place): group for place, group in enumerate(tokens)}
    for key in sorted(done):
        samples = answers[key[0]]
        if not isinstance(samples, TemplateError):
            samples.append(done[key])
    return answers


class _Text:
    """One text with the turns that it holds, and how its characters become tokens."""

    def __init__(self, turns: list[Turn]) -> None:
        self.turns = turns
        self.text = turns[-1].whole
        self.starts: list[int] = []

    def cut(self, template: ChatTemplate) -> list[str]:
        """Everything that must be tokenized to know its ids and where its turns begin and end."""
        pieces = template.pieces(self.text)
        self.starts = [a for a, _ in pieces]
        tails = (self._tail(c) for turn in self.turns for c in (len(turn.prompt), *(edge for span in turn.spans for edge in span)))
        return [self.text[a:b] for a, b in pieces] + [tail for tail in tails if tail]

    def _tail(self, place: int) -> str:
        """From the last cut before a character up to it."""
        return "" if place == len(self.text) else self.text[self.starts[bisect_right(self.starts, place) - 1] : place]

    def resolve(self, table: dict[str, np.ndarray], template: ChatTemplate) -> Tokens | list[list[Turn]]:
        """The tokens; or the turns as several groups, where one text cannot hold them as a server sees them."""
        edges = [*self.starts, len(self.text)]
        parts = [table[self.text[a:b]] for a, b in pairwise(edges)]
        ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
        at = np.cumsum([0, *map(len, parts)]).tolist()

        def before(place: int) -> int | None:
            """Tokens before a character, if those are the ids of the text before it; else None."""
            if place == len(self.text):
                return len(ids)
            piece = bisect_right(self.starts, place) - 1
            expected = table[tail] if (tail := self._tail(place)) else ids[:0]
            stop = at[piece] + len(expected)
            return stop if np.array_equal(ids[at[piece] : stop], expected) else None

        def near(place: int, end: bool) -> int:
            """Tokens before a character that stands within one: whole ones for the end of a span, all that begin before it for its start."""
            known = before(place)
            if known is not None:
                return known
            piece = bisect_right(self.starts, place) - 1
            return at[piece] + template.tokens_before(self.text[self.starts[piece] : edges[piece + 1]], place - self.starts[piece], end)

        spans: list[tuple[int, int]] = []
        for n, turn in enumerate(self.turns):
            if turn.given:  # its first letters may share a token with the header's blank
                spans += [(near(a, end=True), near(b, end=True)) for a, b in turn.spans]
                continue
            start, last = before(len(turn.prompt)), n == len(self.turns) - 1
            if turn.ids is not None:
                stop = (start or 0) + len(turn.ids)
                if last:
                    ids = np.concatenate([ids, np.array(turn.ids, np.int32)])
                elif start is None or tuple(ids[start:stop].tolist()) != turn.ids:
                    return [self.turns[: n + 1], self.turns[n + 1 :]]
                spans.append((start or 0, stop))
            elif start is None:
                alone = Turn(turn.prompt, turn.prompt, ids=tuple(template.encode(turn.whole[len(turn.prompt) :]).tolist()))
                return [group for group in ([*self.turns[:n], alone], self.turns[n + 1 :]) if group]
            elif not last and before(len(turn.whole)) is None:
                return [self.turns[: n + 1], self.turns[n + 1 :]]
            else:
                spans += [(near(a, end=False), near(b, end=True)) for a, b in turn.spans]
        return Tokens(ids, tuple((a, b) for a, b in spans if a < b))
