"""Targets with sliding windows: decoded together while no window can end inside an answer, one by one beyond; always transformers' own text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripted import Scripted
from transformers import Gemma2Config, Gemma2ForCausalLM

from draftsmith.eval.decode import Decoder
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

PROMPTS = [torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 17, 9, 1)]
MAX_NEW, WIDTH = 12, 3
REACH = 17 + MAX_NEW * (WIDTH + 1)


def loaded(folder: Path, window: int) -> tuple[TargetModel, Target, list[list[int]]]:
    """The same weights under a window, and transformers' own answers."""
    torch.manual_seed(4)
    config = Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=512, initializer_range=0.4, sliding_window=window, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(folder)
    model = TargetModel.load(str(folder), torch.float32)
    longest = MAX_NEW + WIDTH + 2
    own = [model.model.generate(torch.tensor([p]), do_sample=False, max_new_tokens=longest)[0, len(p) :].tolist() for p in PROMPTS]
    return model, Target.load(str(folder)), own


@pytest.mark.filterwarnings("ignore:.*attention mask.*")
def test_rows_are_decoded_together_while_no_window_can_end_inside(tmp_path: Path) -> None:
    """A scripted draft insists on getting all rows at once; with its rejections, rows get gaps."""
    model, target, own = loaded(tmp_path / "wide", REACH)
    draft = Scripted(model, [[*p, *answer] for p, answer in zip(PROMPTS, own, strict=True)], lambda row, proposal: (row + proposal) % (WIDTH + 1))
    answers = Decoder(model, target, (), draft, WIDTH).decode(PROMPTS, MAX_NEW)  # type: ignore[arg-type]
    assert [a.token_ids for a in answers] == [answer[:MAX_NEW] for answer in own]


@pytest.mark.parametrize("window", [4, 16])
def test_beyond_the_window_every_prompt_gets_its_own_answer(tmp_path: Path, window: int) -> None:
    model, target, own = loaded(tmp_path / "narrow", window)
    answers = Decoder(model, target, ()).decode(PROMPTS, MAX_NEW)
    assert [a.token_ids for a in answers] == [answer[:MAX_NEW] for answer in own]
    assert own != loaded(tmp_path / "wide", REACH)[2], "the window changes nothing here: the test could not fail"
