"""Every class of transformers' auto mappings, tiny and random, through every layout: `Target` and `TargetModel` against the model that was saved.

By default each class runs once, in a layout and under a tie flag that its name chooses; `pytest -m matrix` runs all of them.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import page
import pytest
import zoo
from matrix import examine

PAGE = Path(__file__).parents[2] / "docs" / "targets.md"
CASES = zoo.cases()


@pytest.fixture(scope="module")
def lines() -> frozenset[str]:
    return frozenset(PAGE.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("name", CASES)
def test_every_class_is_right_or_refused_as_the_page_says(name: str, lines: frozenset[str], tmp_path: Path) -> None:
    case = CASES[name]
    row = page.row(case)
    assert row.line in lines, "run: python tests/target/page.py"
    if row.parts is None:
        return
    choice = zlib.crc32(name.encode())
    layout, tied = zoo.LAYOUTS[choice % 4], bool(choice // 4 % 2)
    assert examine(case, row.parts, tied, [layout], tmp_path) or examine(case, row.parts, not tied, [layout], tmp_path)


def test_the_page_is_about_the_classes_that_there_are(lines: frozenset[str]) -> None:
    assert {line.split("|")[1].strip() for line in lines if line.startswith("| ")} - {"class"} == set(CASES)


@pytest.mark.matrix
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_layout(name: str, tied: bool, tmp_path: Path) -> None:
    row = page.row(CASES[name])
    if row.parts is not None:
        examine(CASES[name], row.parts, tied, zoo.LAYOUTS, tmp_path)
