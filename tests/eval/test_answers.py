"""Recording the target's own answers: each turn is asked with the earlier answers in its prompt, as a server would."""

from __future__ import annotations

import copy

import pytest
import torch

from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.samples import samples_of
from draftsmith.data.template import ChatTemplate, TemplateError
from draftsmith.eval.answers import answer
from draftsmith.eval.decode import Decoder
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

MAX_NEW = 12


@pytest.fixture
def asked(talks: list[Conversation]) -> list[Conversation]:
    """The questions alone, and one conversation that starts with a system message and has three turns."""
    long = Conversation("long", "odd", (Message("system", "be brief"), *(Message("user", q) for q in ("one?", "two?", "and three?"))))
    return [long, *(t.users_only() for t in talks)]


def generate(model: TargetModel, ids: list[int], end_ids: tuple[int, ...]) -> tuple[int, ...]:
    """transformers' own greedy answer."""
    prompt = torch.tensor([ids])
    options = {"do_sample": False, "max_new_tokens": MAX_NEW, "eos_token_id": list(end_ids), "pad_token_id": 0}
    out = model.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return tuple(out[0, len(ids) :].tolist())


def ends(model: TargetModel, target: Target, template: ChatTemplate, asked: list[Conversation]) -> tuple[int, ...]:
    """An end token that stops some first answers, and the tokenizer's own."""
    plain = Decoder(model, target, ()).decode([template.ids(c.messages[:1], prompt=True) for c in asked[1:]], MAX_NEW)
    return (*template.end_ids, plain[3].token_ids[4], plain[7].token_ids[-1])


def answers(found: list[Conversation | TemplateError]) -> list[Conversation]:
    """All of them answered."""
    assert all(isinstance(c, Conversation) for c in found)
    return [c for c in found if isinstance(c, Conversation)]


@pytest.mark.parametrize("batch", [1, 5, 100])
def test_every_turn_equals_transformers_generate_after_the_earlier_answers(
    target_model: TargetModel, target: Target, template: ChatTemplate, asked: list[Conversation], batch: int
) -> None:
    end_ids = ends(target_model, target, template, asked)
    told: list[int] = []
    answered = answers(answer(asked, Decoder(target_model, target, end_ids), template, MAX_NEW, batch, told.append))
    reasons, turns, tokens = set(), 0, 0
    for before, after in zip(asked, answered, strict=True):
        assert (after.id, after.kind, after.users_only()) == (before.id, before.kind, before)
        for i, message in enumerate(after.messages):
            if message.role != "assistant":
                continue
            assert after.messages[i - 1].role == "user"
            ids = generate(target_model, template.ids(after.messages[:i], prompt=True), end_ids)
            assert message.token_ids == ids
            assert message.finish_reason == ("stop" if ids[-1] in end_ids else "length")
            assert message.content == template.tokenizer.decode(list(ids), skip_special_tokens=True)
            reasons.add(message.finish_reason)
            turns, tokens = turns + 1, tokens + len(ids)
    assert turns == sum(m.role == "user" for c in asked for m in c.messages)
    assert reasons == {"stop", "length"}
    assert sum(told) == tokens
    assert max(sum(m.role == "assistant" for m in c.messages) for c in answered) == 3


def test_recorded_answers_are_replaced_and_do_not_matter(target_model: TargetModel, target: Target, template: ChatTemplate, talks: list[Conversation]) -> None:
    decoder = Decoder(target_model, target, ())
    alone = answer([t.users_only() for t in talks], decoder, template, MAX_NEW, 4, lambda _: None)
    assert answer(talks, decoder, template, MAX_NEW, 4, lambda _: None) == alone
    assert alone != talks


def test_an_answer_missing_in_the_middle_goes_where_it_belongs(target_model: TargetModel, target: Target, template: ChatTemplate) -> None:
    messages = (Message("user", "one?"), Message("user", "two?"), Message("assistant", "recorded"), Message("user", "three?"))
    (found,) = answers(answer([Conversation("a", "k", messages)], Decoder(target_model, target, ()), template, MAX_NEW, 4, lambda _: None))
    assert [m.role for m in found.messages] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert found.messages[1].token_ids == generate(target_model, template.ids(messages[:1], prompt=True), ())


def test_recorded_tool_results_end_a_conversation_whose_call_cannot_be_read(target_model: TargetModel, target: Target, template: ChatTemplate) -> None:
    call = ({"type": "function", "function": {"name": "f", "arguments": "{}"}},)
    messages = (Message("user", "one?"), Message("assistant", "", tool_calls=call), Message("tool", "1"), Message("user", "two?"))
    (found,) = answers(answer([Conversation("a", "k", messages)], Decoder(target_model, target, ()), template, MAX_NEW, 4, lambda _: None))
    assert [m.role for m in found.messages] == ["user", "assistant"]


def test_a_refused_conversation_does_not_stop_the_others(target_model: TargetModel, target: Target, template: ChatTemplate, asked: list[Conversation]) -> None:
    """The first one has a system message, which this template refuses."""
    tokenizer = copy.deepcopy(template.tokenizer)
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}" + str(tokenizer.chat_template)
    kind = ChatTemplate(tokenizer, "changed")
    refused, *others = answer(asked, Decoder(target_model, target, ()), kind, MAX_NEW, 4, lambda _: None)
    assert isinstance(refused, TemplateError)
    assert "no system role here" in str(refused)
    assert others == answer(asked[1:], Decoder(target_model, target, ()), template, MAX_NEW, 4, lambda _: None)


def test_what_was_recorded_is_what_is_learned(target_model: TargetModel, target: Target, template: ChatTemplate, asked: list[Conversation]) -> None:
    """Samples supervise exactly the recorded token ids, each after the prompt that it answered."""
    for conversation in answers(answer(asked, Decoder(target_model, target, template.end_ids), template, MAX_NEW, 4, lambda _: None)):
        learned = [s.input_ids[s.loss_mask].tolist() for s in samples_of(conversation, template)]
        assert [i for ids in learned for i in ids] == [i for m in conversation.messages for i in m.token_ids or ()]
