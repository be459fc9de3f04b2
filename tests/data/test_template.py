"""Rendering equals the tokenizer's own, and what ends a turn is found in every kind of template."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import templates
from templates import changed

from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.template import ChatTemplate, TemplateError

TURN = [Message("user", "1 + 1?"), Message("assistant", "2"), Message("user", "sure?")]


def raw(template: ChatTemplate, text: str) -> list[int]:
    return template.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("prompt", [True, False])
def test_ids_are_those_of_the_rendering_by_hand(template: ChatTemplate, prompt: bool) -> None:
    text = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n"
    assert template.ids(TURN, prompt) == raw(template, text + ("<|im_start|>assistant\n" if prompt else ""))


def test_ids_equal_the_tokenizers_own_rendering(template: ChatTemplate, talks: list[Conversation]) -> None:
    for talk in talks:
        rows = [{"role": m.role, "content": m.content} for m in talk.messages]
        own = template.tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=False)
        assert template.ids(talk.messages, prompt=False) == raw(template, str(own))


def test_text_is_without_special_tokens(template: ChatTemplate) -> None:
    assert template.text(raw(template, "caf\u00e9 \U0001f600<|im_end|>")) == "caf\u00e9 \U0001f600"


def test_a_template_that_raises_says_why(template: ChatTemplate) -> None:
    refusing = changed(template, templates.REFUSES_SYSTEM)
    with pytest.raises(TemplateError, match="no system role here"):
        refusing.ids([Message("system", "s"), Message("user", "u")], prompt=True)
    assert refusing.ids(TURN, prompt=True) == template.ids(TURN, prompt=True)


@pytest.mark.parametrize(
    ("jinja", "eos", "expected"),
    [
        (templates.DEFAULT_SYSTEM, None, ["<|im_end|>"]),
        (templates.STRIPS_THINKING, "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
        (templates.OTHER_END, "<|endoftext|>", ["<|endoftext|>"]),
        (templates.NO_END, "<|endoftext|>", ["<|endoftext|>"]),
    ],
)
def test_an_answer_ends_at_the_end_token_and_at_the_templates_mark(template: ChatTemplate, jinja: str, eos: str | None, expected: list[str]) -> None:
    assert list(changed(template, jinja, eos).end_ids) == template.tokenizer.convert_tokens_to_ids(expected)


def test_end_ids_of_the_fixture(template: ChatTemplate) -> None:
    assert template.end_ids == (2,)


def test_a_target_without_chat_template_is_refused_by_name(tiny_target: Path, tmp_path: Path) -> None:
    bare = tmp_path / "base-model"
    shutil.copytree(tiny_target, bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=rf"{re.escape(str(bare))}.*has no chat template.*chat \(instruct\)"):
        ChatTemplate.load(str(bare))


def test_a_target_without_tokenizer_is_refused_by_name(tiny_target: Path, tmp_path: Path) -> None:
    bare = tmp_path / "weights-only"
    bare.mkdir()
    shutil.copy(tiny_target / "config.json", bare)
    with pytest.raises(ValueError, match=re.escape(f"cannot load a tokenizer for target {str(bare)!r}")):
        ChatTemplate.load(str(bare))


def test_a_damaged_tokenizer_is_refused_by_name(tiny_target: Path, tmp_path: Path) -> None:
    bad = tmp_path / "damaged"
    shutil.copytree(tiny_target, bad)
    (bad / "tokenizer.json").write_text((bad / "tokenizer.json").read_text()[:500])
    with pytest.raises(ValueError, match=re.escape(f"cannot load a tokenizer for target {str(bad)!r}")):
        ChatTemplate.load(str(bad))
