"""Which samples meet in which micro-batch, and laying them end to end.

The plan is a pure function of (lengths, tokens a batch, seed, epoch): any source gives the same batches in the same order, and a
run resumes from a single number, the count of micro-batches already consumed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftsmith.core.types import FeatureBatch, Features


def plan(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of samples per micro-batch, shuffled by (seed, epoch); a batch is closed before it exceeds `batch_tokens`
    (a longer sample is a batch alone)."""
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
    return fill(lengths, batch_tokens, order)


def fill(lengths: Sequence[int], batch_tokens: int, order: Sequence[int]) -> list[list[int]]:
    """Samples in this order, cut into batches."""
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if lengths[index] > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def pack(features: Sequence[Features]) -> FeatureBatch:
    """Lay features end to end."""
    lengths = torch.tensor([len(f) for f in features])
    return FeatureBatch(
        ids=tuple(f.sample.id for f in features),
        lengths=tuple(lengths.tolist()),
        input_ids_N=torch.cat([f.sample.input_ids for f in features]).long(),
        loss_mask_N=torch.cat([f.sample.loss_mask for f in features]),
        position_N=torch.cat([torch.arange(len(f)) for f in features]),
        document_N=torch.repeat_interleave(torch.arange(len(features)), lengths),
        hidden_NF=torch.cat([f.hidden_TF for f in features]),
        last_NH=torch.cat([f.last_TH for f in features]),
        argmax_N=torch.cat([f.argmax_T for f in features]).long(),
    )
