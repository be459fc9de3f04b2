"""The draft vocabulary against counting by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.types import Sample
from draftsmith.data.vocab import choose, count

counts = st.lists(st.integers(0, 50), min_size=1, max_size=60)


@settings(deadline=None)
@given(counts, st.data())
def test_offsets_and_marks_are_of_the_same_ids(numbers: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(numbers)))
    vocabulary = choose(torch.tensor(numbers), size)
    assert vocabulary.t2d.dtype == torch.bool
    assert len(vocabulary.t2d) == vocabulary.target_size == len(numbers)
    assert int(vocabulary.t2d.sum()) == len(vocabulary.d2t) == size
    assert torch.equal(vocabulary.t2d.nonzero()[:, 0], torch.arange(size) + vocabulary.d2t)
    assert torch.equal(vocabulary.ids_D, torch.arange(size) + vocabulary.d2t)


@settings(deadline=None)
@given(counts, st.data())
def test_the_most_frequent_are_chosen_and_equal_ones_by_lower_id(numbers: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(numbers)))
    best = sorted(range(len(numbers)), key=lambda i: (-numbers[i], i))[:size]
    vocabulary = choose(torch.tensor(numbers), size)
    assert vocabulary.ids_D.tolist() == sorted(best)
    assert vocabulary.coverage == (sum(numbers[i] for i in best) / sum(numbers) if sum(numbers) else 0.0)


def test_coverage_by_hand() -> None:
    vocabulary = choose(torch.tensor([1, 0, 5, 2, 2]), 2)
    assert vocabulary.ids_D.tolist() == [2, 3]
    assert vocabulary.d2t.tolist() == [2, 2]
    assert vocabulary.t2d.tolist() == [False, False, True, True, False]
    assert vocabulary.coverage == 0.7


def test_a_vocabulary_larger_than_the_targets_is_refused() -> None:
    assert len(choose(torch.ones(7), 7).ids_D) == 7
    with pytest.raises(ValueError, match=r"draft vocabulary of 8 ids is larger than the target's 7"):
        choose(torch.ones(7), 8)


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=20), max_size=6))
def test_only_what_the_assistant_wrote_is_counted(documents: list[list[tuple[int, bool]]]) -> None:
    samples = [Sample(str(i), torch.tensor([t for t, _ in d]), torch.tensor([m for _, m in d])) for i, d in enumerate(documents)]
    wanted = Counter(t for d in documents for t, m in d if m)
    found = count(samples, 9)
    assert found.tolist() == [wanted[i] for i in range(9)]
