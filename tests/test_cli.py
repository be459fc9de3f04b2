"""The command line as a user meets it: help, mistakes (one message, exit code 2), and a whole small run."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import contents, execute, printed, write_recipe

from draftsmith.core.config import load
from draftsmith.data.conversations import Conversation, Message, dumps, read
from draftsmith.data.template import ChatTemplate
from draftsmith.recipe import Recipe

STAGES = ("capture", "train", "eval", "export")
EVAL = ["eval.width=3", "eval.max_new=20", "eval.batch=3", "eval.timed_prompts=2", "eval.timed_tokens=10"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, talks: list[Conversation]) -> tuple[Path, dict[str, str]]:
    """A recipe whose four stages have run, and what each printed."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_recipe(folder, tiny_target, talks)
    return recipe, {stage: printed(folder, stage, recipe, *EVAL, code=0) for stage in STAGES}


@pytest.fixture
def recipe(tmp_path: Path, tiny_target: Path, talks: list[Conversation]) -> Path:
    """A recipe of which nothing has run."""
    return write_recipe(tmp_path, tiny_target, talks)


def edit(recipe: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = yaml.safe_load(recipe.read_text())
    change(data)
    recipe.write_text(yaml.safe_dump(data))


# ---- help ----


def test_help_names_every_stage_and_the_start(tmp_path: Path) -> None:
    text = printed(tmp_path, "--help", code=0)
    assert all(re.search(rf"^│ {name}\b", text, re.MULTILINE) for name in ("quickstart", "regenerate", *STAGES))
    assert "draftsmith quickstart" in text


@pytest.mark.parametrize("stage", STAGES)
def test_help_of_a_stage_shows_recipe_and_overrides(tmp_path: Path, stage: str) -> None:
    text = printed(tmp_path, stage, "--help", code=0)
    assert f"draftsmith {stage}" in text
    assert "key.sub=value" in text


@pytest.mark.parametrize(
    ("name", "options"), [("quickstart", ["--target", "--minutes", "--run"]), ("regenerate", ["--server", "--local", "--target", "--max-tokens", "--batch"])]
)
def test_help_of_the_others_shows_their_options(tmp_path: Path, name: str, options: list[str]) -> None:
    text = printed(tmp_path, name, "--help", code=0)
    assert all(option in text for option in options)


@pytest.mark.parametrize(("arguments", "said"), [(["trian"], "Did you mean 'train'"), (["train"], "recipe"), (["train", "--steps", "3"], "--steps")])
def test_a_wrong_call_is_explained(tmp_path: Path, arguments: list[str], said: str) -> None:
    assert said in printed(tmp_path, *arguments, code=2)


def test_the_installed_command_is_this_one() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="draftsmith")
    assert script.value == "draftsmith.cli:main"


def test_a_mistake_in_a_fresh_interpreter(tmp_path: Path) -> None:
    code, text = execute(["train", tmp_path / "none.yaml"])
    assert code == 2
    assert "error: no recipe at" in text
    assert "Traceback" not in text


# ---- mistakes ----


@pytest.mark.parametrize("stage", STAGES)
def test_no_such_recipe(recipe: Path, stage: str) -> None:
    wrong = recipe.with_name("recipi.yaml")
    assert f"error: no recipe at {wrong}; did you mean {recipe}?" in printed(recipe.parent, stage, wrong, code=2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_misspelt_key_in_the_file_names_its_line(recipe: Path, stage: str) -> None:
    recipe.write_text(recipe.read_text().replace("batch_tokens", "batch_token"))
    line = recipe.read_text()[: recipe.read_text().index("batch_token")].count("\n") + 1
    assert f"{recipe}:{line}: unknown key 'train.batch_token'; did you mean 'batch_tokens'?" in printed(recipe.parent, stage, recipe, code=2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_misspelt_override_is_named(recipe: Path, stage: str) -> None:
    assert "command line: unknown key 'draft.step'; did you mean 'steps'?" in printed(recipe.parent, stage, recipe, "draft.step=3", code=2)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps=many", "command line: train.steps: "),
        ("train.steps=0", "command line: train.steps: "),
        ("draft.steps=0", "command line: draft.steps: expected integers of at least 1"),
        ("draft.steps=[[0, 1], [x, 2]]", "command line: draft.steps: "),
        ("train.steps", "override 'train.steps': expected key.sub=value"),
        ("draft.layers=[1", "draft.layers=[1"),
        ("features.kind=disk", "'files' or 'live'"),
        ("draft.kind=eagle9", "draft.kind"),
    ],
)
def test_a_wrong_value_is_named(recipe: Path, override: str, said: str) -> None:
    assert said in printed(recipe.parent, "train", recipe, override, code=2)


def test_invalid_yaml_is_named(recipe: Path) -> None:
    recipe.write_text("run: [1\n")
    assert f"error: {recipe} is not valid YAML" in printed(recipe.parent, "train", recipe, code=2)


@pytest.mark.parametrize("stage", ["capture", "train", "train features.kind=live"])
def test_no_such_target_names_the_closest(recipe: Path, tiny_target: Path, stage: str) -> None:
    edit(recipe, lambda r: r.update(target=str(tiny_target.with_name("tinny"))))
    name, *overrides = stage.split()
    text = printed(recipe.parent, name, recipe, *overrides, code=2)
    assert "no such target" in text
    assert f"did you mean {tiny_target}?" in text


@pytest.mark.parametrize("stage", ["capture", "train features.kind=live"])
def test_a_target_without_a_chat_template_is_named(recipe: Path, tiny_target: Path, stage: str) -> None:
    bare = Path(shutil.copytree(tiny_target, recipe.parent / "base-model"))
    (bare / "chat_template.jinja").unlink()
    edit(recipe, lambda r: r.update(target=str(bare)))
    name, *overrides = stage.split()
    text = printed(recipe.parent, name, recipe, *overrides, code=2)
    assert f"{str(bare)!r} has no chat template" in text


def test_a_truncated_target_is_named(recipe: Path, tiny_target: Path) -> None:
    cut = Path(shutil.copytree(tiny_target, recipe.parent / "cut"))
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    edit(recipe, lambda r: r.update(target=str(cut)))
    assert str(weights) in printed(recipe.parent, "capture", recipe, code=2)


def test_a_draft_vocabulary_larger_than_the_targets_is_refused(recipe: Path) -> None:
    text = printed(recipe.parent, "train", recipe, "draft.vocab_size=260", "features.kind=live", code=2)
    assert re.search(r"draft.vocab_size 260 is larger than the target's vocabulary of 259", text)


@pytest.mark.parametrize("layers", ["[1,2,6]", "[2,1]", "[-1,2]", "[]"])
@pytest.mark.parametrize("stage", ["capture", "train"])
def test_layers_that_the_target_lacks_are_refused(recipe: Path, stage: str, layers: str) -> None:
    text = printed(recipe.parent, stage, recipe, f"draft.layers={layers}", code=2)
    assert "draft.layers" in text
    assert "6 blocks" in text


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no conversation: it is empty"),
        ("{\n", ":1: not valid JSON"),
        ('{"messages": [{"role": "human", "content": "x"}]}\n', ":1: unknown role 'human'"),
        ('{"messages": [{"role": "user", "content": null}]}\n', ":1: a message needs `role` and `content` as text"),
        (None, "no conversations at"),
    ],
)
def test_bad_data_names_its_file(recipe: Path, split: str, text: str | None, said: str) -> None:
    path = recipe.parent / f"{split}.jsonl"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    found = printed(recipe.parent, "capture", recipe, code=2)
    assert said in found
    assert str(path) in found


def test_nothing_left_to_train_on_gives_the_reasons(recipe: Path) -> None:
    talks = [Conversation("first", "k", (Message("user", "a"),)), Conversation("second", "k", (Message("user", "b"), Message("assistant", "")))]
    (recipe.parent / "train.jsonl").write_text(dumps(talks))
    text = printed(recipe.parent, "capture", recipe, code=2)
    assert "error: nothing left to train on: read 2 = kept 0 + dropped 2" in text
    assert f"1 without an assistant turn (first: {recipe.parent / 'train.jsonl'}:1)" in text
    assert f"1 with answers of fewer than two tokens (first: {recipe.parent / 'train.jsonl'}:2)" in text


def test_a_dropped_conversation_is_counted_and_the_rest_goes_on(recipe: Path, talks: list[Conversation]) -> None:
    lonely = Conversation("lonely", "k", (Message("user", "a"),))
    (recipe.parent / "train.jsonl").write_text(dumps([*talks[:3], lonely]))
    text = printed(recipe.parent, "capture", recipe, code=0)
    assert f"train: read 4 = kept 3 + dropped 1: 1 without an assistant turn (first: {recipe.parent / 'train.jsonl'}:4)" in text


@pytest.mark.parametrize(("stage", "said"), [("train", "draftsmith capture"), ("eval", "draftsmith train"), ("export", "draftsmith train")])
def test_a_stage_before_its_turn_says_what_to_run_first(recipe: Path, stage: str, said: str) -> None:
    assert said in printed(recipe.parent, stage, recipe, code=2)


def test_features_of_other_layers_are_refused(finished: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    recipe, _ = finished
    text = printed(
        tmp_path, "train", recipe, f"run={tmp_path / 'other'}", f"features.path={recipe.parent / 'run' / 'features'}", "draft.layers=[0,2,4]", code=2
    )
    assert "captured under another specification: layers is [1, 2, 4], this run needs [0, 2, 4]" in text


def test_a_checkpoint_of_other_settings_is_refused(finished: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """And the refused command leaves the run as it was, its run.yaml included."""
    copy = Path(shutil.copytree(finished[0].parent / "run", tmp_path / "run"))
    before = contents(copy)
    text = printed(tmp_path, "train", finished[0], *EVAL, f"run={copy}", f"features.path={finished[0].parent / 'run' / 'features'}", "train.seed=4", code=2)
    assert "train.seed = 3, the recipe now says 4" in text
    assert [name for name, data in contents(copy).items() if before.get(name) != data] == []


# ---- a whole run ----


def test_every_stage_leaves_its_files(finished: tuple[Path, dict[str, str]]) -> None:
    run = finished[0].parent / "run"
    for name in ("run.yaml", "features/train/manifest.json", "features/held-out/manifest.json", "metrics.jsonl", "report.json", "export/config.json"):
        assert (run / name).is_file(), name
    assert list(run.rglob("*.partial")) == []


def test_the_report_holds_together(finished: tuple[Path, dict[str, str]], talks: list[Conversation]) -> None:
    report = json.loads((finished[0].parent / "run" / "report.json").read_text())
    assert report["greedy_identical"] is True
    assert report["differing_prompts"] == []
    assert (report["prompts"], report["draft_tokens"], report["temperature"]) == (4, 3, 0.0)
    acceptance = report["acceptance"]
    assert report["acceptance_length"] == acceptance["acceptance_length"] == round(1 + acceptance["accepted"] / acceptance["steps"], 4)
    histogram = acceptance["histogram"]
    assert (len(histogram), sum(histogram)) == (4, acceptance["steps"])
    assert sum(n * count for n, count in enumerate(histogram)) == acceptance["accepted"]
    assert sum(kind["prompts"] for kind in report["by_kind"].values()) == 4
    assert sum(kind["steps"] for kind in report["by_kind"].values()) == acceptance["steps"]
    assert set(report["by_kind"]) == {t.kind for t in talks[-4:]}
    assert report["speedup"] > 0


def test_the_steps_that_were_asked_for_were_made(finished: tuple[Path, dict[str, str]]) -> None:
    lines = [json.loads(line) for line in (finished[0].parent / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 25))
    assert [line["step"] for line in lines if line["kind"] == "held-out"] == [8, 16, 24]
    losses = [line["loss"] for line in lines if line["kind"] == "held-out"]
    assert losses[-1] < losses[0]


def test_what_was_printed_tells_what_happened(finished: tuple[Path, dict[str, str]]) -> None:
    said = finished[1]
    assert "train: read 8 = kept 8 + dropped 0" in said["capture"]
    assert "simulated acceptance length" in said["train"]
    assert "acceptance length" in said["eval"]
    assert "speedup" in said["eval"]
    assert "read back" in said["export"]


def test_run_yaml_is_the_resolved_recipe_and_enough(finished: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    recipe = finished[0]
    resolved = recipe.parent / "run" / "run.yaml"
    assert load(Recipe, resolved) == load(Recipe, recipe, EVAL)
    before = (recipe.parent / "run" / "metrics.jsonl").read_bytes()
    assert "resuming" in printed(tmp_path, "train", resolved, code=0)
    assert (recipe.parent / "run" / "metrics.jsonl").read_bytes() == before


def test_an_export_goes_where_it_is_told(finished: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    printed(tmp_path, "export", finished[0], *EVAL, "--to", tmp_path / "shipped", code=0)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "shipped" / name).read_bytes() == (finished[0].parent / "run" / "export" / name).read_bytes()


def test_local_answers_are_recorded_for_every_question_and_kept(tmp_path: Path, tiny_target: Path, talks: list[Conversation], template: ChatTemplate) -> None:
    asked = [talks[0], talks[1], talks[3]]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl.gz"
    prompts.write_text(dumps(asked))
    arguments = ["regenerate", prompts, out, "--local", "--target", tiny_target, "--max-tokens", 6, "--batch", 2]
    printed(tmp_path, *arguments, code=0)
    found = read(out)
    assert [c.users_only() for c in found] == [c.users_only() for c in asked]
    for conversation in found:
        assert [m.role for m in conversation.messages] == ["user", "assistant"] * (len(conversation.messages) // 2)
        for message in conversation.messages[1::2]:
            assert message.token_ids is not None
            assert 1 <= len(message.token_ids) <= 6
            assert message.content == template.text(message.token_ids)
            assert (message.finish_reason == "stop") == (message.token_ids[-1] in template.end_ids)
    before = out.read_bytes()
    assert "kept" in printed(tmp_path, *arguments, code=0)
    assert "max_tokens = 6, asked for now is 7" in printed(tmp_path, *arguments, "--max-tokens", 7, code=2)
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl.gz", "answers.jsonl.gz.report.json", "output.txt", "prompts.jsonl"]


def test_sampled_local_answers_repeat_with_their_seed(tmp_path: Path, tiny_target: Path, talks: list[Conversation]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(dumps(talks))
    files = {name: tmp_path / f"{name}.jsonl" for name in ("one", "same", "other", "greedy")}
    settings = {"one": (1, 3), "same": (1, 3), "other": (1, 4), "greedy": (0, 3)}
    for name, (temperature, seed) in settings.items():
        sampling = ("--temperature", temperature, "--seed", seed, "--max-tokens", 6)
        printed(tmp_path, "regenerate", prompts, files[name], "--local", "--target", tiny_target, *sampling, code=0)
    one, same, other, greedy = (files[name].read_bytes() for name in settings)
    assert one == same
    assert len({one, other, greedy}) == 3
