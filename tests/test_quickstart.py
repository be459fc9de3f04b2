"""The arithmetic that fits a quickstart to its time budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.quickstart import ANSWER_BATCH, OTHER_TARGET_HELD_OUT, OTHER_TARGET_PROMPTS, answerable, fit_capture


@given(st.floats(1, 1e5), st.floats(1e-3, 100))
def test_answers_fit_their_time_or_are_the_fewest_that_training_can_use(budget: float, each: float) -> None:
    counts = answerable(budget, each)
    fewest = {"train": 4 * ANSWER_BATCH, "held-out": 16}
    assert all(fewest[split] <= counts[split] for split in counts)
    assert counts["train"] <= OTHER_TARGET_PROMPTS
    assert counts["held-out"] <= OTHER_TARGET_HELD_OUT
    assert sum(n for split, n in counts.items() if n > fewest[split]) * each <= budget
    assert budget < 700 * each or counts == {"train": OTHER_TARGET_PROMPTS, "held-out": OTHER_TARGET_HELD_OUT}


def test_a_budget_that_is_used_up_says_what_is_needed() -> None:
    with pytest.raises(ValueError, match=r"^0 s are left of the budget, .* alone take \d+ s\. Give more --minutes; recorded answers are kept"):
        fit_capture(rate=1000, prompt=0.5, budget=-312, tokens=10_000, samples=100, held_out_tokens=5000, prompts=100)
