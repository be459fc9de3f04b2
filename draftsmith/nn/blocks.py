"""Norm, MLP and the projections of a Llama-like draft block."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from draftsmith.nn.linear import Linear


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467); the mean is taken in float32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*n H"]) -> Float[Tensor, "*n H"]:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight.to(x.dtype)


class MLP(nn.Module):
    """Gated MLP with SiLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def forward(self, x: Float[Tensor, "*n H"]) -> Float[Tensor, "*n H"]:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Projections(nn.Module):
    """Query, key, value and output projections; names are those of checkpoints."""

    def __init__(self, inputs: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = Linear(inputs, heads * head_dim)
        self.k_proj = Linear(inputs, kv_heads * head_dim)
        self.v_proj = Linear(inputs, kv_heads * head_dim)
        self.o_proj = Linear(heads * head_dim, hidden)

    def query(self, x: Float[Tensor, "*n I"]) -> Float[Tensor, "*n heads d"]:
        """Queries, split into heads."""
        return self.q_proj(x).unflatten(-1, (-1, self.head_dim))

    def key(self, x: Float[Tensor, "*n I"]) -> Float[Tensor, "*n kv d"]:
        """Keys, split into heads."""
        return self.k_proj(x).unflatten(-1, (-1, self.head_dim))

    def value(self, x: Float[Tensor, "*n I"]) -> Float[Tensor, "*n kv d"]:
        """Values, split into heads."""
        return self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def output(self, x: Float[Tensor, "*n heads d"]) -> Float[Tensor, "*n H"]:
        """Heads joined and projected."""
        return self.o_proj(x.flatten(-2))
