"""GGUF files: the numbers that transformers makes of them, the model's own norm where the file stores another, and damaged files named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import SIZES
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, Lfm2Config, LlamaConfig, PreTrainedModel, Qwen2Config

from draftsmith.data.template import ChatTemplate
from draftsmith.target.gguf_header import gguf_config
from draftsmith.target.model import TargetModel
from draftsmith.target.smollm2 import _gguf, directory
from draftsmith.target.weights import Target

IDS = torch.tensor([[5, 9, 17, 3, 88, 41, 2, 60]])
WIDE = SIZES | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
NARROW = {k: v for k, v in WIDE.items() if k != "head_dim"}
FAMILIES: dict[str, tuple[str, Any]] = {
    "untied": ("qwen2", lambda: Qwen2Config(**NARROW, tie_word_embeddings=False)),
    "tied": ("qwen2", lambda: Qwen2Config(**NARROW, tie_word_embeddings=True)),
    "norm stored with its 1": ("gemma3", lambda: Gemma3TextConfig(**WIDE, tie_word_embeddings=True)),
    "norm stored with its 1, capped": ("gemma2", lambda: Gemma2Config(**WIDE, tie_word_embeddings=True)),
}


def tiny(config: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p += 0.3 * torch.randn_like(p)
    return model


def settings(writer: GGUFWriter, config: Any) -> None:
    """The metadata that transformers needs of every family here."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", 1e-5))
    writer.add_rope_freq_base(float((config.rope_parameters or {}).get("rope_theta", 10000.0)))
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(config.vocab_size)])
    writer.add_array("tokenizer.ggml.token_type", [1] * config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_eos_token_id(1)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(model: PreTrainedModel, architecture: str, path: Path, quantized: str | None = None) -> None:
    """As llama.cpp's converter writes it: its names, and Gemma's norms with 1 added; matrices quantized if so told."""
    writer = GGUFWriter(path, architecture)
    settings(writer, model.config)
    arch = next(a for a, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, model.config.num_hidden_layers)
    tied = set(model.all_tied_weights_keys or {})
    for key, tensor in model.state_dict().items():
        if key in tied:
            continue
        name, _, end = key.rpartition(".")
        values = tensor.numpy() + (1 if architecture.startswith("gemma") and "norm" in key else 0)
        known = names.get_name(name)
        assert known is not None, key
        if quantized is not None and values.ndim == 2:
            kind = GGMLQuantizationType[quantized]
            writer.add_tensor(f"{known}.{end}", quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{known}.{end}", values)
    finish(writer)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantized", [None, "F16", "BF16", "Q8_0"])
def test_tensors_are_those_of_the_model_that_transformers_loads(family: str, quantized: str | None, tmp_path: Path) -> None:
    architecture, config = FAMILIES[family]
    original = tiny(config())
    write(original, architecture, tmp_path / "m.gguf", quantized)
    target, model = Target.load(str(tmp_path / "m.gguf")), TargetModel.load(str(tmp_path / "m.gguf"), torch.float32)
    state = model.model.state_dict()
    shift = 1.0 if architecture.startswith("gemma") else 0.0
    assert target.tied == (family != "untied")
    assert torch.equal(target.embedding_VH.float(), state["model.embed_tokens.weight"])
    assert torch.equal(target.head_VH.float(), model.head.weight)
    torch.testing.assert_close(target.norm_H.float(), state["model.norm.weight"] + shift, rtol=0, atol=1e-6)
    torch.testing.assert_close(target.norm_H.float(), original.state_dict()["model.norm.weight"] + shift, rtol=0, atol=1e-6)
    assert target.embedding_VH.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(quantized or "", torch.float32)
    torch.testing.assert_close(target.logits(model.run(IDS).last_BQH), model.own_logits(IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sized", [False, True])
def test_the_configuration_without_the_vocabulary_is_the_whole_ones(family: str, sized: bool, tmp_path: Path) -> None:
    architecture, config = FAMILIES[family]
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, architecture)
    settings(writer, config())
    if sized:
        writer.add_vocab_size(config().vocab_size)
    writer.add_name("a name")
    writer.add_array("general.languages", ["en", "de"])
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.add_tensor("output.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    whole = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert gguf_config(path).to_dict() == whole.to_dict()
    assert gguf_config(path).vocab_size == 97


def test_a_final_norm_under_another_name(tmp_path: Path) -> None:
    """LFM2's final norm is called after the embedding, in the model and in the file."""
    config = Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv", "full_attention"], block_auto_adjust_ff_dim=False)
    model = tiny(config)
    writer = GGUFWriter(tmp_path / "m.gguf", "lfm2")
    settings(writer, config)
    writer.add_head_count_kv([0, 2, 0, 2])
    writer.add_uint32("lfm2.shortconv.l_cache", config.conv_L_cache)
    writer.add_vocab_size(97)
    writer.add_tensor("token_embd.weight", model.state_dict()["model.embed_tokens.weight"].numpy())
    writer.add_tensor("token_embd_norm.weight", model.state_dict()["model.embedding_norm.weight"].numpy())
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(32, np.float32))
    finish(writer)
    target = Target.load(str(tmp_path / "m.gguf"))
    assert torch.equal(target.norm_H, model.state_dict()["model.embedding_norm.weight"])
    assert torch.equal(target.head_VH, model.state_dict()["model.embed_tokens.weight"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tiny(FAMILIES["untied"][1]()), "qwen2", tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 3000, -1000, -4])
def test_a_truncated_file_is_named(keep: int, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"m\.gguf .*truncated"):
        Target.load(str(file))


@pytest.mark.parametrize("text", ["hello", "version https://git-lfs.github.com/spec/v1\n", "GGUF and then a text that is long enough to be read as a header"])
def test_a_text_under_its_name_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "m.GGUF").write_text(text)
    with pytest.raises(ValueError, match=r"m\.GGUF cannot be read as GGUF"):
        Target.load(str(tmp_path / "m.GGUF"))


@pytest.mark.parametrize(
    ("architecture", "parts", "expected"),
    [("llama", 3, "is one of 3 parts of a model: merge them"), ("brand-new", 1, "architecture brand-new is not supported")],
)
def test_a_part_of_a_model_and_an_unknown_architecture_are_told(architecture: str, parts: int, expected: str, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", architecture)
    settings(writer, LlamaConfig(**SIZES))
    writer.add_uint16("split.count", parts)
    writer.add_tensor("token_embd.weight", np.zeros((97, 32), np.float32))
    finish(writer)
    with pytest.raises(ValueError, match=expected):
        Target.load(str(tmp_path / "m.gguf"))


@pytest.mark.slow
def test_the_real_file_is_its_converted_checkpoint() -> None:
    """SmolLM2, which the conversion rounds to bfloat16."""
    target, converted = Target.load(str(_gguf())), Target.load(str(directory()))
    assert target.tied
    for part in ("embedding_VH", "head_VH", "norm_H"):
        assert torch.equal(getattr(target, part).bfloat16(), getattr(converted, part).bfloat16())
    assert target.shape == converted.shape
    assert ChatTemplate.load(str(_gguf())).end_ids == ChatTemplate.load(str(directory())).end_ids
