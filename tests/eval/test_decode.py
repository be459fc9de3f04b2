"""Greedy speculative decoding equals plain greedy equals transformers' own, whatever the draft, the batch and the ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Scripted

from draftsmith.core.types import FeatureSpec, Progress, Sample
from draftsmith.data.vocab import count
from draftsmith.drafts.base import Draft
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.eval import decode
from draftsmith.eval.decode import Clock, Decoded, Decoder
from draftsmith.features.pack import pack
from draftsmith.target.capture import Capture
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

MAX_NEW = 21
LENGTHS = (1, 2, 3, 7, 12, 31)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


class World:
    """The target, transformers' own answers to any prompt, and drafts."""

    def __init__(self, model: TargetModel, target: Target) -> None:
        self.model, self.target = model, target
        self.greedy = cache(self._greedy)

    def _greedy(self, prompt: tuple[int, ...], tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)
        return out[0, len(prompt) :].tolist()

    def expected(self, prompt: Sequence[int], max_new: int, end_ids: Sequence[int] = ()) -> list[int]:
        """Its answer up to an end token or the limit."""
        tokens = self.greedy(tuple(prompt), MAX_NEW + 12)[:max_new]
        ends = [n for n, token in enumerate(tokens) if token in end_ids]
        return tokens[: ends[0] + 1] if ends else tokens

    def decoder(self, draft: object = None, width: int = 0, end_ids: tuple[int, ...] = ()) -> Decoder:
        return Decoder(self.model, self.target, end_ids, draft, width)  # type: ignore[arg-type]

    def scripted(self, prompts: Sequence[Sequence[int]], right: Callable[[int, int], int]) -> Scripted:
        whole = [[*p, *self.greedy(tuple(p), MAX_NEW + 12)] for p in prompts]
        return Scripted(self.model, whole, right)


@pytest.fixture(scope="module")
def world(target_model: TargetModel, target: Target) -> World:
    return World(target_model, target)


def eagle3(target: Target, seed: int = 5) -> Eagle3:
    torch.manual_seed(seed)
    return Eagle3(Eagle3Config(vocab_size=80, layers=(1, 2, 4), steps=((0.0, 3),)), target.shape).eval()


@pytest.fixture(scope="module")
def random_draft(target: Target) -> Eagle3:
    return eagle3(target)


@pytest.fixture(scope="module")
def trained_draft(world: World) -> Eagle3:
    """Overfitted to the target's answers to the prompts of these tests, so that it is often right."""
    capture = Capture(world.model, world.target, FeatureSpec((1, 2, 4), "float32"))
    samples = []
    for length in LENGTHS:
        ids = [*prompt_of(length), *world.greedy(tuple(prompt_of(length)), MAX_NEW + 12)]
        samples.append(Sample(str(length), torch.tensor(ids), torch.arange(len(ids)) >= length))
    batch = pack([capture(s) for s in samples])
    draft = eagle3(world.target).train()
    draft.initialise(world.target, count(samples, 259), batch)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    for step in range(90):
        output = draft(batch, world.target, Progress(step / 90, step))
        (output.loss.num / output.loss.den).backward()
        optimizer.step()
        optimizer.zero_grad()
    return draft.eval()


def truncated(right: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Accepted counts of an answer when proposals are right this often: what a pass may accept is bounded by what is left."""
    counts, done = [], 1
    for n in right:
        if done >= len(answer):
            break
        counts.append(min(n, len(answer) - done))
        done += n + 1
    return counts


# ---- plain ----


@pytest.mark.parametrize("max_new", [1, 2, 3, 13, MAX_NEW])
def test_plain_decoding_equals_transformers_generate(world: World, max_new: int) -> None:
    prompts = [prompt_of(n) for n in LENGTHS]
    answers = world.decoder().decode(prompts, max_new)
    assert [a.token_ids for a in answers] == [world.expected(p, max_new) for p in prompts]
    assert [a.accepted for a in answers] == [[0] * (max_new - 1)] * len(prompts)
    assert {a.finish_reason for a in answers} == {"length"}


# ---- greedy, any draft ----


@pytest.mark.parametrize(("name", "width"), [*(("trained_draft", w) for w in range(1, 7)), ("random_draft", 1), ("random_draft", 4)])
def test_speculative_greedy_equals_transformers_at_any_width(world: World, name: str, width: int, request: pytest.FixtureRequest) -> None:
    decoder = world.decoder(request.getfixturevalue(name), width)
    prompts = [prompt_of(n) for n in LENGTHS]
    alone = [decoder.decode([p], MAX_NEW)[0] for p in prompts]
    assert [a.token_ids for a in alone] == [world.expected(p, MAX_NEW) for p in prompts]
    assert decoder.decode(prompts, MAX_NEW) == alone, "together as one by one, accepted counts too"


def test_the_trained_draft_is_often_right_and_the_random_one_hardly_ever(world: World, trained_draft: Draft, random_draft: Draft) -> None:
    """Else the tests with them would try little."""
    prompts = [prompt_of(n) for n in LENGTHS]
    trained, untrained = ([n for a in world.decoder(d, 4).decode(prompts, MAX_NEW) for n in a.accepted] for d in (trained_draft, random_draft))
    assert sum(trained) > len(trained) / 2
    assert len(set(trained)) == 5, "every count from 0 to the width occurs"
    assert sum(untrained) < len(untrained) / 5


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(LENGTHS), st.integers(0, 1)), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, MAX_NEW), st.data())
def test_any_batch_width_limit_and_script_gives_the_targets_own_text(
    world: World, shapes: list[tuple[int, int]], width: int, max_new: int, data: st.DataObject
) -> None:
    """Ragged prompts, rows that accept different counts, end tokens taken from the answers: text, counts and reasons as scripted."""
    prompts = [prompt_of(n, seed) for n, seed in shapes]
    plan = data.draw(st.lists(st.lists(st.integers(0, width), min_size=MAX_NEW, max_size=MAX_NEW), min_size=len(prompts), max_size=len(prompts)))
    row, place = data.draw(st.integers(0, len(prompts) - 1)), data.draw(st.integers(0, MAX_NEW + 5))
    end_ids = (world.greedy(tuple(prompts[row]), MAX_NEW + 12)[place],)
    draft = world.scripted(prompts, lambda row, proposal: plan[row][proposal])
    answers = world.decoder(draft, width, end_ids).decode(prompts, max_new)
    for prompt, answer, right in zip(prompts, answers, plan, strict=True):
        expected = world.expected(prompt, max_new, end_ids)
        assert answer.token_ids == expected
        assert answer.accepted == truncated(right, expected)
        assert answer.finish_reason == ("stop" if expected[-1] in end_ids else "length")
    draft.check_features()


# ---- the best and the worst draft ----


@pytest.mark.parametrize("width", [1, 3, 6])
def test_an_oracle_is_accepted_whole_and_each_pass_gives_width_plus_one_tokens(world: World, width: int) -> None:
    prompts = [prompt_of(n) for n in LENGTHS]
    draft = world.scripted(prompts, lambda *_: width)
    clock = Clock()
    passes = 3
    answers = world.decoder(draft, width).decode(prompts, 1 + passes * (width + 1), clock)
    assert [a.accepted for a in answers] == [[width] * passes] * len(prompts)
    assert clock.passes == passes
    assert draft.check_features() == sum(LENGTHS) + len(LENGTHS) * (passes - 1) * (width + 1)


def test_an_adversary_is_never_accepted_and_costs_one_pass_a_token(world: World) -> None:
    prompts = [prompt_of(n) for n in LENGTHS]
    clock = Clock()
    answers = world.decoder(world.scripted(prompts, lambda *_: 0), 4).decode(prompts, MAX_NEW, clock)
    assert [a.accepted for a in answers] == [[0] * (MAX_NEW - 1)] * len(prompts)
    assert [a.token_ids for a in answers] == [world.expected(p, MAX_NEW) for p in prompts]
    assert clock.passes == MAX_NEW - 1


# ---- ends ----


@pytest.mark.parametrize(("place", "accepted"), [(0, []), (1, [1]), (2, [2]), (3, [3]), (4, [3]), (5, [3, 1]), (8, [3, 3])])
def test_an_end_token_stops_the_answer_as_first_drafted_or_bonus_token(world: World, place: int, accepted: list[int]) -> None:
    answers = ((p, world.greedy(tuple(p), MAX_NEW + 12)) for p in (prompt_of(7, seed) for seed in range(99)))
    prompt, whole = next((p, a) for p, a in answers if len(set(a[:9])) == 9)
    absent = next(i for i in range(259) if i not in whole)
    answer = world.decoder(world.scripted([prompt], lambda *_: 3), 3, (absent, whole[place])).decode([prompt], MAX_NEW)[0]
    assert answer == Decoded(whole[: place + 1], accepted, "stop")


@pytest.mark.parametrize(("max_new", "accepted"), [(1, []), (2, [1]), (3, [2]), (4, [3]), (5, [3]), (6, [3, 1])])
def test_the_limit_stops_the_answer_within_a_pass(world: World, max_new: int, accepted: list[int]) -> None:
    prompt = prompt_of(7)
    answer = world.decoder(world.scripted([prompt], lambda *_: 3), 3).decode([prompt], max_new)[0]
    assert answer == Decoded(world.expected(prompt, max_new), accepted, "length")


def test_an_end_token_at_the_limit_is_a_stop(world: World) -> None:
    prompt = prompt_of(7)
    end = world.expected(prompt, 4)[-1]
    assert world.decoder(None, 0, (end,)).decode([prompt], 4)[0].finish_reason == "stop"


def test_rows_that_end_leave_the_batch_and_the_others_are_not_disturbed(world: World, trained_draft: Draft) -> None:
    prompts = [prompt_of(n) for n in LENGTHS]
    ends = tuple({world.greedy(tuple(p), MAX_NEW + 12)[2 + 3 * i] for i, p in enumerate(prompts[:4])})
    decoder = world.decoder(trained_draft, 3, ends)
    clock = Clock()
    together = decoder.decode(prompts, MAX_NEW, clock)
    assert [a.token_ids for a in together] == [world.expected(p, MAX_NEW, ends) for p in prompts]
    assert len({len(a.token_ids) for a in together}) > 3
    assert together == [decoder.decode([p], MAX_NEW)[0] for p in prompts]
    assert clock.passes == max(len(a.accepted) for a in together)


def test_the_same_decoder_answers_twice_alike(world: World, trained_draft: Draft) -> None:
    decoder = world.decoder(trained_draft, 3)
    prompts = [prompt_of(n) for n in (3, 12)]
    assert decoder.decode(prompts, 9) == decoder.decode(prompts, 9)


@pytest.fixture
def accept_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def everything(choice: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones_like(choice, dtype=torch.bool), choice[:, -1]

    with monkeypatch.context() as patch:
        patch.setattr(decode, "verify_choice", everything)
        yield


@pytest.mark.usefixtures("accept_all")
def test_a_verifier_that_accepts_everything_is_seen(world: World, random_draft: Draft) -> None:
    """Planted fault."""
    prompts = [prompt_of(n) for n in LENGTHS]
    answers = world.decoder(random_draft, 3).decode(prompts, MAX_NEW)
    assert all(a.token_ids != world.expected(p, MAX_NEW) for p, a in zip(prompts, answers, strict=True))
