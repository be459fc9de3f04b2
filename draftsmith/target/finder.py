"""Which tensor of a checkpoint is the embedding, the head, its bias and the final norm.

First by transformers' own rules for renaming what lies in files into parameters of the model; where they do not reach (native files, unknown
prefixes) by structure: a known last name, beside the blocks (embedding) or on the way from the root to the embedding (head and norm), of the right
shape. Two that fit, and a head in a form that is not known, are an error, not a choice: taken for absent, it would be replaced by the embedding.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from draftsmith.target.families import Anatomy
from draftsmith.target.place import GgufPlace, HubPlace, Place
from draftsmith.target.quantized import block_of, dequantized, is_float8, packed_scheme, plain_name, scale_key
from draftsmith.target.tensors import Group, Read, groups

_HEADS = ("lm_head", "embed_out", "unembed", "unembedding", "output", "output_layer", "lm_output")
_LAST_NAMES = {
    "embedding": ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "token_embd", "embeddings", "embed", "embedding"),
    "head": _HEADS,
    "head bias": _HEADS,
    "final norm": ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "final_norm", "output_norm", "embedding_norm"),
}
_LAST_RESORT = {"final norm": ("token_embd_norm",)}
"""Of LFM2's GGUF files; in BLOOM's it is another norm, beside the final one."""
_ELSEWHERE = re.compile(r"(^|[._])(vision|visual|vit|image|audio|speech|talker|code2wav|token2wav|mtp|nextn|draft|eagle3?|medusa|codec|code_predictor)([._]|$)")
"""Parts of multi-modal and multi-token checkpoints that have embeddings, heads and norms of their own."""
_NUMBERED = re.compile(r"\.\d+\.")
_CHUNK_ROWS = 8192


@dataclass(frozen=True)
class Keys:
    """Tensor names that a user gives, as they stand in the files."""

    embedding: str | None = None
    head: str | None = None
    norm: str | None = None


@dataclass(frozen=True)
class Part:
    """A tensor in a file, the parameter that it becomes, and its stored form."""

    key: str
    file: str
    parameter: str
    shape: tuple[int, ...]
    dtype: str
    converter: str | None = None
    """Pattern of the rule by which transformers changes the tensor itself (drops padded rows), if one does."""


class Finder:
    """Looks into one checkpoint for the parts of one anatomy. `owner`: where the configuration lies, when that is another checkpoint (head_from)."""

    def __init__(self, place: Place, parts: Anatomy, keys: Keys, owner: str | None = None) -> None:
        self.place, self.parts, self.keys, self._owner = place, parts, keys, owner
        self.counted = Read()
        self.checksum = 0
        """Sum over all bits read, the same in whatever file they lie."""
        self.groups = groups(place)
        mapping = get_model_conversion_mapping(parts.model)
        self._renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        self._converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self._state = parts.model.state_dict()
        self._group_of: dict[str, Group] = {}
        self._names: dict[str, tuple[str, str | None]] = {}

    def embedding(self) -> Part:
        """Raises ValueError, listing the closest keys, when there is none, or several that fit."""
        part = self._part("embedding", self.parts.embedding, self.keys.embedding, self.groups)
        if part is None:
            raise ValueError(self._missing("embedding", self.parts.embedding))
        return part

    def head(self, embedding: Part) -> Part | None:
        """The head on disk; None without one. Raises ValueError when several fit, or what is there has a form that is not known.

        With a tied flag its absence is expected, and only the group that holds the embedding is looked at; without, another group of the same weights may
        be the complete one.
        """
        if self.parts.head == self.parts.embedding:
            return embedding
        main = self._group_of[self.parts.embedding]
        others = (g for g in self.groups if g is not main and (self.keys.head is not None or self._has_same(g, main, embedding)))
        part = self._part("head", self.parts.head, self.keys.head, chain([main], others))
        return self._part_unlisted(main) if part is None else part

    def head_bias(self, head: Part | None) -> Part | None:
        """The bias that the class adds to the head's product. Raises ValueError when the class has one and the files do not."""
        if self.parts.head_bias is None:
            return None
        order = self.groups if head is None else [self._group_of[head.parameter], *self.groups]
        beside = None if head is None else plain_name(head.key).removesuffix("weight") + "bias"
        given = beside if any(beside in g.file_of for g in order) else None
        part = self._part("head bias", self.parts.head_bias, given, order)
        if part is None:
            raise ValueError(self._missing("head bias", self.parts.head_bias))
        return part

    def norm(self) -> Part | None:
        """The final norm's weight; None for families whose norm has none. Raises ValueError when it should be there and is not."""
        rule = self.parts.norm
        if self.keys.norm is None and (rule is None or rule.weight is None):
            return None
        part = self._part("final norm", rule.weight if rule and rule.weight else "norm.weight", self.keys.norm, self.groups)
        if part is None and rule is not None and rule.weight is not None:
            raise ValueError(self._missing("final norm", rule.weight))
        return part

    # ---- reading ----

    def read(self, part: Part) -> Tensor:
        """The tensor as the model would hold it: dequantized, converted, of the configuration's shape, finite. Raises ValueError naming what is wrong."""
        group = self._group_of[part.parameter]
        self._refuse_packed(part, group)
        if part.converter is None:
            self._require_shape(part, part.shape)
        tensor = group.read(part.key, self.counted)
        if is_float8(part.dtype):
            scale = scale_key(part.key, group.file_of)
            assert scale is not None
            tensor = dequantized(tensor, group.read(scale, self.counted), part.key, block_of(self.parts.model.config))
        if part.converter is not None:
            tensor = self._converted(part, tensor)
            self._require_shape(part, tuple(tensor.shape))
        self._require_finite(part, tensor)
        return tensor

    def close(self) -> None:
        """Let go of all files."""
        for group in self.groups:
            group.close()

    def _refuse_packed(self, part: Part, group: Group) -> None:
        if isinstance(self.place, GgufPlace):
            return
        scheme = packed_scheme(part.key, part.dtype, group.file_of)
        if scheme is not None:
            problem = f"{self.place.name}: {part.key} is packed ({scheme}, stored as {part.dtype}) and holds no plain numbers"
        elif is_float8(part.dtype) and scale_key(part.key, group.file_of) is None:
            problem = f"{self.place.name}: {part.key} is float8 ({part.dtype}) and its scale, {part.key}_scale or {part.key}_scale_inv, is not in the files"
        else:
            return
        if self._owner is not None:
            raise ValueError(f"{problem}. It was given as target.head_from, which must be the unquantized checkpoint of {self._owner}")
        raise ValueError(
            f"{problem}. Give the unquantized checkpoint of the same model, whose embedding, norm and head are then used: "
            "target.head_from: <directory or hub id>"
        )

    def _require_shape(self, part: Part, shape: tuple[int, ...]) -> None:
        known = self._state.get(part.parameter)
        if known is None or tuple(known.shape) == shape:
            return
        expected = tuple(known.shape)
        where = f"{part.key} ({part.parameter} of {self.parts.architecture})" if part.key != part.parameter else part.key
        if self._owner is not None:
            raise ValueError(
                f"{self.place.name}, given as target.head_from: {where} is {shape}, and {self._owner}/config.json makes it {expected}: they are "
                "different models; give the unquantized checkpoint of the same one"
            )
        raise ValueError(
            f"{self.place.name}: {where} is {shape} in the files, and config.json makes it {expected}: config.json and weights are of different models, or one "
            "of them was changed alone"
        )

    def _require_finite(self, part: Part, tensor: Tensor) -> None:
        """Chunk by chunk, so that no mask as long as a head is made. Extremes first: isfinite takes ten times as long, and few heads are damaged."""
        bad, first = 0, None
        for start in range(0, len(tensor), _CHUNK_ROWS):
            chunk = tensor[start : start + _CHUNK_ROWS].contiguous()
            self.checksum += _sum_of_bits(chunk) * (start + 1)
            if all(torch.isfinite(extreme) for extreme in chunk.aminmax()):
                continue
            wrong = ~torch.isfinite(chunk)
            bad += int(wrong.sum())
            first = start + int(wrong.flatten(1).any(1).nonzero()[0] if wrong.ndim > 1 else wrong.nonzero()[0]) if first is None else first
        if bad:
            raise ValueError(f"{self.place.name}: {part.key} holds {bad:,} values that are NaN or infinite (first in row {first}): the checkpoint is damaged")

    def _converted(self, part: Part, tensor: Tensor) -> Tensor:
        converter: Any = deepcopy(next(c for c in self._converters if part.converter in c.source_patterns))
        group = self._group_of[part.parameter]
        pieces = {self._name(k)[1]: k for k in self._whole(group) if self._name(k)[0] == part.parameter}  # some tables lie in two tensors, to be joined
        for pattern in converter.source_patterns:
            if pattern in pieces:
                converter.add_tensor(
                    part.parameter, pieces[pattern], pattern, tensor if pieces[pattern] == part.key else group.read(pieces[pattern], self.counted)
                )
        made: Any = converter.convert(part.parameter, model=self.parts.model, config=self.parts.model.config)[part.parameter]
        return made[0] if isinstance(made, list) else made

    # ---- finding ----

    def _part(self, what: str, parameter: str, given: str | None, order: Iterable[Group]) -> Part | None:
        for group in order:
            key = self._key(group, what, parameter) if given is None else given if given in group.file_of else None
            if key is not None:
                return self._made(group, key, parameter)
        if given is not None:
            raise ValueError(f"{self.place.name} holds no tensor {given!r}, which was given as {what}; closest keys: {self._closest(given)}")
        return None

    def _made(self, group: Group, key: str, parameter: str) -> Part:
        self._group_of[parameter] = group
        shape, dtype = group.shape(key)
        return Part(key, group.file_of[key], parameter, shape, dtype, self._name(key)[1])

    def _key(self, group: Group, what: str, parameter: str) -> str | None:
        key = None if isinstance(self.place, GgufPlace) else self._renamed(group, parameter)
        return key or self._structural(group, what, parameter)

    def _part_unlisted(self, group: Group) -> Part | None:
        """A head that a shard holds and its index does not name: transformers reads whole shards. (On a hub, an index is believed.)"""
        before = len(group.file_of)
        if isinstance(self.place, HubPlace) or self.keys.head is not None:
            return None
        group.list_files()
        return self._part("head", self.parts.head, None, [group]) if len(group.file_of) > before else None

    def _renamed(self, group: Group, parameter: str) -> str | None:
        """The key that transformers itself would load into this parameter. Raises ValueError for several that differ."""
        found = [k for k in self._whole(group) if self._name(k)[0] == parameter]
        found = [k for k in found if k == plain_name(k)] or found
        pieces = {self._name(k)[1] for k in found}
        if len(found) > 1 and (None in pieces or len(pieces) < len(found)) and not all(self._equal(group, found[0], k) for k in found[1:]):
            raise ValueError(
                f"{self.place.name}: {' and '.join(sorted(found))} all become {parameter} and differ: remove the wrong ones, or {self._ask(parameter)}"
            )
        return min(found, key=lambda k: (k != parameter, len(k)), default=None)

    def _structural(self, group: Group, what: str, parameter: str) -> str | None:
        """The one key with a known last name in the right place; of several, the one of the right shape."""
        embedding = None if what == "embedding" else self._embedding_of(group)
        shape = tuple(self._state[parameter].shape) if parameter in self._state else None
        choices = (_LAST_NAMES[what], _LAST_RESORT.get(what, ()))
        near = next((found for names in choices if (found := [k for k in self._whole(group) if self._fits_name(k, what, names, group, embedding)])), [])
        fits = [k for k in near if k != plain_name(k) or shape is None or group.shape(k)[0] == shape] or near
        if len(fits) > 1:
            raise ValueError(f"{self.place.name}: {len(fits)} tensors could be the {what}: {', '.join(sorted(fits))}; {self._ask(parameter)}")
        if not fits and what == "head":
            self._refuse_unknown_form(group, embedding)
        return fits[0] if fits else None

    def _fits_name(self, key: str, what: str, names: Sequence[str], group: Group, embedding: str | None) -> bool:
        path, _, kind = plain_name(key).rpartition(".")
        parent, _, last = path.rpartition(".")
        if last not in names or kind != ("bias" if what == "head bias" else "weight") or self._taken(key) or _ELSEWHERE.search(key):
            return False
        return _holds_blocks(group.file_of, parent) if embedding is None else _leads_to(parent, embedding)

    def _refuse_unknown_form(self, group: Group, embedding: str | None) -> None:
        """Adapters, schemes of packing that are not known: what stands under the head's name and is no plain matrix."""
        own = self.parts.head.split(".")[-2]
        for key in group.file_of:
            path = key.split(".")
            at = next((i for i, name in enumerate(path[:-1]) if name == own or (name in _HEADS and name not in ("output", "embed"))), None)
            if at is None or _ELSEWHERE.search(key) or self._taken(key) or path[-1] == "bias" or "scale" in path[-1] or _NUMBERED.search(key):
                continue
            if embedding is None or _leads_to(".".join(path[:at]), embedding):
                raise ValueError(
                    f"{self.place.name}: {key} stands where the head should, in a form that is not known (an adapter that was not merged, or a packed tensor). "
                    f"Give an unquantized, merged checkpoint as target.head_from, or the head's name: {self._ask(self.parts.head)}"
                )

    def _embedding_of(self, group: Group) -> str | None:
        if self._group_of.get(self.parts.embedding) is group and self.keys.embedding in group.file_of:
            return self.keys.embedding
        return self._key(group, "embedding", self.parts.embedding)

    def _has_same(self, group: Group, main: Group, embedding: Part) -> bool:
        """Whether another group holds the same embedding, so that a head in it is of the same weights."""
        if self.parts.tied:
            return False
        own = self._embedding_of(group)
        return own is not None and group.shape(own) == main.shape(embedding.key) and group.sample(own) == main.sample(embedding.key)

    def _whole(self, group: Group) -> Iterator[str]:
        """Keys outside the blocks, sorted as transformers does."""
        wanted = (self.parts.embedding, self.parts.head)
        outside = (k for k in sorted(group.file_of) if k in wanted or not _NUMBERED.search(k))
        return (k for k in outside if plain_name(k).endswith((".weight", ".bias")) or self._name(k)[0] in wanted)

    def _name(self, key: str) -> tuple[str, str | None]:
        """The parameter that transformers makes of a key, and the converter that changes the tensor on the way."""
        if key not in self._names:
            plain = plain_name(key)
            name, converter = rename_source_key(plain, self._renamings, self._converters, self.parts.model.base_model_prefix, self._state)
            self._names[key] = (plain, None) if name not in self._state and plain in self._state else (name, converter)
        return self._names[key]

    def _taken(self, key: str) -> bool:
        return not isinstance(self.place, GgufPlace) and self._name(key)[0] in self._state

    def _equal(self, group: Group, one: str, other: str) -> bool:
        return group.shape(one) == group.shape(other) and torch.equal(group.read(one, self.counted), group.read(other, self.counted))

    # ---- words ----

    def _ask(self, parameter: str) -> str:
        norm = None if self.parts.norm is None else self.parts.norm.weight
        keys = {self.parts.embedding: "embedding_key", norm: "norm_key"}
        return f"say which with target.{keys.get(parameter, 'head_key')}"

    def _missing(self, what: str, parameter: str) -> str:
        return (
            f"{self.place.name}: no {what} found: {self.parts.architecture} calls it {parameter!r}, and no tensor in the files becomes that; closest keys: "
            f"{self._closest(parameter)}. " + ("The class adds it to every logit" if what == "head bias" else f"If one of them is it, {self._ask(parameter)}")
        )

    def _closest(self, key: str) -> str:
        every = [k for g in self.groups for k in g.file_of]
        near = difflib.get_close_matches(key, every, n=3, cutoff=0.3)
        return ", ".join(near) or f"none ({len(every)} tensors in all)"


def _sum_of_bits(tensor: Tensor) -> int:
    stored = tensor.reshape(-1).view(torch.uint8).numpy()
    whole = len(stored) // 8 * 8
    return int(np.add.reduce(stored[:whole].view(np.int64))) + int(stored[whole:].sum())


def _leads_to(parent: str, key: str) -> bool:
    """Whether a module is on the way from the root to a tensor."""
    return not parent or key.startswith(parent + ".")


def _holds_blocks(keys: Mapping[str, str], parent: str) -> bool:
    """Whether numbered blocks lie below a module or beside it, as they do in a language model's body."""
    return any(_leads_to(parent, k) and _NUMBERED.search(k[len(parent) :]) and not _ELSEWHERE.search(k[len(parent) :]) for k in keys)
