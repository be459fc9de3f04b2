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
from transformers import GgufConfig, PreTrainedModel
from transformers.cache_utils import Cache

from draftsmith.core.env import prefer_grouped_attention
from draftsmith.target.cache import growing_cache
from draftsmith.target.families import blocks_of, head_of, model_class, speaker_of
from draftsmith.target.place import GgufPlace, locate


@dataclass(frozen=True)
class States:
    """Outputs of one pass over `[B, Q]` tokens: `last_BQH` is what the head multiplies, `hidden_BQF` the tapped blocks, concatenated."""

    last_BQH: Tensor
    hidden_BQF: Tensor | None


class TargetModel:
    """The frozen target in evaluation mode."""

    def __init__(self, model: PreTrainedModel) -> None:
        name = type(model).__name__
        self.model = model.eval().requires_grad_(False)
        self.speaker = speaker_of(model, name)
        """The part that takes token ids and returns logits: the model, or the text model inside a multi-modal wrapper."""
        self.head = head_of(self.speaker, name)
        self.blocks = blocks_of(self.speaker, name)
        self._alone = Lock()
        """Two live sources share one model, each with its thread: taps must not mix."""

    @staticmethod
    def load(where: str, dtype: torch.dtype, device: str = "cpu", revision: str | None = None) -> TargetModel:
        """Load from a directory, a GGUF file or a hub id. Raises ValueError when it is not a causal language model."""
        place = locate(where, revision)
        config = place.config()
        kind = model_class(config, place.name)
        try:
            name, arguments = place.pretrained
            if isinstance(place, GgufPlace):
                arguments |= {"quantization_config": GgufConfig(dequantize=True), "config": config}
            model = kind.from_pretrained(name, dtype=dtype, **arguments)
        except (OSError, ValueError, RuntimeError, ImportError) as error:
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

    @property
    def recurrent(self) -> bool:
        """Whether some blocks keep a running state (Mamba, linear attention) instead of keys and values of every token."""
        return bool(getattr(self.speaker, "_is_stateful", False))

    def new_cache(self) -> Cache:
        """An empty key-value cache for this model. Raises ValueError for recurrent targets, whose state cannot take back tokens that were rejected."""
        if self.recurrent:
            raise ValueError(
                f"{type(self.speaker).__name__} has recurrent blocks: their state cannot take back rejected tokens, so Draftsmith captures features of "
                "this target and trains drafts for it, but cannot decode with it yet"
            )
        return growing_cache(len(self.blocks))

    @contextmanager
    def _tapped(self, layers: Sequence[int]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Outputs of the blocks, and what the head multiplies; the head itself gets no rows, so that no logits are computed."""
        outputs: list[Tensor] = []
        multiplied: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: object, output: Any) -> None:
            outputs.append(output[0] if isinstance(output, tuple) else output)

        def divert(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            multiplied.append(inputs[0])
            return (inputs[0][..., :0, :],)

        handles = []
        try:
            for i in layers:
                handles.append(self.blocks[i].register_forward_hook(keep))  # noqa: PERF401 - one that fails must not lose the others
            handles.append(self.head.register_forward_pre_hook(divert))
            yield outputs, multiplied
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
        mask = None if mask_B1QT is None else self._understood(mask_B1QT)
        given: dict[str, Any] = {"position_ids": position_BQ, "attention_mask": mask, "cache": cache}
        with self._alone, self._tapped(layers) as (taps, multiplied):
            self.speaker(input_ids=ids_BQ, use_cache=cache is not None, **{k: v for k, v in given.items() if v is not None})
        if len(taps) != len(layers) or len(multiplied) != 1:
            raise ValueError(
                f"{type(self.speaker).__name__} ran {len(taps)} of {len(layers)} tapped blocks and its head {len(multiplied)} times in one pass; "
                "a draft needs a target that runs each of its blocks, and its head, once"
            )
        return States(multiplied[0], torch.cat(taps, dim=-1) if taps else None)

    def _understood(self, mask_B1QT: Tensor) -> Tensor:
        """A caller's mask, closed beyond the window, in the form that the model's attention takes."""
        if self.window is not None:
            query, seen = mask_B1QT.shape[-2:]
            place = torch.arange(seen, device=mask_B1QT.device)
            mask_B1QT = mask_B1QT & (place[seen - query :, None] - place < self.window)
        if self.speaker.config.get_text_config()._attn_implementation != "eager":
            return mask_B1QT
        # Plain attention adds the mask to its scores; families with capped scores or sinks have no other.
        dtype = next(self.model.parameters()).dtype
        return torch.zeros(mask_B1QT.shape, dtype=dtype, device=mask_B1QT.device).masked_fill(~mask_B1QT, torch.finfo(dtype).min)

    def own_logits(self, ids_BQ: Tensor) -> Tensor:
        """The model's own logits, `[B, Q, V]`: what `Target.logits` is compared with."""
        with torch.inference_mode():
            return self.speaker(input_ids=ids_BQ, use_cache=False).logits
