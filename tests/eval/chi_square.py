"""Pearson's chi-square test of counts against expected probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Chance of counts this far from `probs` or further; cells that expect fewer than 5 are merged, and an impossible one that occurred gives 0."""
    counts, probs = counts.double().flatten(), probs.double().flatten()
    assert abs(float(probs.sum()) - 1) < 1e-5, "the expected probabilities must sum to 1"
    if float(counts[probs == 0].sum()):
        return 0.0
    expected = probs * counts.sum()
    large = expected >= 5
    seen, due = ([*x[large].tolist(), float(x[~large].sum())] for x in (counts, expected))
    if due[-1] < 1e-9:
        seen, due = seen[:-1], due[:-1]
    assert len(due) > 1, "too few samples: everything fell into one cell"
    statistic = sum((s - d) ** 2 / d for s, d in zip(seen, due, strict=True))
    half = torch.tensor([(len(due) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
