"""Every stage with targets of other families, each named by its directory alone: head rule and logit rule hold wherever a run uses the target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import command, write_recipe
from safetensors.torch import load_file
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, PreTrainedConfig, Qwen2Config

from draftsmith.data.conversations import Conversation
from draftsmith.features.files import FORMAT
from draftsmith.target.weights import Target

SIZES = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "initializer_range": 0.25, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[PreTrainedConfig, str, dict[str, object]]] = {
    "qwen2": (Qwen2Config(**SIZES, tie_word_embeddings=True), "head @ last", {}),
    "gemma2": (Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0), "2 x tanh(head @ last / 2)", {"final_logit_softcapping": None}),
    "cohere": (CohereConfig(**SIZES, logit_scale=0.25), "0.25 x head @ last", {"logit_scale": 1.0}),
}
"""Configuration, logit rule, and what makes the rule a plain one."""
SETTINGS = ["train.steps=8", "eval.width=3", "eval.max_new=20", "eval.batch=3", "eval.timed_prompts=2", "eval.timed_tokens=10"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, one file, no index."""
    folder = tmp_path_factory.mktemp(family) / "target"
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(FAMILIES[family][0], dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    return folder


def run(folder: Path, target: Path, talks: list[Conversation], kind: str, stages: tuple[str, ...]) -> Path:
    """The run's folder after these stages."""
    recipe = write_recipe(folder, target, talks, kind)
    for stage in stages:
        code, text = command([stage, recipe, *SETTINGS], folder / f"{stage}.txt")
        assert code == 0, text
    return folder / "run"


@pytest.fixture(scope="module", params=["files", "live"])
def finished(request: pytest.FixtureRequest, checkpoint: Path, talks: list[Conversation], tmp_path_factory: pytest.TempPathFactory) -> Path:
    stages = ("capture", "train", "eval", "export") if request.param == "files" else ("train", "eval", "export")
    return run(tmp_path_factory.mktemp(request.param), checkpoint, talks, request.param, stages)


def test_what_is_decoded_with_a_draft_is_the_targets_own(finished: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    assert report["greedy_identical"] is True
    assert report["differing_prompts"] == []
    assert report["prompts"] == 4


def test_the_exported_embedding_is_the_targets(finished: Path, checkpoint: Path) -> None:
    shipped = load_file(finished / "export" / "model.safetensors")
    stored = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(shipped["embed_tokens.weight"], stored)


def held_out_loss(run: Path) -> float:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line["loss"] for line in lines if line["kind"] == "held-out")


def test_training_is_under_the_targets_rule(family: str, finished: Path, checkpoint: Path, talks: list[Conversation], tmp_path: Path) -> None:
    """The same weights under a plain rule teach something else; a family that has a plain one is its own twin."""
    twin = Path(shutil.copytree(checkpoint, tmp_path / "twin"))
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | FAMILIES[family][2]))
    assert Target.load(str(checkpoint)).rule.describe() == FAMILIES[family][1]
    assert Target.load(str(twin)).rule.describe() == "head @ last"
    plain, own = held_out_loss(run(tmp_path, twin, talks, "live", ("train",))), held_out_loss(finished)
    assert own == plain if family == "qwen2" else abs(own - plain) > 0.1 * plain


def test_the_manifest_is_of_this_target(finished: Path, checkpoint: Path) -> None:
    for path in finished.glob("features/*/manifest.json"):
        manifest = json.loads(path.read_text())
        assert manifest["format"] == FORMAT
        assert manifest["identity"]["target"] == Target.load(str(checkpoint)).fingerprint
