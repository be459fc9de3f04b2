"""For any conversation and every family: supervised is what the model writes, and before it stands what a server feeds."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server import ENDS, Refused, header, turns
from showing import runs
from template_families import FAMILIES, family

from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.samples import samples_of
from draftsmith.data.template import TemplateError

letters = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Co", "Cn"]), max_size=8)
SPACES = (" ", "  ", "\n", "\n\n", "\t", "\r\n")
WORDS = ("yes", "No.", "42", "说中文", "مرحبا", "👩\u200d👩\u200d👧", "👍🏽", "e\u0301", "\u200d", "```py\nx = 1\n```")
MARKS = (*sorted(set(ENDS.values())), "<think>", "</think>", "<|im_start|>assistant\n", "[/INST]", "<|user|>", "<|assistant|>")
pieces = st.sampled_from([*SPACES, *WORDS]) | letters
answers = st.tuples(st.sampled_from(["", *SPACES]), st.lists(pieces, max_size=4)).map(lambda parts: parts[0] + "".join(parts[1]))
thoughts = st.none() | letters.map(str.strip).filter(bool)


@st.composite
def conversations(draw: st.DrawFn, name: str) -> Conversation:
    """One to four turns, with and without a system prompt and thinking. Users type marks of all families and what opens an answer in their own."""
    questions = st.lists(pieces | st.sampled_from([*MARKS, header(name)]), max_size=5).map("".join)
    system = [Message("system", draw(questions))] if draw(st.booleans()) else []
    said = draw(st.lists(st.tuples(questions, answers, thoughts), min_size=1, max_size=4))
    pairs = [(Message("user", asked), Message("assistant", text, reasoning=thought)) for asked, text, thought in said]
    return Conversation("any", "k", (*system, *chain.from_iterable(pairs)))


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_supervised_is_what_the_model_writes_behind_what_a_server_feeds(name: str, data: st.DataObject) -> None:
    template, conversation = family(name), data.draw(conversations(name))
    try:
        expected = turns(name, conversation)
    except Refused:
        with pytest.raises(TemplateError):
            samples_of(conversation, template)
        return
    found = [(sample.input_ids.tolist(), run) for sample in samples_of(conversation, template) for run in runs(sample, template) if run.own]
    assert [run.text for _, run in found] == [turn.text for turn in expected]
    for (ids, run), turn in zip(found, expected, strict=True):
        fed = len(turn.prompt)
        assert ids[:fed] == turn.prompt
        assert template.tokenizer.decode(ids[fed : run.start]) == turn.block
