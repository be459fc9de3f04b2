"""A tiny target: its configuration, and a real tokenizer with a chat template."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, and the ChatML marks: 259 ids."""
    vocab = {c: i for i, c in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML)


def tiny_config(**changes: object) -> LlamaConfig:
    """Six blocks of hidden size 32, two key-value heads for four query heads."""
    sizes = {
        "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": True, "initializer_range": 0.25,
        "eos_token_id": 2, "bos_token_id": None, "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }  # fmt: skip
    return LlamaConfig(**(sizes | changes))
