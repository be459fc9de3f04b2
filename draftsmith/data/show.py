"""Prepared samples for people: the counts as a table, and single samples with the tokens to learn from in colour."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from rich.text import Text

from draftsmith.core.log import console, say, table
from draftsmith.data import vocab
from draftsmith.data.cache import ArrowSamples
from draftsmith.data.prepare import Figures
from draftsmith.data.template import ChatTemplate

EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Borders of the histogram of lengths, in tokens."""
SIZES = (4096, 8192, 16384, 32768, 65536)
"""Draft vocabularies whose coverage is shown."""
COLOURS = ("bold green", "bold cyan")
"""Answers in turn."""


def describe(found: ArrowSamples, figures: Figures) -> str:
    """One line: read = kept + dropped with reasons, samples, tokens, share to learn from."""
    tokens, supervised = int(found.lengths.sum()), _supervised(found)
    cut = f", {found.cut_tokens:,} tokens cut at the maximum length" if found.cut_tokens else ""
    return f"{figures.counts.describe()}; {len(found):,} samples, {tokens:,} tokens, {supervised / max(tokens, 1):.0%} supervised{cut}"


def report(title: str, found: ArrowSamples, figures: Figures, template: ChatTemplate) -> None:
    """Everything that was counted: shapes, drops, tokens, lengths, coverage of draft vocabularies."""
    counts, tokens, supervised = figures.counts, int(found.lengths.sum()), _supervised(found)
    for shape, number in figures.shapes.items():
        say(f"{title}: {number:,} rows of {shape}")
    for reason, (number, first) in counts.reasons.items():
        say(f"{title}: dropped {number:,} {reason} (first: {first})")
    rows = [
        ("conversations read", f"{counts.read:,}", ""),
        ("kept", f"{counts.kept:,}", f"{counts.kept / max(counts.read, 1):.1%}"),
        ("dropped", f"{counts.dropped:,}", f"{counts.dropped / max(counts.read, 1):.1%}"),
        ("samples", f"{len(found):,}", ""),
        ("tokens", f"{tokens:,}", ""),
        ("supervised", f"{supervised:,}", f"{supervised / max(tokens, 1):.1%}"),
        ("cut at the maximum length", f"{found.cut_tokens:,}", f"{found.cut_tokens / max(tokens + found.cut_tokens, 1):.1%} of all tokens"),
    ]
    table(title, ("", "number", "share"), rows)
    lengths = histogram(found)
    longest = max(n for _, n in lengths)
    table("tokens a sample", ("", "samples", ""), [(name, f"{n:,}", "█" * round(40 * n / longest) or "▏") for name, n in lengths])
    covered = [(label, f"{share:.2%}") for label, share in coverage(found, template)]
    table("draft vocabulary", ("most frequent ids", "answer tokens covered"), covered)


def histogram(found: ArrowSamples) -> list[tuple[str, int]]:
    """Samples by length, ranges without samples left out."""
    numbers = np.histogram(found.lengths, bins=[*EDGES, np.iinfo(np.int64).max])[0].tolist()
    names = [f"{a:,} to {b - 1:,}" for a, b in pairwise(EDGES)] + [f"{EDGES[-1]:,} or more"]
    return [(name, n) for name, n in zip(names, numbers, strict=True) if n]


def coverage(found: ArrowSamples, template: ChatTemplate) -> list[tuple[str, float]]:
    """The share of answer tokens that draft vocabularies of several sizes cover, and the size that covers all."""
    vocabulary = max(len(template.tokenizer), 1 + max((int(ids.max()) for ids in found.supervised_ids() if len(ids)), default=0))
    seen = vocab.count(found, vocabulary)
    sizes = [(f"{size:,}", vocab.choose(seen, size).coverage) for size in SIZES if size < vocabulary]
    return [*sizes, (f"{int((seen > 0).sum()):,} ids seen", 1.0)]


def show(found: ArrowSamples, template: ChatTemplate, count: int) -> None:
    """The first samples as the target sees them; what is learned from is coloured, answer by answer."""
    if not count:
        return
    say("\n[what is asked] [what is learned from, answers in turn: green, cyan]")
    for i in range(min(count, len(found))):
        sample = found.tokens(i)
        text, place = Text(), 0
        for n, (start, stop) in enumerate(sample.spans):
            text.append(_decode(template, sample.ids[place:start]), "dim")
            text.append(_decode(template, sample.ids[start:stop]), COLOURS[n % 2])
            place = stop
        text.append(_decode(template, sample.ids[place:]), "dim")
        console.rule(f"{found[i].id}: {len(sample):,} tokens, {sample.supervised:,} supervised", align="left")
        console.print(text)


def _decode(template: ChatTemplate, ids: np.ndarray) -> str:
    return str(template.tokenizer.decode(ids.tolist()))


def _supervised(found: ArrowSamples) -> int:
    return sum(map(len, found.supervised_ids()))
