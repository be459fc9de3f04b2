"""Tiny random checkpoints, and families whose logits are not `head @ last`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, MiniCPM3Config, PhiConfig, PreTrainedConfig

_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8, "dim_model_base": 8}


def saved(config: PreTrainedConfig, folder: Path, seed: int = 3, spread: float = 0.3, **how: object) -> Path:
    """A checkpoint with seeded random weights; biases and norms move by `spread`, so that leaving one out shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p += spread * torch.randn_like(p)
    model.save_pretrained(folder, **how)
    return folder


def ruled(cap: float, **sizes: Any) -> dict[str, Callable[[], PreTrainedConfig]]:
    """Configurations by what their class does to the head's product, four blocks of hidden size 32."""
    every: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "initializer_range": 0.25, "bos_token_id": None, "pad_token_id": 0, **sizes,
    }  # fmt: skip
    return {
        "gemma2 (cap)": lambda: Gemma2Config(**every, head_dim=8, final_logit_softcapping=cap),
        "cohere (scale)": lambda: CohereConfig(**every, logit_scale=0.25),
        "granite (scale)": lambda: GraniteConfig(**every, logits_scaling=4.0),
        "minicpm3 (before the head)": lambda: MiniCPM3Config(**every, **_LATENT),
        "phi (bias)": lambda: PhiConfig(**every),
    }
