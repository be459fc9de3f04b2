"""Tiny random checkpoints of several families, built from their configurations."""

from __future__ import annotations

from collections.abc import Callable

from transformers import (
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "initializer_range": 0.25, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip

PLAIN: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2-tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=False),
    "phi3": lambda: Phi3Config(**SIZES, tie_word_embeddings=False),
}
OTHER_RULES: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0),
    "cohere": lambda: CohereConfig(**SIZES, logit_scale=0.25),
    "cohere2": lambda: Cohere2Config(**SIZES, logit_scale=0.25),
    "granite": lambda: GraniteConfig(**SIZES, logits_scaling=4.0),
    "phi (head with a bias)": lambda: PhiConfig(**SIZES),
}
