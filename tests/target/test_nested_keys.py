"""Multi-modal and older checkpoints under the names that they were published with: the same tensors are found, with no flag."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration
from zoo import Case, build, cases

from draftsmith.target.families import anatomy
from draftsmith.target.weights import Target

INSIDE = ((r"^model\.language_model\.", "language_model.model."), (r"^lm_head\.", "language_model.lm_head."), (r"^model\.(?!language_model)", ""))
"""One generation: the language model whole inside the wrapper, with its head."""
BARE = ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual."))
"""Another: the language model's own names, the rest beside it."""
DEEP = ((r"^model\.language_model\.", "model.language_model."),)
"""The newest: as in memory."""
THINKER_BARE = ((r"^model\.language_model\.", "thinker.model."), (r"^model\.(?=visual|audio)", "thinker."), (r"^", "thinker."))
"""A thinker out of a checkpoint that also talks."""

SPELLINGS: dict[str, tuple[tuple[tuple[str, str], ...], ...]] = {
    "LlavaForConditionalGeneration": (INSIDE, BARE, DEEP),
    "LlavaNextForConditionalGeneration": (INSIDE, DEEP),
    "LlavaOnevisionForConditionalGeneration": (INSIDE, DEEP),
    "VideoLlavaForConditionalGeneration": (INSIDE, DEEP),
    "AriaForConditionalGeneration": (INSIDE, DEEP),
    "Qwen2VLForConditionalGeneration": (BARE, DEEP),
    "Qwen2_5_VLForConditionalGeneration": (BARE, DEEP),
    "Qwen3VLForConditionalGeneration": (DEEP,),
    "Qwen3VLMoeForConditionalGeneration": (DEEP,),
    "Gemma3ForConditionalGeneration": (INSIDE, DEEP),
    "PaliGemmaForConditionalGeneration": (INSIDE, DEEP),
    "Mistral3ForConditionalGeneration": (INSIDE, DEEP),
    "InternVLForConditionalGeneration": (INSIDE, DEEP),
    "GotOcr2ForConditionalGeneration": (INSIDE, DEEP),
    "MllamaForConditionalGeneration": (INSIDE, DEEP),
    "Llama4ForConditionalGeneration": (((r"^language_model\.", "language_model."),),),
    "Idefics3ForConditionalGeneration": (((r"^model\.text_model\.", "model.text_model."),), ((r"^model\.text_model\.", "text_model."),)),
    "SmolVLMForConditionalGeneration": (((r"^model\.text_model\.", "model.text_model."),),),
    "FuyuForCausalLM": (INSIDE, DEEP),
    "NemotronHForCausalLM": (((r"^model\.", "backbone."),),),
    "MambaForCausalLM": (((r"^backbone\.", "backbone."),),),
    "GPT2LMHeadModel": (((r"^transformer\.", ""),), ((r"^transformer\.", "transformer."),)),
    "BloomForCausalLM": (((r"^transformer\.", ""),), ((r"^transformer\.", "transformer."),)),
    "GPTNeoXForCausalLM": (((r"^gpt_neox\.", "gpt_neox."),),),
    "Kimi_K25ForConditionalGeneration": (INSIDE, DEEP),
    "Qwen2_5OmniThinkerForConditionalGeneration": (THINKER_BARE, BARE, DEEP),
    "Qwen3OmniMoeThinkerForConditionalGeneration": (THINKER_BARE,),
}
KNOWN = [(name, i, tied) for name, spellings in SPELLINGS.items() for i in range(len(spellings)) for tied in (False, True)]


@cache
def model_of(name: str, tied: bool) -> PreTrainedModel:
    return build(cases()[name], tied)


def renamed(key: str, spelling: tuple[tuple[str, str], ...]) -> str:
    for pattern, published in spelling:
        key, changed = re.subn(pattern, published, key)
        if changed:
            return key
    return key


def expected(model: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding, head and norm as the model in memory names them."""
    parts, state = anatomy(model, "it"), model.state_dict()
    assert parts.norm is not None
    assert parts.norm.weight is not None
    return state[parts.embedding], state[parts.head], state[parts.norm.weight] + parts.norm.offset


def same(target: Target, model: PreTrainedModel) -> bool:
    return all(torch.equal(a, b) for a, b in zip((target.embedding_VH, target.head_VH, target.norm_H), expected(model), strict=True))


def write(model: PreTrainedModel, folder: Path, spelling: tuple[tuple[str, str], ...]) -> set[str]:
    """A checkpoint of a tied model holds no head, as published ones do not; returns its keys."""
    model.config.save_pretrained(folder)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    tensors = {renamed(k, spelling): v.clone().contiguous() for k, v in model.state_dict().items() if k not in tied}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return set(tensors)


@pytest.mark.parametrize(("name", "spelling", "tied"), KNOWN)
def test_a_published_spelling_is_found(name: str, spelling: int, tied: bool, tmp_path: Path) -> None:
    model = model_of(name, tied)
    write(model, tmp_path, SPELLINGS[name][spelling])
    assert same(Target.load(str(tmp_path)), model)


@pytest.mark.parametrize("name", SPELLINGS)
def test_what_transformers_saves_is_found(name: str, tmp_path: Path) -> None:
    model = model_of(name, False)
    model.save_pretrained(tmp_path)
    assert same(Target.load(str(tmp_path)), model)


def test_every_class_of_the_table_exists() -> None:
    assert set(SPELLINGS) <= set(cases())


@pytest.mark.parametrize("published", [True, False])
def test_the_thinker_is_found_in_a_checkpoint_that_also_talks(published: bool, tmp_path: Path) -> None:
    """The talker has an embedding, a norm and a head of its own."""
    model = build(Case("omni", Qwen2_5OmniForConditionalGeneration.__name__, "qwen2_5_omni", Qwen2_5OmniConfig.__name__, text=False), tied=False)
    old = ((r"^thinker\.model\.language_model\.", "thinker.model."), (r"^thinker\.model\.(?=visual|audio)", "thinker."))
    keys = write(model, tmp_path, old if published else ())
    assert {"talker.model.embed_tokens.weight", "talker.model.norm.weight", "talker.codec_head.weight"} <= keys
    assert ("thinker.model.embed_tokens.weight" in keys) == published
    target, thinker = Target.load(str(tmp_path)), model.thinker.state_dict()
    assert torch.equal(target.head_VH, thinker["lm_head.weight"])
    assert torch.equal(target.embedding_VH, thinker["model.language_model.embed_tokens.weight"])
    assert torch.equal(target.norm_H, thinker["model.language_model.norm.weight"])
