"""Decoding of targets with caps, scales and biases: greedy text is transformers' own, and sampling draws from the ruled distribution."""

from __future__ import annotations

import pytest
import torch
from checkpoints import ruled, saved
from chi_square import p_value
from test_decode_sampled import LIMIT, PROMPT, ROWS, TOKENS, VOCABULARY, decoder, exact, tally

from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.eval.decode import Decoder
from draftsmith.target.families import LogitRule
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

FAMILIES = ruled(1.0, vocab_size=VOCABULARY, max_position_embeddings=128, eos_token_id=None)
Small = tuple[TargetModel, Target]


@pytest.fixture(scope="module", params=FAMILIES)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = str(saved(FAMILIES[request.param](), tmp_path_factory.mktemp("rules") / "target", seed=5, spread=0.5))
    return TargetModel.load(folder, torch.float32), Target.load(folder)


@pytest.fixture(scope="module")
def eagle3(small: Small) -> Eagle3:
    torch.manual_seed(1)
    draft = Eagle3(Eagle3Config(vocab_size=8, layers=(0, 1, 3)), small[1].shape).eval()
    draft.lm_head.weight.data *= 3
    return draft


@pytest.mark.parametrize("width", [0, 1, 4])
def test_greedy_text_is_that_of_transformers(small: Small, eagle3: Eagle3, width: int) -> None:
    prompts = [[3, 1, 4], [7], [2, 9, 11, 5, 6, 8]]
    answers = Decoder(*small, (), eagle3 if width else None, width).decode(prompts, 24)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        whole = small[0].model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0)
        assert answer.token_ids == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("width", [0, 2])
def test_sampling_draws_from_the_targets_own_distribution(small: Small, eagle3: Eagle3, width: int) -> None:
    answers = decoder(small, eagle3 if width else None, width).decode([PROMPT] * ROWS, TOKENS)
    assert p_value(tally(answers), exact(small, 1.0)) > LIMIT


def test_without_the_rule_it_would_be_another_distribution(small: Small, eagle3: Eagle3) -> None:
    """Planted fault: the plain product."""
    model, target = small
    plain = target._moved("cpu", None)
    plain.rule, plain.bias_V = LogitRule(), None
    plain.head_VH = plain.head_VH / (target.rule.pre or 1.0)
    assert p_value(tally(decoder((model, plain), eagle3, 2).decode([PROMPT] * ROWS, TOKENS)), exact(small, 1.0)) < LIMIT
