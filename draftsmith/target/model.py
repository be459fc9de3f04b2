"""The whole target, run through transformers, with its decoder blocks tapped.

Used where the target must compute: capture and decoding. What is trained against is `Target` (weights.py), which reads three
tensors; `TargetModel.check` proves on real tokens that both agree before anything expensive starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GgufConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from draftsmith.core.env import prefer_grouped_attention
from draftsmith.target.cache import growing_cache
from draftsmith.target.families import blocks_of, config_for, head_of, model_class, setting, speaker_of
from draftsmith.target.place import GgufPlace, locate


@dataclass(frozen=True)
class States:
    """Outputs of one pass over `[B, Q]` tokens: `last_BQH` is what the head multiplies, `hidden_BQF` the tapped blocks, concatenated."""

    last_BQH: Tensor
    hidden_BQF: Tensor | None


_WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size", "attention_window_size", "window_size")
_GAP = 40
"""Hidden places in the middle of the row with which masks are tried: families that count positions by places are off by as many."""


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
        """Load from a directory, a GGUF file or a hub id. Raises ValueError when it is not a causal language model, or not a whole one."""
        place = locate(where, revision)
        config = place.config()
        kind = model_class(config, place.name)
        try:
            name, arguments = place.pretrained
            if isinstance(place, GgufPlace):
                arguments |= {"quantization_config": GgufConfig(dequantize=True)}
            # The configuration is given, since the class would read its own kind, under which transformers may not know the names in the files.
            model, loaded = kind.from_pretrained(name, config=config_for(kind, config), dtype=dtype, output_loading_info=True, **arguments)
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise ValueError(f"cannot load target {where!r} as a causal language model: {error}") from error
        target = TargetModel(model.to(device))
        target._require_whole(set(loaded["missing_keys"]), place.name)
        prefer_grouped_attention(device)
        return target

    def _require_whole(self, missing: set[str], name: str) -> None:
        """transformers fills what the files lack with random numbers. A head that they lack is the embedding, as in `Target`; nothing else may be missing."""
        names = {id(t): n for n, t in [*self.model.named_parameters(), *self.model.named_buffers()]}
        own = {names[id(t)] for t in [*self.speaker.parameters(), *self.speaker.buffers()]} & missing
        table = self.speaker.get_input_embeddings().weight
        head = names[id(self.head.weight)]
        if head in own and self.head.weight.shape == table.shape:
            self.head.weight = table
            own.remove(head)
        if own:
            raise ValueError(
                f"{name}: {len(own)} parameters of {type(self.speaker).__name__} are not in the files ({', '.join(sorted(own)[:3])}): the checkpoint is "
                "incomplete, or its names are of another version of transformers"
            )

    @property
    def window(self) -> int | None:
        """How many tokens back the attention of its local blocks (sliding or chunked) reaches; None without such blocks.

        A caller's mask hides more on top of it, by places, so rows of a batch must have no gaps: such targets are decoded one row at a time.
        """
        text = self.model.config.get_text_config(decoder=True)
        local = not self._layer_types or any(not kind.startswith("full") for kind in self._layer_types)
        sizes = [size for field in _WINDOWS if isinstance(size := setting(text, field), int) and size > 0]
        return min(sizes) if sizes and local and getattr(text, "use_sliding_window", True) else None

    @property
    def _layer_types(self) -> set[str]:
        return set(setting(self.model.config.get_text_config(decoder=True), "layer_types") or ())

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        return next(self.model.parameters()).device

    @property
    def recurrent(self) -> bool:
        """Whether some blocks keep a running state (Mamba, linear attention) or an index, not only keys and values of every token."""
        kinds = {type(layer).__name__ for layer in self._usual_cache.layers}
        return bool(getattr(self.speaker, "_is_stateful", False)) or any("LinearAttention" in kind or "Indexed" in kind for kind in kinds)

    @property
    def _usual_cache(self) -> Cache:
        """The cache that transformers would use."""
        return DynamicCache(config=self.speaker.config.get_text_config(decoder=True))

    def new_cache(self) -> Cache:
        """An empty key-value cache for this model.

        Raises ValueError for targets that cannot be decoded with one: recurrent ones, whose state cannot take back tokens that were rejected, and those
        whose states come out differently with a cache than without.
        """
        name = type(self.speaker).__name__
        if self.recurrent:
            raise ValueError(
                f"{name} has recurrent blocks: their state cannot take back rejected tokens, so Draftsmith captures features of "
                "this target and trains drafts for it, but cannot decode with it yet"
            )
        if self._decoding_fault is not None:
            raise ValueError(
                f"{name} cannot be decoded with yet: with a cache and positions its states differ from those of one whole pass ({self._decoding_fault}). "
                "Draftsmith captures features of this target and trains drafts for it"
            )
        return self._empty_cache()

    def _empty_cache(self) -> Cache:
        return growing_cache(max(len(self._usual_cache.layers), len(self.blocks)))

    @cached_property
    def _decoding_fault(self) -> str | None:
        """What goes wrong when a few tokens run in pieces with a cache, after tokens that are taken back; tried once on the model itself."""
        ids = self._some_ids(12)
        order = torch.arange(ids.shape[1], device=ids.device)[None]
        cache = self._empty_cache()
        try:
            whole = self.run(ids).last_BQH
            self.run(ids[:, :5], (), order[:, :5], None, cache)
            self.run(ids[:, :3], (), order[:, 5:8], None, cache)
            cache.crop(-3)
            pieces = [self.run(ids[:, i : i + n], (), order[:, i : i + n], None, cache).last_BQH for i, n in ((5, 1), (6, 4), (10, 2))]
        except (ValueError, RuntimeError, IndexError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        right = _error(torch.cat(pieces, dim=1), whole[:, 5:]) <= _rounding(whole)
        return None if right else "other numbers"

    @cached_property
    def takes_masks(self) -> bool:
        """Whether places hidden in the middle of a row change nothing, so that rows of unequal lengths can run together; tried once on the model itself.

        False for families that count positions by places, whatever positions they are given (Bart, BLOOM, MPT).
        """
        ids = self._some_ids(_GAP + 12)
        order = torch.arange(ids.shape[1], device=ids.device)
        real = (order < 4) | (order >= _GAP + 4)
        mask = ((order <= order[:, None]) & real) | (order == order[:, None])
        position = torch.where(real, real.cumsum(0) - 1, 0)[None]
        try:
            alone = self.run(ids[:, real], (), position[:, real]).last_BQH
            spread = self.run(ids[:, real], (), order[real][None]).last_BQH
            hidden = self.run(ids, (), position, mask[None, None]).last_BQH[:, real]
        except (ValueError, RuntimeError, IndexError, KeyError):
            return False
        # Whether positions count at all is asked apart, for what they change can be little beside the rounding of bfloat16.
        return not torch.equal(spread, alone) and _error(hidden, alone) <= _rounding(alone)

    def require_causal(self, ids_BT: Tensor) -> None:
        """Raises ValueError when the states of tokens change with what follows them: features would tell a draft what it is to predict."""
        part = ids_BT.shape[1] // 2
        alone = self.run(ids_BT[:, :part]).last_BQH
        if not _error(self.run(ids_BT).last_BQH[:, :part], alone) <= _rounding(alone):
            raise ValueError(
                f"{type(self.speaker).__name__} is no causal language model on text: its states are other ones when later tokens are left out, so features "
                "would give away what a draft is to predict"
            )

    def _some_ids(self, count: int) -> Tensor:
        """Ids from the middle of the vocabulary, where no family keeps its special tokens."""
        size = self.head.weight.shape[0]
        return (size // 2 + torch.arange(count, device=self.device) * 7 % max(1, size // 4))[None]

    @contextmanager
    def _tapped(self, layers: Sequence[int]) -> Iterator[tuple[dict[int, list[Tensor]], list[Tensor]]]:
        """Outputs of the blocks, and what the head multiplies; the head itself gets no rows, so that no logits are computed."""
        outputs: dict[int, list[Tensor]] = {i: [] for i in layers}
        multiplied: list[Tensor] = []

        def divert(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            multiplied.append(inputs[0])
            return (inputs[0][..., :0, :],)

        def keep(i: int) -> Any:
            return lambda _module, _inputs, output: outputs[i].append(output if isinstance(output, Tensor) else output[0])

        with ExitStack() as hooks:
            for i in outputs:
                hooks.callback(self.blocks[i].register_forward_hook(keep(i)).remove)
            hooks.callback(self.head.register_forward_pre_hook(divert).remove)
            yield outputs, multiplied

    @torch.inference_mode()
    def run(
        self,
        ids_BQ: Tensor,
        layers: Sequence[int] = (),
        position_BQ: Tensor | None = None,
        mask_B1QT: Tensor | None = None,
        cache: Cache | None = None,
    ) -> States:
        """One pass. `layers`: blocks whose outputs to return; `mask_B1QT`: True where query may see key; the cache grows by Q.

        Of blocks that hand on several streams (hyper-connections) the output is their mean.
        Raises ValueError for a target that does not run on token ids alone, or does not run its head or a tapped block once a pass.
        """
        mask = None if mask_B1QT is None else self._understood(mask_B1QT)
        given: dict[str, Any] = {"position_ids": position_BQ, "attention_mask": mask, "cache": cache}
        with self._alone, self._tapped(layers) as (taps, multiplied):
            try:
                self.speaker(input_ids=ids_BQ, use_cache=cache is not None, **{k: v for k, v in given.items() if v is not None})
            except (TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"{type(self.speaker).__name__} does not run on token ids alone ({error}), so it cannot be a target") from error
        if len(multiplied) != 1:
            raise ValueError(f"{type(self.speaker).__name__} ran its head {len(multiplied)} times in one pass; a draft needs a target that runs it once")
        hidden = [self._one_state(i, taps[i], ids_BQ.shape) for i in layers]
        return States(multiplied[0], torch.cat(hidden, dim=-1) if hidden else None)

    def _one_state(self, i: int, outputs: list[Tensor], shape: torch.Size) -> Tensor:
        """The one `[B, Q, H]` state that a block gives in a pass."""
        name = f"block {i} of {type(self.speaker).__name__}"
        if len(outputs) != 1:
            why = "it sees images only" if not outputs else f"it runs {len(outputs)} times a pass, and which of its outputs a draft should see has no answer"
            raise ValueError(f"{name} cannot be tapped: {why}; choose other capture layers")
        output = outputs[0]
        if output.ndim == 3 and output.shape[:2] == shape:
            return output
        streams = [d for d in (0, 2) if output.ndim == 4 and output.movedim(d, 2).shape[:2] == shape]
        if len(streams) != 1:
            raise ValueError(f"{name} cannot be tapped: it gives {tuple(output.shape)} for ids {tuple(shape)}, expected one state, or several streams, a token")
        return output.mean(streams[0])

    def _understood(self, mask_B1QT: Tensor) -> Tensor:
        """A caller's mask, closed beyond the window, in the form that the model's attention takes."""
        query, seen = mask_B1QT.shape[-2:]
        if self.window is not None and seen > self.window:
            if any(kind.startswith("full") for kind in self._layer_types):
                raise ValueError(f"{type(self.speaker).__name__}: one mask for {seen} places cannot close the windows ({self.window}) of some blocks alone")
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


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Median over tokens of the relative error of their states: rounding may send single tokens to another expert, a fault is in most."""
    error = torch.linalg.vector_norm(ours.float() - theirs.float(), dim=-1) / torch.linalg.vector_norm(theirs.float(), dim=-1).clamp(min=1e-6)
    return float(error.median()) if error.numel() else 0.0


def _rounding(states: Tensor) -> float:
    """Relative error that is taken for rounding: 0.0003 in float32, 0.09 in bfloat16."""
    return torch.finfo(states.dtype).eps ** 0.5
