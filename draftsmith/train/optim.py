"""AdamW with float32 masters, warm-up and decay to zero, and clipping by the global norm."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from draftsmith.core.config import Config, Fraction, Rate, Size

Averaging = Annotated[float, Field(ge=0, lt=1, strict=True)]
"""A factor of an exponential average."""


class OptimConfig(Config):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    learning_rate: Rate = 1e-3
    """Peak learning rate."""
    warmup: Fraction = 0.03
    """Share of all steps over which the rate rises from 0."""
    weight_decay: Size = 0.0
    """Decoupled decay of matrices; norms are not decayed."""
    betas: tuple[Averaging, Averaging] = (0.9, 0.95)
    """Averaging factors of the two moments."""
    clip: Rate = 1.0
    """Largest global norm of the gradient."""


def build(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """The optimizer over all trainable parameters."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of step `step` (0-based) of `steps`: linear warm-up, then a cosine to zero."""
    warm = config.warmup * steps
    if step < warm:
        return config.learning_rate * (step + 1) / (warm + 1)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))


def apply(model: nn.Module, optimizer: torch.optim.AdamW, denominator: float, learning_rate: float, clip: float) -> float:
    """One update from summed gradients of loss numerators: divide once, clip, step.

    Returns the gradient's norm before clipping. Raises ValueError, before anything changes, when it is not finite.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients)) / max(denominator, 1e-38)
    if not math.isfinite(norm):
        raise ValueError(
            "the gradient is not finite; nothing was updated, and the last checkpoint is kept. Look at the features (NaN or Inf) first, then lower "
            "train.optimizer.learning_rate"
        )
    # Division and clipping ride along in the fused update, which divides by its `grad_scale`: two passes over all gradients less.
    scaled: Any = optimizer
    scaled.grad_scale = torch.tensor(max(denominator, 1e-38) * max(1.0, norm / clip), device=gradients[0].device)
    scaled.found_inf = torch.zeros((), device=gradients[0].device)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
