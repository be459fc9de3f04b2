"""The draft vocabulary: the target's most frequent answer tokens, so that the draft's head is small.

`d2t` is an offset (target id = draft id + d2t[draft id]), `t2d` marks the chosen target ids: the convention of EAGLE-3 and every engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from draftsmith.core.types import Sample

TOGETHER = 1_000
"""Samples counted in one pass: each pass costs as much as the vocabulary is large."""


@dataclass(frozen=True)
class DraftVocabulary:
    """Chosen target ids, ascending, with the share of the counted answer tokens that they cover."""

    ids_D: Int[Tensor, " D"]
    target_size: int
    coverage: float

    @property
    def d2t(self) -> Int[Tensor, " D"]:
        """Offsets: target id - draft id."""
        return self.ids_D - torch.arange(len(self.ids_D))

    @property
    def t2d(self) -> Bool[Tensor, " V"]:
        """True for every target id that is in the draft vocabulary."""
        chosen = torch.zeros(self.target_size, dtype=torch.bool)
        chosen[self.ids_D] = True
        return chosen


def count(samples: Iterable[Sample], target_size: int) -> Int[Tensor, " V"]:
    """How often each target id was written by the assistant."""
    total = torch.zeros(target_size, dtype=torch.long)
    waiting: list[Tensor] = []
    for sample in samples:
        waiting.append(sample.input_ids[sample.loss_mask])
        if len(waiting) == TOGETHER:
            total += torch.bincount(torch.cat(waiting), minlength=target_size)
            waiting = []
    return total + torch.bincount(torch.cat(waiting), minlength=target_size) if waiting else total


def choose(counts_V: Int[Tensor, " V"], size: int) -> DraftVocabulary:
    """The `size` most frequent ids; equal counts go to the lower id. Raises ValueError when `size` exceeds the target's."""
    if size > len(counts_V):
        raise ValueError(f"draft vocabulary of {size:,} ids is larger than the target's {len(counts_V):,}; choose at most that many")
    order = torch.sort(counts_V, descending=True, stable=True).indices[:size]
    total = int(counts_V.sum())
    covered = int(counts_V[order].sum()) / total if total else 0.0
    return DraftVocabulary(order.sort().values, len(counts_V), covered)
