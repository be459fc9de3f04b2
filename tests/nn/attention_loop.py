"""Attention of one query, key by key: the reference of all fast forms."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def one(query_d: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Softmax attention of one head of one query."""
    scores = [(query_d * k).sum() / math.sqrt(len(query_d)) for k in keys]
    top = max(float(s.detach()) for s in scores)
    parts = [(s - top).exp() for s in scores]
    return torch.stack([p / sum(parts) * v for p, v in zip(parts, values, strict=True)]).sum(0)
