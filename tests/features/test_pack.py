from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.core.types import IGNORED, Features, Progress, Sample
from draftsmith.data import samples as rendering
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.features.pack import fill, pack, plan
from draftsmith.target.capture import Capture

LENGTHS = st.lists(st.integers(1, 60), min_size=0, max_size=40)


def greedy(lengths: list[int], room: int, order: list[int]) -> list[list[int]]:
    """The slow way: try to append, and see whether the sum fits."""
    batches: list[list[int]] = []
    for i in order:
        if batches and sum(lengths[j] for j in [*batches[-1], i]) <= room:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


@given(LENGTHS, st.integers(1, 100), st.randoms(use_true_random=False))
def test_fill_is_the_greedy_cut_of_an_order(lengths: list[int], room: int, random) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)
    assert fill(lengths, room, order) == greedy(lengths, room, order)


@given(LENGTHS, st.integers(1, 100), st.integers(-5, 2**40), st.integers(0, 50))
def test_a_plan_holds_every_sample_once_within_the_room(lengths: list[int], room: int, seed: int, epoch: int) -> None:
    batches = plan(lengths, room, seed, epoch)
    assert sorted(flat(batches)) == list(range(len(lengths)))
    assert all(batch and (len(batch) == 1 or sum(lengths[i] for i in batch) <= room) for batch in batches)


@given(st.lists(st.integers(1, 9), min_size=12, max_size=20), st.integers(0, 1000), st.integers(0, 20), st.integers(1, 20))
def test_a_plan_repeats_itself_and_differs_by_seed_and_epoch(lengths: list[int], seed: int, epoch: int, other: int) -> None:
    """Of 12! orders, two agree by chance once in 479 million."""
    order = flat(plan(lengths, 20, seed, epoch))
    torch.manual_seed(seed + epoch)
    assert flat(plan(lengths, 20, seed, epoch)) == order
    assert flat(plan(lengths, 20, seed, epoch + other)) != order
    assert flat(plan(lengths, 20, seed + other, epoch)) != order


def test_planning_leaves_the_global_random_stream_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    plan([3] * 20, 9, 1, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_sample_comes_first_about_equally_often() -> None:
    firsts = torch.tensor([plan([1] * 8, 3, seed, epoch)[0][0] for seed in range(20) for epoch in range(40)]).bincount(minlength=8)
    assert firsts.min() > 60  # 100 each on average, with a standard deviation of 9.4
    assert firsts.max() < 140


def random_features(length: int, seed: int) -> Features:
    g = torch.Generator().manual_seed(seed)
    sample = Sample(f"s{seed}", torch.randint(0, 99, (length,), generator=g), torch.rand(length, generator=g) < 0.5)
    argmax = torch.randint(-1, 99, (length,), generator=g, dtype=torch.int32)
    return Features(sample, torch.randn(length, 6, generator=g), torch.randn(length, 3, generator=g), argmax)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_packing_lays_documents_end_to_end(lengths: list[int]) -> None:
    """Compared token by token."""
    found = [random_features(n, i) for i, n in enumerate(lengths)]
    batch = pack(found)
    assert batch.ids == tuple(f.sample.id for f in found)
    assert batch.lengths == tuple(lengths)
    assert len(batch.input_ids_N) == sum(lengths)
    n = 0
    for d, f in enumerate(found):
        for t in range(len(f)):
            assert batch.document_N[n] == d
            assert batch.position_N[n] == t
            assert batch.input_ids_N[n] == f.sample.input_ids[t]
            assert batch.loss_mask_N[n] == f.sample.loss_mask[t]
            assert batch.argmax_N[n] == f.argmax_T[t]
            assert torch.equal(batch.hidden_NF[n], f.hidden_TF[t])
            assert torch.equal(batch.last_NH[n], f.last_TH[t])
            n += 1
    assert {x.dtype for x in (batch.input_ids_N, batch.position_N, batch.document_N, batch.argmax_N)} == {torch.int64}


@pytest.fixture
def captured(target, target_model, template, talks) -> list[Features]:
    spec = Eagle3.needs(Eagle3Config(layers=(1, 2, 4), vocab_size=48), target.shape)
    capture = Capture(target_model, target, type(spec)(spec.layers, "float32"))
    return [capture(s) for s in rendering.prepare(talks, template, 200).samples]


@pytest.fixture
def draft(target, captured: list[Features]) -> Eagle3:
    torch.manual_seed(3)
    made = Eagle3(Eagle3Config(layers=(1, 2, 4), vocab_size=48, steps=3), target.shape)
    counts = torch.bincount(torch.cat([f.sample.input_ids[f.sample.loss_mask] for f in captured]), minlength=target.shape.vocab_size)
    made.initialise(target, counts, pack(captured))
    return shaken(made)


def shaken(draft: Eagle3) -> Eagle3:
    """No weight at the zero that a fresh draft may start some of them from, so that every gradient can differ."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in draft.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    return draft


def learn(draft: Eagle3, target, parts: list[list[Features]], exact: bool) -> tuple[dict, dict]:
    """Summed metrics and gradients over some batches."""
    draft.zero_grad()
    total: dict = {}
    for part in parts:
        out = draft(pack(part), target, Progress(0.0, 0, exact=exact))
        out.loss.num.backward()
        for name, ratio in {"loss": out.loss.detach(), **out.metrics}.items():
            total[name] = total[name] + ratio if name in total else ratio
    return total, {n: p.grad.clone() for n, p in draft.named_parameters()}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("cuts", [list(range(13)), [0, 5, 12], [0, 1, 12]])
def test_one_large_batch_equals_separate_documents(draft: Eagle3, target, captured: list[Features], cuts: list[int], exact: bool) -> None:
    """Loss, every metric and every gradient: nothing crosses a document's border."""
    together, whole = learn(draft, target, [captured], exact)
    summed, parts = learn(draft, target, [captured[a:b] for a, b in pairwise(cuts)], exact)
    assert together.keys() == summed.keys() >= {"loss", "acceptance_length", "position_rates", "step_accuracy"}
    for name in together:
        torch.testing.assert_close(together[name].num, summed[name].num, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(together[name].den, summed[name].den)
    for name, gradient in whole.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, parts[name], rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_the_order_of_documents_does_not_matter(draft: Eagle3, target, captured: list[Features]) -> None:
    _, one = learn(draft, target, [captured], exact=False)
    _, other = learn(draft, target, [captured[::-1]], exact=False)
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_the_target_s_choice_is_captured_exactly_where_the_next_token_is_supervised(captured: list[Features]) -> None:
    for f in captured:
        wanted = torch.cat((f.sample.loss_mask[1:], torch.tensor([False])))
        assert torch.equal(f.argmax_T != IGNORED, wanted)
