"""Masks of every family and case, checked by eye once and kept as text in `golden/<family>/<case>.txt`.

pytest tests/data/test_golden.py --regenerate-golden     # then read what `git diff` shows before it is committed
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import CASES, conversation
from families import FAMILIES, family
from showing import shown

from draftsmith.data.samples import samples_of
from draftsmith.data.template import TemplateError

GOLDEN = Path(__file__).parent / "golden"


def found(name: str, case: str) -> str:
    """What becomes of a conversation: its samples, or the reason for which it is dropped."""
    try:
        return shown(samples_of(conversation(name, case), family(name)), family(name))
    except TemplateError as error:
        return f"dropped: {error}\n"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_mask_is_the_one_that_was_checked_by_eye(name: str, case: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / name / f"{case}.txt"
    if request.config.getoption("--regenerate-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found(name, case), encoding="utf-8")
    assert found(name, case) == path.read_text(encoding="utf-8")


def test_no_golden_is_left_over() -> None:
    assert sorted(p.relative_to(GOLDEN).with_suffix("").as_posix() for p in GOLDEN.rglob("*.txt")) == sorted(f"{n}/{c}" for n in FAMILIES for c in CASES)
