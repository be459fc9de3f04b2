"""Chains of training-time test: which drafts a batch of documents has something to teach.

A chain starts at an anchor and predicts the tokens from anchor + 2 on; it matters only while its predictions are supervised (docs/design/alignment.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Chains:
    """Chains of a batch, sorted by anchor: packed index of the anchor, how many steps have a supervised prediction, and the weight."""

    anchor_C: Int[Tensor, " C"]
    alive_C: Int[Tensor, " C"]
    weight_C: Float[Tensor, " C"]

    @staticmethod
    def of(loss_mask_N: Bool[Tensor, " N"], document_N: Int[Tensor, " N"]) -> Chains:
        """All chains with at least one supervised prediction, each of weight 1."""
        run_N = run_lengths(loss_mask_N, document_N)
        given_N = torch.cat((run_N[1:] * (document_N[1:] == document_N[:-1]), run_N.new_zeros(1)))
        anchor_C = (given_N >= 2).nonzero()[:, 0]
        return Chains(anchor_C, given_N[anchor_C] - 1, torch.ones(len(anchor_C), device=anchor_C.device))

    def draw(self, document_N: Int[Tensor, " N"], count: int, seed: int) -> Chains:
        """At most `count` chains of each document, all equally likely, with weight (there are / drawn): sums keep their expectation."""
        document_C = document_N[self.anchor_C]
        generator = torch.Generator().manual_seed(seed)
        key_C = torch.rand(len(self), generator=generator, dtype=torch.float64).to(document_C.device)
        order = torch.argsort(document_C + key_C)
        total_G = torch.bincount(document_C)
        rank_C = torch.arange(len(self), device=document_C.device) - (total_G.cumsum(0) - total_G)[document_C]
        chosen = order[rank_C < count].sort().values
        weight_G = total_G / total_G.clamp(max=count)
        return Chains(self.anchor_C[chosen], self.alive_C[chosen], weight_G[document_C[chosen]].float())

    def keep(self, rows: Tensor) -> Chains:
        """These chains."""
        return Chains(self.anchor_C[rows], self.alive_C[rows], self.weight_C[rows])

    def __len__(self) -> int:
        return len(self.anchor_C)


def run_lengths(mask_N: Bool[Tensor, " N"], document_N: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """How many tokens from here on, within the document, the assistant wrote without a break."""
    n = len(mask_N)
    index_N = torch.arange(n, device=mask_N.device)
    ends_N = torch.ones(n, dtype=torch.bool, device=mask_N.device)
    ends_N[:-1] = document_N[1:] != document_N[:-1]
    stop_N = torch.where(~mask_N, index_N, torch.where(ends_N, index_N + 1, n + 1))
    stop_N = stop_N.flip(0).cummin(0).values.flip(0)
    return (stop_N - index_N).clamp(min=0) * mask_N


def visited(anchor_C: Tensor, accepted_C: Tensor) -> Tensor:
    """Which chains decoding would start: after a step it goes on behind the accepted tokens and the bonus token."""
    visited, free = torch.zeros(len(anchor_C)), -1
    for i, (anchor, accepted) in enumerate(zip(_integers(anchor_C), _integers(accepted_C), strict=True)):
        if anchor >= free:
            visited[i] = 1
            free = anchor + accepted + 1
    return visited.to(anchor_C.device)


def _integers(values: Tensor) -> Sequence[int]:
    return values.tolist()
