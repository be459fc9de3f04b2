"""`verify`, `import`, `draft.init_from` and refused engines, as a user meets them: one small run, its draft taken up by another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from command_line import DRAFT, printed, write_recipe
from safetensors.torch import load_file, save_file

from draftsmith.data.conversations import Conversation

EVAL = ["eval.width=3", "eval.max_new=12", "eval.batch=3", "eval.timed_prompts=1", "eval.timed_tokens=8"]
FEW = ["train.steps=4", "train.evaluate_every=4", "train.checkpoint_every=4"]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, talks: list[Conversation]) -> Path:
    """A recipe of a run with an export."""
    folder = tmp_path_factory.mktemp("shipped")
    recipe = write_recipe(folder, tiny_target, talks)
    for stage in ("capture", "train", "export"):
        printed(folder, stage, recipe, *FEW, *EVAL, code=0)
    return recipe


@pytest.fixture
def adopting(tmp_path: Path, shipped: Path, tiny_target: Path, talks: list[Conversation]) -> Path:
    """A recipe of another run that takes up the draft of the first, with its features."""
    recipe = write_recipe(tmp_path, tiny_target, talks)
    data = yaml.safe_load(recipe.read_text())
    data["draft"] = {key: value for key, value in DRAFT.items() if key in ("steps", "chains")} | {"init_from": str(shipped.parent / "run" / "export")}
    data["features"]["path"] = str(shipped.parent / "run" / "features")
    recipe.write_text(yaml.safe_dump(data))
    return recipe


def test_an_export_passes_against_target_and_run(shipped: Path, tiny_target: Path, tmp_path: Path) -> None:
    run = shipped.parent / "run"
    text = printed(tmp_path, "verify", run / "export", "--run", run / "run.yaml", "--engine", "sglang", "--engine", "llama.cpp", code=0)
    assert "15 checks: 14 passed, 0 failed, 1 skipped" in text
    assert "12 passed, 0 failed, 3 skipped" not in text
    assert "skipped: proposals of the checkpoint: no run given: --run" in printed(tmp_path, "verify", run / "export", "--target", tiny_target, code=0)


def test_a_fault_ends_in_exit_code_2_and_is_told(shipped: Path, tmp_path: Path) -> None:
    wrong = Path(shutil.copytree(shipped.parent / "run" / "export", tmp_path / "wrong"))
    fields = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(fields | {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}))
    text = printed(tmp_path, "verify", wrong, code=2)
    assert "failed: layer ids: eagle_aux_hidden_state_layer_ids is [1, 2, 4]" in text
    assert "3 failed" in text  # it was changed since it was exported, and does not reload either


@pytest.mark.parametrize(("leave", "said"), [((), "it has no config.json"), (("config.json",), "model.safetensors is missing")])
def test_a_directory_with_nothing_to_check_is_an_error(shipped: Path, tmp_path: Path, leave: tuple[str, ...], said: str) -> None:
    for name in leave:
        shutil.copy(shipped.parent / "run" / "export" / name, tmp_path)
    assert said in printed(tmp_path, "verify", tmp_path, code=2)


def test_an_unknown_engine_is_an_error_with_the_known_ones(shipped: Path, tmp_path: Path) -> None:
    assert "sglang, vllm, llama.cpp, tensorrt-llm" in printed(tmp_path, "verify", shipped.parent / "run" / "export", "--engine", "vlm", code=2)


def test_an_imported_draft_is_the_published_one(shipped: Path, tiny_target: Path, tmp_path: Path) -> None:
    """Published with other names and without embedding, it comes back as it was exported."""
    export, other = shipped.parent / "run" / "export", tmp_path / "published"
    other.mkdir()
    tensors = load_file(export / "model.safetensors")
    embedding = tensors.pop("embed_tokens.weight")
    save_file({name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}, other / "model.safetensors")
    fields = json.loads((export / "config.json").read_text())
    fields.pop("eagle_config")
    (other / "config.json").write_text(json.dumps(fields))
    text = printed(tmp_path, "import", other, "--to", tmp_path / "mine", "--target", tiny_target, code=0)
    assert f"a recipe in which draft.init_from is {tmp_path / 'mine'}" in text
    mine = load_file(tmp_path / "mine" / "model.safetensors")
    assert {name: bool((mine[name] == tensor).all()) for name, tensor in tensors.items()} == dict.fromkeys(tensors, True)
    assert bool((mine["embed_tokens.weight"] == embedding).all())
    assert (tmp_path / "mine" / "config.json").read_bytes() == (export / "config.json").read_bytes()
    assert "0 failed" in printed(tmp_path, "verify", tmp_path / "mine", "--target", tiny_target, code=0)


def test_a_run_starts_from_a_published_draft(adopting: Path, shipped: Path, tmp_path: Path) -> None:
    """Nothing is initialised; sizes and layers are the draft's and stand in run.yaml; a resumed run goes on; another directory is refused."""
    export, still = shipped.parent / "run" / "export", [*FEW, "train.optimizer.learning_rate=1e-9"]
    text = printed(tmp_path, "train", adopting, *still, code=0)
    assert f"starting from the draft of {export}" in text
    assert "draft vocabulary" not in text
    resolved = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["draft"]
    assert (resolved["layers"], resolved["vocab_size"], resolved["intermediate_size"]) == (DRAFT["layers"], DRAFT["vocab_size"], DRAFT["intermediate_size"])
    trained, begun = load_file(next((tmp_path / "run").glob("checkpoints/*/draft.safetensors"))), load_file(export / "model.safetensors")
    for name in ("fc.weight", "lm_head.weight", "d2t", "t2d"):
        assert torch.allclose(trained[name], begun[name], rtol=0, atol=1e-6), name
    assert "resuming" in printed(tmp_path, "train", tmp_path / "run" / "run.yaml", code=0)
    changed = Path(shutil.copytree(shipped.parent / "run" / "export", tmp_path / "changed"))
    tensors = load_file(changed / "model.safetensors")
    tensors["fc.weight"] += 1
    save_file(tensors, changed / "model.safetensors")
    assert "was trained with draft.init_from" in printed(tmp_path, "train", adopting, *still, f"draft.init_from={changed}", code=2)


def test_settings_that_the_draft_contradicts_are_refused(adopting: Path, tmp_path: Path) -> None:
    text = printed(tmp_path, "train", adopting, "draft.vocab_size=99", code=2)
    assert "draft.vocab_size is 99, but " in text
    assert "has 48: leave draft.vocab_size out of the recipe" in text


def test_a_published_draft_is_judged_and_exported_as_it_is(adopting: Path, shipped: Path, tmp_path: Path) -> None:
    text = printed(tmp_path, "eval", adopting, *EVAL, code=0)
    assert "no checkpoint in " in text
    assert "is taken as it is, untrained by this run" in text
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["step"], report["simulated_acceptance_length"], report["greedy_identical"]) == (0, None, True)
    printed(tmp_path, "export", adopting, *EVAL, code=0)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "run" / "export" / name).read_bytes() == (shipped.parent / "run" / "export" / name).read_bytes()


def test_an_engine_that_cannot_serve_is_refused_before_capture(tmp_path: Path, tiny_target: Path, talks: list[Conversation]) -> None:
    recipe = write_recipe(tmp_path, tiny_target, talks)
    for stage in ("capture", "train"):
        text = printed(tmp_path, stage, recipe, "draft.layers=[1,2]", "export.engines=[vllm,llama.cpp]", code=2)
        assert "llama.cpp: draft.layers [1, 2]: llama.cpp reads exactly three; capture three" in text
        assert not (tmp_path / "run").exists()
