"""Drafts published by others: every layout read to the same tensors, what is not computed here refused by name, and import(export(x)) == x."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import CONFIG, DRAFT_VOCABULARY, EAGLE, LAYERS, ORIGIN, SPECFORGE, SPECULATORS, WIDTH, propose, renamed, save_directory, tiny_draft
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.core.types import Features
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.export.read import published, read, require_embedding
from draftsmith.export.write import ExportConfig, export
from draftsmith.target.weights import Target

TABLES = ("d2t", "t2d")


def same(draft: Eagle3, other: Any) -> None:
    """Bit for bit, captured blocks and sizes too."""
    assert isinstance(other, Eagle3)
    ours, theirs = draft.plain_state(), other.plain_state()
    assert {name: torch.equal(theirs[name], tensor) for name, tensor in ours.items()} == dict.fromkeys(ours, True)
    assert (other.layers, other.config.norm_before_residual) == (draft.layers, draft.config.norm_before_residual)
    assert (other.shape.rope["rope_theta"], other.shape.head_dim, other.shape.intermediate_size) == (5000.0, 8, 48)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("form", ["engine", "speculators"])
def test_a_round_trip_changes_no_bit(target: Target, found: list[Features], tmp_path: Path, form: Any, normed: bool) -> None:
    draft = tiny_draft(target, found, norm_before_residual=normed)
    export(draft, target, tmp_path / "x", ExportConfig(format=form), found, WIDTH)
    again = read(tmp_path / "x", target.shape)
    same(draft, again)
    export(again, target, tmp_path / "y", ExportConfig(format=form), found, WIDTH)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "x" / name).read_bytes() == (tmp_path / "y" / name).read_bytes()


def test_the_speculators_form_is_that_of_its_library(draft: Eagle3, target: Target, found: list[Features], tmp_path: Path) -> None:
    """Every field that SPECULATORS, written by hand, has; ids count inputs, norm flags are stated, the block is `layers.0.`."""
    export(draft, target, tmp_path / "x", ExportConfig(format="speculators"), found, 4, ORIGIN)
    fields = published(tmp_path / "x").fields
    expected = SPECULATORS["transformer_layer_config"] | {"eos_token_id": 2, "bos_token_id": None}
    assert {k: fields["transformer_layer_config"].get(k) for k in expected} == expected
    for key in (
        "speculators_model_type",
        "architectures",
        "draft_vocab_size",
        "norm_before_residual",
        "tie_word_embeddings",
        "eagle_aux_hidden_state_layer_ids",
    ):
        assert fields[key] == SPECULATORS[key]
    proposal = fields["speculators_config"]
    assert (proposal["algorithm"], proposal["verifier"]["name_or_path"], proposal["proposal_methods"][0]["speculative_tokens"]) == ("eagle3", "some/target", 4)
    names = set(load_file(tmp_path / "x" / "model.safetensors"))
    assert {"layers.0.hidden_norm.weight", "layers.0.self_attn.q_proj.weight", "fc.weight", "d2t", "t2d"} <= names
    assert not any(name.startswith("midlayer.") for name in names)


# ---- layouts of others ----


def test_specforge(draft: Eagle3, target: Target, found: list[Features], tmp_path: Path) -> None:
    """`midlayer.` names, no embedding, ids of outputs nested; and it drafts what the draft drafts."""
    again = read(save_directory(tmp_path, SPECFORGE, renamed(draft.plain_state(), "midlayer.")), target.shape)
    same(draft, again)
    for features in found:
        assert propose(again, target, features, len(features) - 1) == propose(draft, target, features, len(features) - 1)


@pytest.mark.parametrize("t2d", [True, False])
def test_eagles_own(target: Target, found: list[Features], tmp_path: Path, t2d: bool) -> None:
    """pytorch_model.bin, with an embedding, no layer ids: the default ones of the target's blocks."""
    shape = replace(target.shape, layers=10)
    draft = tiny_draft(target, found)
    tensors = renamed(draft.plain_state(), "midlayer.") | {"embed_tokens.weight": target.embedding_VH.clone()}
    if not t2d:
        tensors.pop("t2d")
    folder = save_directory(tmp_path, EAGLE, tensors)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    again = read(folder, shape)
    assert again.layers == (1, 4, 6)
    again.layers = LAYERS
    same(draft, again)


def test_without_layer_ids_and_target_the_default_is_not_guessed(draft: Eagle3, tmp_path: Path) -> None:
    folder = save_directory(tmp_path, EAGLE, renamed(draft.plain_state(), "midlayer."))
    with pytest.raises(ValueError, match="the default depends on the number of the target's blocks: give the target"):
        read(folder)


def test_speculators(draft: Eagle3, target: Target, tmp_path: Path) -> None:
    """`layers.0.` names, sizes nested, ids of inputs."""
    same(draft, read(save_directory(tmp_path, SPECULATORS, renamed(draft.plain_state(), "layers.0.")), target.shape))


def test_speculators_with_the_normed_residual(target: Target, found: list[Features], tmp_path: Path) -> None:
    draft = tiny_draft(target, found, norm_before_residual=True)
    again = read(save_directory(tmp_path, SPECULATORS | {"norm_before_residual": True}, renamed(draft.plain_state(), "layers.0.")), target.shape)
    same(draft, again)
    assert propose(again, target, found[3], 20) == propose(draft, target, found[3], 20)


def test_shards_are_read_as_one(draft: Eagle3, target: Target, tmp_path: Path) -> None:
    tensors = renamed(draft.plain_state(), "midlayer.")
    folder = save_directory(tmp_path, SPECFORGE, {})
    (folder / "model.safetensors").unlink()
    for i, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, folder / f"model-0000{i + 1}-of-00002.safetensors")
    same(draft, read(folder, target.shape))


def test_a_whole_vocabulary_ships_and_is_read_without_its_tables(target: Target, found: list[Features], tmp_path: Path) -> None:
    draft = tiny_draft(target, found, vocab_size=259)
    export(draft, target, tmp_path / "x", CONFIG, found, WIDTH)
    assert not set(TABLES) & set(load_file(tmp_path / "x" / "model.safetensors"))
    same(draft, read(tmp_path / "x", target.shape))
    tensors = {name: t for name, t in renamed(draft.plain_state(), "midlayer.").items() if name not in TABLES}
    fields = {key: value for key, value in EAGLE.items() if key != "draft_vocab_size"} | {"architectures": ["LlamaForCausalLMEagle3"]}
    fields["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in LAYERS]
    again = read(save_directory(tmp_path / "eagle", fields, tensors), target.shape)
    assert again.config.vocab_size == 259
    assert propose(again, target, found[3], 20) == propose(draft, target, found[3], 20)


def test_bfloat16_is_read_into_float32(draft: Eagle3, target: Target, tmp_path: Path) -> None:
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in renamed(draft.plain_state(), "midlayer.").items()}
    again = read(save_directory(tmp_path, SPECFORGE, tensors), target.shape).plain_state()
    assert all(torch.equal(again[name], t.bfloat16().float()) for name, t in draft.plain_state().items() if t.is_floating_point())
    assert {t.dtype for t in again.values()} == {torch.float32, torch.int64, torch.bool}


def test_training_settings_are_the_recipes_and_sizes_the_directorys(draft: Eagle3, target: Target, tmp_path: Path) -> None:
    folder = save_directory(tmp_path, SPECFORGE, renamed(draft.plain_state(), "midlayer."))
    again = read(folder, target.shape, Eagle3Config(steps=((0.0, 3),), train_head=False, vocab_size=8192))
    assert (again.config.steps, again.config.train_head, again.config.vocab_size, again.config.layers) == (((0.0, 3),), False, DRAFT_VOCABULARY, LAYERS)
    assert not again.lm_head.weight.requires_grad


# ---- refused ----

VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "norm before fc": ({"norm_before_fc": True}, "norm_before_fc = True: a norm before fc"),
    "norm before fc, nested": ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc = True"),
    "EAGLE-3.1 features": ({"fc_norm": True}, "fc_norm = True: EAGLE-3.1"),
    "EAGLE-3.1 state": ({"norm_output": True}, "norm_output = True: EAGLE-3.1"),
    "TensorRT-LLM's name for it": ({"eagle_config": {"return_hidden_post_norm": True}}, "norm_output = True"),
    "two blocks": ({"num_hidden_layers": 2}, "num_hidden_layers = 2: more than one block"),
    "another width": ({"target_hidden_size": 64}, "target_hidden_size = 64: the draft itself is 32 wide"),
    "last state alone": ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state = False"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = gelu"),
    "biases": ({"attention_bias": True}, "attention_bias = True"),
    "another block": ({"model_type": "deepseek_v3"}, "model_type = deepseek_v3"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_that_computes_something_else_is_named(draft: Eagle3, target: Target, tmp_path: Path, name: str) -> None:
    changed, said = VARIANTS[name]
    folder = save_directory(tmp_path, SPECFORGE | changed, renamed(draft.plain_state(), "midlayer."))
    with pytest.raises(ValueError, match=rf"config.json: this draft is of a variant that Draftsmith does not compute: {said}"):
        read(folder, target.shape)


def test_speculators_without_its_norm_flag_is_not_guessed(draft: Eagle3, target: Target, tmp_path: Path) -> None:
    fields = {key: value for key, value in SPECULATORS.items() if key != "norm_before_residual"}
    with pytest.raises(ValueError, match="norm_before_residual is missing: vLLM takes that for true, the speculators library for false"):
        read(save_directory(tmp_path, fields, renamed(draft.plain_state(), "layers.0.")), target.shape)


def test_layer_ids_that_disagree_are_refused(draft: Eagle3, target: Target, tmp_path: Path) -> None:
    fields = SPECFORGE | {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    with pytest.raises(ValueError, match=r"the layer ids disagree: .* \[1, 2, 4\] means outputs of blocks \[0, 1, 3\]"):
        read(save_directory(tmp_path, fields, renamed(draft.plain_state(), "midlayer.")), target.shape)


@pytest.mark.parametrize("changed", [{"hidden_size": 64}, {"vocab_size": 300}])
def test_a_draft_of_another_target_is_refused(draft: Eagle3, target: Target, tmp_path: Path, changed: dict[str, int]) -> None:
    folder = save_directory(tmp_path, SPECFORGE, renamed(draft.plain_state(), "midlayer."))
    with pytest.raises(ValueError, match=r"is a draft of another target: its (hidden size is 32, this target's is 64|vocabulary is 259, this target's is 300)"):
        read(folder, replace(target.shape, **changed))


Tables = Callable[[dict[str, Tensor]], object]
WRONG_TABLES: dict[str, tuple[Tables, str]] = {
    "missing": (lambda t: t.pop("d2t"), "d2t is missing: the draft has 70 of 259 ids"),
    "twice": (lambda t: t["d2t"].__setitem__(1, -1), "d2t names 1 target ids twice, first 0"),
    "out of range": (lambda t: t["d2t"].__setitem__(69, 300), "1 ids outside 0 … 258"),
    "absolute": (lambda t: t["d2t"].add_(torch.arange(70)), "d2t holds target ids"),
    "numbers": (lambda t: t.update(d2t=t["d2t"].float()), "expected 70 whole numbers"),
    "marks": (lambda t: t.update(t2d=t["t2d"].flip(0)), "t2d marks other ids"),
}


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_a_wrong_vocabulary_map_is_refused(draft: Eagle3, target: Target, tmp_path: Path, name: str) -> None:
    plant, said = WRONG_TABLES[name]
    tensors = renamed(draft.plain_state(), "midlayer.")
    plant(tensors)
    with pytest.raises(ValueError, match=said):
        read(save_directory(tmp_path, SPECFORGE, tensors), target.shape)


def test_an_absolute_map_is_told_without_marks_too(draft: Eagle3, target: Target, tmp_path: Path) -> None:
    """Ascending ids of which the last, taken as an offset, would leave the vocabulary."""
    tensors = renamed(draft.plain_state(), "midlayer.")
    tensors.pop("t2d")
    tensors["d2t"] = torch.arange(70) * 3 + 20
    with pytest.raises(ValueError, match="d2t holds target ids"):
        read(save_directory(tmp_path, SPECFORGE, tensors), target.shape)


def test_a_name_near_a_missing_one_is_suggested(draft: Eagle3, target: Target, tmp_path: Path) -> None:
    tensors = renamed(draft.plain_state(), "midlayer.")
    tensors["midlayer.hiden_norm.weight"] = tensors.pop("midlayer.hidden_norm.weight")
    with pytest.raises(ValueError, match=r"missing tensors \['hidden_norm.weight'\], unknown .*; is midlayer.hiden_norm.weight meant as hidden_norm.weight\?"):
        read(save_directory(tmp_path, SPECFORGE, tensors), target.shape)


def test_an_embedding_of_its_own_is_refused_and_a_rounded_one_is_not(draft: Eagle3, target: Target, tmp_path: Path) -> None:
    tensors = renamed(draft.plain_state(), "midlayer.")
    for name, embedding in (("rounded", target.embedding_VH.bfloat16()), ("own", target.embedding_VH.flip(0).contiguous())):
        folder = save_directory(tmp_path / name, SPECFORGE, tensors | {"embed_tokens.weight": embedding})
        if name == "own":
            with pytest.raises(ValueError, match=r"its embed_tokens\.weight is not the target's"):
                require_embedding(published(folder), target.embedding_VH)
        else:
            require_embedding(published(folder), target.embedding_VH)


def test_a_tensor_in_two_files_is_refused(draft: Eagle3, target: Target, tmp_path: Path) -> None:
    tensors = renamed(draft.plain_state(), "midlayer.")
    folder = save_directory(tmp_path, SPECFORGE, tensors)
    save_file({"d2t": tensors["d2t"]}, folder / "vocabulary.safetensors")
    with pytest.raises(ValueError, match=r"vocabulary\.safetensors: tensors that another file of the directory also holds: d2t"):
        read(folder, target.shape)
