"""Every class that transformers maps to text generation, as a tiny random model.

A configuration is shrunk by the names of its fields, sub-configurations included; `zoo_fixes` says what single families need besides. Nothing here
asks Draftsmith for anything: it is the independent side of the matrix.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from zoo_fixes import DEFAULTS, FIXES, FORCED, SIZES, TEXT_PARTS, WINDOWS

BLOCKS = 4
"""Decoder blocks of every tiny model; vision and sound towers have two."""


@dataclass(frozen=True)
class Case:
    """One class under one kind of configuration that it is mapped from."""

    name: str
    architecture: str
    model_type: str
    config_name: str
    text: bool
    """In the mapping of text models; in that of image-text models alone otherwise."""

    @property
    def kind(self) -> Any:
        """The model's class."""
        return getattr(transformers, self.architecture)

    @property
    def config_class(self) -> Any:
        """The configuration's; of a wrapper's, mapped to the text model inside, the part that this model is built from."""
        mapped = getattr(transformers, self.config_name)
        return self.kind.config_class if self.kind.config_class in mapped.sub_configs.values() else mapped


def cases() -> dict[str, Case]:
    """All of them by name, in the order of the mappings, from tables of strings: nothing is imported for it."""
    found: dict[tuple[str, str], Case] = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        for model_type, kinds in mapping._model_mapping.items():
            for kind in kinds if isinstance(kinds, tuple) else (kinds,):
                if model_type in mapping._config_mapping:
                    config_name = mapping._config_mapping[model_type]
                    found.setdefault((kind, config_name), Case("", kind, model_type, config_name, mapping is MODEL_FOR_CAUSAL_LM_MAPPING))
    shared = Counter(case.architecture for case in found.values())
    plain = [c for c in found.values() if shared[c.architecture] == 1 or c.architecture.startswith(c.config_name.removesuffix("Config") + "For")]
    named = [replace(c, name=c.architecture if c in plain else f"{c.architecture}-{c.model_type}") for c in found.values()]
    return {case.name: case for case in named}


def tiny(case: Case, tied: bool | None = None, window: int = 4) -> PreTrainedConfig:
    """The case's configuration, small, with everything set that makes a rule visible: multipliers, caps, scales.

    `tied`: the tie flag at every level; None leaves it as the class has it. `window`: how far sliding windows reach.
    """
    config = _shrunk(case.config_class, tied, text=True, decoder=case.text, sizes=SIZES | dict.fromkeys(WINDOWS, window))
    config.architectures = [case.architecture]
    return config


def _shrunk(config_class: Any, tied: bool | None, text: bool, decoder: bool, sizes: Mapping[str, Any]) -> Any:
    default = DEFAULTS[config_class.__name__]() if config_class.__name__ in DEFAULTS else config_class()
    given: dict[str, Any] = {}
    for n, field in enumerate(_fields(config_class)):
        value = default.__dict__.get(field)
        if isinstance(value, PreTrainedConfig):
            given[field] = _shrunk(type(value), tied, text and field in TEXT_PARTS, decoder, sizes)
        elif field in sizes and (field in FORCED or value is not None) and not isinstance(value, dict | list | tuple):
            given[field] = sizes[field]
        elif field.endswith(("token_id", "token_index")) and isinstance(value, int) and value > 8:
            given[field] = 75 + n % 16
    special = {"is_decoder": True, "is_encoder_decoder": False} if decoder else {}
    special |= {} if tied is None else {"tie_word_embeddings": tied}
    given |= {field: value for field, value in special.items() if field in _fields(config_class)}
    if "kv_lora_rank" in given:
        given["num_key_value_heads"] = sizes["num_attention_heads"]
    if not text:
        given |= {field: 2 for field in ("num_hidden_layers", "num_layers", "n_layer") if field in given}
    return config_class(**(given | FIXES.get(config_class.__name__, {})))


def _fields(config_class: Any) -> Iterator[str]:
    kept = {"tie_word_embeddings", "is_decoder", "is_encoder_decoder"}
    base = {f.name for f in dataclasses.fields(PreTrainedConfig)} - kept
    return (f.name for f in dataclasses.fields(config_class) if f.name not in base)


@torch.no_grad()
def build(case: Case, tied: bool | None = None, window: int = 4) -> PreTrainedModel:
    """A model in float32 whose every parameter is random: norms, biases and scales too."""
    torch.manual_seed(5)
    model = case.kind._from_config(tiny(case, tied, window), dtype=torch.float32).eval()
    for p in model.parameters():
        if p.ndim < 2:
            p += 0.3 * torch.randn_like(p)
        else:
            p.copy_(torch.randn_like(p) / math.sqrt(p.shape[-1]))
    return model.requires_grad_(False)


def head_of(model: PreTrainedModel) -> nn.Module:
    """The head: the model's own, or its text model's."""
    return next(m.get_output_embeddings() for m in model.modules() if isinstance(m, PreTrainedModel) and m.get_output_embeddings() is not None)


def ties(model: PreTrainedModel) -> bool:
    """Whether head and embedding are one parameter."""
    return head_of(model).weight is model.get_input_embeddings().weight


LAYOUTS = ("safetensors, one file", "safetensors, shards", "bin, one file", "bin, shards")


def save(model: PreTrainedModel, folder: Path, layout: str) -> None:
    """Write a checkpoint: safetensors as transformers does; `.bin` as transformers 4 did, its state dict pickled, tied tensors under both names."""
    size = sum(p.nbytes for p in model.parameters())
    shards = 3 if layout.endswith("shards") else 1
    if layout.startswith("safetensors"):
        model.save_pretrained(folder, max_shard_size=size if shards == 1 else size // shards)
        return
    model.config.save_pretrained(folder)
    tensors = {k: t.contiguous() for k, t in revert_weight_conversion(model, dict(model.state_dict())).items()}
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    names = list(tensors)
    file_of = {k: f"pytorch_model-0000{n % shards + 1}-of-0000{shards}.bin" for n, k in enumerate(names)}
    for file in set(file_of.values()):
        torch.save({k: tensors[k] for k in names if file_of[k] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": file_of}), encoding="utf-8")
