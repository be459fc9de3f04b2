"""Every class that transformers maps to text generation, as a tiny random model.

A configuration is shrunk by the names of its fields, sub-configurations included; `zoo_fixes` says what single families need besides. Nothing here
asks Draftsmith for anything: it is the independent side of the matrix.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from zoo_fixes import DEFAULTS, FIXES, FORCED, SIZES, TEXT_PARTS

BLOCKS = 4
"""Decoder blocks of every tiny model; vision and sound towers have two."""
TEXT, IMAGE = "text", "image and text"


@dataclass(frozen=True)
class Case:
    """One class under one of the configurations that it is mapped from."""

    kind: Any
    config_class: Any
    mappings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The class's name; with the configuration's where that is another family's."""
        own = self.kind.config_class is self.config_class
        return self.kind.__name__ if own else f"{self.kind.__name__}-{self.config_class.__name__}"


@cache
def cases() -> dict[str, Case]:
    """All of them by name, in the order of the mappings."""
    found: dict[tuple[Any, Any], list[str]] = {}
    for mapping, table in ((TEXT, MODEL_FOR_CAUSAL_LM_MAPPING), (IMAGE, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)):
        for config_class, kinds in table.items():
            for kind in kinds if isinstance(kinds, tuple) else (kinds,):
                # A wrapper's configuration that is mapped to the text model inside: that model is built from its own part.
                inner = kind.config_class if kind.config_class in config_class.sub_configs.values() else config_class
                mapped = found.setdefault((kind, inner), [])
                mapped.extend([mapping] if mapping not in mapped else [])
    made = [Case(kind, config_class, tuple(mappings)) for (kind, config_class), mappings in found.items()]
    return {case.name: case for case in made}


def tiny(case: Case, tied: bool) -> PreTrainedConfig:
    """The case's configuration, small, with everything set that makes a rule visible: multipliers, caps, scales."""
    config = _shrunk(case.config_class, tied, text=True, decoder=TEXT in case.mappings)
    config.architectures = [case.kind.__name__]
    return config


def _shrunk(config_class: Any, tied: bool, text: bool, decoder: bool) -> Any:
    default = DEFAULTS[config_class.__name__]() if config_class.__name__ in DEFAULTS else config_class()
    given: dict[str, Any] = {}
    for n, field in enumerate(_fields(config_class)):
        value = default.__dict__.get(field)
        if isinstance(value, PreTrainedConfig):
            given[field] = _shrunk(type(value), tied, text and field in TEXT_PARTS, decoder)
        elif field in SIZES and (field in FORCED or value is not None) and not isinstance(value, dict | list):
            given[field] = SIZES[field]
        elif field.endswith(("token_id", "token_index")) and isinstance(value, int) and value > 8:
            given[field] = 75 + n % 16
    special = {"tie_word_embeddings": tied} | ({"is_decoder": True, "is_encoder_decoder": False} if decoder else {})
    given |= {field: value for field, value in special.items() if field in _fields(config_class)}
    if "kv_lora_rank" in given:
        given["num_key_value_heads"] = SIZES["num_attention_heads"]
    if not text:
        given |= {field: 2 for field in ("num_hidden_layers", "num_layers", "n_layer") if field in given}
    return config_class(**(given | FIXES.get(config_class.__name__, {})))


def _fields(config_class: Any) -> Iterator[str]:
    kept = {"tie_word_embeddings", "is_decoder", "is_encoder_decoder"}
    base = {f.name for f in dataclasses.fields(PreTrainedConfig)} - kept
    return (f.name for f in dataclasses.fields(config_class) if f.name not in base)


@torch.no_grad()
def build(case: Case, tied: bool) -> PreTrainedModel:
    """A model in float32 whose every parameter is random: norms, biases and scales too."""
    torch.manual_seed(5)
    model = case.kind._from_config(tiny(case, tied), dtype=torch.float32).eval()
    for p in model.parameters():
        if p.ndim < 2:
            p += 0.3 * torch.randn_like(p)
        else:
            p.copy_(torch.randn_like(p) / math.sqrt(p.shape[-1]))
    return model.requires_grad_(False)


def ties(model: PreTrainedModel) -> bool:
    """Whether head and embedding are one parameter."""
    head = model.get_output_embeddings()
    return any(m is not head and getattr(m, "weight", None) is head.weight for m in model.modules())


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
