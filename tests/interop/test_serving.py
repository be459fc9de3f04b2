"""The comparison itself, on counts made by hand; it needs no engine."""

from __future__ import annotations

import pytest
from serving import cut, disagreements

from draftsmith.eval.decode import Decoded


@pytest.mark.parametrize(
    ("accepted", "length", "counted"),
    [
        ([2, 0, 1], 7, [2, 0, 1]),  # 1 + 3 + 1 + 2: nothing was cut
        ([2, 0, 3], 6, [2, 0, 1]),  # the last pass had room for one token of its four
        ([2, 0, 1], 6, [2, 0, 1]),  # only the bonus token was cut
        ([5], 2, [1]),
        ([], 1, []),
    ],
)
def test_the_last_pass_is_cut_as_the_answer_was(accepted: list[int], length: int, counted: list[int]) -> None:
    assert cut(accepted, length) == counted


def answers(*accepted: list[int]) -> list[Decoded]:
    return [Decoded(list(range(1 + sum(a) + len(a))), a) for a in accepted]


def test_equal_passes_agree() -> None:
    rows = answers(*[[1, 0, 2, 0]] * 20)
    assert disagreements(rows, rows, 2) == []


def test_one_near_tie_in_many_answers_is_no_disagreement() -> None:
    rows = [[1, 0, 2, 0]] * 40
    assert disagreements(answers(*rows), answers([1, 1, 1, 0], *rows[1:]), 2) == []


def test_rates_beyond_the_tolerance_are_told() -> None:
    found = disagreements(answers(*[[1, 0, 2, 0]] * 20), answers(*[[1, 0, 1, 0]] * 20), 2)
    assert [line.split(":")[0].split(" 1.")[0] for line in found] == [
        "acceptance length",
        "position 2",
        "passes of 20 of 20 answers accept other numbers of tokens",
    ]


def test_equal_rates_in_other_passes_are_told() -> None:
    """A misalignment that happens to keep the averages."""
    found = disagreements(answers(*[[1, 0, 2, 0]] * 20), answers(*[[0, 1, 0, 2]] * 20), 2)
    assert found == ["passes of 20 of 20 answers accept other numbers of tokens"]
