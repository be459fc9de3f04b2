"""A key-value cache that grows in place.

transformers' dynamic cache concatenates, hence copies, every layer's keys and values for each new token: with 64 rows and 300 tokens of
SmolLM2 that is 0.9 GB a step, more than the step's arithmetic. This one writes into room kept ahead and hands out views.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_ROOM = 64
"""Tokens of room added when a layer is full."""


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, `[B, heads, tokens, head_dim]` views of larger buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Append and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old, new = self.get_seq_length(), key_states.shape[-2]
        if self._buffers is None or old + new > self._buffers[0].shape[-2]:
            self._buffers = (self._grown(self.keys, key_states, old), self._grown(self.values, value_states, old))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, old : old + new] = states
        self.keys, self.values = (buffer[:, :, : old + new] for buffer in self._buffers)
        return self.keys, self.values

    @staticmethod
    def _grown(kept: Tensor | None, states: Tensor, old: int) -> Tensor:
        rows, heads, new, dim = states.shape
        buffer = torch.empty(rows, heads, old + new + max(_ROOM, old // 2), dim, dtype=states.dtype, device=states.device)
        if old and kept is not None:
            buffer[:, :, :old] = kept
        return buffer

    def keep(self, first: int, place_BK: Tensor) -> None:
        """From `first` on keep the places `first + place_BK` alone, in this order."""
        if self.keys is None or self.values is None:
            return
        end = first + place_BK.shape[1]
        for states in (self.keys, self.values):
            index = place_BK[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
            states[:, :, first:end] = states[:, :, first:].gather(2, index)
        self.keys, self.values = self.keys[:, :, :end], self.values[:, :, :end]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        super().batch_select_indices(indices)
        self._buffers = None


def growing_cache(layers: int) -> Cache:
    """An empty cache for a target with this many decoder blocks."""
    return Cache(layers=[GrowingLayer() for _ in range(layers)])


def keep_places(cache: Cache, first: int, place_BK: Tensor) -> None:
    """Of the places from `first` on, keep `first + place_BK` of each row in every layer, in this order: the accepted branch of a tree."""
    for layer in cache.layers:
        assert isinstance(layer, GrowingLayer)
        layer.keep(first, place_BK)
