"""A linear map that a step uses many times and differentiates once.

Training-time test applies the same matrices to the few rows of every step. Autograd would form a weight gradient per use, each a thin product as
expensive to write as a full one, and add them up; here the rows of all uses are laid end to end and multiplied once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Linear(nn.Linear):
    """Without bias; inside `one_weight_gradient` all uses share one gradient product."""

    _uses: _Uses | None = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, input: Float[Tensor, "*n I"]) -> Float[Tensor, "*n O"]:
        if self._uses is None:
            return super().forward(input)
        return _Use.apply(input.to(self._uses.weight.dtype), self._uses.token, self._uses)  # type: ignore[no-any-return]


@contextmanager
def one_weight_gradient(module: nn.Module) -> Iterator[None]:
    """Every `Linear` of the module collects its uses in this forward pass; their backward pass forms each weight's gradient once."""
    layers = [m for m in module.modules() if isinstance(m, Linear) and m.weight.requires_grad] if torch.is_grad_enabled() else []
    for layer in layers:
        layer._uses = _Uses.of(layer.weight)
    try:
        yield
    finally:
        for layer in layers:
            layer._uses = None


@dataclass(eq=False)
class _Uses:
    """`weight`: in the dtype of the products; `token`: what ties all uses to the parameter in the graph; `rows`: inputs and output gradients so far."""

    weight: Tensor
    token: Tensor
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @staticmethod
    def of(weight: Tensor) -> _Uses:
        device = weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        uses = _Uses(weight.detach().to(dtype), torch.empty(0))
        uses.token = _Collect.apply(weight, uses)  # type: ignore[assignment]
        return uses


class _Collect(torch.autograd.Function):
    """Its backward runs after that of every use, because all of them hold its token."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, uses: _Uses) -> Tensor:
        ctx.uses, ctx.dtype = uses, weight.dtype
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        inputs, outputs = (torch.cat(rows) for rows in zip(*ctx.uses.rows, strict=True))
        ctx.uses.rows.clear()
        return (outputs.T @ inputs).to(ctx.dtype), None


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, token: Tensor, uses: _Uses) -> Tensor:
        ctx.save_for_backward(input)
        ctx.uses = uses
        return input @ uses.weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (input,), grad = ctx.saved_tensors, grads[0]
        ctx.uses.rows.append((input.flatten(0, -2), grad.flatten(0, -2)))
        return grad @ ctx.uses.weight if ctx.needs_input_grad[0] else None, ctx.uses.token.new_zeros(()), None
