"""Decoding with every kind of attention: answers are those of whole passes without a cache, in batches or one by one; what cannot be decoded is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.types import FeatureSpec, Proposal, Sample
from draftsmith.drafts.base import Context, Sampling
from draftsmith.eval.decode import Decoder
from draftsmith.target.capture import Capture
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

CASES = zoo.cases()
TOGETHER = (
    "LlamaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "GptOssForCausalLM",
    "Llama4ForCausalLM-llama4_text", "Llama4ForConditionalGeneration", "Mistral3ForConditionalGeneration", "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "DeepseekV3ForCausalLM",
)  # fmt: skip
ONE_BY_ONE = ("BloomForCausalLM", "MptForCausalLM", "BartForCausalLM")
RECURRENT = ("MambaForCausalLM", "JambaForCausalLM", "Qwen3NextForCausalLM", "Lfm2MoeForCausalLM", "DeepseekV32ForCausalLM", "InklingForCausalLM")
PROMPTS = [torch.randint(3, 70, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (2, 13, 7)]
MAX_NEW, WIDTH = 10, 2
WIDE = 64
"""A window beyond the reach of every answer."""


@dataclass
class Half:
    """A draft that knows the answers and gets every other proposal wrong, so that rows take back different numbers of tokens."""

    whole: Sequence[Sequence[int]]
    layers: tuple[int, ...] = (0,)
    batches: list[int] = field(default_factory=list)

    def start(self, rows: int) -> Half:
        self.batches.append(rows)
        return self

    def select(self, rows: Tensor) -> None:
        """Rows are told apart by their texts."""

    def propose(self, context: Context, state: Half, target: Target, width: int, sampling: Sampling) -> Proposal:
        tokens = []
        for positions, valid, following in zip(context.position_BR, context.valid_BR, context.next_BR, strict=True):
            at, token = int(positions[valid][-1]) + 2, int(following[valid][-1])
            row = next(r for r, text in enumerate(self.whole) if len(text) > at and text[at - 1] == token)
            ahead = [*self.whole[row][at : at + width], *[0] * width][:width]
            tokens.append(ahead if (at + row) % 2 else [(t + 1) % 99 for t in ahead])
        return Proposal(torch.tensor(tokens), None)


def greedy(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """The text token by token, each from a whole pass of the model as it was made."""
    own = model.language_model if type(model).__name__ == "Llama4ForConditionalGeneration" else model  # its wrapper demands an image
    ids = list(prompt)
    for _ in range(MAX_NEW + WIDTH):
        with torch.no_grad():
            ids.append(int(own(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


def check(name: str, window: int, folder: Path) -> list[int]:
    """Answers with a draft are the model's own; what batches there were."""
    made = zoo.build(CASES[name], window=window)
    zoo.save(made, folder, zoo.LAYOUTS[0])
    model, target = TargetModel.load(str(folder), torch.float32), Target.load(str(folder))
    whole = [greedy(made, prompt) for prompt in PROMPTS]
    draft = Half(whole)
    answers = Decoder(model, target, (), draft, WIDTH).decode(PROMPTS, MAX_NEW)  # type: ignore[arg-type]
    assert [a.token_ids for a in answers] == [text[len(p) : len(p) + MAX_NEW] for p, text in zip(PROMPTS, whole, strict=True)]
    counts = {n for a in answers for n in a.accepted}
    assert {0, WIDTH} <= counts, "nothing was accepted, or nothing rejected"
    return draft.batches


@pytest.mark.parametrize("name", TOGETHER)
def test_rows_decoded_together_are_whole_passes(name: str, tmp_path: Path) -> None:
    assert check(name, WIDE, tmp_path) == [3]


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM-llama4_text", "Cohere2ForCausalLM", "MistralForCausalLM"])
def test_beyond_a_small_window_prompts_are_decoded_alone(name: str, tmp_path: Path) -> None:
    assert check(name, 4, tmp_path) == [1, 1, 1]


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_families_that_count_positions_by_places_are_decoded_alone(name: str, tmp_path: Path) -> None:
    assert check(name, WIDE, tmp_path) == [1, 1, 1]


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_targets_are_refused_at_decoding_by_name(name: str) -> None:
    model = TargetModel(zoo.build(CASES[name]))
    with pytest.raises(ValueError, match=rf"{name} has recurrent blocks.*cannot decode"):
        model.new_cache()
    assert model.run(torch.tensor([[5, 6, 7]]), (0,)).hidden_BQF is not None


@pytest.mark.parametrize("name", ["RobertaForCausalLM", "OpenAIGPTLMHeadModel", "Kosmos2ForConditionalGeneration"])
def test_targets_whose_cached_states_are_other_ones_are_refused_by_name(name: str) -> None:
    """Positions that start at another number, no cache at all: wrong answers, if nothing looked."""
    model = TargetModel(zoo.build(CASES[name]))
    with pytest.raises(ValueError, match=rf"{type(model.speaker).__name__} cannot be decoded with yet"):
        model.new_cache()


@pytest.mark.parametrize("name", ["PaliGemmaForConditionalGeneration", "XLNetLMHeadModel"])
def test_states_that_see_later_tokens_are_refused_before_capture(name: str, tmp_path: Path) -> None:
    zoo.save(zoo.build(CASES[name]), tmp_path, zoo.LAYOUTS[0])
    capture = Capture(TargetModel.load(str(tmp_path), torch.float32), Target.load(str(tmp_path)), FeatureSpec((1,), "float32"))
    with pytest.raises(ValueError, match=f"{name} is no causal language model on text"):
        capture.check(Sample("s", torch.tensor(PROMPTS[1]), torch.ones(13, dtype=torch.bool)))


def test_a_mask_beyond_the_window_of_some_blocks_is_refused() -> None:
    """One mask for all blocks would close the window of those that have none."""
    model = TargetModel(zoo.build(CASES["Gemma3ForCausalLM"], window=4))
    order = torch.arange(9)
    with pytest.raises(ValueError, match=r"one mask for 9 places cannot close the windows \(4\) of some blocks alone"):
        model.run(torch.tensor([PROMPTS[1][:9]]), (), order[None], (order <= order[:, None])[None, None])
