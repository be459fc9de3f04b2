"""Arguments of tool calls, given as text or as an object, come out as the template wants them: strictly, and under a tokenizer without offsets too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from templates import OBJECT_ARGUMENTS, TEXT_ARGUMENTS, changed
from tiny import CHATML
from transformers import ByT5Tokenizer

from draftsmith.data import cache
from draftsmith.data.config import DataConfig
from draftsmith.data.prepare import open_job
from draftsmith.data.template import ChatTemplate


@pytest.fixture
def slow() -> ChatTemplate:
    """A tokenizer in Python: bytes, and the ChatML marks."""
    tokenizer = ByT5Tokenizer(extra_ids=0, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = CHATML
    assert not tokenizer.is_fast
    return ChatTemplate(tokenizer, "slow")


@pytest.mark.parametrize(("jinja", "written"), [(TEXT_ARGUMENTS, '<call>f {"a": 1}'), (OBJECT_ARGUMENTS, "<call>f a=1")], ids=["wants text", "wants object"])
@pytest.mark.parametrize("given", ['{"a": 1}', {"a": 1}], ids=["text", "object"])
@pytest.mark.parametrize("kind", ["template", "slow"])
def test_both_ways_are_written_as_the_template_wants(
    tmp_path: Path, kind: str, given: Any, jinja: str, written: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    own = changed(request.getfixturevalue(kind), jinja)
    call = {"type": "function", "function": {"name": "f", "arguments": given}}
    asked, result = {"role": "user", "content": "q"}, {"role": "tool", "content": "2", "tool_call_id": "x"}
    messages = [asked, {"role": "assistant", "content": None, "tool_calls": [{"id": "x", **call}]}, result, {"role": "assistant", "content": "two"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (sample,), figures = cache.prepare(open_job(DataConfig.model_validate({"train": str(tmp_path / "rows.jsonl")}), own, "train"), strict=True)
    assert (figures.counts.read, figures.counts.kept) == (1, 1)
    assert own.tokenizer.decode(sample.input_ids[sample.loss_mask].tolist()) == f"{written}<|im_end|>two<|im_end|>"
