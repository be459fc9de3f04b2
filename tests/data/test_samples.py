"""Masks and cuts: supervised is what the assistant wrote, the ids are what a server sees, and everything is counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import templates
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import changed

from draftsmith.core.types import Sample
from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.samples import prepare, samples_of, supervised_pairs
from draftsmith.data.template import ChatTemplate
from draftsmith.target import smollm2

END = "<|im_end|>"


def talk(*turns: Message | str, name: str = "talk") -> Conversation:
    """Texts alternate between user and assistant."""
    roles = ("user", "assistant")
    return Conversation(name, "k", tuple(t if isinstance(t, Message) else Message(roles[i % 2], t) for i, t in enumerate(turns)))


def spoken(sample: Sample, template: ChatTemplate) -> list[str]:
    """Decoded runs of supervised tokens, special tokens included."""
    runs: list[list[int]] = []
    before = False
    for token, own in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if own and not before:
            runs.append([])
        if own:
            runs[-1].append(token)
        before = own
    return [template.tokenizer.decode(run) for run in runs]


def whole(sample: Sample, template: ChatTemplate) -> str:
    return template.tokenizer.decode(sample.input_ids.tolist())


def by_hand(conversation: Conversation, system: str = "") -> str:
    return system + "".join(f"<|im_start|>{m.role}\n{m.content}{END}\n" for m in conversation.messages)


contents = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
conversations = st.lists(st.tuples(contents, contents), min_size=1, max_size=3).map(lambda turns: talk(*(t for pair in turns for t in pair)))


@settings(deadline=None, max_examples=60)
@given(conversations)
def test_chatml_supervises_exactly_the_answers_and_their_end(template: ChatTemplate, conversation: Conversation) -> None:
    (sample,) = samples_of(conversation, template)
    assert spoken(sample, template) == [m.content + END for m in conversation.messages if m.role == "assistant"]
    assert whole(sample, template) + "\n" == by_hand(conversation)
    assert sample.id == "talk"


def test_the_ids_are_those_of_one_rendering_of_the_whole(template: ChatTemplate, talks: list[Conversation]) -> None:
    for conversation in talks:
        (sample,) = samples_of(conversation, template)
        assert sample.input_ids.tolist() == template.ids(conversation.messages, prompt=False)[:-1]


def test_a_default_system_prompt_is_seen_but_not_supervised(template: ChatTemplate) -> None:
    conversation = talk("a", "first", "b", "second")
    kind = changed(template, templates.DEFAULT_SYSTEM)
    (sample,) = samples_of(conversation, kind)
    assert spoken(sample, kind) == ["first" + END, "second" + END]
    assert whole(sample, kind) + "\n" == by_hand(conversation, f"<|im_start|>system\nBe kind.{END}\n")


def test_a_template_that_strips_earlier_thinking_makes_one_sample_a_turn(template: ChatTemplate) -> None:
    kind = changed(template, templates.STRIPS_THINKING)
    first, second = "<think>hm</think>\n\nyes", "<think>well</think>\n\nno"
    samples = samples_of(talk("a", first, "b", second), kind)
    assert [s.id for s in samples] == ["talk/0", "talk/1"]
    assert [spoken(s, kind) for s in samples] == [[first + END], [second + END]]
    assert whole(samples[0], kind) + "\n" == by_hand(talk("a", first))
    assert whole(samples[1], kind) + "\n" == by_hand(talk("a", "yes", "b", second))


def test_without_thinking_that_template_makes_one_sample(template: ChatTemplate) -> None:
    kind = changed(template, templates.STRIPS_THINKING)
    (sample,) = samples_of(talk("a", "yes", "b", "no"), kind)
    assert (sample.id, spoken(sample, kind)) == ("talk", ["yes" + END, "no" + END])


def test_a_template_without_end_mark_supervises_what_it_renders(template: ChatTemplate) -> None:
    kind = changed(template, templates.NO_END, "<|endoftext|>")
    (sample,) = samples_of(talk("a", "yes"), kind)
    assert spoken(sample, kind) == ["yes\n"]


SYSTEM = f"<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face{END}\n"


def test_the_real_template_supervises_exactly_the_answers_and_their_end() -> None:
    real = ChatTemplate.load(str(smollm2.directory()))
    assert real.end_ids == (real.tokenizer.convert_tokens_to_ids(END),)
    for turns in (
        ["What is 2+2?", "It is 4.", "And 3+3?", "Six.\n\nReally."],
        ["x", "tabs\tand trailing spaces  ", "y", "caf\u00e9 \U0001f600\n"],
        ["", "ok"],
        ["def f(x):\n    return x", "```python\nprint(1)\n```"],
    ):
        conversation = talk(*turns)
        (sample,) = samples_of(conversation, real)
        assert spoken(sample, real) == [t + END for t in turns[1::2]]
        assert whole(sample, real) + "\n" == by_hand(conversation, SYSTEM)
    own = Conversation("s", "k", (Message("system", "Be brief."), Message("user", "a"), Message("assistant", "b c")))
    assert whole(samples_of(own, real)[0], real) + "\n" == by_hand(own)


@pytest.mark.parametrize("answer", ["  two spaces first", "\na line break first", " one space first"])
def test_an_answer_whose_first_characters_would_merge_with_the_header_is_kept(answer: str) -> None:
    """A server tokenises the header alone; the target then writes the answer."""
    real = ChatTemplate.load(str(smollm2.directory()))
    conversation = talk("x", answer)
    (sample,) = samples_of(conversation, real)
    prompt = real.ids(conversation.messages[:1], prompt=True)
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(sample) - len(prompt))
    assert spoken(sample, real) == [answer + END]


def recorded(template: ChatTemplate, text: str, reason: str) -> Message:
    ids = template.tokenizer(text + (END if reason == "stop" else ""))["input_ids"]
    return Message("assistant", text, token_ids=tuple(ids), finish_reason=reason)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_recorded_ids_are_used_as_they_are(template: ChatTemplate, reason: str) -> None:
    answer = recorded(template, "cut off her", reason)
    (sample,) = samples_of(talk("a", answer), template)
    assert tuple(sample.input_ids[sample.loss_mask].tolist()) == answer.token_ids
    assert spoken(sample, template) == ["cut off her" + (END if reason == "stop" else "")]
    assert bool(sample.loss_mask[-1])


def test_an_answer_cut_by_length_is_closed_by_the_template_and_that_is_not_supervised(template: ChatTemplate) -> None:
    conversation = talk("a", recorded(template, "cut off her", "length"), "b", recorded(template, "done", "stop"))
    (sample,) = samples_of(conversation, template)
    assert spoken(sample, template) == ["cut off her", "done" + END]
    assert whole(sample, template) + "\n" == by_hand(conversation)


def test_recorded_ids_that_are_not_the_usual_ones_start_a_new_sample_at_the_next_turn() -> None:
    real = ChatTemplate.load(str(smollm2.directory()))
    usual = real.tokenizer("hello world")["input_ids"]
    odd = [t for c in "hello world" for t in real.tokenizer(c)["input_ids"]]
    assert odd != usual
    assert real.text(odd) == "hello world"
    samples = samples_of(talk("a", Message("assistant", "hello world", token_ids=(*odd, 2), finish_reason="stop"), "b", "yes"), real)
    assert [spoken(s, real) for s in samples] == [["hello world" + END], ["yes" + END]]
    assert samples[0].input_ids[samples[0].loss_mask].tolist() == [*odd, 2]
    assert "hello world" in whole(samples[1], real)


@pytest.mark.parametrize("ids", [(100_000, 2), (90, 91, 2)])
def test_recorded_ids_of_another_tokenizer_are_not_taken(template: ChatTemplate, ids: tuple[int, ...]) -> None:
    assert template.text([90, 91]) != "hello world"
    with pytest.raises(ValueError, match="token"):
        prepare([talk("a", Message("assistant", "hello world", token_ids=ids, finish_reason="stop"))], template, 100)


def fate(reason: str) -> Conversation:
    return {
        "kept": talk("a", "good"),
        "without an assistant turn": talk("a"),
        "with answers of fewer than two tokens": talk("a", ""),
        "with no answer within the maximum length": talk("a" * 70, "late"),
        "refuses": Conversation("r", "k", (Message("system", "s"), *talk("a", "good").messages)),
    }[reason]


FATES = ["kept", "without an assistant turn", "with answers of fewer than two tokens", "with no answer within the maximum length", "refuses"]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(FATES), max_size=20))
def test_read_is_kept_plus_dropped_with_reasons_and_first_places(template: ChatTemplate, fates: list[str]) -> None:
    kind = changed(template, templates.REFUSES_SYSTEM)
    found = [Conversation(f"c{i}", "k", fate(f).messages) for i, f in enumerate(fates)]
    if "kept" not in fates:
        with pytest.raises(ValueError, match=f"nothing left to train on: read {len(fates)} = kept 0 \\+ dropped {len(fates)}"):
            prepare(found, kind, 60)
        return
    prepared = prepare(found, kind, 60)
    counts = prepared.counts
    assert counts.read == len(fates) == counts.kept + counts.dropped
    assert [s.id for s in prepared.samples] == [f"c{i}" for i, f in enumerate(fates) if f == "kept"]
    for reason in set(fates) - {"kept"}:
        ((number, first),) = [value for name, value in counts.reasons.items() if reason in name]
        assert (number, first) == (fates.count(reason), f"c{fates.index(reason)}")
    assert set(fates) - {"kept"} == {r for r in FATES if any(r in name for name in counts.reasons)}


def test_nothing_left_names_reason_count_and_first_place(template: ChatTemplate) -> None:
    with pytest.raises(ValueError, match=r"nothing left to train on: read 2 = kept 0 \+ dropped 2: 2 without an assistant turn \(first: one\)"):
        prepare([talk("a", name="one"), talk("b", name="two")], template, 100)
    with pytest.raises(ValueError, match="nothing left to train on: read 0"):
        prepare([], template, 100)


def test_a_template_that_rewrites_the_answer_drops_with_that_reason(template: ChatTemplate) -> None:
    with pytest.raises(ValueError, match="1 with an answer without thinking, which the prompt of the template opens"):
        prepare([talk("a", "b c")], changed(template, templates.REWRITES_ANSWER), 100)


@pytest.mark.parametrize("messages", [(), (Message("assistant", "alone"),)])
def test_a_conversation_that_cannot_be_rendered_is_dropped_not_fatal(template: ChatTemplate, messages: Sequence[Message]) -> None:
    prepared = prepare([Conversation("odd", "k", tuple(messages)), talk("a", "good")], template, 100)
    assert (prepared.counts.kept, prepared.counts.dropped) == (1, 1)
    assert [first for _, first in prepared.counts.reasons.values()] == ["odd"]


@settings(deadline=None, max_examples=40)
@given(st.lists(conversations, min_size=1, max_size=4), st.integers(1, 120))
def test_longer_samples_are_cut_and_the_cut_is_counted(template: ChatTemplate, found: list[Conversation], length: int) -> None:
    found = [Conversation(f"c{i}", "k", c.messages) for i, c in enumerate(found)]
    whole_ones = {s.id: s for c in found for s in samples_of(c, template)}
    left = {n: s for n, s in whole_ones.items() if supervised_pairs(Sample(n, s.input_ids[:length], s.loss_mask[:length]))}
    if not left:
        with pytest.raises(ValueError, match="nothing left"):
            prepare(found, template, length)
        return
    prepared = prepare(found, template, length)
    assert [s.id for s in prepared.samples] == list(left)
    for sample in prepared.samples:
        assert torch.equal(sample.input_ids, left[sample.id].input_ids[:length])
        assert torch.equal(sample.loss_mask, left[sample.id].loss_mask[:length])
    if len(left) == len(found):
        assert prepared.tokens + prepared.cut_tokens == sum(map(len, whole_ones.values()))
    assert prepared.supervised == sum(int(s.loss_mask[:length].sum()) for s in left.values())
    assert ("cut at the maximum length" in prepared.describe()) == (prepared.cut_tokens > 0)


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_supervised_pairs_are_neighbours(mask: list[bool]) -> None:
    pairs = sum(mask[i] and mask[i + 1] for i in range(len(mask) - 1))
    assert supervised_pairs(Sample("s", torch.zeros(len(mask), dtype=torch.long), torch.tensor(mask))) == pairs
