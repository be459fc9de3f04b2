"""Figures of acceptance, by hand and by a recount one pass at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.eval.acceptance import Acceptance
from draftsmith.eval.decode import Decoded


def answer(*accepted: int, tokens: int | None = None) -> Decoded:
    """An answer of these passes; by default each emitted what it accepted and a bonus token."""
    return Decoded([1] * (tokens or 1 + sum(accepted) + len(accepted)), list(accepted))


def test_figures_by_hand() -> None:
    found = Acceptance.of([answer(2, 0, 3), answer(1), answer()], width=3)
    assert (found.steps, found.accepted, found.tokens, found.histogram) == (4, 6, 10, (1, 1, 1, 1))
    assert found.length == 2.5
    assert found.position_rates == [0.75, 0.5, 0.25]
    assert found.conditional_rates == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert found.as_dict() == {
        "acceptance_length": 2.5, "steps": 4, "accepted": 6, "drafted": 12, "tokens_per_step": 2.5, "acceptance_rate": 0.5,
        "position_rates": [0.75, 0.5, 0.25], "conditional_rates": [0.75, 0.6667, 0.5], "histogram": [1, 1, 1, 1],
    }  # fmt: skip


def test_an_answer_cut_before_its_bonus_token_lowers_tokens_per_step_alone() -> None:
    whole, cut = Acceptance.of([answer(2, 2)], 2), Acceptance.of([answer(2, 2, tokens=6)], 2)
    assert whole.length == cut.length == 3
    assert (whole.as_dict()["tokens_per_step"], cut.as_dict()["tokens_per_step"]) == (3, 2.5)


def test_nothing_decoded_gives_figures_without_dividing_by_zero() -> None:
    found = Acceptance.of([answer(), answer()], width=2)
    assert (found.steps, found.accepted, found.tokens) == (0, 0, 0)
    assert found.position_rates == found.conditional_rates == [0, 0]


@settings(deadline=None)
@given(st.integers(1, 6), st.data())
def test_figures_equal_a_slow_recount(width: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.lists(st.integers(0, width), max_size=8), min_size=1, max_size=6))
    found = Acceptance.of([answer(*row) for row in rows], width)
    passes = [n for row in rows for n in row]
    steps = len(passes)
    assert found.steps == steps
    assert list(found.histogram) == [passes.count(n) for n in range(width + 1)]
    for k in range(1, width + 1):
        reached = sum(1 for n in passes if n >= k - 1)
        accepted = sum(1 for n in passes if n >= k)
        assert found.position_rates[k - 1] == (accepted / steps if steps else 0)
        assert found.conditional_rates[k - 1] == (accepted / reached if reached else 0)
    if steps:
        assert found.length == pytest.approx(1 + sum(passes) / steps)
        assert found.length == pytest.approx(1 + sum(found.position_rates))
        assert found.tokens == steps + found.accepted


@settings(deadline=None)
@given(st.integers(1, 4), st.data())
def test_figures_of_parts_add_up_to_those_of_the_whole(width: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.lists(st.integers(0, width), max_size=6), min_size=2, max_size=8))
    answers = [answer(*row) for row in rows]
    one, two, both = (Acceptance.of(part, width) for part in (answers[::2], answers[1::2], answers))
    for name in ("steps", "accepted", "tokens"):
        assert getattr(one, name) + getattr(two, name) == getattr(both, name)
    assert [a + b for a, b in zip(one.histogram, two.histogram, strict=True)] == list(both.histogram)
