"""Samples made from one tokenization of each text equal the slow way, which renders and tokenizes every turn's prompt as a server does."""

from __future__ import annotations

import copy
import functools

import pytest
import slow_samples as reference
import templates
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import changed
from tokenizers import AddedToken

from draftsmith.data.config import DataConfig
from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.samples import Tokens, samples_of, tokenize
from draftsmith.data.template import ChatTemplate
from draftsmith.target import smollm2

KINDS = {
    "own": None,
    "default system": templates.DEFAULT_SYSTEM,
    "strips thinking": templates.STRIPS_THINKING,
    "trims": templates.TRIMS,
    "begins with a mark": templates.BEGINS,
    "other end": templates.OTHER_END,
    "no end": templates.NO_END,
    "plain words": templates.PLAIN_WORDS,
    "ends otherwise in history": templates.HISTORY_END,
}
MARKS = ("<|im_end|>", "<|im_start|>", "<|im_start|>assistant\n", "<|endoftext|>", "<|im_", "assistant\n", ": ", "###")
words = st.sampled_from(
    ("", " ", "\n", "\n\n", "a", "hello world", "  two", "\tx", "don't", "1234", "\u00e9\u4e2d", "\U0001f600", "</think>", "<think>", *MARKS)
)
texts = st.lists(words, max_size=5).map("".join)
turns = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def real() -> ChatTemplate:
    return ChatTemplate.load(str(smollm2.directory()))


@functools.cache
def _kept() -> dict[tuple[str, str], ChatTemplate]:
    return {}


def made(tokenizer: str, base: ChatTemplate, kind: str) -> ChatTemplate:
    """The tokenizer under a template, made once: copying a tokenizer takes longer than a hundred examples."""
    jinja, eos = KINDS[kind], "<|endoftext|>" if kind in ("other end", "ends otherwise in history") else None
    if (tokenizer, kind) not in _kept():
        _kept()[tokenizer, kind] = base if jinja is None else changed(base, jinja, eos)
    return _kept()[tokenizer, kind]


def conversation(pairs: list[tuple[str, str]], system: str | None) -> Conversation:
    first = () if system is None else (Message("system", system),)
    return Conversation("c", "k", (*first, *(Message(r, t) for pair in pairs for r, t in zip(("user", "assistant"), pair, strict=True))))


def found(template: ChatTemplate, talk: Conversation) -> list[tuple[list[int], list[bool]]]:
    return [(s.input_ids.tolist(), s.loss_mask.tolist()) for s in samples_of(talk, template)]


def expanded(samples: list[tuple[list[int], list[bool]]]) -> list[tuple[list[int], list[int]]]:
    """For each answer the ids before it, and its own."""
    turns: list[tuple[list[int], list[int]]] = []
    for ids, mask in samples:
        edges = [n for n in range(len(ids) + 1) if (mask[n] if n < len(ids) else False) != (mask[n - 1] if n else False)]
        turns += [(ids[:a], ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return turns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokenizer", ["tiny", "real"])
@settings(deadline=None, max_examples=25)
@given(pairs=turns, system=st.none() | texts)
def test_fast_equals_slow(template: ChatTemplate, real: ChatTemplate, tokenizer: str, kind: str, pairs: list[tuple[str, str]], system: str | None) -> None:
    base = template if tokenizer == "tiny" else real
    own = made(tokenizer, base, kind)
    talk = conversation(pairs, system)
    if kind == "no end":  # without end marks, where a text must be split is a choice; what is learned after which ids is not
        assert expanded(found(own, talk)) == expanded(reference.samples(talk, own))
    else:
        assert found(own, talk) == reference.samples(talk, own)


@settings(deadline=None, max_examples=25)
@given(pairs=turns, recorded=st.lists(st.sampled_from(["no", "usual", "letters", "cut"]), min_size=4, max_size=4))
def test_fast_equals_slow_with_recorded_answers(real: ChatTemplate, pairs: list[tuple[str, str]], recorded: list[str]) -> None:
    """Ids as a target may have written them: the usual ones, others of the same text, without end mark."""

    def answer(text: str, how: str) -> Message:
        text = real.text(real.encode(text).tolist())  # marks inside would not be in a decoded text
        ids = [t for c in text for t in real.encode(c).tolist()] if how == "letters" else real.encode(text).tolist()
        return Message("assistant", text) if how == "no" else Message("assistant", text, token_ids=(*ids, *([2] if how != "cut" else [])))

    talk = Conversation("c", "k", tuple(m for (u, a), how in zip(pairs, recorded, strict=False) for m in (Message("user", u), answer(a, how))))
    if any(m.token_ids and real.text(m.token_ids) != m.content for m in talk.messages):
        return
    assert found(real, talk) == reference.samples(talk, real)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(turns, st.none() | texts), max_size=5))
def test_neighbours_in_a_batch_do_not_matter(real: ChatTemplate, batch: list[tuple[list[tuple[str, str]], str | None]]) -> None:
    talks = [conversation(*item) for item in batch]
    together = tokenize(talks, real, DataConfig())
    alone = [tokenize([t], real, DataConfig())[0] for t in talks]
    assert [[(t.ids.tolist(), t.spans) for t in one] for one in together] == [[(t.ids.tolist(), t.spans) for t in one] for one in alone]  # type: ignore[union-attr]


@settings(deadline=None, max_examples=25)
@given(text=st.lists(words, max_size=12).map("".join))
def test_pieces_tokenize_to_the_ids_of_the_whole(template: ChatTemplate, real: ChatTemplate, text: str) -> None:
    for each in (template, real):
        assert each.encode(text).tolist() == each.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
@settings(deadline=None, max_examples=20)
@given(text=st.lists(st.sampled_from(["<s>", " ", "\n", "a", "<|im_end|>", "<|im_start|>"]), max_size=8).map("".join))
def test_marks_that_depend_on_their_neighbours_do_too(real: ChatTemplate, flag: str, text: str) -> None:
    if ("flag", flag) not in _kept():
        copied = copy.deepcopy(real.tokenizer)
        copied.add_tokens([AddedToken("<s>", **{"normalized": False, "special": True, flag: True})], special_tokens=True)
        _kept()["flag", flag] = ChatTemplate(copied, "other")
    own = _kept()["flag", flag]
    tokenizer = own.tokenizer
    assert own.encode(text).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_message_of_ten_megabytes(real: ChatTemplate) -> None:
    talk = conversation([("words " * (10_000_000 // 6), "yes"), ("again", "no")], None)
    (tokens,) = tokenize([talk], real, DataConfig())[0]  # type: ignore[misc]
    assert isinstance(tokens, Tokens)
    assert len(tokens) > 1_600_000
    assert [real.tokenizer.decode(tokens.ids[a:b].tolist()) for a, b in tokens.spans] == ["yes<|im_end|>", "no<|im_end|>"]
