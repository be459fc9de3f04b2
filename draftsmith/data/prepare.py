"""A chunk of rows to samples: read, choose, render, tokenize, fit. Nothing here depends on other chunks, so chunks run in any order and process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.data import sources
from draftsmith.data.config import DataConfig
from draftsmith.data.conversations import Conversation, Counts, RowError
from draftsmith.data.samples import Text, Tokens, fit, kept_names, tokenize
from draftsmith.data.shapes import SHAPES, Item, detect
from draftsmith.data.sources import Chunk, Source
from draftsmith.data.template import ChatTemplate, TemplateError

NOT_DRAWN, HELD_OUT, FOR_TRAINING, ASKED_BY_BOTH, REPEATED = (
    "not drawn (its source's weight)", "in the held-out share", "in the training share", "asked in the held-out set too", "equal to an earlier one",
)  # fmt: skip
CHOSEN = frozenset({NOT_DRAWN, HELD_OUT, FOR_TRAINING, ASKED_BY_BOTH, REPEATED})
"""Reasons that settings ask for: no mistakes, so `--strict` accepts them."""
BATCH = 200
"""Conversations tokenized in one call."""


@dataclass
class Figures:
    """What became of rows. `shapes`: rows by source and detected shape."""

    counts: Counts = field(default_factory=Counts)
    shapes: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: Figures) -> Figures:
        shapes = {key: self.shapes.get(key, 0) + other.shapes.get(key, 0) for key in (self.shapes | other.shapes)}
        return Figures(self.counts + other.counts, shapes)

    def to_row(self) -> dict[str, Any]:
        """As JSON."""
        return {"read": self.counts.read, "kept": self.counts.kept, "reasons": self.counts.reasons, "shapes": self.shapes}

    @staticmethod
    def of_row(row: Mapping[str, Any]) -> Figures:
        """What `to_row` wrote."""
        reasons = {reason: (number, first) for reason, (number, first) in row["reasons"].items()}
        return Figures(Counts(row["read"], row["kept"], reasons), dict(row["shapes"]))


@dataclass(frozen=True)
class Entry:
    """A conversation that was chosen: its id, the row that it came from, and hashes of what is asked and of all of it."""

    name: str
    where: str
    item: Item
    asked: bytes
    content: bytes

    @property
    def kind(self) -> str:
        """The conversation's kind; `all` for rows that cannot have one."""
        return self.item.kind if isinstance(self.item, Conversation) else "all"


@dataclass(frozen=True)
class Done:
    """A conversation with its samples; `cut` tokens of them were cut off."""

    entry: Entry
    samples: tuple[tuple[str, Tokens], ...]
    cut: int


@dataclass(frozen=True)
class Job:
    """Everything that decides which samples come out of rows; without a template, only which conversations. `excluded`: hashes of what the held-out
    conversations ask."""

    sources: tuple[Source, ...]
    config: DataConfig
    template: ChatTemplate | None
    split: str = "train"
    excluded: frozenset[bytes] = frozenset()

    def entries(self, chunk: Chunk, figures: Figures) -> Iterator[Entry]:
        """The conversations of a chunk that are chosen; all others are counted."""
        source = self.sources[chunk.source]
        for number, raw in chunk.rows:
            where = f"{source.name}:{number}"
            figures.counts.read += 1
            try:
                entry = self._entry(source, number, raw, figures)
            except RowError as error:
                figures.counts.drop(error.reason, f"{where}: {error}")
                continue
            left_out = self._left_out(entry, source.config.weight - chunk.repeat)
            if left_out is not None:
                figures.counts.drop(left_out, where)
                continue
            yield entry if not chunk.repeat else Entry(f"{entry.name}#{chunk.repeat + 1}", where, entry.item, entry.asked, entry.content)

    def _entry(self, source: Source, number: int, raw: sources.Raw, figures: Figures) -> Entry:
        try:
            row = json.loads(raw) if isinstance(raw, bytes) else raw
        except ValueError as error:
            raise RowError("that are no valid JSON", f"not valid JSON in UTF-8 ({error}); expected one conversation a line") from error
        except RecursionError as error:
            raise RowError("that are nested too deep", "nested too deep to be read") from error
        default = f"line-{number}" if len(self.sources) == 1 else f"{source.name}:{number}"
        if source.convert is not None:
            label, convert = f"{source.name}: the set's own columns", source.convert
        else:
            shape = source.config.shape or detect(row)
            label, convert = f"{source.name}: {shape} ({SHAPES[shape].describes})", SHAPES[shape].convert
        figures.shapes[label] = figures.shapes.get(label, 0) + 1
        if not isinstance(row, Mapping):
            raise RowError("that are no objects", f"expected an object, got {str(row)[:80]}")
        name, item = convert(row, default)
        return Entry(name, f"{source.name}:{number}", item, *hashes(item))

    def _left_out(self, entry: Entry, weight: float) -> str | None:
        share = self.config.held_out_share
        if weight < 1 and place(entry.content, "weight") >= weight:
            return NOT_DRAWN
        if share is not None and (place(entry.asked, "held out") < share) != (self.split == "held-out"):
            return HELD_OUT if self.split == "train" else FOR_TRAINING
        return ASKED_BY_BOTH if entry.asked in self.excluded else None

    def run(self, chunk: Chunk) -> tuple[list[Done], Figures]:
        """The samples of a chunk in order, and what became of its rows."""
        assert self.template is not None
        figures = Figures()
        entries = list(self.entries(chunk, figures))
        done: list[Done] = []
        for start in range(0, len(entries), BATCH):
            batch = entries[start : start + BATCH]
            for entry, found in zip(batch, tokenize([e.item for e in batch], self.template, self.config), strict=True):
                if isinstance(found, TemplateError):
                    figures.counts.drop(found.reason, entry.where)
                    continue
                kept, cut, reason = fit(found, self.config)
                if not kept:
                    figures.counts.drop(reason, entry.where)
                    continue
                figures.counts.kept += 1
                done.append(Done(entry, tuple(kept_names(entry.name, kept, found)), cut))
        return done, figures


def open_job(config: DataConfig, template: ChatTemplate, split: str, excluded: frozenset[bytes] = frozenset()) -> Job:
    """The job for one split of the settings. Raises ValueError for a source that is not there."""
    own = config.train if split == "train" or config.held_out_share is not None else config.held_out
    bundled = "train" if config.held_out_share is not None else split
    return Job(tuple(sources.open_source(s, bundled) for s in own), config, template, split, excluded)


def hashes(item: Item) -> tuple[bytes, bytes]:
    """Stable hashes of what is asked (everything but the answers) and of the whole."""
    if isinstance(item, Conversation):
        asked = [[m.role, m.content] for m in item.messages if m.role != "assistant"]
        whole = [[m.role, m.content, m.reasoning, m.tool_calls] for m in item.messages]
        return _hash(json.dumps([asked, item.tools])), _hash(json.dumps([whole, item.tools]))
    content = _hash(item.text) if isinstance(item, Text) else hashlib.blake2b(item.ids.tobytes(), digest_size=16).digest()
    return content, content


def place(content: bytes, purpose: str) -> float:
    """Where a hash falls in [0, 1); independent between purposes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, person=purpose.encode()).digest()) / 2**64


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
