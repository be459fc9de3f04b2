"""Decoding of targets with caps, scales and biases: greedy text is transformers' own, and sampling draws from the ruled distribution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chi_square import p_value
from test_decode_sampled import LIMIT, PROMPT, ROWS, TOKENS, VOCABULARY, decoder, exact, tally
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, MiniCPM3Config, PhiConfig, PreTrainedConfig

from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.eval.decode import Decoder
from draftsmith.target.families import LogitRule
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 128, "initializer_range": 0.25, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8, "dim_model_base": 8}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma2 (cap)": lambda: Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=1.0),
    "cohere (scale)": lambda: CohereConfig(**SIZES, logit_scale=0.25),
    "minicpm3 (before the head)": lambda: MiniCPM3Config(**SIZES, **LATENT),
    "phi (bias)": lambda: PhiConfig(**SIZES),
}
Small = tuple[TargetModel, Target]


@pytest.fixture(scope="module", params=FAMILIES)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder: Path = tmp_path_factory.mktemp("rules") / "target"
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(FAMILIES[request.param](), dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p += 0.5 * torch.randn_like(p)
    model.save_pretrained(folder)
    return TargetModel.load(str(folder), torch.float32), Target.load(str(folder))


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
