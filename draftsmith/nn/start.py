"""Closed-form starts: what a layer can know before its first gradient step.

A draft trained for minutes spends many of them on finding what a linear map already knows. These functions solve for it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

SHARPNESS = 20.0
"""Score of a place with itself in an attention that starts on its own place; its neighbour scores 4 to 5 less."""
FAST_PAIRS = 4
"""Rotary pairs that tell neighbours apart: the fastest ones."""


def ridge(x_MI: Float[Tensor, "M I"], y_MO: Float[Tensor, "M O"], strength: float) -> Float[Tensor, "I O"]:
    """Least squares with a penalty of `strength` times the mean square of an input."""
    gram_II = x_MI.T @ x_MI
    gram_II.diagonal().add_(strength * gram_II.diagonal().mean() + 1e-6)
    return torch.linalg.solve(gram_II, x_MI.T @ y_MO)


def low_rank(map_IO: Float[Tensor, "I O"], x_MI: Float[Tensor, "M I"], rank: int) -> tuple[Float[Tensor, "I R"], Float[Tensor, "R O"]]:
    """The two factors of rank `rank` whose product is nearest to the map on these inputs (reduced-rank regression)."""
    moment_II = x_MI.T @ x_MI / len(x_MI)
    moment_II.diagonal().add_(1e-4 * moment_II.diagonal().mean() + 1e-6)
    root_II = torch.linalg.cholesky(moment_II)
    left_IK, values_K, right_KO = torch.linalg.svd(root_II.T @ map_IO, full_matrices=False)
    scale_R = values_K[:rank].sqrt()
    return torch.linalg.solve_triangular(root_II.T, left_IK[:, :rank] * scale_R, upper=True), scale_R[:, None] * right_KO[:rank]


def own_place(x_MI: Float[Tensor, "M I"], head_dim: int, strength: float) -> Float[Tensor, "d I"]:
    """A projection for queries and keys of one head that makes every place attend to itself, whatever it holds.

    A linear map that is nearly 1 on all inputs times a fixed vector: after rotation, the score of two places depends on their distance
    alone and is highest at 0.
    """
    one_I = ridge(x_MI, x_MI.new_ones(len(x_MI), 1), strength)[:, 0]
    vector_d = x_MI.new_zeros(head_dim)
    vector_d[:FAST_PAIRS] = (SHARPNESS * head_dim**0.5 / FAST_PAIRS) ** 0.5
    return vector_d[:, None] * one_I
