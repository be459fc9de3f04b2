"""Which tensor of a checkpoint is the embedding, the head, its bias and the final norm.

First by transformers' own rules for renaming what lies in files into parameters of the model; where they do not reach (native files, unknown
prefixes) by structure: the one tensor with a known last name and the right shape. Two that fit are an error, not a choice.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from draftsmith.target.families import Anatomy
from draftsmith.target.place import GgufPlace, HubPlace, Place
from draftsmith.target.quantized import dequantized, packed_scheme, scale_key
from draftsmith.target.tensors import Group, Read, groups

_LAST_NAMES = {
    "embedding": ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "token_embd", "embeddings", "embed", "embedding"),
    "head": ("lm_head", "embed_out", "unembed", "output", "output_layer", "lm_output"),
    "final norm": ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "final_norm", "output_norm", "embedding_norm"),
}
_LAST_RESORT = {"final norm": ("token_embd_norm",)}
"""Of LFM2's GGUF files; in BLOOM's it is another norm, beside the final one."""
_ELSEWHERE = re.compile(r"vision|visual|image|audio|speech|talker|code2wav|mtp|nextn|draft|eagle|codec|\.\d+\.")
"""Parts of multi-modal and multi-token checkpoints that have embeddings, heads and norms of their own, and numbered blocks."""


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
    """Looks into one checkpoint for the parts of one anatomy."""

    def __init__(self, place: Place, parts: Anatomy, keys: Keys) -> None:
        self.place, self.parts, self.keys = place, parts, keys
        self.counted = Read()
        self.groups = groups(place)
        mapping = get_model_conversion_mapping(parts.model)
        self._renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        self._converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self._state = parts.model.state_dict()
        self._group_of: dict[str, Group] = {}

    def embedding(self) -> Part:
        """Raises ValueError, listing the closest keys, when there is none, or several that fit."""
        part = self._part("embedding", self.parts.embedding, self.keys.embedding, self.groups)
        if part is None:
            raise ValueError(self._missing("embedding", self.parts.embedding))
        return part

    def head(self, search_everywhere: bool) -> Part | None:
        """The head on disk; None without one. With a tied flag only the group that holds the embedding is looked at: its absence is expected."""
        main = self._group_of[self.parts.embedding]
        order = [main, *(g for g in self.groups if g is not main and search_everywhere)]
        return self._part("head", self.parts.head, self.keys.head, order)

    def head_bias(self) -> Part | None:
        """The bias that the class adds to the head's product. Raises ValueError when the class has one and the files do not."""
        if self.parts.head_bias is None:
            return None
        part = self._part("head bias", self.parts.head_bias, None, self.groups)
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

    def read(self, part: Part) -> Tensor:
        """The tensor as the model would hold it: dequantized, converted, checked to be finite. Raises ValueError naming what is wrong."""
        group = self._group_of[part.parameter]
        scheme = packed_scheme(part.key, part.dtype, set(group.file_of))
        if scheme is not None:
            raise ValueError(
                f"{self.place.name}: {part.key} is packed ({scheme}, stored as {part.dtype}) and holds no plain numbers. Give the unquantized "
                "checkpoint of the same model, whose embedding, norm and head are then used: target.head_from: <directory or hub id>"
            )
        tensor = group.read(part.key, self.counted)
        scale = scale_key(part.key, part.dtype, group.file_of)
        if scale is not None:
            tensor = dequantized(tensor, group.read(scale, self.counted), part.key)
        if part.converter is not None:
            tensor = self._converted(part, tensor)
        bad = ~torch.isfinite(tensor)
        if bad.any():
            row = int(bad.flatten(1).any(1).nonzero()[0]) if tensor.ndim > 1 else int(bad.nonzero()[0])
            raise ValueError(
                f"{self.place.name}: {part.key} holds {int(bad.sum()):,} values that are NaN or infinite (first in row {row}): the checkpoint is damaged"
            )
        return tensor

    def close(self) -> None:
        """Let go of all files."""
        for group in self.groups:
            group.close()

    def check_shapes(self, embedding: Tensor, head: Tensor, bias: Tensor | None) -> None:
        """Raises ValueError when shapes disagree with what config.json says the model has."""
        given = {self.parts.embedding: embedding, self.parts.head: head} | ({} if bias is None else {str(self.parts.head_bias): bias})
        for name, tensor in given.items():
            expected = tuple(self._state[name].shape)
            if tuple(tensor.shape) != expected:
                raise ValueError(
                    f"{self.place.name}: {name} is {tuple(tensor.shape)} in the files, and config.json makes it {expected}: config.json and weights are of "
                    "different models, or one of them was changed alone"
                )

    def fingerprint(self, config: PreTrainedConfig) -> str:
        """Sixteen hex digits of the configuration and a sample of every tensor; of a hub repository, its commit."""
        skipped = ("_name_or_path", "transformers_version", "dtype")
        digest = hashlib.sha256(json.dumps({k: v for k, v in config.to_dict().items() if k not in skipped}, sort_keys=True, default=str).encode())
        if isinstance(self.place, HubPlace):
            digest.update(self.place.snapshot.commit.encode())
        else:
            for group in self.groups:
                for key in sorted(group.file_of):
                    digest.update(key.encode() + group.sample(key))
                group.close()
        return digest.hexdigest()[:16]

    def _part(self, what: str, parameter: str, given: str | None, order: list[Group]) -> Part | None:
        for group in order:
            key = given if given in group.file_of else None
            if given is None:
                key = self._renamed(group, parameter) or self._structural(group, what, parameter)
            if key is not None:
                self._group_of[parameter] = group
                shape, dtype = group.shape(key)
                return Part(key, group.file_of[key], parameter, shape, dtype, self._name(key)[1])
        if given is not None:
            raise ValueError(f"{self.place.name} holds no tensor {given!r}, which was given as {what}; closest keys: {self._closest(given)}")
        return None

    def _renamed(self, group: Group, parameter: str) -> str | None:
        """The key that transformers itself would load into this parameter."""
        if isinstance(self.place, GgufPlace):
            return None
        found = [k for k in self._candidates(group) if self._name(k)[0] in (parameter, _unpacked(parameter))]
        found = sorted(found, key=lambda k: (k != parameter, len(k)))
        return found[0] if found else None

    def _structural(self, group: Group, what: str, parameter: str) -> str | None:
        names = _LAST_NAMES.get(what)
        if names is None:
            return None
        shape = tuple(self._state[parameter].shape) if parameter in self._state else None
        free = [k for k in self._candidates(group) if self._name(k)[0] not in self._state]
        named = [k for k in free if _last_name(k) in names] or [k for k in free if _last_name(k) in _LAST_RESORT.get(what, ())]
        fits = [k for k in named if shape is None or group.shape(k)[0] == shape]
        if len(fits) > 1:
            raise ValueError(
                f"{self.place.name}: {len(fits)} tensors could be the {what}: {', '.join(sorted(fits))}; say which with target.{what.split()[-1]}_key"
            )
        return fits[0] if fits else None

    def _candidates(self, group: Group) -> Iterator[str]:
        return (k for k in group.file_of if k.endswith((".weight", ".bias", *_PACKED)) and not _ELSEWHERE.search(k))

    def _name(self, key: str) -> tuple[str, str | None]:
        """The parameter that transformers makes of a key, and the converter that changes the tensor on the way."""
        key = _unpacked(key)
        name, converter = rename_source_key(key, self._renamings, self._converters, self.parts.model.base_model_prefix, self._state)
        if name not in self._state and key in self._state:
            return key, None
        return name, converter

    def _converted(self, part: Part, tensor: Tensor) -> Tensor:
        converter: Any = deepcopy(next(c for c in self._converters if part.converter in c.source_patterns))
        converter.add_tensor(part.parameter, part.key, part.converter, tensor)
        made: Any = converter.convert(part.parameter, model=self.parts.model, config=self.parts.model.config)[part.parameter]
        return made[0] if isinstance(made, list) else made

    def _missing(self, what: str, parameter: str) -> str:
        return (
            f"{self.place.name}: no {what} found: {self.parts.architecture} calls it {parameter!r}, and no tensor in the files becomes that; closest keys: "
            f"{self._closest(parameter)}. If one of them is it, give target.{what.split()[-1]}_key"
        )

    def _closest(self, key: str) -> str:
        every = [k for g in self.groups for k in g.file_of]
        near = difflib.get_close_matches(key, every, n=3, cutoff=0.3)
        return ", ".join(near) or f"none ({len(every)} tensors in all)"


_PACKED = (".qweight", ".weight_packed")


def _unpacked(key: str) -> str:
    """The plain tensor's name behind a packed one's."""
    for suffix in _PACKED:
        if key.endswith(suffix):
            return key.removesuffix(suffix) + ".weight"
    return key


def _last_name(key: str) -> str:
    return _unpacked(key).rpartition(".")[0].rpartition(".")[2]
