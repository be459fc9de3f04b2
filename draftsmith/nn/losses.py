"""Fused linear + divergence: the loss of a draft's head against its teacher, with exact gradients, in chunks.

Logits never exist for more than a chunk of rows. Gradients of the loss are formed in the forward pass, chunk by chunk, while the chunk's
probabilities are at hand; the backward pass only scales them. Teacher probabilities are computed once a token, however many
steps of training-time test look at it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK_ROWS = 512
"""Rows of logits that exist at a time."""


@dataclass(frozen=True)
class HeadLoss:
    """`loss` is the weighted sum over rows and differentiable; the rest are facts of each row."""

    loss: Float[Tensor, ""]
    kl_M: Float[Tensor, " M"]
    argmax_M: Int[Tensor, " M"]
    """The draft's most likely draft id."""
    overlap_M: Float[Tensor, " M"]
    """Sum over the draft vocabulary of min(teacher, draft): the chance that a sampled draft token is accepted."""


def linear_kl(
    hidden_MH: Float[Tensor, "M H"],
    head_DH: Float[Tensor, "D H"],
    teacher: Callable[[Tensor], Tensor],
    teacher_row_M: Int[Tensor, " M"],
    weight_M: Float[Tensor, " M"],
) -> HeadLoss:
    """Forward KL(teacher || draft) of `softmax(hidden @ head.T)`, weighted and summed.

    `teacher(rows)` returns the teacher's logits `[len(rows), D]` over the draft vocabulary for these (unique) rows; `teacher_row_M` says which
    row judges each prediction. Divergences are computed in float32 (float64 for float64 input).
    """
    loss, kl, argmax, overlap = _LinearKL.apply(hidden_MH, head_DH, teacher, teacher_row_M, weight_M)  # type: ignore[misc]
    return HeadLoss(loss, kl, argmax, overlap)


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_MH: Tensor, head_DH: Tensor, teacher: Callable[[Tensor], Tensor], teacher_row_M: Tensor, weight_M: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exact = torch.promote_types(hidden_MH.dtype, torch.float32)
        head = head_DH.to(hidden_MH.dtype)
        order = torch.argsort(teacher_row_M, stable=True)
        need_hidden, need_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden_MH) if need_hidden else None
        grad_head = torch.zeros_like(head_DH) if need_head else None
        kl_M, overlap_M = (hidden_MH.new_zeros(len(hidden_MH), dtype=exact) for _ in range(2))
        argmax_M = torch.zeros_like(teacher_row_M)
        for rows in order.split(CHUNK_ROWS):
            unique, back = torch.unique_consecutive(teacher_row_M[rows], return_inverse=True)
            log_p = torch.log_softmax(teacher(unique).to(exact), dim=-1)[back]
            chunk = hidden_MH[rows]
            log_q = torch.log_softmax((chunk @ head.T).to(exact), dim=-1)
            p, q = log_p.exp(), log_q.exp()
            kl_M[rows] = (p * (log_p - log_q)).sum(-1)
            argmax_M[rows] = log_q.argmax(-1)
            overlap_M[rows] = torch.minimum(p, q).sum(-1)
            if need_hidden or need_head:
                grad_logits = (q.sub_(p) * weight_M[rows, None].to(exact)).to(hidden_MH.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = grad_logits @ head
                if grad_head is not None:
                    grad_head += (grad_logits.T @ chunk).to(grad_head.dtype)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(kl_M, argmax_M, overlap_M)
        return (kl_M * weight_M.to(exact)).sum(), kl_M, argmax_M, overlap_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        grad_loss = grads[0]
        scaled = [None if g is None else g * grad_loss.to(g.dtype) for g in (grad_hidden, grad_head)]
        return scaled[0], scaled[1], None, None, None
