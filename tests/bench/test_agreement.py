"""Three acceptance lengths side by side: what is compared, what is said instead, and what is a finding."""

from __future__ import annotations

import pytest

from draftsmith.bench.agreement import CHECKS, DECODED, SERVED, SIMULATED, Figure, agreement, of_report

RATES = (0.6, 0.3, 0.1)
REPORT = {
    "acceptance_length": 2.0, "simulated_acceptance_length": 2.02, "draft_tokens": 3, "prompts": 40, "temperature": 0.0,
    "acceptance": {"position_rates": list(RATES)}, "by_kind": {"math": {"prompts": 30}, "code": {"prompts": 10}},
}  # fmt: skip


def served(length: float = 2.0, rates: tuple[float, ...] | None = RATES, width: int | None = 3, **changes: object) -> Figure:
    rest = {"prompts": 40, "temperature": 0.0, "kinds": {"math": 30, "code": 10}} | changes
    return Figure(SERVED, length, rates, width, **rest)  # type: ignore[arg-type]


def three(figure: Figure) -> dict[str, object]:
    return agreement([*of_report(REPORT), figure])


def test_figures_of_a_report() -> None:
    simulated, decoded = of_report(REPORT)
    assert (simulated.name, simulated.length, decoded.name, decoded.length) == (SIMULATED, 2.02, DECODED, 2.0)
    assert (decoded.position_rates, decoded.draft_tokens, decoded.kinds) == (RATES, 3, {"math": 30, "code": 10})
    assert [f.name for f in of_report({k: v for k, v in REPORT.items() if k != "simulated_acceptance_length"})] == [DECODED]


@pytest.mark.parametrize("missing", ["acceptance_length", "acceptance", "draft_tokens"])
def test_what_is_no_report_is_refused(missing: str) -> None:
    with pytest.raises(ValueError, match=f"no report of `draftsmith eval`: it has no '{missing}'"):
        of_report({k: v for k, v in REPORT.items() if k != missing})


UNTOLD = f"{SIMULATED} and {DECODED}: the number of drafted tokens is known for {DECODED} (3) and not for {SIMULATED}"
"""Said of every report: training simulates another number of tokens perhaps."""


def test_three_that_agree() -> None:
    found = three(served(1.95))
    assert (found["differences"], found["findings"], found["check_first"]) == ([UNTOLD], [], [])
    assert [(g["lengths"], g["gap"]) for g in found["gaps"]] == [([2.02, 2.0], -0.0099), ([2.0, 1.95], -0.025)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", [1.8, 2.2])
def test_a_gap_above_five_percent_is_a_finding_in_either_direction(length: float) -> None:
    found = three(served(length, None))
    assert found["findings"] == [f"{SERVED} {length:.2f}, {DECODED} 2.00: {length / 2 - 1:+.1%}"]
    assert found["check_first"] == list(CHECKS)
    words = ["layer ids", "log says", "vocabulary map", "unnormed", "template", "temperature", "draft length", "dtype"]
    assert all(word in check for word, check in zip(words, CHECKS, strict=True))


def test_a_finding_says_where_the_rates_part() -> None:
    (line,) = three(served(1.7, (0.59, 0.1, 0.01)))["findings"]  # type: ignore[misc]
    assert line.endswith("; they part at position 2: 30% and 10%")


def test_other_draft_lengths_are_said_and_compared_over_what_both_have() -> None:
    """Five drafted in the engine, three in the report: 1 + 0.6 + 0.3 + 0.1 on both sides, although the engine's own length is larger."""
    found = three(served(2.3, (*RATES, 0.2, 0.1), 5))
    assert found["differences"] == [UNTOLD, f"{DECODED} and {SERVED}: 3 and 5 drafted tokens; compared over the first 3"]
    assert found["gaps"][-1]["lengths"] == [2.0, 2.0]  # type: ignore[index]
    assert found["findings"] == []


def test_other_draft_lengths_without_rates_are_not_compared() -> None:
    found = three(served(2.9, None, 5))
    assert len(found["gaps"]) == 1  # type: ignore[arg-type]
    assert any("are not compared" in line for line in found["differences"])  # type: ignore[union-attr]
    assert found["findings"] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompts": 12}, f"{DECODED} and {SERVED}: 40 and 12 prompts, so not the same ones"),
        ({"kinds": {"math": 40}}, f"{DECODED} and {SERVED}: 40 prompts each, but not the same ones: 10 code, 30 math and 40 math"),
        ({"temperature": 0.7}, f"{DECODED} and {SERVED}: temperature 0 and 0.7"),
    ],
)
def test_what_makes_figures_less_comparable_is_said(change: dict[str, object], said: str) -> None:
    assert three(served(**change))["differences"] == [UNTOLD, said]  # type: ignore[arg-type]


def test_an_engine_that_does_not_tell_its_draft_length() -> None:
    found = three(served(2.0, None, None))
    said = f"{DECODED} and {SERVED}: the number of drafted tokens is known for {DECODED} (3) and not for {SERVED}"
    assert found["differences"] == [UNTOLD, said]


def test_a_gap_between_training_and_our_own_evaluator_is_a_finding_too() -> None:
    found = agreement(of_report(REPORT | {"simulated_acceptance_length": 2.4}))
    assert found["findings"] == [f"{DECODED} 2.00, {SIMULATED} 2.40: -16.7%"]
