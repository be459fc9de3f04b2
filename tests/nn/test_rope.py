"""Rotary positions against those of transformers' Llama."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftsmith.nn.rope import Rope

DIM, HEADS = 16, 3
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
PARAMETERS = {
    "default": DEFAULT,
    "other theta": DEFAULT | {"rope_theta": 100000.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512},
}  # fmt: skip


def by_transformers(parameters: dict, x: Tensor, position: Tensor) -> Tensor:
    config = LlamaConfig(hidden_size=HEADS * DIM, num_attention_heads=HEADS, head_dim=DIM, max_position_embeddings=2048, rope_parameters=dict(parameters))
    cos, sin = LlamaRotaryEmbedding(config)(x, position[None])
    turned, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    return turned[0].transpose(0, 1)


@pytest.mark.parametrize("kind", list(PARAMETERS))
def test_rotation_equals_that_of_transformers(kind: str) -> None:
    x = torch.randn(40, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    position = torch.cat((torch.arange(38), torch.tensor([700, 2047])))
    got = Rope(PARAMETERS[kind], DIM, 2048)(x, position)
    torch.testing.assert_close(got, by_transformers(PARAMETERS[kind], x, position), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [k for k in PARAMETERS if k != "default"])
def test_the_parameters_make_a_difference(kind: str) -> None:
    """Guards the comparison above: every kind turns otherwise than the default does."""
    x, position = torch.ones(4, HEADS, DIM), torch.tensor([1, 5, 80, 1000])
    assert float((Rope(PARAMETERS[kind], DIM, 2048)(x, position) - Rope(DEFAULT, DIM, 2048)(x, position)).abs().max()) > 0.05


def test_position_zero_turns_nothing_and_batches_turn_row_by_row() -> None:
    rope, x = Rope(DEFAULT, DIM, 2048), torch.randn(2, 5, HEADS, DIM)
    assert torch.equal(rope(x, torch.zeros(2, 5, dtype=torch.long)), x)
    position = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    together = rope(x, position)
    assert all(torch.equal(together[b, q], rope(x[b, q][None], position[b, q][None])[0]) for b in range(2) for q in range(5))


def test_products_depend_on_the_distance_alone() -> None:
    rope, g = Rope(PARAMETERS["llama3"], DIM, 2048).double(), torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 1, DIM, generator=g, dtype=torch.float64) for _ in range(2))

    def product(i: int, j: int) -> float:
        return float((rope(query, torch.tensor([i])) * rope(key, torch.tensor([j]))).sum())

    assert product(7, 3) == pytest.approx(product(1004, 1000), rel=1e-9)
    assert product(7, 3) != pytest.approx(product(7, 4), rel=1e-3)


def test_bfloat16_is_turned_in_float32_and_rounded_once() -> None:
    rope, x = Rope(DEFAULT, DIM, 2048), torch.randn(6, HEADS, DIM, generator=torch.Generator().manual_seed(2)).bfloat16()
    position = torch.tensor([0, 1, 10, 257, 1001, 2047])  # 257 and 1001 are no bfloat16 numbers
    got = rope(x, position)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rope(x.float(), position).bfloat16())


def test_nothing_of_it_is_saved_or_trained() -> None:
    rope = Rope(DEFAULT, DIM, 2048)
    assert not rope.state_dict()
    assert not list(rope.parameters())
