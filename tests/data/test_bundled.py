"""The conversations that ship: enough, varied, separate, and what the target really said."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import pytest

from draftsmith.data import bundled
from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.samples import prepare
from draftsmith.data.template import ChatTemplate
from draftsmith.target import smollm2

KINDS = {"chat", "code", "math", "writing", "extraction", "tools"}
END = 2
LONGEST = 160


@pytest.fixture(scope="module")
def real() -> ChatTemplate:
    return ChatTemplate.load(str(smollm2.directory()))


@pytest.fixture(scope="module", params=["train", "held-out"])
def answered(request: pytest.FixtureRequest) -> list[Conversation]:
    return bundled.conversations(request.param)


def asked(conversation: Conversation) -> list[str]:
    """Words of all user turns, without case and punctuation."""
    return re.findall(r"\w+", " ".join(m.content for m in conversation.messages if m.role == "user").lower())


def grams(conversation: Conversation, n: int) -> set[tuple[str, ...]]:
    words = asked(conversation)
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def leaked(held_out: Iterable[Conversation], training: Iterable[Conversation], n: int = 8, share: float = 0.2) -> list[str]:
    """Held-out conversations whose questions are a training one's, or of which a fifth of the n-grams stands in one training conversation."""
    training = list(training)
    exact = {tuple(asked(c)) for c in training}
    where: dict[tuple[str, ...], list[int]] = {}
    for i, c in enumerate(training):
        for gram in grams(c, n):
            where.setdefault(gram, []).append(i)
    found: list[str] = []
    for c in held_out:
        own = grams(c, n)
        hits = Counter(i for gram in own for i in where.get(gram, []))
        if tuple(asked(c)) in exact or (hits and max(hits.values()) >= share * len(own)):
            found.append(c.id)
    return found


def test_there_are_enough_of_every_kind() -> None:
    training, held_out = bundled.prompts("train"), bundled.prompts("held-out")
    assert len(training) >= 2400
    assert len(held_out) == 100
    for split in (training, held_out):
        kinds = Counter(c.kind for c in split)
        assert set(kinds) == KINDS
        assert min(kinds.values()) >= len(split) // 12
        assert sum(sum(m.role == "user" for m in c.messages) > 1 for c in split) >= len(split) // 20


def test_ids_are_unique_over_both_splits() -> None:
    ids = [c.id for split in ("train", "held-out") for c in bundled.prompts(split)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_prompts_end_with_a_question_and_hold_no_answer(split: str) -> None:
    for c in bundled.prompts(split):
        assert c.messages[-1].role == "user", c.id
        assert {m.role for m in c.messages} <= {"system", "user"}, c.id
        assert all(m.content.strip() for m in c.messages), c.id


def test_no_two_prompts_are_alike() -> None:
    texts = Counter((tuple(asked(c)), *(m.content for m in c.messages if m.role == "system")) for s in ("train", "held-out") for c in bundled.prompts(s))
    assert [t for t, n in texts.items() if n > 1] == []


@pytest.mark.parametrize("n", [5, 8])
def test_no_held_out_conversation_is_a_training_one(n: int) -> None:
    assert leaked(bundled.prompts("held-out"), bundled.prompts("train"), n) == []


def test_a_planted_leak_is_found() -> None:
    held_out, training = bundled.prompts("held-out"), bundled.prompts("train")
    victims = [c for c in held_out if len(asked(c)) >= 30][:5]
    reworded = [
        Conversation(f"copy-{c.id}", c.kind, tuple(Message(m.role, "Please help me. " + " ".join(m.content.upper().split())) for m in c.messages))
        for c in victims
    ]
    assert len(victims) == 5
    assert set(leaked(held_out, [*training, *reworded])) == {c.id for c in victims}
    short = next(c for c in held_out if len(asked(c)) < 12)
    assert short.id in leaked(held_out, [*training, Conversation("again", short.kind, short.messages)])


def test_every_question_has_an_answer_of_the_target(answered: list[Conversation]) -> None:
    for c in answered:
        for i, message in enumerate(c.messages):
            if message.role == "user":
                assert i + 1 < len(c.messages), c.id
                assert c.messages[i + 1].role == "assistant", c.id
        for message in c.messages:
            assert (message.token_ids is not None) == (message.role == "assistant"), c.id


def test_answered_conversations_are_the_prompts() -> None:
    for split in ("train", "held-out"):
        assert [c.users_only() for c in bundled.conversations(split)] == bundled.prompts(split)


def test_answers_have_their_length_and_say_stop_exactly_after_the_end_token(answered: list[Conversation], real: ChatTemplate) -> None:
    assert real.end_ids == (END,)
    for c in answered:
        for m in c.messages:
            if m.token_ids is None:
                continue
            assert 1 <= len(m.token_ids) <= LONGEST, c.id
            assert m.finish_reason in ("stop", "length"), c.id
            assert (m.finish_reason == "stop") == (m.token_ids[-1] == END), c.id
            assert END not in m.token_ids[:-1], c.id
            assert m.finish_reason == "stop" or len(m.token_ids) == LONGEST, c.id


def test_texts_are_the_decoded_ids(answered: list[Conversation], real: ChatTemplate) -> None:
    wrong = [c.id for c in answered for m in c.messages if m.token_ids is not None and real.text(m.token_ids) != m.content]
    assert wrong == []


def test_all_of_them_become_samples(answered: list[Conversation], real: ChatTemplate) -> None:
    prepared = prepare(answered, real, 4096)
    recorded = sum(len(m.token_ids) for c in answered for m in c.messages if m.token_ids is not None)
    assert prepared.counts.dropped <= len(answered) // 100, prepared.describe()
    assert prepared.cut_tokens == 0
    if not prepared.counts.dropped:
        assert prepared.supervised == recorded


def test_the_readme_counts_what_is_there() -> None:
    text = (bundled.FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"{len(bundled.prompts('train')):,} training and {len(bundled.prompts('held-out'))} held-out" in text
    for kind in KINDS:
        counts = [sum(c.kind == kind for c in bundled.prompts(s)) for s in ("train", "held-out")]
        assert f"| {kind} | {counts[0]} | {counts[1]} |" in text
    for split in ("train", "held-out"):
        assert f"prompts-{split}.jsonl" in text
