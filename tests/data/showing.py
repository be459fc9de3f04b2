"""Samples as text for the eye: supervised runs stand in ⟦ ⟧, whitespace that would be overlooked is drawn."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from draftsmith.core.types import Sample
from draftsmith.data.template import ChatTemplate


def shown(samples: Sequence[Sample], template: ChatTemplate) -> str:
    """Each sample with its counts; ↵ ends a line that ends in the text, · is a space at an edge, → a tab."""
    parts: list[str] = []
    for number, sample in enumerate(samples, 1):
        head = f"sample {number} of {len(samples)}: {len(sample)} tokens, {int(sample.loss_mask.sum())} supervised"
        text = "".join(f"⟦{drawn(run.text)}⟧" if run.own else drawn(run.text) for run in runs(sample, template))
        parts.append(f"{head}\n{text}\n")
    return "\n".join(parts)


class Run(NamedTuple):
    """Neighbouring tokens of the same mask: where they start, and their text."""

    own: bool
    start: int
    text: str


def runs(sample: Sample, template: ChatTemplate) -> list[Run]:
    """All of a sample. Decoded from the start each time: a SentencePiece model decodes a run by itself to other spaces."""
    found: list[Run] = []
    ids, end, before = sample.input_ids.tolist(), 0, ""
    for own, group in itertools.groupby(sample.loss_mask.tolist()):
        start, end = end, end + len(list(group))
        text = str(template.tokenizer.decode(ids[:end]))
        assert text.startswith(before), "a mask that changes inside a character"
        found.append(Run(own, start, text[len(before) :]))
        before = text
    return found


def drawn(text: str) -> str:
    """Spaces beside another space, a line's edge or the run's edge as ·, tabs as →, line ends as ↵ and a line break."""
    text = re.sub(r"^ +| +$| {2,}|(?<=\n) +| +(?=\n)", lambda m: "·" * len(m[0]), text)
    return text.replace("\t", "→").replace("\r", "␍").replace("\n", "↵\n")
