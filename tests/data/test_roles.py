"""Turns by role: what is learned of system, user and tool turns, and that the ids stay those of the whole text."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import templates
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from template_families import FAMILIES, family
from templates import changed

from draftsmith.data.config import DataConfig
from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.samples import Text, tokenize
from draftsmith.data.template import ChatTemplate, TemplateError

END = "<|im_end|>"
TALK = (Message("system", "s"), Message("user", "a"), Message("assistant", "yes"), Message("tool", "3"), Message("assistant", "no"), Message("user", "b"))
SAID = {"system": ["s" + END], "user": ["a" + END, "b" + END], "assistant": ["yes" + END, "no" + END], "tool": ["3" + END]}
INST = (  # like Llama 2 and Mistral: the system prompt inside the first question, no mark behind a question, answers closed by the end of the sequence
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {% if loop.index0 == 1 and messages[0]['role'] == 'system' %}<<{{ messages[0]['content'] }}>> "
    "{% endif %}{{ m['content'] | trim }} [/INST]{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\u241f"), max_size=6)


def parts(found: list[Any] | TemplateError, template: ChatTemplate) -> list[list[tuple[str, str]]]:
    """For each sample, what is learned, each with the text before it."""
    if isinstance(found, TemplateError):
        raise found
    samples: list[list[tuple[str, str]]] = []
    for tokens in found:
        edges = [0, *(edge for span in tokens.spans for edge in span)]
        texts = [template.tokenizer.decode(tokens.ids[a:b].tolist()) for a, b in pairwise(edges)]
        samples.append(list(zip(texts[::2], texts[1::2], strict=True)))
    return samples


def learned(messages: tuple[Message, ...], template: ChatTemplate, *roles: str, **settings: Any) -> list[list[tuple[str, str]]]:
    (found,) = tokenize([Conversation("c", "k", messages)], template, DataConfig.model_validate({"roles": roles, **settings}))
    return parts(found, template)


def said(messages: tuple[Message, ...], template: ChatTemplate, *roles: str, **settings: Any) -> list[str]:
    return [text for sample in learned(messages, template, *roles, **settings) for _, text in sample]


@pytest.mark.parametrize("roles", [("user",), ("system",), ("tool",), ("tool", "system"), ("user", "assistant"), tuple(SAID)])
def test_chosen_roles_are_learned_with_their_end_marks_and_without_headers(template: ChatTemplate, roles: tuple[str, ...]) -> None:
    places = {role: iter(texts) for role, texts in SAID.items()}
    assert said(TALK, template, *roles) == [next(places[m.role]) for m in TALK if m.role in roles]
    assert len(learned(TALK, template, *roles)) == 1


def test_the_assistant_alone_is_the_default_and_the_last_turn_is_the_last_of_the_chosen_roles(template: ChatTemplate) -> None:
    (default,) = tokenize([Conversation("c", "k", TALK)], template, DataConfig())
    assert parts(default, template) == learned(TALK, template, "assistant")
    assert said(TALK, template, "user", "assistant", turns="last") == ["b" + END]
    assert said(TALK, template, "tool", "assistant", turns="last") == ["no" + END]


def test_a_question_without_an_end_mark_is_its_text_as_the_template_writes_it(template: ChatTemplate) -> None:
    kind = changed(template, INST)
    talk = (Message("system", "s"), Message("user", " a "), Message("assistant", "yes"), Message("user", "b"), Message("assistant", "no"))
    assert learned(talk, kind, "user", "assistant") == [[("[INST] <<s>> ", "a"), (" [/INST]", " yes" + END), ("[INST] ", "b"), (" [/INST]", " no" + END)]]
    with pytest.raises(TemplateError, match="with a system turn that the chat template does not set apart"):
        learned(talk, kind, "system")


@pytest.mark.parametrize("jinja", ["{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}", "{% for m in messages %}x{% endfor %}"])
def test_what_cannot_be_told_is_dropped_with_a_reason(template: ChatTemplate, jinja: str) -> None:
    with pytest.raises(TemplateError, match="with a user turn that the chat template does not set apart"):
        learned(TALK[1:2], changed(template, jinja), "user")


def test_the_default_system_prompt_is_no_turn_of_the_user(template: ChatTemplate) -> None:
    assert learned(TALK[1:2], changed(template, templates.DEFAULT_SYSTEM), "user") == [[(f"<|im_start|>system\nBe kind.{END}\n<|im_start|>user\n", "a" + END)]]


def test_conversations_without_such_turns_and_rendered_text_are_dropped_with_a_reason(template: ChatTemplate) -> None:
    with pytest.raises(TemplateError, match="without a turn of tool or system"):
        learned(TALK[1:3], template, "tool", "system")
    (found,) = tokenize([Text("t", "x")], template, DataConfig(roles=("user",)))
    assert isinstance(found, TemplateError)
    assert "rendered already, in which only assistant turns can be found" in found.reason
    for wrong in ((), ("human",)):
        with pytest.raises(ValidationError):
            DataConfig.model_validate({"roles": wrong})


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_ids_are_those_of_the_whole_rendering_whatever_is_learned(template: ChatTemplate, pairs: list[tuple[str, str]]) -> None:
    messages = tuple(Message(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True))
    (found,) = tokenize([Conversation("c", "k", messages)], template, DataConfig(roles=("user", "assistant")))
    assert not isinstance(found, TemplateError)
    (tokens,) = found
    assert tokens.ids.tolist() == template.ids(messages, prompt=False)[: len(tokens.ids)]
    assert [template.tokenizer.decode(tokens.ids[a:b].tolist()) for a, b in tokens.spans] == [m.content + END for m in messages]


@pytest.mark.parametrize("name", FAMILIES)
def test_questions_of_every_family_within_the_ids_of_the_whole_rendering(name: str) -> None:
    """Where a header and a question share a token, a server has that token, so nothing is tokenized by itself."""
    kind = family(name)
    messages = (Message("user", "One?"), Message("assistant", "One."), Message("user", " the second"))
    (found,) = tokenize([Conversation("c", "k", messages)], kind, DataConfig(roles=("user",)))
    assert not isinstance(found, TemplateError)
    wholes = [kind.encode(text).tolist() for text in kind.render([messages[:1], messages], prompt=False)]
    assert all(any(whole[: len(tokens.ids)] == tokens.ids.tolist() for whole in wholes) for tokens in found)
    texts = [text.strip() for sample in parts(found, kind) for _, text in sample]
    assert [text[: len(expected)] for text, expected in zip(texts, ("One?", "the second"), strict=True)] == ["One?", "the second"]
