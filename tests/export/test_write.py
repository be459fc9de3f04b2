"""Exported directories: what engines read, proposed alike by a reader written from their rules alone, and refused when anything is off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import CONFIG, DRAFT_VOCABULARY, LAYERS, WIDTH, propose
from mini_eagle3 import MiniEagle3
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from draftsmith.core.types import Features
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.export.layouts import config_of
from draftsmith.export.read import read
from draftsmith.export.write import ExportConfig, compare, export
from draftsmith.target.weights import Target

# ---- what is written ----


def test_the_directory_holds_four_files_and_the_tensors_that_engines_name(folder: Path, tensors: dict[str, Tensor]) -> None:
    assert sorted(p.name for p in folder.parent.rglob("*")) == ["README.md", "config.json", "draft", "draftsmith.json", "model.safetensors"]
    hidden, mlp, kv = 32, 48, 16
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "fc.weight": (hidden, 3 * hidden), "embed_tokens.weight": (259, hidden), "norm.weight": (hidden,), "lm_head.weight": (DRAFT_VOCABULARY, hidden),
        "midlayer.input_layernorm.weight": (hidden,), "midlayer.hidden_norm.weight": (hidden,), "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (hidden, 2 * hidden), "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden), "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.mlp.gate_proj.weight": (mlp, hidden), "midlayer.mlp.up_proj.weight": (mlp, hidden), "midlayer.mlp.down_proj.weight": (hidden, mlp),
        "d2t": (DRAFT_VOCABULARY,), "t2d": (259,),
    }  # fmt: skip


def test_config_fields_are_those_of_the_engines(fields: dict[str, Any]) -> None:
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 259, "draft_vocab_size": DRAFT_VOCABULARY,
        "hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False, "norm_before_residual": False, "dtype": "float32", "torch_dtype": "float32",
        "rope_theta": 5000.0, "rope_scaling": None, "num_aux_hidden_states": 3, "bos_token_id": None, "eos_token_id": 2,
    }  # fmt: skip
    assert {k: fields.get(k, "absent") for k in expected} == expected
    assert fields["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}


def test_layer_ids_stand_in_both_conventions(fields: dict[str, Any]) -> None:
    """Outputs for SGLang, nested; inputs for vLLM and llama.cpp, at the top level."""
    assert fields["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    assert fields["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]


def test_scaled_rotary_positions_are_written_both_ways(target: Target) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 9000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    shape = target.shape.__class__(**(vars(target.shape) | {"rope": rope}))
    config = config_of(Eagle3(Eagle3Config(vocab_size=8, layers=LAYERS), shape), "engine", "float32", "", WIDTH)
    assert config["rope_parameters"] == rope
    assert config["rope_theta"] == 9000.0
    assert config["rope_scaling"] == {k: v for k, v in rope.items() if k != "rope_theta"}


def test_vocabulary_tables_agree(tensors: dict[str, Tensor], found: list[Features]) -> None:
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    assert int(t2d.sum()) == DRAFT_VOCABULARY
    assert torch.equal(t2d.nonzero()[:, 0], torch.arange(DRAFT_VOCABULARY) + d2t)
    answered = {i for f in found for i in f.sample.input_ids[f.sample.loss_mask].tolist()}
    assert len(answered) <= DRAFT_VOCABULARY
    assert answered <= set(t2d.nonzero()[:, 0].tolist())


def test_the_constants_of_training_are_inside_fc_and_the_embedding_is_the_targets(
    tensors: dict[str, Tensor], draft: Eagle3, target: Target, folder: Path
) -> None:
    for i, scale in enumerate(draft.feature_scale.tolist()):
        columns = slice(32 * i, 32 * (i + 1))
        assert torch.equal(tensors["fc.weight"][:, columns], draft.fc.weight[:, columns] / scale)
    assert torch.equal(tensors["embed_tokens.weight"], target.embedding_VH)
    assert torch.equal(read(folder).feature_scale, torch.ones(3))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
def test_transformers_reads_the_config(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.vocab_size, config.draft_vocab_size) == ("llama", 259, DRAFT_VOCABULARY)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert (config.tie_word_embeddings, config.dtype, config.head_dim) == (False, torch.float32, 8)
    assert config.eagle_aux_hidden_state_layer_ids == [2, 3, 5]


# ---- what it proposes ----


@pytest.mark.parametrize("legacy", [False, True])
def test_a_reader_of_the_directory_alone_proposes_the_same(folder: Path, draft: Eagle3, target: Target, found: list[Features], legacy: bool) -> None:
    mini = MiniEagle3(folder, legacy)
    texts = set()
    for features in found:
        for stop in {1, len(features) // 2, len(features) - 1} - {0}:
            expected = mini.propose(features.hidden_TF, features.sample.input_ids[1 : stop + 1].tolist(), WIDTH)
            assert propose(draft, target, features, stop) == expected
            texts.add(tuple(expected))
    assert len(texts) > 5, "proposals differ from place to place"


def test_read_gives_back_the_draft(folder: Path, draft: Eagle3, target: Target, found: list[Features]) -> None:
    again = read(folder)
    assert isinstance(again, Eagle3)
    assert again.layers == LAYERS
    assert {k: torch.equal(v, again.plain_state()[k]) for k, v in draft.plain_state().items()} == dict.fromkeys(draft.plain_state(), True)
    for features in found:
        assert propose(again, target, features, len(features) - 1) == propose(draft, target, features, len(features) - 1)


def test_export_compares_up_to_eight_places_of_every_sample(draft: Eagle3, target: Target, found: list[Features], tmp_path: Path) -> None:
    assert export(draft, target, tmp_path / "one", CONFIG, found, WIDTH) == 8 + 1 + 8 + 8


def test_bfloat16_export_rounds_every_tensor_and_compares_with_the_rounded_draft(draft: Eagle3, target: Target, found: list[Features], tmp_path: Path) -> None:
    where = tmp_path / "half"
    assert export(draft, target, where, ExportConfig(dtype="bfloat16"), found, WIDTH) == 25
    fields, tensors = json.loads((where / "config.json").read_text()), load_file(where / "model.safetensors")
    assert fields["dtype"] == fields["torch_dtype"] == "bfloat16"
    assert torch.equal(tensors["fc.weight"], draft.plain_state()["fc.weight"].bfloat16())
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert {name: t.dtype for name, t in tensors.items() if t.is_floating_point() and t.dtype != torch.bfloat16} == {}
    assert all(p.dtype == torch.float32 for p in draft.parameters()), "the draft itself is left as it was"
    mini = MiniEagle3(where)
    again = read(where)
    features = found[3]
    same = [
        mini.propose(features.hidden_TF, features.sample.input_ids[1 : stop + 1].tolist(), WIDTH) == propose(again, target, features, stop)  # type: ignore[arg-type]
        for stop in (3, 11, 30)
    ]
    assert same == [True] * 3


# ---- faults ----


def test_constants_forgotten_at_export_are_found_and_nothing_is_left(
    draft: Eagle3, target: Target, found: list[Features], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: fc without the constants."""
    monkeypatch.setattr(Eagle3, "plain_state", lambda self: {k: v for k, v in self.state_dict().items() if k != "feature_scale"})
    with pytest.raises(ValueError, match=r"proposes .* where the checkpoint proposes .*sample 's\d"):
        export(draft, target, tmp_path / "wrong", CONFIG, found, WIDTH)
    assert list(tmp_path.iterdir()) == []


def swapped_head(state: dict[str, Tensor]) -> None:
    state["lm_head.weight"] = state["lm_head.weight"].flip(0)


def wrong_offsets(state: dict[str, Tensor]) -> None:
    """Absolute ids instead of offsets."""
    state["d2t"] = state["d2t"] + torch.arange(len(state["d2t"]))


def swapped_norms(state: dict[str, Tensor]) -> None:
    state["input_layernorm.weight"], state["hidden_norm.weight"] = state["hidden_norm.weight"], state["input_layernorm.weight"]


@pytest.mark.parametrize("fault", [swapped_head, wrong_offsets, swapped_norms])
def test_a_wrong_tensor_is_found_and_an_older_export_is_kept(
    draft: Eagle3, target: Target, found: list[Features], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[dict[str, Tensor]], None]
) -> None:
    where = tmp_path / "kept"
    export(draft, target, where, CONFIG, found, WIDTH)
    before = {p.name: p.read_bytes() for p in where.iterdir()}
    right = Eagle3.plain_state

    def wrong(self: Eagle3) -> dict[str, Tensor]:
        state = right(self)
        fault(state)
        return state

    monkeypatch.setattr(Eagle3, "plain_state", wrong)
    with pytest.raises((ValueError, IndexError)):
        export(draft, target, where, CONFIG, found, WIDTH)
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert {p.name: p.read_bytes() for p in where.iterdir()} == before


def test_compare_sees_one_different_proposal(folder: Path, draft: Eagle3, target: Target, found: list[Features]) -> None:
    other = read(folder)
    assert compare(other, draft, target, found, WIDTH) == 25
    assert isinstance(other, Eagle3)
    other.fc.weight.data[:, 64:] *= -1
    with pytest.raises(ValueError, match="token 1"):
        compare(other, draft, target, found[2:], WIDTH)


# ---- bad directories ----


@pytest.mark.parametrize("name", ["d2t", "fc.weight", "midlayer.hidden_norm.weight"])
def test_a_missing_tensor_is_named(copied: Callable[..., Path], tensors: dict[str, Tensor], name: str) -> None:
    tensors.pop(name)
    named = name.removeprefix("midlayer.")
    with pytest.raises(ValueError, match="d2t is missing" if name == "d2t" else rf"missing tensors \['{named}'\], unknown tensors none"):
        read(copied(other=tensors))


def test_an_unknown_tensor_is_named(copied: Callable[..., Path], tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(32)
    with pytest.raises(ValueError, match=r"missing tensors none, unknown tensors \['midlayer.self_attn.q_proj.bias'\]"):
        read(copied(other=tensors))


def test_an_export_without_the_embedding_is_read(copied: Callable[..., Path], tensors: dict[str, Tensor]) -> None:
    tensors.pop("embed_tokens.weight")
    assert read(copied(other=tensors)).layers == LAYERS


@pytest.mark.parametrize("given", [["DFlashDraftModel"], ["LlamaForCausalLMEagle"], [], None])
def test_an_unknown_architecture_is_named(copied: Callable[..., Path], fields: dict[str, Any], given: list[str] | None) -> None:
    with pytest.raises(ValueError, match=rf"architecture {(given or ['none'])[0]} is none that Draftsmith reads; it reads eagle3"):
        read(copied(fields | {"architectures": given}))


REQUIRED = (
    "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(copied: Callable[..., Path], fields: dict[str, Any], name: str) -> None:
    fields.pop(name)
    with pytest.raises(ValueError, match=rf"lacks '{name}'"):
        read(copied(fields))


def test_a_missing_file_is_named(copied: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        read(copied(changed=None))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read(copied(other=None))


def test_a_truncated_file_is_named(copied: Callable[..., Path]) -> None:
    path = copied() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read(path.parent)


def test_a_tensor_of_another_size_than_the_config_says_is_named(copied: Callable[..., Path], fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"d2t is \[70\] of torch.int64, expected 69 whole numbers"):
        read(copied(fields | {"draft_vocab_size": DRAFT_VOCABULARY - 1}))
    with pytest.raises(ValueError, match=r"mlp.gate_proj.weight is \[48, 32\], config.json asks for \[47, 32\]"):
        read(copied(fields | {"intermediate_size": 47}))
