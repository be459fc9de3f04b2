"""`draftsmith prepare` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import command, execute, write_recipe
from pyarrow import parquet

from draftsmith.data.conversations import Conversation, dumps
from draftsmith.prepare import TOGETHER

BAD = '{"messages": [{"role": "asistant", "content": "x"}]}\n'


def printed(folder: Path, *arguments: object, code: int = 0) -> str:
    output = folder / "output.txt"
    output.unlink(missing_ok=True)
    found, text = command(["prepare", *arguments], output)
    assert found == code, text
    assert "Traceback" not in text, text
    return text


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path, talks: list[Conversation]) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text(dumps(talks) + BAD)
    return path


def test_counts_and_samples_are_printed(tmp_path: Path, tiny_target: Path, file: Path) -> None:
    text = printed(tmp_path, file, "--target", tiny_target, "--show", 2, "data.turns=last")
    assert f"train: 13 rows of {file}: messages" in text
    assert f"train: dropped 1 with the unknown role 'asistant' (first: {file}:13: " in text
    assert re.search(rf"talk-0: \d+ tokens, {len('yes 0') + 1} supervised", text)  # the last of its two answers, and the end mark
    assert "answer 7 to that<|im_end|>" in text
    assert "answer 14 to that" not in text


def test_a_recipe_prepares_both_splits(tmp_path: Path, tiny_target: Path, talks: list[Conversation]) -> None:
    text = printed(tmp_path, write_recipe(tmp_path / "r", tiny_target, talks))
    assert text.index("held-out: 4 rows") < text.index("train: 8 rows")


def test_strict_ends_at_the_bad_row(tmp_path: Path, tiny_target: Path, file: Path) -> None:
    text = printed(tmp_path, file, "--target", tiny_target, "--strict", code=2)
    assert f"(first: {file}:13: unknown role 'asistant'; expected system, user, assistant or tool; did you mean 'assistant'?)" in text


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_what_is_written_is_read_again_and_never_replaced_unasked(tmp_path: Path, tiny_target: Path, file: Path, suffix: str) -> None:
    out, again = tmp_path / f"out{suffix}", tmp_path / f"again{suffix}"
    printed(tmp_path, file, "--target", tiny_target, "--out", out)
    text = printed(tmp_path, out, "--target", tiny_target, "--out", again)
    assert "12 rows of" in text
    assert "tokens (`input_ids`" in text
    if suffix == ".jsonl":
        assert out.read_text() == again.read_text()
        row = json.loads(out.read_text().splitlines()[1])
        assert len(row["input_ids"]) == len(row["loss_mask"])
        assert sum(row["loss_mask"]) == len("answer 7 to that") + 1
    before = out.read_bytes()
    assert "exists; name another file, or add --force" in printed(tmp_path, file, "--target", tiny_target, "--out", out, code=2)
    assert out.read_bytes() == before
    printed(tmp_path, file, "--target", tiny_target, "--out", out, "--force")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ultrachatt"], "did you mean 'ultrachat'?"),
        ([], "expected one recipe (.yaml), or files and data sets, got nothing"),
        (["a.yaml", "b.jsonl"], "expected one recipe"),
        (["gsm8k", "data.turn=last"], "unknown key 'data.turn'; did you mean 'turns'?"),
        (["gsm8k", "--out", "x.bin"], "expected a name that ends in .jsonl or .parquet"),
        (["gsm8k", "data.template=none.jinja"], "no chat template at none.jinja"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, tiny_target: Path, arguments: list[str], said: str) -> None:
    assert said in printed(tmp_path, "--target", tiny_target, *arguments, code=2)


def test_more_samples_than_a_row_group_holds(tmp_path: Path, tiny_target: Path) -> None:
    file, out = tmp_path / "pairs.jsonl", tmp_path / "out.parquet"
    file.write_text("".join(json.dumps({"prompt": "q", "completion": f"answer {n}"}) + "\n" for n in range(2 * TOGETHER + 1)))
    printed(tmp_path, file, "--target", tiny_target, "--out", out)
    read = parquet.ParquetFile(out)
    assert [read.metadata.row_group(n).num_rows for n in range(read.num_row_groups)] == [TOGETHER, TOGETHER, 1]
    assert read.read()["id"].to_pylist() == [f"line-{n}" for n in range(1, 2 * TOGETHER + 2)]


def test_public_sets_are_listed(tmp_path: Path) -> None:
    text = printed(tmp_path, "--presets")
    assert "HuggingFaceH4/ultrachat_200k" in text


def test_several_processes_from_a_fresh_interpreter(tmp_path: Path, tiny_target: Path, file: Path) -> None:
    code, text = execute(["prepare", file, "--target", tiny_target, "--processes", 2])
    assert code == 0, text
    assert "13" in text
