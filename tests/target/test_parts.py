"""Bad inputs around the parts of a target, as a user meets them; overrides; padded vocabularies; fingerprints."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import saved
from command_line import command
from families import PLAIN, SIZES
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PhiConfig,
)

from draftsmith.data.template import ChatTemplate
from draftsmith.pipeline import Run
from draftsmith.recipe import Recipe
from draftsmith.target.finder import Keys
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(PLAIN["llama"](), tmp_path_factory.mktemp("parts") / "llama")


@pytest.fixture
def changed(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the untied Llama whose tensors were changed."""

    def make(change: Change | None = None, name: str = "changed", **settings: Any) -> Path:
        folder = Path(shutil.copytree(llama, tmp_path / name))
        tensors = load_file(folder / "model.safetensors")
        if change is not None:
            change(tensors)
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | settings))
        return folder

    return make


def refused(folder: Path, keys: Keys | None = None) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        Target.load(str(folder), keys=keys)
    return str(raised.value)


# ---- damaged numbers, shapes ----


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("key", [HEAD, EMBEDDING, NORM])
def test_numbers_that_are_not_finite_are_counted_and_placed(key: str, value: float, changed: Callable[..., Path]) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[key].view(-1)[-1] = value

    folder = changed(damage)
    last = 31 if key == NORM else 96
    assert refused(folder) == f"{folder}: {key} holds 1 values that are NaN or infinite (first in row {last}): the checkpoint is damaged"


@pytest.mark.parametrize("rows", [90, 96, 98, 128])
@pytest.mark.parametrize("key", [HEAD, EMBEDDING])
def test_rows_that_disagree_with_the_config_are_named(key: str, rows: int, changed: Callable[..., Path]) -> None:
    """Also more rows than config.json says, as some engines pad them: which are the vocabulary's is then a guess."""
    found = refused(changed(lambda t: t.update({key: torch.ones(rows, 32)})))
    assert f"{key} is ({rows}, 32) in the files, and config.json makes it (97, 32)" in found


def test_a_missing_bias_of_a_class_with_one_is_named(tmp_path: Path) -> None:
    folder = saved(PhiConfig(**SIZES), tmp_path / "phi")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.bias"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "no head bias found: PhiForCausalLM calls it 'lm_head.bias'" in refused(folder)


# ---- overrides ----


@pytest.mark.parametrize(
    ("keys", "what", "closest"),
    [
        (Keys(embedding="model.embed_token.weight"), "embedding", EMBEDDING),
        (Keys(head="lm_heads.weight"), "head", HEAD),
        (Keys(norm="model.norms.weight"), "final norm", NORM),
    ],
)
def test_a_wrong_override_lists_the_closest_keys(keys: Keys, what: str, closest: str, llama: Path) -> None:
    found = refused(llama, keys)
    assert f"holds no tensor {keys.embedding or keys.head or keys.norm!r}, which was given as {what}; closest keys: {closest}" in found


def test_overrides_are_used_and_checked(changed: Callable[..., Path]) -> None:
    other = {"a.head": torch.full((97, 32), 2.0), "an.embedding": torch.full((97, 32), 3.0), "a.norm": torch.full((32,), 4.0), "small": torch.ones(5, 32)}
    folder = str(changed(lambda t: t.update(other), tie_word_embeddings=True))
    with pytest.warns(UserWarning, match=r"a\.head differs from an\.embedding"):
        target = Target.load(folder, keys=Keys("an.embedding", "a.head", "a.norm"))
    assert torch.equal(target.head_VH, other["a.head"])
    assert torch.equal(target.embedding_VH, other["an.embedding"])
    assert torch.equal(target.norm_H, other["a.norm"])
    assert "small (lm_head.weight of LlamaForCausalLM) is (5, 32) in the files" in refused(Path(folder), Keys(head="small"))


def test_an_override_decides_an_ambiguous_checkpoint(changed: Callable[..., Path]) -> None:
    def double(tensors: dict[str, Tensor]) -> None:
        for key in list(tensors):
            tensors["module." + key] = tensors.pop(key)
        tensors["module.output.weight"] = torch.full((97, 32), 2.0)

    folder = changed(double)
    assert "2 tensors could be the head: module.lm_head.weight, module.output.weight; say which with target.head_key" in refused(folder)
    assert torch.equal(Target.load(str(folder), keys=Keys(head="module.output.weight")).head_VH, torch.full((97, 32), 2.0))


def test_two_tensors_of_one_parameter_that_differ_are_refused_and_equal_ones_are_not(changed: Callable[..., Path]) -> None:
    """transformers takes whichever comes first in the alphabet."""
    folder = changed(lambda t: t.update({"model.lm_head.weight": torch.ones(97, 32)}))
    assert "lm_head.weight and model.lm_head.weight all become lm_head.weight and differ" in refused(folder)
    assert torch.equal(Target.load(str(folder), keys=Keys(head="model.lm_head.weight")).head_VH, torch.ones(97, 32))
    twice = changed(lambda t: t.update({"model.lm_head.weight": t[HEAD].clone()}), "twice")
    assert Target.load(str(twice)).found.head.key == HEAD


def test_the_command_line_takes_keys_and_lists_the_closest(changed: Callable[..., Path], tmp_path: Path) -> None:
    folder = changed(lambda t: t.update({"other.head": t[HEAD] * 2}))
    code, said = command(["inspect", folder, "--head-key", "lm_hed.weight"], tmp_path / "wrong.txt")
    assert code != 0 or "closest keys" in said
    assert "closest keys: lm_head.weight" in " ".join(said.split())
    code, said = command(["inspect", folder, "--head-key", "other.head", "--json"], tmp_path / "right.txt")
    assert code == 0
    assert json.loads(said[said.index("{") :])["head"]["key"] == "other.head"


# ---- what is no language model ----


def test_a_body_without_a_head_is_refused_untied_and_its_own_head_tied(tmp_path: Path) -> None:
    body = LlamaModel(LlamaConfig(**SIZES, tie_word_embeddings=False))
    body.save_pretrained(tmp_path / "untied")
    found = refused(tmp_path / "untied")
    assert "was saved from LlamaModel, which has no language-model head" in found
    assert "checkpoint of LlamaForCausalLM" in found
    LlamaModel(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path / "tied")
    target = Target.load(str(tmp_path / "tied"))
    assert target.head_VH is target.embedding_VH


def test_a_classifier_is_refused(tmp_path: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "classifier")
    assert "is a LlamaForSequenceClassification: it has no language-model head; a draft needs a LlamaForCausalLM" in refused(tmp_path / "classifier")


# ---- vocabularies ----


def test_a_tokenizer_with_more_ids_than_rows_is_refused_before_a_run(tiny_target: Path, changed: Callable[..., Path], tmp_path: Path) -> None:
    folder = changed(None, "small")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny_target / file).exists():
            shutil.copy(tiny_target / file, folder / file)
    with pytest.raises(ValueError, match=r"tokenizer of .*small has ids up to 258 .*, and the target's head has only 97 rows") as raised:
        _ = Run(Recipe.model_validate({"run": str(tmp_path / "run"), "target": str(folder)})).target
    assert "use the tokenizer that belongs to the weights" in str(raised.value)


def test_padded_rows_are_kept_as_they_are(tiny_target: Path, tmp_path: Path) -> None:
    """config.json and files agree on more rows than the tokenizer has ids: logits have all of them, as the model's own do."""
    folder = saved(LlamaConfig(**(SIZES | {"vocab_size": 320}), tie_word_embeddings=True), tmp_path / "padded")
    target, model = Target.load(str(folder)), TargetModel.load(str(folder), torch.float32)
    ChatTemplate.load(str(tiny_target)).require_rows(target.shape.vocab_size, "padded")
    ids = torch.tensor([[5, 300, 7]])
    assert target.logits(model.run(ids).last_BQH).shape == (1, 3, 320) == model.own_logits(ids).shape


def test_a_head_with_fewer_rows_than_the_embedding_has_its_own_vocabulary(tmp_path: Path) -> None:
    text = {k: v for k, v in SIZES.items() if k not in ("initializer_range", "bos_token_id")} | {"cross_attention_layers": []}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2, "intermediate_size": 16, "image_size": 28}
    vision |= {"patch_size": 14, "max_num_tiles": 1, "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]], "vision_output_dim": 32}
    torch.manual_seed(0)
    MllamaForConditionalGeneration(MllamaConfig(text_config=text, vision_config=vision)).save_pretrained(tmp_path / "mllama")
    target, model = Target.load(str(tmp_path / "mllama")), TargetModel.load(str(tmp_path / "mllama"), torch.float32)
    assert (target.embedding_VH.shape[0], target.head_VH.shape[0], target.shape.vocab_size) == (105, 97, 97)
    ids = torch.tensor([[5, 104, 7]])
    torch.testing.assert_close(target.logits(model.run(ids).last_BQH), model.own_logits(ids), rtol=1e-5, atol=1e-5)


def test_ids_that_a_target_never_produces_are_never_chosen_also_among_some(tmp_path: Path) -> None:
    config = ChameleonConfig(
        **{k: v for k, v in SIZES.items() if k not in ("vocab_size", "bos_token_id")}, vocab_size=97, vq_config={"resolution": 32, "num_embeddings": 8},
        vocabulary_map={"<image>": 8, "IMGIMGBS": 20, "IMGIMGCS": 21},
    )  # fmt: skip
    torch.manual_seed(0)
    ChameleonForConditionalGeneration(config).save_pretrained(tmp_path / "chameleon")
    target, model = Target.load(str(tmp_path / "chameleon")), TargetModel.load(str(tmp_path / "chameleon"), torch.float32)
    assert target.rule.banned
    ids = torch.tensor([[5, 9, 17, 3]])
    last, own = model.run(ids).last_BQH, model.own_logits(ids)
    every = target.logits(last)
    torch.testing.assert_close(torch.softmax(every, -1), torch.softmax(own, -1), rtol=1e-4, atol=1e-6)
    some = torch.tensor([target.rule.banned[0], 3, 90])
    torch.testing.assert_close(target.logits(last, some)[..., 1:], every[..., [3, 90]])
    assert (target.logits(last, some)[..., 0] == torch.finfo(torch.float32).min).all()


# ---- fingerprints ----


def test_the_same_weights_have_one_fingerprint_in_one_file_shards_and_bin(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    Path(tmp_path / "bin").mkdir()
    shutil.copy(llama / "config.json", tmp_path / "bin" / "config.json")
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    assert len({Target.load(str(f)).fingerprint for f in (llama, tmp_path / "shards", tmp_path / "bin")}) == 1


@pytest.mark.parametrize("key", ["model.layers.2.mlp.up_proj.weight", NORM, "model.layers.0.input_layernorm.weight"])
def test_a_fine_tune_has_another_fingerprint(key: str, changed: Callable[..., Path], llama: Path) -> None:
    assert Target.load(str(changed(lambda t: t[key].mul_(1.01)))).fingerprint != Target.load(str(llama)).fingerprint


@pytest.mark.parametrize("key", [HEAD, EMBEDDING])
def test_one_row_trained_anew_is_another_target(key: str, changed: Callable[..., Path], llama: Path) -> None:
    """New special tokens are often trained alone, somewhere in the middle."""
    assert Target.load(str(changed(lambda t: t[key][50].add_(0.01)))).fingerprint != Target.load(str(llama)).fingerprint


def test_another_configuration_is_another_target(changed: Callable[..., Path], llama: Path) -> None:
    others = {"theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "eps": {"rms_norm_eps": 1e-3}}
    prints = [Target.load(str(changed(None, name, **settings))).fingerprint for name, settings in others.items()]
    assert len({*prints, Target.load(str(llama)).fingerprint}) == 3
    assert Target.load(str(changed(None, "version", transformers_version="5.0"))).fingerprint == Target.load(str(llama)).fingerprint


def test_a_fingerprint_of_many_tensors_reads_little(changed: Callable[..., Path]) -> None:
    """Ten thousand experts: a sample of each, and of stacked ones only the first one's first row."""
    experts = {f"model.layers.0.experts.{i}.up.weight": torch.ones(8, 8) for i in range(10_000)} | {"stacked": torch.ones(64, 256, 256)}
    folder = changed(lambda t: t.update(experts))
    target = Target.load(str(folder))
    before = int(Path("/proc/self/io").read_text().split()[1])
    started = time.perf_counter()
    assert len(target.fingerprint) == 16
    print(f"{time.perf_counter() - started:.2f} s")
    assert int(Path("/proc/self/io").read_text().split()[1]) - before < 120e6
