"""`draftsmith prepare --strict` and rows that are wrong, or only look so: status, file and line, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import command

GOOD = json.dumps({"prompt": "question", "completion": "answer"})
USER = {"role": "user", "content": "q"}


def talk(*messages: dict[str, Any]) -> str:
    return json.dumps({"messages": [USER, *messages]})


def calls(arguments: Any) -> str:
    return talk({"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]})


def run(folder: Path, target: Path, line: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[int, str, Path]:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(folder / "cache"))
    file = folder / "rows.jsonl"
    file.write_text(f"{GOOD}\n{line}\n")
    code, text = command(["prepare", file, "--target", target, "--strict", *more], folder / "output.txt")
    assert "Traceback" not in text, text
    return code, text, file


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'prompt': 1}", "that are no valid JSON"),
        (talk({"role": "asistant", "content": "a"}), "did you mean 'assistant'?"),
        (talk({"role": "assistant", "content": ""}), "with answers of fewer than two tokens"),
        (talk({"role": "assistant", "content": None}), "with null content"),
        (json.dumps({"messages": None}), "of no known shape"),
        (calls("[1]"), "the arguments of a tool call must be a JSON object"),
        (calls([1]), "the arguments of a tool call must be a JSON object"),
        (calls('{"a": 1}'), "with tool calls, which the chat template leaves out"),
        (talk({"role": "assistant", "content": "\ud800"}), "with a lone surrogate"),
    ],
)
def test_a_bad_row_ends_it_with_file_and_line(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str) -> None:
    code, text, file = run(tmp_path, tiny_target, line, monkeypatch)
    assert code == 2, text
    assert f"first: {file}:2" in text
    assert said in text
    assert "repair or remove them, or leave out --strict to drop and count them" in text


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
        talk({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}),
        talk({"role": "assistant", "content": "a\u0000\u0007\u001b[31m\u007f"}),
        talk({"role": "assistant", "content": "a", "tool_calls": None, "name": None, "reasoning_content": None}),
    ],
    ids=["another shape", "two answers in a row", "control characters", "null fields"],
)
def test_a_row_that_can_be_used_is_kept(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    code, text, _ = run(tmp_path, tiny_target, line, monkeypatch)
    assert code == 0, text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["data.max_length=5"], "with no answer within the maximum length (first: {file}:1"),
        (["data.max_length=5", "data.too_long=drop"], "longer than the maximum length (first: {file}:1"),
        (["data.template={folder}/raises.jinja"], "the chat template refuses it: "),
    ],
)
def test_rows_that_do_not_fit_the_settings(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], said: str) -> None:
    (tmp_path / "raises.jinja").write_text("{{ raise_exception('not today') }}")
    code, text, file = run(tmp_path, tiny_target, GOOD, monkeypatch, *(option.format(folder=tmp_path) for option in more))
    assert code == 2, text
    assert said.format(file=file) in text


def test_an_answer_of_ten_megabytes_is_cut_and_counted(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = run(tmp_path, tiny_target, talk({"role": "assistant", "content": "ten bytes " * 1_000_000}), monkeypatch)
    assert code == 0, text
    whole = len("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n") - 2 * len("<|im_start|>") - len("<|im_end|>") + 3 + 10_000_000 + 1
    assert f"{whole - 2048:,}" in next(line for line in text.splitlines() if "cut at the maximum length" in line)


def test_a_question_of_ten_megabytes_leaves_no_room_for_an_answer(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"prompt": "ten bytes " * 1_000_000, "completion": "yes"})
    code, text, file = run(tmp_path, tiny_target, line, monkeypatch)
    assert code == 2, text
    assert f"1 conversations with no answer within the maximum length (first: {file}:2" in text
    assert len(text) < 2_000
