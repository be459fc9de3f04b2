"""Which targets can be decoded with, and whether in batches: known families by name, and every class of the zoo against its own passes without a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zoo

from draftsmith.eval.decode import Decoder
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

PROMPTS = [[5, 9, 17], [8, 8, 30, 4, 70, 66, 12]]
NEW = 6


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[[str], tuple[TargetModel, Target]]:
    def load(name: str) -> tuple[TargetModel, Target]:
        zoo.save(zoo.build(zoo.cases()[name], False), tmp_path / name, "safetensors, one file")
        return TargetModel.load(str(tmp_path / name), torch.float32), Target.load(str(tmp_path / name))

    return load


def own_words(model: TargetModel, prompt: list[int]) -> list[int]:
    """Greedy tokens from whole passes: no cache, no positions, no mask."""
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(model.own_logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("name", "together"), [("Qwen2ForCausalLM", True), ("LongcatFlashForCausalLM", True), ("BloomForCausalLM", False), ("PLBartForCausalLM", False)]
)
def test_what_takes_no_mask_or_positions_is_decoded_one_by_one(loaded: Callable, name: str, together: bool) -> None:
    model, target = loaded(name)
    assert model.together is together
    assert [a.token_ids for a in Decoder(model, target, ()).decode(PROMPTS, NEW)] == [own_words(model, p) for p in PROMPTS]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Mamba2ForCausalLM", "recurrent blocks"),
        ("Qwen3NextForCausalLM", "recurrent blocks"),
        ("Lfm2MoeForCausalLM", "recurrent blocks"),
        ("DeepseekV32ForCausalLM", "more than keys and values"),
        ("RobertaForCausalLM", "explicit positions"),
    ],
)
def test_what_cannot_be_decoded_with_says_why(loaded: Callable, name: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} .*{why}.* captures its features"):
        Decoder(*loaded(name), ()).decode(PROMPTS, NEW)


@pytest.mark.matrix
def test_every_class_gives_its_own_words_or_is_refused_by_name(tmp_path: Path) -> None:
    wrong, decoded = [], 0
    for name, case in zoo.cases().items():
        try:
            zoo.save(zoo.build(case, False), tmp_path / name, "safetensors, one file")
            model, target = TargetModel.load(str(tmp_path / name), torch.float32), Target.load(str(tmp_path / name))
            answers = Decoder(model, target, ()).decode(PROMPTS, NEW)
        except (ValueError, ImportError):  # a class that is no target, or that says why it is not decoded with: tests/target/test_matrix.py lists them
            continue
        decoded += 1
        if [a.token_ids for a in answers] != [own_words(model, p) for p in PROMPTS]:
            wrong.append(name)
    assert wrong == []
    assert decoded > 190
