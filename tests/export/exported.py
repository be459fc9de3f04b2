"""A small draft with no idle part, and its directory as other tools would have published it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.core.types import Features
from draftsmith.data.vocab import count
from draftsmith.drafts.base import Context, Draft, Sampling
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.export.card import Origin
from draftsmith.export.write import ExportConfig
from draftsmith.features.pack import pack
from draftsmith.target.weights import Target

LAYERS, DRAFT_VOCABULARY, WIDTH = (1, 2, 4), 70, 5
CONFIG = ExportConfig()
ORIGIN = Origin("some/target", tokenizer="tokens")


def tiny_draft(target: Target, found: Sequence[Features], **settings: object) -> Eagle3:
    """With the constants and the vocabulary of an initialised draft, and random weights, so that no part of the block is idle."""
    torch.manual_seed(1)
    made = Eagle3(Eagle3Config(**({"vocab_size": DRAFT_VOCABULARY, "layers": LAYERS} | settings)), target.shape)
    made.initialise(target, count([f.sample for f in found], 259), pack(list(found)))
    for parameter in made.parameters():
        parameter.data = torch.rand(len(parameter)) + 0.5 if parameter.ndim == 1 else torch.randn(parameter.shape) / parameter.shape[1] ** 0.5
    assert made.feature_scale.max() > 1
    return made.eval()


def propose(draft: Draft, target: Target, features: Features, stop: int) -> list[int]:
    place = torch.arange(stop)[None]
    context = Context(features.hidden_TF[None, :stop], features.sample.input_ids[None, 1 : stop + 1], place, torch.ones_like(place, dtype=torch.bool))
    return draft.propose(context, draft.start(1), target, WIDTH, Sampling()).tokens_BW[0].tolist()


def save_directory(where: Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> Path:
    """A directory of these contents; the checksum in `facts` becomes that of the tensors."""
    where.mkdir(exist_ok=True)
    (where / "config.json").write_text(json.dumps(fields))
    save_file(dict(tensors), where / "model.safetensors")
    if facts is not None:
        digest = hashlib.sha256((where / "model.safetensors").read_bytes()).hexdigest()
        (where / "draftsmith.json").write_text(json.dumps(dict(facts) | {"sha256": {"model.safetensors": digest}}))
    return where


BLOCK = ("self_attn.", "mlp.", "input_layernorm.", "hidden_norm.", "post_attention_layernorm.")
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "vocab_size": 259,
    "max_position_embeddings": 512, "hidden_act": "silu", "num_hidden_layers": 1, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": [2, 7],
}  # fmt: skip
SPECFORGE = SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": DRAFT_VOCABULARY, "rope_theta": 5000.0, "rope_scaling": None,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "use_aux_hidden_state": True}, "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
EAGLE = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": DRAFT_VOCABULARY, "rope_theta": 5000.0, "bias": False}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0", "draft_vocab_size": DRAFT_VOCABULARY,
    "norm_before_residual": False, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [i + 1 for i in LAYERS], "tie_word_embeddings": False,
    "transformer_layer_config": SIZES | {"model_type": "llama", "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}},
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
    },
}  # fmt: skip


def renamed(plain: Mapping[str, Tensor], block: str) -> dict[str, Tensor]:
    """Our tensors under the names of published checkpoints."""
    return {block + name if name.startswith(BLOCK) else name: tensor.clone() for name, tensor in plain.items()}
