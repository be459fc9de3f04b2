"""Masks of every family and case, checked by eye once and kept as text in `golden/<family>/<case>.txt`.

pytest tests/data/test_golden.py --regenerate-golden     # then read what `git diff` shows before it is committed
"""

from __future__ import annotations

from pathlib import Path

import pytest
from showing import shown
from talk_cases import CASES, conversation
from template_families import FAMILIES, family

from draftsmith.data.config import DataConfig
from draftsmith.data.samples import tokenize
from draftsmith.data.template import ChatTemplate, TemplateError

GOLDEN = Path(__file__).parent / "golden"


SWITCHED = [name for name in FAMILIES if "enable_thinking" in family(name).jinja()]
"""Families whose server takes `enable_thinking`; their thinking is also switched off."""
PLACES = [(name, case) for name in FAMILIES for case in CASES] + [(name, "thinking_off") for name in SWITCHED]


def found(name: str, case: str) -> str:
    """What becomes of a conversation: its samples, or the reason for which it is dropped."""
    off = case == "thinking_off"
    talk = conversation(name, "reasoning" if off else case)
    template = ChatTemplate(family(name).tokenizer, name, variables={"enable_thinking": False} if off else None)
    (made,) = tokenize([talk], template, DataConfig(thinking=False if off else None))
    return f"dropped: {made}\n" if isinstance(made, TemplateError) else shown([tokens.sample(case) for tokens in made], template)


@pytest.mark.parametrize(("name", "case"), PLACES)
def test_the_mask_is_the_one_that_was_checked_by_eye(name: str, case: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / name / f"{case}.txt"
    if request.config.getoption("--regenerate-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found(name, case), encoding="utf-8")
    assert found(name, case) == path.read_text(encoding="utf-8")


def test_no_golden_is_left_over() -> None:
    assert sorted(p.relative_to(GOLDEN).with_suffix("").as_posix() for p in GOLDEN.rglob("*.txt")) == sorted(f"{name}/{case}" for name, case in PLACES)
