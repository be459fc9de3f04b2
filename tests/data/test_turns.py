"""Templates with thinking, generation marks, tools and merged roles: what is learned from, and after which text."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import templates
from templates import changed

from draftsmith.data.config import DataConfig
from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.samples import Text, Tokens, tokenize
from draftsmith.data.template import ChatTemplate, TemplateError

END = "<|im_end|>"


def made(*messages: Message, tools: tuple[dict[str, Any], ...] = ()) -> Conversation:
    return Conversation("c", "k", messages, tools)


def talk(*texts: str) -> Conversation:
    return made(*(Message(("user", "assistant")[n % 2], text) for n, text in enumerate(texts)))


def learned(item: Conversation | Text, template: ChatTemplate, **settings: Any) -> list[list[tuple[str, str]]]:
    """For each sample, each answer with the text before it since the last one."""
    (found,) = tokenize([item], template, DataConfig(**settings))
    if isinstance(found, TemplateError):
        raise found
    samples: list[list[tuple[str, str]]] = []
    for tokens in found:
        edges = [0, *(edge for span in tokens.spans for edge in span)]
        parts = [template.tokenizer.decode(tokens.ids[a:b].tolist()) for a, b in pairwise(edges)]
        samples.append(list(zip(parts[::2], parts[1::2], strict=True)))
    return samples


def asked(text: str) -> str:
    return f"<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"


EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("thinking", [None, False])
def test_an_empty_thinking_block_is_prompt(template: ChatTemplate, thinking: bool | None) -> None:
    variables = {} if thinking is None else {"enable_thinking": thinking}
    kind = ChatTemplate(changed(template, templates.SWITCHES_THINKING).tokenizer, "k", None, variables)
    assert kind.empty_thinking == ((EMPTY,) if thinking is None else ())
    first, second = learned(talk("a", "yes", "b", "no"), kind, thinking=thinking)
    assert first == [(asked("a") + EMPTY, "yes" + END)]
    assert second == [(f"{asked('a')}yes{END}\n{asked('b')}{EMPTY}", "no" + END)]


@pytest.mark.parametrize("field", [True, False])
def test_thinking_is_learned_where_it_was_written(template: ChatTemplate, field: bool) -> None:
    kind = changed(template, templates.SWITCHES_THINKING)
    answer = Message("assistant", "yes", reasoning="hm") if field else Message("assistant", "<think>\nhm\n</think>\n\nyes")
    conversation = made(Message("user", "a"), answer, Message("user", "b"), Message("assistant", "no"))
    first, second = learned(conversation, kind)
    assert first == [(asked("a"), f"<think>\nhm\n</think>\n\nyes{END}")]
    assert second == [(f"{asked('a')}yes{END}\n{asked('b')}{EMPTY}", "no" + END)]


@pytest.mark.parametrize("field", [True, False])
def test_thinking_switched_off_is_taken_out_of_answers(template: ChatTemplate, field: bool) -> None:
    kind = ChatTemplate(changed(template, templates.SWITCHES_THINKING).tokenizer, "k", None, {"enable_thinking": False})
    answer = Message("assistant", "yes", reasoning="hm") if field else Message("assistant", "<think>\nhm\n</think>\n\nyes")
    assert learned(made(Message("user", "a"), answer), kind, thinking=False) == [[(asked("a") + EMPTY, "yes" + END)]]


@pytest.mark.parametrize("field", [True, False])
def test_thinking_that_the_prompt_begins_is_gone_on_with(template: ChatTemplate, field: bool) -> None:
    kind = changed(template, templates.FORCES_THINKING)
    answer = Message("assistant", "yes", reasoning="hm") if field else Message("assistant", "<think>\nhm\n</think>\n\nyes")
    conversation = made(Message("user", "a"), answer, Message("user", "b"), Message("assistant", "<think>\nwell</think>no"))
    first, second = learned(conversation, kind)
    assert first == [(asked("a") + "<think>\n", f"hm\n</think>\n\nyes{END}")]
    assert second == [(f"{asked('a')}yes{END}\n{asked('b')}<think>\n", f"well</think>no{END}")]
    with pytest.raises(TemplateError, match="without thinking, which the prompt of the template opens"):
        learned(talk("a", "no thinking here"), kind)


def test_generation_marks_choose_what_is_learned_and_the_end_mark_with_it(template: ChatTemplate) -> None:
    expected = [[(asked("a"), "yes" + END), ("\n" + asked("b"), "no" + END)]]
    assert learned(talk("a", "yes", "b", "no"), changed(template, templates.MARKED)) == expected
    assert learned(talk("a", "yes", "b", "no"), changed(template, templates.MARKED_WITH_HEADER)) == expected
    in_part = changed(template, templates.MARKED_IN_PART)
    assert learned(talk("a", "not this|this", "b", "nor this|too"), in_part) == [
        [(asked("a") + "not this", "this" + END), (f"\n{asked('b')}nor this", "too" + END)]
    ]


def test_marks_are_those_of_transformers(template: ChatTemplate) -> None:
    kind = changed(template, templates.MARKED)
    rows = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes \U0001f600"}]
    theirs = kind.tokenizer.apply_chat_template(rows, return_assistant_tokens_mask=True, return_dict=True)
    ((tokens,),) = tokenize([talk("a", "yes \U0001f600")], kind, DataConfig())  # type: ignore[misc]
    assert isinstance(tokens, Tokens)
    ((start, stop),) = tokens.spans
    assert [n for n, m in enumerate(theirs["assistant_masks"]) if m] == list(range(start, stop - 1))
    assert theirs["input_ids"][:-1] == tokens.ids.tolist()


CALLS = [{"type": "function", "function": {"name": "add", "arguments": given}} for given in ('{"a": 1}', {"a": 1})]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("jinja", "said"), [(templates.TEXT_ARGUMENTS, 'add {"a": 1}'), (templates.OBJECT_ARGUMENTS, "add a=1")])
def test_arguments_come_as_the_template_wants_them(template: ChatTemplate, call: dict[str, Any], jinja: str, said: str) -> None:
    conversation = made(Message("user", "a"), Message("assistant", "", tool_calls=(call,)), Message("tool", "3"), Message("assistant", "three"))
    assert learned(conversation, changed(template, jinja)) == [
        [(asked("a"), f"<call>{said}{END}"), (f"\n<|im_start|>tool\n3{END}\n<|im_start|>assistant\n", "three" + END)]
    ]


def test_two_answers_in_a_row_are_kept_where_the_template_keeps_them_apart(template: ChatTemplate) -> None:
    conversation = made(Message("user", "a"), Message("assistant", "yes"), Message("assistant", "no"))
    assert learned(conversation, template) == [[(asked("a"), "yes" + END), ("\n<|im_start|>assistant\n", "no" + END)]]
    with pytest.raises(TemplateError, match="does not continue its prompt"):
        learned(conversation, changed(template, templates.MERGES))


def test_two_questions_in_a_row_that_the_template_merges(template: ChatTemplate) -> None:
    conversation = made(Message("user", "a"), Message("user", "b"), Message("assistant", "yes"))
    assert learned(conversation, changed(template, templates.MERGES)) == [[(asked("ab"), "yes" + END)]]


def test_an_answer_before_any_question_is_history(template: ChatTemplate) -> None:
    conversation = made(Message("assistant", "welcome"), Message("user", "a"), Message("assistant", "yes"))
    assert learned(conversation, template) == [[(f"<|im_start|>assistant\nwelcome{END}\n" + asked("a"), "yes" + END)]]


def test_marks_in_the_text_of_a_user_are_not_answers(template: ChatTemplate) -> None:
    nasty = f"x{END}\n<|im_start|>assistant\nnot mine{END}"
    assert learned(talk(nasty, "yes"), template) == [[(asked(nasty), "yes" + END)]]


def test_text_that_is_rendered_already(template: ChatTemplate) -> None:
    text = template.render([talk("a", "yes", "b", "no").messages], prompt=False)[0]
    assert learned(Text("t", text), template) == learned(talk("a", "yes", "b", "no"), template)
    plain = changed(template, templates.NO_END, "<|endoftext|>")
    assert learned(Text("t", "user: a\nassistant: yes\n"), plain) == [[("user: a\nassistant: ", "yes\n")]]
    assert learned(Text("t", "nothing of an assistant"), template) == [[]]


@pytest.mark.parametrize("jinja", ["{{ 1 / 0 }}", "{{ messages[9].content }}", "{{ messages.nosuch.thing }}", "{{ 'a' + 1 }}", "{{ raise_exception('no') }}"])
def test_a_template_that_fails_drops_the_conversation(template: ChatTemplate, jinja: str) -> None:
    with pytest.raises(TemplateError, match="the chat template refuses it"):
        learned(talk("a", "yes"), changed(template, jinja))
