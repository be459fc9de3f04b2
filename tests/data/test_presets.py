"""Rows as the public sets hold them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.data.conversations import Conversation, Message, RowError
from draftsmith.data.presets import PRESETS

SHAREGPT = {"id": "QWJhYvA_0", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
ROWS: dict[str, dict[str, Any]] = {
    "ultrachat": {"prompt": "q", "prompt_id": "p1", "messages": [{"content": "q", "role": "user"}, {"content": "a", "role": "assistant"}]},
    "sharegpt": SHAREGPT,
    "perfectblend": {"conversations": SHAREGPT["conversations"], "source": "meta-math/MetaMathQA"},
    "perfectblend-llama-3.1-8b": {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    "perfectblend-llama-3.3-70b": {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    "magpie": {"uuid": "u1", "instruction": "q", "response": "a", "conversations": SHAREGPT["conversations"], "task_category": "Math", "difficulty": "easy"},
    "magpie-qwen2.5": {"uuid": "u1", "instruction": "q", "response": "a", "conversations": SHAREGPT["conversations"]},
    "opencodeinstruct": {
        "id": "c1", "input": "q", "output": "a", "domain": "generic", "generation_algorithm": "self-instruct", "llm_judgement": "{}", "unit_tests": "[]",
        "tests_execution_status": "[]", "average_test_score": "1",
    },
    "codealpaca": {"instruction": "q", "input": "", "output": "a"},
    "magicoder-evol": {"instruction": "q", "response": "a"},
    "opencoder": {"instruction": "q", "output": "a", "tag": "x"},
    "gsm8k": {"question": "q", "answer": "a"},
    "math": {"problem": "q", "level": "Level 5", "type": "Algebra", "solution": "a"},
    "math-qa": {"Problem": "p", "Rationale": "a", "options": "o", "correct": "c", "annotated_formula": "", "linear_formula": "", "category": "general"},
    "camel-physics": {"role_1": "Physicist_RoleType.ASSISTANT", "topic;": "Optics", "sub_topic": "Lenses", "message_1": "q", "message_2": "a"},
    "nemotron-post-training": {
        "uuid": "n1", "license": "cc-by-4.0", "generator": "Qwen", "version": "1", "category": "chat", "reasoning": "off",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    },
    "nemotron-post-training-v1": {
        "uuid": "n1", "category": "tool", "reasoning": "off", "metadata": json.dumps({"tools": [TOOL]}),
        "messages": [{"role": "user", "content": "q", "tool_calls": []}, {"role": "assistant", "content": "a", "tool_calls": []}],
    },
    "llama-nemotron": {"input": [{"role": "user", "content": "q"}], "output": "a", "category": "chat", "reasoning": "off", "system_prompt": "s"},
    "hermes-function-calling": {"id": "h1", "conversations": [{"from": "system", "value": "s"}, *SHAREGPT["conversations"]], "tools": '[{"type": "function"}]'},
}  # fmt: skip


def test_every_set_has_a_row_here() -> None:
    assert set(ROWS) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_in_its_real_schema(name: str) -> None:
    found, item = PRESETS[name].convert(ROWS[name], "line-1")
    assert isinstance(item, Conversation)
    asked = "p\no" if name == "math-qa" else "q"
    system = (Message("system", "s"),) if name in ("nemotron-post-training", "llama-nemotron", "hermes-function-calling") else ()
    assert item.messages == (*system, Message("user", asked), Message("assistant", "a"))
    assert item.tools == {"nemotron-post-training-v1": (TOOL,), "hermes-function-calling": ({"type": "function"},)}.get(name, ())
    assert found == ROWS[name].get("id", ROWS[name].get("uuid", ROWS[name].get("prompt_id", "line-1")))


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_of_another_set_is_refused(name: str) -> None:
    with pytest.raises(RowError):
        PRESETS[name].convert({"unrelated": "x"}, "line-1")


@pytest.mark.parametrize("metadata", ["", None, "{}", json.dumps({"tools": None})])
def test_nemotron_rows_without_tools(metadata: str | None) -> None:
    _, item = PRESETS["nemotron-post-training-v1"].convert({**ROWS["nemotron-post-training-v1"], "metadata": metadata}, "line-1")
    assert isinstance(item, Conversation)
    assert item.tools == ()


def test_nemotron_tools_that_cannot_be_read_are_not_left_out() -> None:
    with pytest.raises(RowError, match="`metadata` must be a JSON object"):
        PRESETS["nemotron-post-training-v1"].convert({**ROWS["nemotron-post-training-v1"], "metadata": "{tools"}, "line-1")
