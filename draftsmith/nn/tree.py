"""Growing a tree of drafted tokens: EAGLE-2 (Li et al., arXiv 2406.16858, section 4), expansion and reranking.

A token's score is the log-probability of its whole branch under the draft. tests/nn/test_tree.py holds the same one token at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass
class Growth:
    """The tokens found so far, level by level, `top_k` below each of the M tokens that were followed; M is 1 at first: the given token."""

    top_k: int
    tokens: list[Tensor] = field(default_factory=list)
    parents: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    _followed_BM: Tensor | None = None
    _score_BM: Tensor | None = None

    def extend(self, logits_BMD: Float[Tensor, "B M D"]) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"]]:
        """Add the likeliest tokens below the M followed ones. Returns the N tokens to follow next, and which of the M each stands below."""
        rows, parents, vocabulary = logits_BMD.shape
        branches = min(self.top_k, vocabulary)
        best = torch.log_softmax(logits_BMD.float(), dim=-1).topk(branches, dim=-1)
        above_BM = logits_BMD.new_full((rows, parents), -1, dtype=torch.long) if self._followed_BM is None else self._followed_BM
        score_BMb = best.values if self._score_BM is None else best.values + self._score_BM[..., None]
        score_BC, token_BC = score_BMb.flatten(1), best.indices.flatten(1)
        chosen_BN = _best(score_BC, self.top_k)
        self._followed_BM, self._score_BM = chosen_BN + self._found, score_BC.gather(1, chosen_BN)
        self.tokens.append(token_BC)
        self.parents.append(above_BM.repeat_interleave(branches, dim=1))
        self.scores.append(score_BC)
        return token_BC.gather(1, chosen_BN), chosen_BN // branches

    @property
    def _found(self) -> int:
        return sum(level.shape[1] for level in self.tokens)

    def best(self, nodes: int) -> tuple[Int[Tensor, "B W"], Int[Tensor, "B W"]]:
        """The `nodes` tokens of highest score, the best first, and the place of each one's parent among them (-1: the given token).

        A child never scores above its parent, and equals keep their order, so that parents are chosen with their children, and come before them.
        """
        tokens_BC, parents_BC, scores_BC = (torch.cat(levels, dim=1) for levels in (self.tokens, self.parents, self.scores))
        chosen_BW = _best(scores_BC, nodes)
        place_BC = torch.full_like(tokens_BC, -1).scatter(1, chosen_BW, torch.arange(chosen_BW.shape[1], device=chosen_BW.device).expand_as(chosen_BW))
        parents_BW = parents_BC.gather(1, chosen_BW)
        return tokens_BC.gather(1, chosen_BW), torch.where(parents_BW < 0, -1, place_BC.gather(1, parents_BW.clamp(min=0)))


def _best(scores_BC: Tensor, count: int) -> Tensor:
    return scores_BC.sort(dim=1, descending=True, stable=True).indices[:, :count]
