"""`Target`: the right tensors out of every kind of checkpoint, the model's own logits, and errors that name what is wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import saved
from families import OTHER_RULES, PLAIN, SIZES
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BartConfig, LlamaConfig, T5Config

from draftsmith.core.types import FeatureSpec, Sample
from draftsmith.target.capture import Capture
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

IDS = torch.tensor([[5, 9, 17, 3, 88, 41, 2, 60]])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of one family's tiny checkpoint, made once."""
    root = tmp_path_factory.mktemp("families")

    def make(name: str) -> Path:
        folder = root / name.split()[0]
        return folder if folder.exists() else saved((PLAIN | OTHER_RULES)[name](), folder)

    return make


@pytest.fixture
def copied(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """An untied Llama to damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "my-llama"))


def refused(folder: Path | str) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        Target.load(str(folder))
    return str(raised.value)


@pytest.mark.parametrize("family", PLAIN)
def test_logits_are_the_models_own(checkpoint: Callable[[str], Path], family: str) -> None:
    folder = str(checkpoint(family))
    target, model = Target.load(folder), TargetModel.load(folder, torch.float32)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = own(input_ids=IDS).logits
    torch.testing.assert_close(target.logits(model.run(IDS).last_BQH), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(target.embed(IDS), own.get_input_embeddings()(IDS))
    assert torch.equal(target.norm_H, own.model.norm.weight)
    assert target.tied == family.endswith("tied")


def obstacle(folder: str) -> str | None:
    """Why a run with this target would stop before it trains."""
    try:
        made = Capture(TargetModel.load(folder, torch.float32), Target.load(folder), FeatureSpec((1,), "float32"))
        made.check(Sample("s", IDS[0], torch.ones(8, dtype=torch.bool)))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("family", PLAIN)
def test_the_plain_families_have_no_obstacle(checkpoint: Callable[[str], Path], family: str) -> None:
    assert obstacle(str(checkpoint(family))) is None


@pytest.mark.parametrize("family", OTHER_RULES)
def test_another_logit_rule_is_refused_before_training_or_right(checkpoint: Callable[[str], Path], family: str) -> None:
    folder = str(checkpoint(family))
    refusal = obstacle(folder)
    if refusal is None:
        model = TargetModel.load(folder, torch.float32)
        torch.testing.assert_close(Target.load(folder).logits(model.run(IDS).last_BQH), model.model(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)
    else:
        assert "logit rule" in refusal
        assert family.split()[0] in refusal


def test_the_fixtures_of_other_rules_really_have_another_rule(checkpoint: Callable[[str], Path]) -> None:
    for family in OTHER_RULES:
        model = TargetModel.load(str(checkpoint(family)), torch.float32)
        plain = model.run(IDS).last_BQH @ model.model.get_output_embeddings().weight.T
        assert (plain - model.model(input_ids=IDS).logits).abs().max() > 0.1, family


def test_logits_over_some_ids_are_those_columns(checkpoint: Callable[[str], Path]) -> None:
    target = Target.load(str(checkpoint("llama")))
    last, some, others = torch.randn(3, 32), torch.tensor([4, 9, 90]), torch.tensor([0, 1])
    every = target.logits(last)
    for ids in (some, others, some, None, others):
        torch.testing.assert_close(target.logits(last, ids), every if ids is None else every[:, ids], rtol=1e-5, atol=1e-5)
    half = target.logits(last.bfloat16(), some)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), every[:, some], rtol=0.03, atol=0.1)
    torch.testing.assert_close(target.logits(last, some), every[:, some], rtol=1e-5, atol=1e-5)


def test_shape_is_the_configs(checkpoint: Callable[[str], Path]) -> None:
    shape = Target.load(str(checkpoint("qwen3"))).shape
    assert (shape.hidden_size, shape.vocab_size, shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (32, 97, 4, 4, 2, 16)
    assert (shape.intermediate_size, shape.max_positions, shape.model_type, shape.eos_token_id) == (48, 512, "qwen3", 1)


def test_a_head_tensor_is_the_head_and_without_one_the_embedding_is(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.warns(UserWarning, match=r"lm_head.weight differs from model.embed_tokens.weight: the head tensor is used"):
        untied = Target.load(str(copied))
    assert not untied.tied
    assert torch.equal(untied.head_VH, tensors["lm_head.weight"])
    assert torch.equal(untied.embedding_VH, tensors["model.embed_tokens.weight"])
    del tensors["lm_head.weight"]
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    (copied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.warns(UserWarning, match=r"no head and the tie flag is off: the embedding is used"):
        tied = Target.load(str(copied))
    assert tied.tied
    assert torch.equal(tied.head_VH, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tied_tensors_share_memory(checkpoint: Callable[[str], Path], dtype: torch.dtype | None) -> None:
    target = Target.load(str(checkpoint("qwen2-tied")), "cpu", dtype)
    assert target.head_VH.data_ptr() == target.embedding_VH.data_ptr()
    assert target.norm_H.dtype == target.head_VH.dtype == (dtype or torch.float32)


@pytest.fixture
def sharded(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(checkpoint("llama")).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    return folder


def test_a_sharded_checkpoint_is_the_same_target(checkpoint: Callable[[str], Path], sharded: Path) -> None:
    one, many = Target.load(str(checkpoint("llama"))), Target.load(str(sharded))
    assert all(torch.equal(getattr(one, n), getattr(many, n)) for n in ("embedding_VH", "head_VH", "norm_H"))
    assert one.fingerprint == many.fingerprint


def holder(folder: Path, key: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][key]


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = holder(sharded, "model.layers.2.mlp.up_proj.weight")
    shard.unlink()
    found = refused(sharded)
    assert shard.name in found
    assert "1 missing" in found


@pytest.mark.parametrize("key", ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"])
def test_a_truncated_shard_is_named(sharded: Path, key: str) -> None:
    shard = holder(sharded, key)
    shard.write_bytes(shard.read_bytes()[:-100])
    assert str(shard) in refused(sharded)


@pytest.mark.parametrize("keep", [0, 5, 2000, -4])
def test_a_truncated_file_is_named(copied: Path, keep: int) -> None:
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refused(copied)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refused(sharded)


def test_no_weights_are_told(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "weights.dat")
    assert f"{copied} holds no weights" in refused(copied)


def test_no_such_directory_names_the_closest(copied: Path) -> None:
    assert re.search(rf"no such target: '.*my-lama'.*did you mean {re.escape(str(copied))}\?", refused(copied.with_name("my-lama")))
    assert "did you mean" not in refused(copied.with_name("zzzzz"))
    assert "no such target" in refused(copied.parent / "nowhere" / "at-all")
    assert "no such target" in refused(copied / "config.json")


@pytest.mark.parametrize("text", [None, "{", "{}", '{"model_type": "no-such-model"}'])
def test_a_config_that_is_missing_or_not_understood_is_named(copied: Path, text: str | None) -> None:
    if text is None:
        (copied / "config.json").unlink()
    else:
        (copied / "config.json").write_text(text)
    found = refused(copied)
    assert str(copied) in found
    assert "config.json" in found


@pytest.mark.parametrize("config", [T5Config(d_model=16, num_layers=1), BartConfig(d_model=16, encoder_layers=1, decoder_layers=1)])
def test_an_encoder_decoder_is_refused(copied: Path, config: Any) -> None:
    config.save_pretrained(copied)
    assert "encoder-decoder; a draft needs a causal language model" in refused(copied)


def test_weights_of_another_hidden_size_are_told_from_the_config(copied: Path) -> None:
    LlamaConfig(**(SIZES | {"hidden_size": 64})).save_pretrained(copied)
    found = refused(copied)
    assert "(97, 32)" in found
    assert "config.json makes it (97, 64)" in found


@pytest.mark.parametrize(("key", "what"), [("model.embed_tokens.weight", "embedding"), ("model.norm.weight", "final norm")])
def test_a_missing_tensor_lists_the_closest_keys(copied: Path, key: str, what: str) -> None:
    tensors = load_file(copied / "model.safetensors")
    tensors["model.something.weight"] = tensors.pop(key)
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    found = refused(copied)
    assert f"no {what} found: LlamaForCausalLM calls it {key!r}" in found
    assert "closest keys: model." in found


def test_the_norms_of_blocks_are_not_the_final_norm(copied: Path) -> None:
    """Keys are chosen by their end; a block's or a vision tower's must not win."""
    tensors = load_file(copied / "model.safetensors")
    norm = tensors["model.norm.weight"]
    tensors |= {"vision.norm.weight": torch.zeros(7), "model.layers.0.norm.weight": torch.zeros(7), "norm_f.weight": torch.zeros(7)}
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(Target.load(str(copied)).norm_H, norm)


def test_a_copy_has_the_same_fingerprint_and_another_target_another(checkpoint: Callable[[str], Path], copied: Path) -> None:
    prints = {Target.load(str(checkpoint(f))).fingerprint for f in PLAIN}
    assert len(prints) == len(PLAIN)
    assert Target.load(str(copied)).fingerprint == Target.load(str(checkpoint("llama"))).fingerprint
    tensors = load_file(copied / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * 1.01}, copied / "model.safetensors", metadata={"format": "pt"})
    assert Target.load(str(copied)).fingerprint != Target.load(str(checkpoint("llama"))).fingerprint


def test_a_fingerprint_is_the_same_in_every_dtype_that_it_is_loaded_in(checkpoint: Callable[[str], Path]) -> None:
    folder = str(checkpoint("llama"))
    assert Target.load(folder).fingerprint == Target.load(folder, "cpu", torch.bfloat16).fingerprint


def test_another_body_under_the_same_head_has_another_fingerprint(checkpoint: Callable[[str], Path], copied: Path) -> None:
    """A fine-tuned target often keeps its head; features of the one must not pass for features of the other."""
    tensors = load_file(copied / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 0.1
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    assert Target.load(str(copied)).fingerprint != Target.load(str(checkpoint("llama"))).fingerprint
