"""Which engine serves what, refused with reasons; commands to serve; the card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exported import CONFIG, LAYERS, ORIGIN, WIDTH
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.core.types import Features, TargetShape
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.export import layouts
from draftsmith.export.card import Origin
from draftsmith.export.write import ExportConfig, export
from draftsmith.target.weights import Target

REPORT = {
    "acceptance_length": 2.345, "prompts": 100, "draft_tokens": 5, "temperature": 0.0, "acceptance_rule": "greedy: equal to the target's arg-max",
    "dtype": "float32", "greedy_identical": True, "acceptance": {"position_rates": [0.5, 0.25]}, "simulated_acceptance_length": 2.3,
}  # fmt: skip


def refused(shape: TargetShape, form: Any = "engine", **config: Any) -> dict[str, list[str]]:
    """Engines that cannot serve, with reasons."""
    return {k: v for k, v in layouts.refusals(Eagle3, Eagle3Config(**({"layers": LAYERS} | config)), shape, form).items() if v}


def test_three_captured_blocks_are_served_by_all(target: Target) -> None:
    assert refused(target.shape) == {}


def test_llama_cpp_reads_three_blocks_exactly(target: Target) -> None:
    for layers in ((1, 2), (0, 1, 2, 3)):
        assert refused(target.shape, layers=layers) == {"llama.cpp": [f"draft.layers {list(layers)}: llama.cpp reads exactly three; capture three"]}


def test_one_captured_block_skips_fc_in_two_engines(target: Target) -> None:
    assert set(refused(target.shape, layers=(2,))) == {"sglang", "llama.cpp", "tensorrt-llm"}


def test_the_normed_residual_is_for_engines_that_read_its_flag(target: Target) -> None:
    assert set(refused(target.shape, norm_before_residual=True)) == {"sglang", "tensorrt-llm"}


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_rotary_types_that_llama_cpp_does_not_write_for_a_draft(target: Target, kind: str) -> None:
    shape = replace(target.shape, rope={"rope_type": kind, "rope_theta": 5000.0})
    assert refused(shape) == {
        "llama.cpp": [f"rotary positions of type {kind}: llama.cpp's converter writes default, linear, yarn, llama3; choose another engine"]
    }


def test_a_target_whose_inner_states_sglang_does_not_get(target: Target) -> None:
    found = refused(replace(target.shape, model_type="gpt_neox"))
    assert found.keys() == {"sglang"}
    assert found["sglang"][0].startswith("target of type gpt_neox: SGLang 0.5.23 gets no states of inner blocks from it")


def test_the_speculators_form_is_for_two_engines(target: Target) -> None:
    found = refused(target.shape, "speculators")
    assert set(found) == {"sglang", "tensorrt-llm"}
    assert found["sglang"] == ["export.format speculators: SGLang reads engine; choose export.format=engine"]


def test_a_named_engine_that_cannot_serve_is_an_error_with_every_reason(target: Target) -> None:
    found = layouts.refusals(Eagle3, Eagle3Config(layers=(2,)), target.shape, "engine")
    layouts.require(("vllm",), found)
    with pytest.raises(ValueError, match=r"export.engines names engines that cannot serve this draft:\n  sglang: draft.layers \[2\].*\n  llama.cpp: "):
        layouts.require(("vllm", "sglang", "llama.cpp"), found)


def test_export_refuses_before_it_writes(draft: Eagle3, target: Target, found: list[Features], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"export\.format speculators: SGLang reads engine"):
        export(draft, target, tmp_path / "x", ExportConfig(engines=("sglang",), format="speculators"), found, WIDTH)
    assert list(tmp_path.iterdir()) == []


def test_a_share_of_turned_dimensions_does_not_ship(target: Target) -> None:
    """A draft turns whole heads; vLLM would turn half of each if the target's share stood in its config."""
    shape = replace(target.shape, rope={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5})
    draft = Eagle3(Eagle3Config(vocab_size=8, layers=LAYERS), shape)
    assert len(draft.rope.inverse) == shape.head_dim // 2
    assert layouts.config_of(draft, "engine", "float32", "", WIDTH)["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}


@given(rope=st.sampled_from([{"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}]))
def test_both_spellings_of_rotary_positions_are_read_alike(target: Target, rope: dict[str, Any]) -> None:
    draft = Eagle3(Eagle3Config(vocab_size=8, layers=LAYERS), replace(target.shape, rope=rope))
    fields = layouts.config_of(draft, "engine", "float32", "", WIDTH)
    assert layouts.rope_of(fields) == layouts.rope_of(fields, legacy=True) == rope
    old = {"rope_theta": fields["rope_theta"], "rope_scaling": {"type": rope["rope_type"], **{k: v for k, v in rope.items() if k == "factor"}}}
    assert layouts.rope_of(old) == rope


# ---- the card ----


def text_of(draft: Eagle3, target: Target, found: list[Features], where: Path, origin: Origin, config: ExportConfig = CONFIG) -> str:
    export(draft, target, where, config, found, WIDTH, origin)
    return (where / "README.md").read_text()


def test_the_card_gives_commands_for_every_engine(draft: Eagle3, target: Target, found: list[Features], tmp_path: Path) -> None:
    text = text_of(draft, target, found, tmp_path / "x", ORIGIN)
    assert f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {tmp_path / 'x'}" in text
    assert "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6" in text
    assert f'vllm serve some/target --speculative-config \'{{"method": "eagle3", "model": "{tmp_path / "x"}", "num_speculative_tokens": 5}}\'' in text
    assert "--spec-type draft-eagle3 --spec-draft-n-max 5" in text
    assert "decoding_type: Eagle3" in text
    assert "eagle3_layers_to_capture: [1, 2, 4]" in text
    assert "outputs of blocks 1, 2, 4 (counted from 0)" in text


def test_the_card_says_what_was_not_measured(draft: Eagle3, target: Target, found: list[Features], tmp_path: Path) -> None:
    text = text_of(draft, target, found, tmp_path / "x", ORIGIN)
    assert "Nothing: this draft was not judged" in text
    assert "Not recorded." in text
    assert "Not chosen here." in text


def test_the_card_gives_figures_with_their_conditions(draft: Eagle3, target: Target, found: list[Features], tmp_path: Path) -> None:
    origin = replace(
        ORIGIN, report=REPORT | {"best_width": 2}, data=("train: talks.jsonl; 12 read",), recipe="run: x\n", training={"trained": "30 of 60 steps"}
    )
    text = text_of(draft, target, found, tmp_path / "x", origin)
    assert "**2.35** tokens a verification pass (the bonus token counts), over 100 prompts, 5 drafted tokens, temperature 0" in text
    assert "50.0%, 25.0%" in text
    assert "equal to the target's own greedy output for all of them" in text
    assert "* train: talks.jsonl; 12 read" in text
    assert "| trained | 30 of 60 steps |" in text
    assert "The draft length of 2 is predicted to be fastest on the machine that judged it" in text
    assert "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3" in text
    different = text_of(draft, target, found, tmp_path / "y", replace(origin, report=REPORT | {"greedy_identical": False}))
    assert "NOT equal to the target's own greedy output everywhere" in different
    drawn = text_of(draft, target, found, tmp_path / "z", replace(origin, report=REPORT | {"greedy_identical": None, "temperature": 0.7}))
    assert "temperature 0.7" in drawn
    assert "Tokens were drawn, so outputs were not compared." in drawn
    assert "greedy output" not in drawn


def test_the_card_tells_which_engine_cannot(draft: Eagle3, target: Target, found: list[Features], tmp_path: Path) -> None:
    text = text_of(draft, target, found, tmp_path / "x", ORIGIN, ExportConfig(format="speculators"))
    assert "Cannot serve it: export.format speculators: SGLang reads engine" in text
    assert "sglang.launch_server" not in text
