"""Verification against plain loops, and its distribution against one worked out by enumeration."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from chi_square import p_value
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.core.types import Proposal
from draftsmith.eval.verify import verify_choice, verify_sampled

DRAWS = 60_000
VOCABULARY = 5


def verify_chain(choice_BQ: Tensor, drafted_BW: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens of chains are kept, and what follows them."""
    proposal = Proposal(drafted_BW)
    kept_BQ, next_B = verify_choice(choice_BQ, drafted_BW, None, proposal.lineage)
    assert torch.equal(kept_BQ.int(), kept_BQ.int().cumprod(1)), "of a chain the first tokens are kept"
    return kept_BQ.sum(1) - 1, next_B


def greedy_by_loop(choice: list[int], drafted: list[int]) -> tuple[int, int]:
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == choice[accepted]:
        accepted += 1
    return accepted, choice[accepted]


@settings(deadline=None)
@given(st.integers(0, 6), st.integers(1, 6), st.data())
def test_greedy_keeps_the_longest_prefix_that_the_target_chooses(width: int, rows: int, data: st.DataObject) -> None:
    token = st.integers(0, 2)
    choice = data.draw(st.lists(st.lists(token, min_size=width + 1, max_size=width + 1), min_size=rows, max_size=rows))
    drafted = data.draw(st.lists(st.lists(token, min_size=width, max_size=width), min_size=rows, max_size=rows))
    accepted_B, next_B = verify_chain(torch.tensor(choice), torch.tensor(drafted, dtype=torch.long).reshape(rows, width))
    expected = [greedy_by_loop(c, d) for c, d in zip(choice, drafted, strict=True)]
    assert list(zip(accepted_B.tolist(), next_B.tolist(), strict=True)) == expected


def test_a_late_match_after_a_mismatch_counts_nothing() -> None:
    accepted_B, next_B = verify_chain(torch.tensor([[7, 8, 9]]), torch.tensor([[6, 8]]))
    assert (accepted_B.tolist(), next_B.tolist()) == ([0], [7])


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**31))
def test_sampled_acceptance_follows_the_uniform_numbers_given(width: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target_BQV = torch.softmax(2 * torch.randn(rows, width + 1, VOCABULARY, generator=generator), -1)
    draft_BWV = torch.softmax(2 * torch.randn(rows, width, VOCABULARY, generator=generator), -1)
    drafted_BW = torch.randint(VOCABULARY, (rows, width), generator=generator)
    uniform_BW = torch.rand(rows, width, generator=generator)
    accepted_B, next_B = verify_sampled(target_BQV, draft_BWV, drafted_BW, uniform_BW, generator)
    for b in range(rows):
        count = 0
        for w in range(width):
            x = int(drafted_BW[b, w])
            if not uniform_BW[b, w] < target_BQV[b, w, x] / draft_BWV[b, w, x]:
                break
            count += 1
        assert int(accepted_B[b]) == count
        if count < width:  # the replacement comes from where the target has more mass than the draft
            x = int(next_B[b])
            assert float(target_BQV[b, count, x]) > float(draft_BWV[b, count, x])


def outcomes(target_QV: Tensor, draft_WV: Tensor) -> dict[tuple[int, ...], float]:
    """Probability of every output (how many accepted, which, and the one that follows), by the rule of the paper, one outcome at a time."""
    p, q = target_QV.double().tolist(), draft_WV.double().tolist()
    width = len(q)
    found: dict[tuple[int, ...], float] = {}
    for count in range(width + 1):
        for kept in itertools.product(range(VOCABULARY), repeat=count):
            chance = 1.0
            for w, x in enumerate(kept):
                chance *= min(p[w][x], q[w][x])
            after = p[width] if count == width else [max(a - b, 0.0) for a, b in zip(p[count], q[count], strict=True)]
            # the chance to reject equals the sum of what is left, so that it need not be normalised
            found |= {(count, *kept, y): chance * share for y, share in enumerate(after)}
    return found


def drawn(target_QV: Tensor, draft_WV: Tensor, seed: int) -> Counter[tuple[int, ...]]:
    """`DRAWS` outputs, counted: (accepted, tokens …)."""
    generator = torch.Generator().manual_seed(seed)
    width = len(draft_WV)
    drafted_BW = torch.stack([torch.multinomial(q, DRAWS, replacement=True, generator=generator) for q in draft_WV], dim=1)
    uniform_BW = torch.rand(DRAWS, width, generator=generator)
    accepted_B, next_B = verify_sampled(target_QV.expand(DRAWS, -1, -1), draft_WV.expand(DRAWS, -1, -1), drafted_BW, uniform_BW, generator)
    kept_BW = drafted_BW.where(torch.arange(width) < accepted_B[:, None], -1)
    rows, counts = torch.cat((accepted_B[:, None], kept_BW, next_B[:, None]), 1).unique(dim=0, return_counts=True)
    return Counter({(n, *row[:n], row[-1]): c for (n, *row), c in zip(rows.tolist(), counts.tolist(), strict=True)})


def marginal(outputs: Counter[tuple[int, ...]], place: int) -> Tensor:
    """Counts of the token emitted at this place."""
    counts = torch.zeros(VOCABULARY)
    for (_, *tokens), n in outputs.items():
        if place < len(tokens):
            counts[tokens[place]] += n
    return counts


def distributions(kind: str, width: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target_QV = torch.softmax(1.5 * torch.randn(width + 1, VOCABULARY, generator=generator), -1)
    draft_WV = torch.softmax(1.5 * torch.randn(width, VOCABULARY, generator=generator), -1)
    if kind == "draft lacks tokens":
        draft_WV[:, [0, 3]] = 0
    if kind == "target lacks tokens":
        target_QV[:, [1, 2]] = 0
    if kind == "disjoint":
        draft_WV[:, :3], target_QV[:, 3:] = 0, 0
    if kind == "near":
        draft_WV = target_QV[:width] + 0.05 * draft_WV
    target_QV, draft_WV = (x / x.sum(-1, keepdim=True) for x in (target_QV, draft_WV))
    if kind == "equal":
        draft_WV = target_QV[:width].clone()
    return target_QV, draft_WV


KINDS = ("random", "draft lacks tokens", "target lacks tokens", "disjoint", "near", "equal")


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_outputs_have_the_enumerated_distribution(kind: str, width: int) -> None:
    target_QV, draft_WV = distributions(kind, width, 11 * width)
    expected = outcomes(target_QV, draft_WV)
    counts = drawn(target_QV, draft_WV, 3)
    assert set(counts) <= {k for k, v in expected.items() if v > 0}
    keys = list(expected)
    if sum(expected[k] > 0 for k in keys) > 1:
        assert p_value(torch.tensor([counts[k] for k in keys]), torch.tensor([expected[k] for k in keys])) > 1e-4


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_emitted_token_is_distributed_as_the_target_whatever_the_draft(kind: str, width: int) -> None:
    target_QV, draft_WV = distributions(kind, width, 7 * width + 1)
    outputs = drawn(target_QV, draft_WV, 5)
    for place in range(width + 1):
        counts = marginal(outputs, place)
        if counts.sum() > 1000:
            assert p_value(counts, target_QV[place]) > 1e-4


def test_a_draft_equal_to_the_target_is_never_rejected() -> None:
    target_QV, draft_WV = distributions("equal", 3, 2)
    assert {row[0] for row in drawn(target_QV, draft_WV, 1)} == {3}


def test_a_token_impossible_for_the_target_is_never_accepted() -> None:
    target_QV, draft_WV = distributions("disjoint", 2, 2)
    assert {row[0] for row in drawn(target_QV, draft_WV, 1)} == {0}
    zero = torch.zeros(1, 2)
    accepted_B, _ = verify_sampled(target_QV[None], draft_WV[None], torch.tensor([[4, 4]]), zero)
    assert accepted_B.tolist() == [0], "not even for the uniform number 0"


def test_the_statistic_sees_a_replacement_drawn_from_the_target_itself() -> None:
    """Planted fault: the usual mistake of not subtracting the draft's distribution."""
    target_QV, draft_WV = distributions("random", 1, 11)
    generator = torch.Generator().manual_seed(9)
    outputs = drawn(target_QV, draft_WV, 3)
    rejected = sum(n for row, n in outputs.items() if row[0] == 0)
    kept = marginal(Counter({row: n for row, n in outputs.items() if row[0]}), 0)
    replaced = torch.bincount(torch.multinomial(target_QV[0], rejected, replacement=True, generator=generator), minlength=VOCABULARY)
    assert p_value(marginal(outputs, 0), target_QV[0]) > 1e-4
    assert p_value(kept + replaced, target_QV[0]) < 1e-4
