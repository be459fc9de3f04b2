"""Verification of drafted tokens, as pure functions: the output is distributed exactly as the target's own.

Greedy: keep drafted tokens while they are the target's arg-max. Sampling, a chain of drawn tokens: Leviathan et al., arXiv 2211.17192, algorithm 1.
Sampling, tokens that were chosen and not drawn, as a tree's are: draw the target's own token at every place, and keep drafted tokens while they are that one.
Every output is then the target's own draw. It is the recursive rejection of SpecInfer (arXiv 2305.09781, algorithm 2) and of EAGLE-2's code for a draft
without chance: a candidate x is accepted with probability p(x), else removed from p, which is renormalised, and the next one is tried.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def verify_choice(
    choice_BQ: Int[Tensor, "B Q"], drafted_BW: Int[Tensor, "B W"], parent_BW: Int[Tensor, "B W"] | None, lineage_BQQ: Bool[Tensor, "B Q Q"]
) -> tuple[Bool[Tensor, "B Q"], Int[Tensor, " B"]]:
    """`choice_BQ` (Q = W + 1): the target's own token after the given one and after each drafted one, its arg-max or drawn from its distribution.

    A drafted token is kept when it and all before it on its branch are what the target chose there; with one branch these are the first ones. Returns
    what is kept, the given token included, and the target's own token that follows. `parent_BW` and `lineage_BQQ` are those of the `Proposal`.
    """
    before_BW = choice_BQ[:, :-1] if parent_BW is None else choice_BQ.gather(1, parent_BW + 1)
    wrong_BQ = torch.nn.functional.pad(before_BW != drafted_BW, (1, 0))
    kept_BQ = ~(lineage_BQQ & wrong_BQ[:, None]).any(dim=2)
    place_Q = torch.arange(choice_BQ.shape[1], device=choice_BQ.device)
    last_B = (place_Q * kept_BQ).max(dim=1).values
    return kept_BQ, choice_BQ.gather(1, last_B[:, None])[:, 0]


def verify_sampled(
    target_BQV: Float[Tensor, "B Q V"],
    draft_BWV: Float[Tensor, "B W V"],
    drafted_BW: Int[Tensor, "B W"],
    uniform_BW: Float[Tensor, "B W"],
    generator: torch.Generator | None = None,
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Accept x with probability min(1, p(x) / q(x)); at the first rejection draw from max(p - q, 0), renormalised.

    `target_BQV` and `draft_BWV` are probabilities at the temperature of decoding; `uniform_BW` are uniform numbers in [0, 1).
    """
    width = drafted_BW.shape[1]
    chance_BW = _of(target_BQV[:, :width], drafted_BW) / _of(draft_BWV, drafted_BW).clamp(min=1e-30)
    accepted_B = (uniform_BW < chance_BW).cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(drafted_BW), device=drafted_BW.device)
    after_BV = target_BQV[rows, accepted_B]
    padded_BQV = torch.cat((draft_BWV, torch.zeros_like(target_BQV[:, :1])), dim=1)
    rest_BV = (after_BV - padded_BQV[rows, accepted_B]).clamp(min=0)
    rest_BV = torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, after_BV)
    return accepted_B, torch.multinomial(rest_BV, 1, generator=generator)[:, 0]


def _of(probs_BWV: Tensor, tokens_BW: Tensor) -> Tensor:
    return probs_BWV.gather(2, tokens_BW[..., None])[..., 0]
