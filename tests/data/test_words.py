"""Ids out of the dictionary of words are the tokenizer's own, for every pattern that known families cut by."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from draftsmith.data import words
from draftsmith.data.words import Words

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
MISTRAL = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = ["It's a test, isn't it? WE'LL see 12345 def f(x):\n    return x ** 2\n\n", "the then there their theory, hello world!\r\n\tHello World\n"] * 20


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )  # fmt: skip


BEFORE = {"gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False), "llama3": split(LLAMA3), "mistral": split(MISTRAL)}


def trained(before: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = before
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


TRAINED = {name: trained(before) for name, before in BEFORE.items()}
FOUND = {name: Words.of(tokenizer) for name, tokenizer in TRAINED.items()}
pieces = st.sampled_from(
    [" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "12", "3456", "hello", "The", "x_y", "**", "/", "\x1c", "\x00", "\x7f", "don't", "...", ")\n\n"]
)
texts = st.lists(pieces | st.characters(max_codepoint=127), max_size=30).map("".join)


@pytest.mark.parametrize("name", BEFORE)
@settings(deadline=None, max_examples=300)
@given(text=texts)
def test_ids_are_the_tokenizers(name: str, text: str) -> None:
    found = FOUND[name]
    assert found is not None
    assert found.ids(text) == TRAINED[name].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["caf\u00e9", "\u2019", "\U0001f600"])
def test_other_text_is_left_to_the_tokenizer(text: str) -> None:
    assert [found.ids(text) for found in FOUND.values() if found] == [None] * 3


def test_text_that_the_pattern_does_not_cover_is_left_to_the_tokenizer() -> None:
    assert Words(TRAINED["gpt2"], "[a-z]+").ids("abc1") is None


@pytest.mark.parametrize("change", ["normalizer", "prefix space", "several splits", "groups", "unknown class", "another pattern"])
def test_other_kinds_of_tokenizers_have_no_dictionary(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained(BEFORE["gpt2"])
    if change == "normalizer":
        tokenizer.normalizer = normalizers.Lowercase()
    elif change == "prefix space":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif change == "several splits":
        parts = [pre_tokenizers.Digits(), pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    elif change == "groups":
        tokenizer.pre_tokenizer = split(r"(a)|\s+|[^\sa]+")
    elif change == "unknown class":
        tokenizer.pre_tokenizer = split(r"\p{Sc}|[^$]+")
    else:
        monkeypatch.setattr(words, "GPT2", r"\s+|\S+")
    assert Words.of(tokenizer) is None


def test_the_dictionary_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "KNOWN", 5)
    found = Words(TRAINED["gpt2"], words.GPT2)
    text = " ".join(f"word{n}" for n in range(50))
    assert found.ids(text) == TRAINED["gpt2"].encode(text).ids
    assert len(found._known) <= 5


def test_classes_are_written_out_for_ascii() -> None:
    assert words._in_ascii(r"\p{L}+|[^\s\p{L}\p{N}]\[\p{M}") == r"[A-Za-z]+|[^\sA-Za-z0-9]\[[^\s\S]"
    for name, letters in words._CLASSES.items():
        import regex

        chosen = {c for c in map(chr, range(128)) if regex.fullmatch(rf"\p{{{name}}}", c)}
        assert chosen == {c for c in map(chr, range(128)) if letters and re.fullmatch(f"[{letters}]", c)}
