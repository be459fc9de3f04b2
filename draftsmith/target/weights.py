"""`Target`: the frozen embedding, final norm and head of a checkpoint, read without building the model.

Which tensor is which is asked of transformers (`families.anatomy` names the model's parts, its own conversion rules name the file's tensors), so
there is no key to know. Only the needed tensors are read, memory-mapped, in their stored dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig

from draftsmith.core.types import TargetShape
from draftsmith.target.families import Anatomy, LogitRule, anatomy, blocks_of, setting, skeleton, speaker_of
from draftsmith.target.finder import Finder, Keys, Part
from draftsmith.target.fingerprint import fingerprint
from draftsmith.target.place import Place, locate
from draftsmith.target.tensors import Read


@dataclass(frozen=True)
class Found:
    """What was found where, and why the head is the head: shown by `draftsmith inspect`."""

    architecture: str
    embedding: Part
    head: Part
    head_bias: Part | None
    norm: Part | None
    norm_rule: str
    why: str
    tied: bool
    """The tie flag, as the model class reads it from whichever config holds it."""
    read: Read
    checksum: int
    """Of every bit of the tensors read, whatever dtype they are then held in."""
    notes: tuple[str, ...]


@dataclass
class Target:
    """What every loss and every draft borrows from the target: `embed`, `logits`, the norm to start from, and its sizes.

    Never a submodule of a draft, so that a draft's `state_dict()` holds exactly what is trained.
    """

    name: str
    shape: TargetShape
    embedding_VH: Tensor
    head_VH: Tensor
    bias_V: Tensor | None
    norm_H: Tensor
    """What the normed state is multiplied with: the stored weight, plus 1 in families that store it so."""
    rule: LogitRule
    tied: bool
    """Head and embedding are one tensor here."""
    config: PreTrainedConfig
    found: Found
    places: tuple[Place, ...] = field(repr=False)
    """Where its weights lie: the checkpoint, then the one of head_from."""
    _rows: tuple[Tensor | None, Tensor, Tensor | None] | None = field(default=None, repr=False)

    @staticmethod
    def load(
        where: str,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        revision: str | None = None,
        head_from: str | None = None,
        keys: Keys | None = None,
    ) -> Target:
        """Read from a directory, a GGUF file, or a hub id at a revision (only the files that hold the tensors are downloaded).

        `head_from`: a checkpoint of the same model whose embedding, norm and head are read instead, for targets that hold them packed.
        `keys`: names of tensors that overrule what was found.
        Raises ValueError, with what was found and what to do, when there is no such place, no weights, a damaged file, a
        tensor that is missing, packed, misshapen or not finite, or a family whose logits cannot be read off.
        """
        place = locate(where, revision)
        config = place.config()
        parts = anatomy(skeleton(config, place.name), place.name)
        places = (place,) if head_from is None else (place, locate(head_from))
        finder = Finder(places[-1], parts, keys or Keys(), None if head_from is None else place.name)
        embedding, head, bias, norm, found = _find_all(finder, config, parts)
        finder.close()
        target = Target(place.name, shape_of(config, parts, head), embedding, head, bias, norm, parts.rule, head is embedding, config, found, places)
        for note in found.notes:
            warnings.warn(f"{place.name}: {note}", stacklevel=2)
        return target._moved(device, dtype)

    def _moved(self, device: str, dtype: torch.dtype | None) -> Target:
        embedding = self.embedding_VH.to(device, dtype)
        head = embedding if self.tied else self.head_VH.to(device, dtype)
        bias = None if self.bias_V is None else self.bias_V.to(device, dtype)
        return replace(self, embedding_VH=embedding, head_VH=head, bias_V=bias, norm_H=self.norm_H.to(device, dtype))

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that tell targets apart, the same in every dtype that one is held in."""
        return fingerprint(self.config, self.places, self.found.checksum)

    def embed(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n H"]:
        """Rows of the embedding as stored, which is what serving engines hand to a draft; families that scale them do so in their own body."""
        return self.embedding_VH[ids]

    def logits(self, last: Float[Tensor, "*n H"], ids_D: Int[Tensor, " D"] | None = None) -> Float[Tensor, "*n D"]:
        """The target's next-token logits under its own rule, over all of its vocabulary or over `ids_D` alone, in the dtype of `last`."""
        rows, bias = self._selected(ids_D, last.dtype)
        product = last @ rows.T
        logits = self.rule(product if bias is None else product + bias)
        if self.rule.banned:
            banned = torch.tensor(self.rule.banned, device=logits.device)
            hidden = torch.isin(torch.arange(self.shape.vocab_size, device=logits.device) if ids_D is None else ids_D, banned)
            logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
        return logits

    def rows(self, ids_D: Int[Tensor, " D"] | None, dtype: torch.dtype) -> Float[Tensor, "D H"]:
        """Rows of the head; the last selection is kept, since a draft always asks for the same one."""
        return self._selected(ids_D, dtype)[0]

    def _selected(self, ids_D: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        if ids_D is None and self.head_VH.dtype == dtype:
            return self.head_VH[: self.shape.vocab_size], None if self.bias_V is None else self.bias_V[: self.shape.vocab_size]
        kept = self._rows
        if kept is None or kept[0] is not ids_D or kept[1].dtype != dtype:
            wanted = slice(self.shape.vocab_size) if ids_D is None else ids_D
            bias = None if self.bias_V is None else self.bias_V[wanted].to(dtype)
            self._rows = kept = (ids_D, self.head_VH[wanted].to(dtype), bias)
        return kept[1], kept[2]


def _find_all(finder: Finder, config: PreTrainedConfig, parts: Anatomy) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Found]:
    """Embedding, head, bias and norm under the head rule: a head on disk wins; without one the embedding is the head."""
    notes: list[str] = []
    embedding_part = finder.embedding()
    embedding = finder.read(embedding_part)
    head_part = finder.head(embedding_part)
    if head_part is None:
        _refuse_headless(finder.place, config, parts)
        head, why = embedding, "no head tensor on disk: the embedding is the head"
        if not parts.tied:
            notes.append("the files hold no head and the tie flag is off: the embedding is used as the head. If the head was lost, give target.head_from")
    elif head_part == embedding_part:
        head, why = embedding, "the class has one tensor for both"
    else:
        head, why = finder.read(head_part), "a head tensor on disk"
        if parts.tied and torch.equal(head, embedding):
            head, why = embedding, "the tie flag is set, and the head tensor on disk equals the embedding"
        elif parts.tied:
            notes.append(
                f"the tie flag is set, but {head_part.key} differs from {embedding_part.key}: the head tensor is used, as transformers does. "
                "SGLang and vLLM drop it and serve with the embedding: their logits are other ones until the flag is false"
            )
    bias_part = finder.head_bias(head_part)
    bias = None if bias_part is None else finder.read(bias_part)
    norm_part = finder.norm()
    norm = torch.ones(embedding.shape[1], dtype=embedding.dtype)
    if norm_part is not None:
        norm = finder.read(norm_part)
        if parts.norm is not None and parts.norm.offset:
            norm = norm.float() + parts.norm.offset  # in bfloat16 the sum would lose most of a small weight
    found = Found(
        architecture=parts.architecture,
        embedding=embedding_part,
        head=head_part or embedding_part,
        head_bias=bias_part,
        norm=norm_part,
        norm_rule="none that is known" if parts.norm is None else parts.norm.describe(),
        why=why,
        tied=parts.tied,
        read=finder.counted,
        checksum=finder.checksum,
        notes=tuple(notes),
    )
    return embedding, head, bias, norm, found


def _refuse_headless(place: Place, config: PreTrainedConfig, parts: Anatomy) -> None:
    """A body saved without its head, of a class that does not tie it: the embedding would be a wrong head."""
    written = (config.architectures or [""])[0]
    if not parts.tied and written.endswith("Model") and written != parts.architecture:
        raise ValueError(
            f"{place.name} was saved from {written}, which has no language-model head, and its config does not tie one to the embedding: give the "
            f"checkpoint of {parts.architecture}, or target.head_key if it lies under another name"
        )


def shape_of(config: PreTrainedConfig, parts: Anatomy, head_VH: Tensor) -> TargetShape:
    """The sizes that a draft is built from; what a family does not have (attention heads in a recurrent one) is what a usual one of its width would."""
    text = speaker_of(parts.model, "").config.get_text_config(decoder=True)
    hidden = getattr(text, "hidden_size", head_VH.shape[1])
    heads = _first(text, ("num_attention_heads", "n_head"), max(1, hidden // 64))
    ends = getattr(text, "eos_token_id", None)
    return TargetShape(
        hidden_size=hidden,
        vocab_size=min(head_VH.shape[0], parts.model.get_parameter(parts.head).shape[0]),
        layers=len(blocks_of(speaker_of(parts.model, ""), "")),
        heads=heads,
        kv_heads=_first(text, ("num_key_value_heads",), heads),
        head_dim=_first(text, ("head_dim",), hidden // heads),
        intermediate_size=_first(text, ("intermediate_size",), 4 * hidden),
        norm_eps=1e-5 if parts.norm is None else parts.norm.eps,
        max_positions=_first(text, ("max_position_embeddings",), 4096),
        rope=_rope(text),
        model_type=text.model_type,
        bos_token_id=getattr(text, "bos_token_id", None),
        eos_token_id=ends[0] if isinstance(ends, list) else ends,
    )


def _first(text: PreTrainedConfig, names: Sequence[str], otherwise: int) -> int:
    values = (setting(text, n) for n in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), otherwise)


def _rope(text: PreTrainedConfig) -> dict[str, object]:
    rope = dict(getattr(text, "rope_parameters", None) or {})
    nested = [v for v in rope.values() if isinstance(v, dict)]
    if nested:
        rope = dict(rope["full_attention"] if isinstance(rope.get("full_attention"), dict) else nested[0])
    return rope or {"rope_type": "default", "rope_theta": 10000.0}
