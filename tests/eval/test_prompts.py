"""Prompt sets: categories by file, every row counted, and nothing left out in silence."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.data.config import DataConfig, SourceConfig
from draftsmith.data.prepare import open_job
from draftsmith.data.template import ChatTemplate
from draftsmith.eval.prompts import NOT_CHOSEN, PromptSet, open_sets, read_all, spread


def write(path: Path, rows: list[Any]) -> SourceConfig:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(path=str(path))


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def test_sets_are_categories_and_their_counts_add_up(tmp_path: Path, template: ChatTemplate) -> None:
    talk = {"messages": [{"role": r, "content": c} for r, c in (("user", "one?"), ("assistant", "yes"), ("user", "two?"), ("assistant", "no"))]}
    code = write(tmp_path / "code.jsonl", [ask("sort this"), talk, ask("x" * 300), {"text": "rendered already"}, "no object", ask("last")])
    math = write(tmp_path / "math.en.jsonl", [ask(f"{n} + {n}?", kind="sums") for n in range(6)])
    other = write(tmp_path / "more" / "code.jsonl", [ask("again")])
    prompts, told = read_all(open_sets([code, math, other], DataConfig(held_out_share=0.5)), template, None, 100)
    assert [p.kind for p in prompts] == ["code"] * 3 + ["math"] * 6 + ["code#2"]
    assert [p.id for p in prompts][:4] == ["code/line-1", "code/line-2", "code/line-6", "math/line-1"]
    assert len({p.id for p in prompts}) == len(prompts)
    text = str(template.tokenizer.decode(list(prompts[1].token_ids)))
    assert text.index("yes") < text.index("two?")
    assert "no<" not in text
    assert text.endswith("<|im_start|>assistant\n")
    assert {name: (c["read"], c["kept"], c["dropped"]) for name, c in told.items()} == {"code": (6, 3, 3), "math": (6, 6, 0), "code#2": (1, 1, 0)}
    reasons = told["code"]["reasons"]
    assert set(reasons) == {"longer than 100 tokens", "that are rendered already: where the target answers is not told", "of no known shape"}
    assert reasons["longer than 100 tokens"] == (1, f"{code.path}:3")


def test_a_limit_is_counted_too_and_spreads(tmp_path: Path, template: ChatTemplate) -> None:
    sets = open_sets([write(tmp_path / "math.jsonl", [ask(f"{n}?") for n in range(10)])], DataConfig())
    prompts, told = read_all(sets, template, 3, 100)
    assert [p.id for p in prompts] == ["math/line-2", "math/line-6", "math/line-9"]
    assert told["math"] | {"reasons": None} == {"read": 10, "kept": 3, "dropped": 7, "reasons": None}
    assert told["math"]["reasons"] == {NOT_CHOSEN: (7, f"{sets[0].job.sources[0].name}:1")}


def test_held_out_conversations_keep_their_kinds(tmp_path: Path, template: ChatTemplate) -> None:
    source = write(tmp_path / "held.jsonl", [ask("a?", kind="letters", id="first"), ask("1?", kind="digits")])
    prompts, told = read_all([PromptSet(open_job(DataConfig(held_out=(source,)), template, "held-out"))], template, None, 100)
    assert [(p.id, p.kind) for p in prompts] == [("first", "letters"), ("line-2", "digits")]
    assert told["held-out"]["kept"] == 2


def test_a_set_with_nothing_to_ask_is_refused_with_its_counts(tmp_path: Path, template: ChatTemplate) -> None:
    sets = open_sets([write(tmp_path / "long.jsonl", [ask("x" * 99)] * 2)], DataConfig())
    with pytest.raises(ValueError, match=r"long has nothing to ask: read 2 = kept 0 \+ dropped 2: 2 longer than 50 tokens \(first: .*long.jsonl:1\)"):
        read_all(sets, template, None, 50)


def test_a_set_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "prompts.jsonl", [ask("a")])
    with pytest.raises(ValueError, match=r"did you mean .*prompts\.jsonl"):
        open_sets([SourceConfig(path=str(tmp_path / "promts.jsonl"))], DataConfig())


def test_spread_by_hand() -> None:
    assert spread("abcdefghij", 3) == ["b", "f", "i"]
    assert spread("abc", 1) == ["b"]
    assert spread("abc", None) == spread("abc", 3) == spread("abc", 9) == ["a", "b", "c"]


@given(st.integers(1, 60), st.integers(1, 60))
def test_spread_keeps_order_and_distances(size: int, count: int) -> None:
    found = spread(range(size), count)
    assert len(found) == min(size, count)
    gaps = {b - a for a, b in itertools.pairwise(found)}
    assert all(g >= 1 for g in gaps)
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
