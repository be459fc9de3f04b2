"""Verification of drafted tokens, as pure functions: the output is distributed exactly as the target's own.

Greedy: keep drafted tokens while they are the target's arg-max. Sampling: Leviathan et al., arXiv 2211.17192, algorithm 1.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def verify_greedy(choice_BQ: Int[Tensor, "B Q"], drafted_BW: Int[Tensor, "B W"]) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """`choice_BQ` (Q = W + 1): the target's arg-max after the given token and after each drafted one.

    Returns how many drafted tokens are accepted, and the target's own token that follows them.
    """
    accepted_B = (choice_BQ[:, :-1] == drafted_BW).cumprod(dim=1).sum(dim=1)
    return accepted_B, choice_BQ.gather(1, accepted_B[:, None])[:, 0]


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
