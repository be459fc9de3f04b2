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
BLOCK_ROWS = 64
"""Rows judged at a time."""
SPAN = 128
"""Entries of a row whose largest is found first."""


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
        grad_head: Tensor | None = None
        kl_M, overlap_M = (hidden_MH.new_zeros(len(hidden_MH), dtype=exact) for _ in range(2))
        argmax_M = torch.zeros_like(teacher_row_M)
        for rows in order.split(CHUNK_ROWS):
            unique, back = torch.unique_consecutive(teacher_row_M[rows], return_inverse=True)
            chunk, weight = hidden_MH[rows], weight_M[rows, None].to(hidden_MH.dtype)
            logits = (chunk @ head.T).to(exact)
            kl_M[rows], argmax_M[rows], overlap_M[rows] = _judge(logits, teacher(unique).to(exact), back)
            slope = logits.to(hidden_MH.dtype)  # `_judge` left the derivative in its place; weights are applied to the short rows
            if grad_hidden is not None:
                grad_hidden[rows] = (slope @ head).mul_(weight)
            if need_head:
                grad_head = _plus_product(grad_head, slope.T, chunk * weight, head_DH.dtype)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(kl_M, argmax_M, overlap_M)
        return (kl_M * weight_M.to(exact)).sum(), kl_M, argmax_M, overlap_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        grad_loss = grads[0]
        plain = grad_loss.device.type == "cpu" and float(grad_loss) == 1  # as in training: nothing to scale
        scaled = [g if g is None or plain else g * grad_loss.to(g.dtype) for g in (grad_hidden, grad_head)]
        return scaled[0], scaled[1], None, None, None


def _judge(logits_MD: Tensor, teacher_UD: Tensor, back_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Divergence, arg-max and overlap of each row; `logits_MD` becomes its derivative, draft - teacher, and `teacher_UD` the teacher's distribution.

    In blocks of rows that stay in a core's cache, each pass in place: memory traffic is what this costs. KL = sum p log p - sum p z + log-sum-exp z.
    """
    norm_U = torch.logsumexp(teacher_UD, dim=-1)
    p_UD = torch.softmax(teacher_UD, dim=-1)
    certainty_U = torch.linalg.vecdot(p_UD, teacher_UD) - norm_U
    kl, argmax, overlap = [], [], []
    for z_RD, back in zip(logits_MD.split(BLOCK_ROWS), back_M.split(BLOCK_ROWS), strict=True):
        p_RD = p_UD.index_select(0, back)
        best = _argmax(z_RD)[:, None]
        top, cross = z_RD.gather(1, best), torch.linalg.vecdot(p_RD, z_RD)
        q_RD = torch.softmax(z_RD, dim=-1, out=z_RD)
        norm = (top - q_RD.gather(1, best).log())[:, 0]
        kl.append(certainty_U[back] - cross + norm)
        argmax.append(best[:, 0])
        overlap.append(1 - torch.linalg.vector_norm(q_RD.sub_(p_RD), ord=1, dim=-1) / 2)
    return torch.cat(kl), torch.cat(argmax), torch.cat(overlap)


def _argmax(z_RD: Tensor) -> Tensor:
    """The first largest entry of each row. On a CPU `argmax` runs one number at a time and `amax` does not: find the span, then the place in it."""
    if z_RD.device.type != "cpu" or z_RD.shape[1] % SPAN:
        return z_RD.argmax(-1)
    spans_RSs = z_RD.unflatten(1, (-1, SPAN))
    span_R = spans_RSs.amax(-1).argmax(-1)
    return span_R * SPAN + spans_RSs[torch.arange(len(z_RD)), span_R].argmax(-1)


def _plus_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """total + left @ right, in place and without a temporary where that is possible."""
    if total is None:
        return (left @ right).to(dtype)
    return total.addmm_(left, right) if left.dtype == dtype else total.add_(left @ right)
