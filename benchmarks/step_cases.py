"""Shapes, batches and exact work of one EAGLE-3 training step, the same for every contender of `eagle3_step.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

STEPS = 7
"""Steps of training-time test (K)."""
LAYERS = 3
TURNS = 4
"""Answers of the one document of a batch."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and its draft, and tokens of a batch."""

    hidden: int
    vocab: int
    draft_vocab: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


SHAPES = {
    "A": Shape(576, 49152, 16384, 512, 9, 3, 64, 1536),
    "B": Shape(1024, 151936, 32000, 512, 16, 8, 128, 3072),
    "C": Shape(576, 49152, 16384, 2048, 9, 3, 64, 1536),
}
"""A and C: SmolLM2-135M; B: Qwen3-0.6B."""


@dataclass(frozen=True)
class Inputs:
    """One document: tokens, which are answers, features, final states and the target's own choices."""

    ids_N: torch.Tensor
    mask_N: torch.Tensor
    hidden_NF: torch.Tensor
    last_NH: torch.Tensor
    argmax_N: torch.Tensor


def mask(tokens: int, share: float) -> torch.Tensor:
    """`TURNS` turns of equal length, each ending in an answer that takes `share` of it."""
    place = torch.arange(tokens)
    turn = tokens // TURNS
    return place % turn >= turn - round(share * turn)


def target_tensors(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding, which is the head too, and the final norm's weight."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape.vocab, shape.hidden, generator=generator).mul_(0.05).to(dtype), torch.ones(shape.hidden, dtype=dtype)


def inputs(shape: Shape, share: float, dtype: torch.dtype) -> Inputs:
    """Random, with every choice of the target inside the draft vocabulary, so that no contender may skip a prediction."""
    generator = torch.Generator().manual_seed(2)
    ids, argmax = (torch.randint(shape.draft_vocab, (shape.tokens,), generator=generator) for _ in range(2))
    hidden = torch.randn(shape.tokens, LAYERS * shape.hidden, generator=generator).to(dtype)
    return Inputs(ids, mask(shape.tokens, share), hidden, torch.randn(shape.tokens, shape.hidden, generator=generator).to(dtype), argmax)


def exact_work(shape: Shape, mask_N: torch.Tensor, steps: int = STEPS) -> dict[str, float]:
    """Floating-point operations (two per multiply-add) of the loss and all its gradients, by part.

    A product with a trained matrix costs three products (forward, and gradients of input and weight); `fc` and the step-0 keys and values of all
    positions, the head and the block of supervised predictions alone, the teacher once per judged token without gradients.
    """
    h, heads = shape.hidden, shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    run = torch.zeros(len(mask_N) + 1, dtype=torch.long)
    for i in range(len(mask_N) - 1, -1, -1):
        run[i] = run[i + 1] + 1 if mask_N[i] else 0
    alive = (run[1:] - 1).clamp(min=0, max=steps)  # chain at i: its given token i + 1, and predictions behind it
    predictions = int(alive.sum())
    judged = torch.zeros(len(mask_N) + steps + 1, dtype=torch.bool)
    attended = 0
    for i, count in enumerate(alive.tolist()):
        judged[i + 1 : i + 1 + count] = True
        attended += sum(i + 1 + k for k in range(count))
    later = predictions - int((alive > 0).sum())
    return {
        "fc": 2 * 2.0 * shape.tokens * LAYERS * h * h,
        "keys and values": 3 * 2.0 * (shape.tokens + later) * 2 * h * 2 * keys,
        "chains": 3 * 2.0 * predictions * (2 * h * heads + heads * h + 3 * h * shape.intermediate),
        "attention": 3 * 2.0 * attended * heads * 2,
        "head": 3 * 2.0 * predictions * h * shape.draft_vocab,
        "teacher": 2.0 * int(judged.sum()) * h * shape.draft_vocab,
    }
