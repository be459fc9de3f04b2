"""The whole target, run through transformers, with its decoder blocks tapped.

Used where the target must compute: capture and decoding. What is trained against is `Target` (weights.py), which reads three
tensors; `TargetModel.check` proves on real tokens that both agree before anything expensive starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache

from draftsmith.core.env import prefer_grouped_attention
from draftsmith.target.cache import growing_cache


@dataclass(frozen=True)
class States:
    """Outputs of one pass over `[B, Q]` tokens: `last_BQH` is what the head multiplies, `hidden_BQF` the tapped blocks, concatenated."""

    last_BQH: Tensor
    hidden_BQF: Tensor | None


class TargetModel:
    """The frozen target in evaluation mode."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.body = model.get_decoder()
        self.blocks = _blocks(model, self.body)
        self._alone = Lock()
        """Two live sources share one model, each with its thread: taps must not mix."""

    @staticmethod
    def load(where: str, dtype: torch.dtype, device: str = "cpu") -> TargetModel:
        """Load from a directory or hub id. Raises ValueError when it is not a causal language model."""
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot load target {where!r} as a causal language model: {error}") from error
        prefer_grouped_attention(device)
        return TargetModel(model.to(device))

    @property
    def window(self) -> int | None:
        """How many tokens back the attention of its sliding-window blocks reaches; None without such blocks.

        A caller's mask hides more on top of it, by places, so rows of a batch must have no gaps: such targets are decoded one row at a time.
        """
        text = self.model.config.get_text_config()
        window = getattr(text, "sliding_window", None)
        kinds = set(getattr(text, "layer_types", None) or ["sliding_attention"])
        return window if window and "sliding_attention" in kinds and getattr(text, "use_sliding_window", True) else None

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        return next(self.model.parameters()).device

    def new_cache(self) -> Cache:
        """An empty key-value cache for this model."""
        return growing_cache(len(self.blocks))

    @contextmanager
    def _tapped(self, layers: Sequence[int]) -> Iterator[list[Tensor]]:
        outputs: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: object, output: object) -> None:
            outputs.append(output[0] if isinstance(output, tuple) else output)  # type: ignore[arg-type]

        handles = []
        try:
            for i in layers:
                handles.append(self.blocks[i].register_forward_hook(keep))  # noqa: PERF401 - one that fails must not lose the others
            yield outputs
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def run(
        self,
        ids_BQ: Tensor,
        layers: Sequence[int] = (),
        position_BQ: Tensor | None = None,
        mask_B1QT: Tensor | None = None,
        cache: Cache | None = None,
    ) -> States:
        """One pass. `layers`: blocks whose outputs to return; `mask_B1QT`: True where query may see key; the cache grows by Q."""
        if mask_B1QT is not None and self.window is not None:
            query, seen = mask_B1QT.shape[-2:]
            place = torch.arange(seen, device=mask_B1QT.device)
            mask_B1QT = mask_B1QT & (place[seen - query :, None] - place < self.window)
        with self._alone, self._tapped(layers) as taps:
            output = self.body(input_ids=ids_BQ, position_ids=position_BQ, attention_mask=mask_B1QT, cache=cache, use_cache=cache is not None)
        return States(output.last_hidden_state, torch.cat(taps, dim=-1) if taps else None)


def _blocks(model: PreTrainedModel, body: nn.Module) -> nn.ModuleList:
    """The list of decoder blocks: the one ModuleList with as many entries as the config has layers."""
    count = model.config.get_text_config().num_hidden_layers
    found = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not found:
        raise ValueError(f"{type(model).__name__}: no list of {count} decoder blocks found in {type(body).__name__}; it cannot be tapped")
    return found[0]
