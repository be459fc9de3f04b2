"""Rotary positions with the target's own frequencies, scaled variants included (Su et al., arXiv 2104.09864).

The inverse frequencies come from transformers' table of rope types, so that a draft never falls back to another theta than its target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class Rope(nn.Module):
    """Turns queries and keys; holds no trained state and nothing that is saved."""

    inverse: Tensor

    def __init__(self, parameters: Mapping[str, Any], head_dim: int, max_positions: int) -> None:
        super().__init__()
        config = LlamaConfig(
            head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1,
            max_position_embeddings=max_positions, rope_parameters=dict(parameters),
        )  # fmt: skip
        table = LlamaRotaryEmbedding(config)
        self.scale = float(table.attention_scaling)
        self.register_buffer("inverse", table.inv_freq.detach().clone(), persistent=False)

    def forward(self, x: Float[Tensor, "*n heads d"], position: Int[Tensor, "*n"]) -> Float[Tensor, "*n heads d"]:
        """Rotate `x` at integer positions; halves are paired as in Llama."""
        exact = torch.promote_types(x.dtype, torch.float32)
        angle = position[..., None].to(exact) * self.inverse.to(exact)
        cos, sin = (f[..., None, :] * self.scale for f in (angle.cos(), angle.sin()))
        first, second = x.to(exact).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
