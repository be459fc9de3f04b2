"""Recipes: what is refused, where the error points, what overrides mean, and that dump and parse are inverse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from draftsmith.core.config import at, dump, load, parse
from draftsmith.data.config import SourceConfig
from draftsmith.drafts.eagle3 import Eagle3Config
from draftsmith.recipe import Recipe
from draftsmith.train.loop import TrainConfig

GOOD = """\
# a comment, so that lines and keys do not coincide
run: runs/x

target: somewhere
draft:
  kind: eagle3
  steps: 3
train:
  optimizer:
    learning_rate: 0.001

  seed: 4
"""


def message(text: str, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        parse(Recipe, text, overrides, source="r.yaml")
    return str(raised.value)


def swapped(old: str, new: str) -> tuple[str, int]:
    """GOOD with one change, and the line of that change."""
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new), GOOD[: GOOD.index(old)].count("\n") + 1


def test_a_good_recipe_sets_what_it_says_and_defaults_the_rest() -> None:
    recipe = parse(Recipe, GOOD)
    assert (recipe.run, recipe.target.where, recipe.train.seed, recipe.train.optimizer.learning_rate) == ("runs/x", "somewhere", 4, 0.001)
    assert recipe.draft.steps == ((0.0, 3),)
    assert recipe.train.steps == TrainConfig().steps
    assert recipe.draft.vocab_size == Eagle3Config().vocab_size


@pytest.mark.parametrize(
    ("old", "new", "dotted", "meant"),
    [
        ("target: somewhere", "taget: somewhere", "taget", "target"),
        ("  seed: 4", "  sead: 4", "train.sead", "seed"),
        ("    learning_rate: 0.001", "    lerning_rate: 0.001", "train.optimizer.lerning_rate", "learning_rate"),
        ("  steps: 3", "  step: 3", "draft.step", "steps"),
        ("  steps: 3", "  chain: 3", "draft.chain", "chains"),
    ],
)
def test_a_misspelt_key_is_named_with_its_line_and_the_closest_known_key(old: str, new: str, dotted: str, meant: str) -> None:
    text, line = swapped(old, new)
    assert f"r.yaml:{line}: unknown key '{dotted}'; did you mean '{meant}'?" in message(text)


def test_a_key_like_none_lists_the_known_ones() -> None:
    text, line = swapped("    learning_rate: 0.001", "    zzz: 1")
    found = message(text)
    assert f"r.yaml:{line}: unknown key 'train.optimizer.zzz'" in found
    assert "betas, clip, learning_rate, warmup, weight_decay" in found
    assert "did you mean" not in found


def test_every_fault_gets_its_own_line() -> None:
    text, _ = swapped("  steps: 3", "  step: 3")
    found = message(text.replace("seed: 4", "seed: soon")).splitlines()
    assert len(found) == 2
    assert "r.yaml:7: unknown key 'draft.step'" in found[0]
    assert "r.yaml:12: train.seed" in found[1]


@pytest.mark.parametrize(
    ("old", "new", "dotted", "given"),
    [
        ("  seed: 4", "  seed: soon", "train.seed", "'soon', a str"),
        ("  seed: 4", "  seed: 1.5", "train.seed", "1.5, a float"),
        ("    learning_rate: 0.001", "    learning_rate: [1]", "train.optimizer.learning_rate", "[1], a list"),
        ("    learning_rate: 0.001", "    learning_rate: 0", "train.optimizer.learning_rate", "0, a int"),
        ("    learning_rate: 0.001", "    betas: [0.9]", "train.optimizer.betas", ""),
        ("run: runs/x", "run: [1]", "run", "[1], a list"),
        ("  steps: 3", "  vocab_size: 0", "draft.vocab_size", "0, a int"),
        ("  steps: 3", "  layers: [1, x]", "draft.layers", "'x', a str"),
        ("  seed: 4", "  seed: true", "train.seed", "True, a bool"),
        ("  seed: 4", "  steps: true", "train.steps", "True, a bool"),
        ("    learning_rate: 0.001", "    learning_rate: true", "train.optimizer.learning_rate", "True, a bool"),
        ("    learning_rate: 0.001", "    learning_rate: .inf", "train.optimizer.learning_rate", "inf, a float"),
        ("    learning_rate: 0.001", "    learning_rate: .nan", "train.optimizer.learning_rate", "nan, a float"),
    ],
)
def test_a_wrong_value_is_shown_with_its_line_and_type(old: str, new: str, dotted: str, given: str) -> None:
    text, line = swapped(old, new)
    found = message(text)
    assert found.startswith(f"r.yaml:{line}: {dotted}")
    assert given in found


def test_a_missing_key_is_named() -> None:
    text, _ = swapped("target: somewhere\n", "")
    assert re.search(r"r\.yaml:\d+: target is required", message(text))


def test_a_section_that_is_a_single_value_is_refused_at_its_line() -> None:
    assert message("run: a\ntarget: b\ntrain: 3\n").startswith("r.yaml:3: train:")


@pytest.mark.parametrize("steps", ["0", "-1", "true", "1.5", "many", "[]", "[[0, 0]]", "[[0.1, 1]]", "[[0, 1], [0.5, 2], [0.4, 3]]", "[[0, 1], [0, 2]]", "[[0, 1], [1, 2]]", "[[0, 1, 2]]", "[1, 2]", "[[0, 1], [x, 2]]", "[[0, 1], [.nan, 2]]"])  # fmt: skip  # noqa: E501
def test_a_bad_schedule_is_refused_in_the_file_and_on_the_command_line(steps: str) -> None:
    text, line = swapped("  steps: 3", f"  steps: {steps}")
    assert message(text).startswith(f"r.yaml:{line}: draft.steps: ")
    assert message(GOOD, f"draft.steps={steps}").startswith("command line: draft.steps: ")


def test_k_of_0_says_what_is_expected() -> None:
    assert "at least 1" in message(GOOD, "draft.steps=0")


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.001, 0.999), st.integers(1, 50)), max_size=6, unique_by=lambda s: s[0]), st.integers(1, 50), st.floats(0, 1))
def test_a_schedule_holds_its_last_value_that_began(later: list[tuple[float, int]], first: int, fraction: float) -> None:
    stages = [(0.0, first), *sorted(later)]
    schedule = parse(Recipe, GOOD, [f"draft.steps={yaml.safe_dump([list(s) for s in stages], default_flow_style=True).strip()}"]).draft.steps
    assert schedule == tuple(stages)
    expected = first
    for start, value in stages:
        if start <= fraction:
            expected = value
    assert at(schedule, fraction) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=7", 7),
        ("train.optimizer.learning_rate=1e-3", 1e-3),
        ("train.optimizer.learning_rate=5", 5.0),
        ("train.optimizer.betas=[0.8, 0.99]", (0.8, 0.99)),
        ("draft.layers=[0,2]", (0, 2)),
        ("draft.layers=null", None),
        ("draft.steps=[[0, 1], [0.5, 3]]", ((0.0, 1), (0.5, 3))),
        ("data.limit=3", 3),
        ("data.train=a=b.jsonl", (SourceConfig(path="a=b.jsonl"),)),
        ("train.tensorboard=true", True),
        ("features.kind=live", "live"),
        ("train.seed = 9", 9),
    ],
)
def test_an_override_replaces_the_value(override: str, expected: object) -> None:
    value: Any = parse(Recipe, GOOD, [override])
    for part in override.partition("=")[0].strip().split("."):
        value = getattr(value, part)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("value", ["2026", "1e3", "nan", "3.14", "null", "true"])
def test_text_that_looks_like_a_number_is_still_text_for_a_setting_that_is_text(value: str) -> None:
    assert parse(Recipe, GOOD, [f"run='{value}'"]).run == value


def test_the_last_override_wins_and_leaves_its_neighbours() -> None:
    recipe = parse(Recipe, GOOD, ["train.seed=5", "train.seed=6", "train.steps=2"])
    assert (recipe.train.seed, recipe.train.steps, recipe.train.optimizer.learning_rate) == (6, 2, 0.001)


@pytest.mark.parametrize("override", ["train.steps", "=3", "train..steps=3", ".=3", "train.=3"])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    assert message(GOOD, override).startswith(f"override {override!r}: expected key.sub=value")


def test_an_override_below_a_single_value_is_refused() -> None:
    assert "train.seed.x=1" in message(GOOD, "train.seed.x=1")


def test_an_override_that_is_not_yaml_is_refused_and_named() -> None:
    found = message(GOOD, "draft.layers=[1, 2")
    assert "draft.layers=[1, 2" in found


@pytest.mark.parametrize(
    ("override", "dotted", "meant"),
    [("train.step=3", "train.step", "steps"), ("trian.steps=3", "trian", "train"), ("train.optimizer.clipp=3", "train.optimizer.clipp", "clip")],
)
def test_a_misspelt_override_is_told_from_the_file(override: str, dotted: str, meant: str) -> None:
    assert f"command line: unknown key '{dotted}'; did you mean '{meant}'?" in message(GOOD, override)


def test_a_fault_of_the_file_beside_an_override_keeps_its_line() -> None:
    text, line = swapped("  seed: 4", "  sead: 4")
    assert f"r.yaml:{line}: unknown key 'train.sead'" in message(text, "train.steps=3")


def test_a_missing_recipe_is_named_with_the_closest_neighbour(tmp_path: Path) -> None:
    (tmp_path / "smollm2-eagle3.yaml").write_text(GOOD)
    with pytest.raises(ValueError, match=r"no recipe at .*smolm2-eagle3\.yaml; did you mean .*smollm2-eagle3\.yaml"):
        load(Recipe, tmp_path / "smolm2-eagle3.yaml")
    with pytest.raises(ValueError, match=r"no recipe at .*else/x\.yaml$"):
        load(Recipe, tmp_path / "else" / "x.yaml")


def test_load_names_the_file_that_it_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(GOOD)
    assert load(Recipe, path, ["train.seed=11"]).train.seed == 11
    path.write_text(GOOD.replace("seed", "sed"))
    with pytest.raises(ValueError, match=re.escape(f"{path}:12: unknown key 'train.sed'; did you mean 'seed'?")):
        load(Recipe, path)


@pytest.mark.parametrize("text", ["run: [1\n", "run: x\n  target: y\n", "a: b: c\n", "\tx: 1\n"])
def test_invalid_yaml_is_named(text: str) -> None:
    found = message(text)
    assert "r.yaml is not valid YAML" in found
    assert "line" in found


def test_a_recipe_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(GOOD.replace("somewhere", "d\u00e9j\u00e0").encode("latin-1"))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        load(Recipe, path)


@pytest.mark.parametrize(("text", "got"), [("- a\n", "list"), ("just text\n", "str"), ("3\n", "int")])
def test_a_file_without_keys_is_refused(text: str, got: str) -> None:
    assert message(text) == f"r.yaml: expected `key: value` settings at the top level, got {got}"


@pytest.mark.parametrize("text", ["[]\n", "0\n", "false\n", "''\n"])
def test_a_falsy_file_is_not_an_empty_recipe(text: str) -> None:
    assert "expected `key: value` settings" in message(text)


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n"])
def test_an_empty_recipe_lacks_the_required_keys(text: str) -> None:
    found = message(text)
    assert "run is required" in found
    assert "target is required" in found


def test_settings_are_frozen() -> None:
    recipe = parse(Recipe, GOOD)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.train.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        recipe.run = "other"  # type: ignore[misc]


# PyYAML folds a next-line character (U+0085) into a space when it writes text as it is.
text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\x85"), min_size=1, max_size=12)
schedules = st.one_of(st.integers(1, 9), st.lists(st.floats(0.01, 0.99), max_size=4, unique=True).map(lambda f: [[0.0, 1], *([x, 2] for x in sorted(f))]))
fractions = st.floats(0, 1, exclude_max=True)
optimizers = st.fixed_dictionaries({"learning_rate": st.floats(1e-12, 1e3), "warmup": st.floats(0, 1), "betas": st.tuples(fractions, fractions)})
recipes = st.fixed_dictionaries(
    {
        "run": text,
        "target": text,
        "draft": st.fixed_dictionaries({"steps": schedules, "layers": st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple)}),
        "train": st.fixed_dictionaries({"seed": st.integers(-(10**12), 10**12), "optimizer": optimizers, "tensorboard": st.booleans()}),
        "data": st.fixed_dictionaries({"train": text, "limit": st.none() | st.integers(1, 99)}),
        "features": st.fixed_dictionaries({"kind": st.sampled_from(["files", "live"]), "path": st.none() | text}),
    }
)


@settings(deadline=None, max_examples=25)
@given(recipes)
def test_dump_and_parse_are_inverse(data: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(data)
    assert parse(Recipe, dump(recipe)) == recipe
    assert dump(parse(Recipe, dump(recipe))) == dump(recipe)


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False, min_value=1e-300, max_value=1e300))
def test_any_number_survives_the_command_line(number: float) -> None:
    assert parse(Recipe, GOOD, [f"train.optimizer.learning_rate={number!r}"]).train.optimizer.learning_rate == number
