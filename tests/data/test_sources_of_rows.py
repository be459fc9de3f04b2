"""Rows out of every kind of file: the same rows, numbered, streamed; sources that are missing, damaged or empty say so."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from draftsmith.data import bundled, sources
from draftsmith.data.config import SourceConfig
from draftsmith.data.sources import chunks, open_source

ROWS = [{"prompt": f"q{i} \u00e9\u4e2d", "completion": f"a{i}\n[,]"} for i in range(7)]


def write(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows{suffix}"
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
    if ".json" in suffix and ".jsonl" not in suffix:
        text = json.dumps(rows, ensure_ascii=False, indent=1)
    if suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["prompt", "completion"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    return path


def read(path: Path | str, **settings: Any) -> list[Any]:
    found = open_source(SourceConfig(path=str(path), **settings), "train").rows()
    return [json.loads(raw) if isinstance(raw, bytes) else raw for _, raw in found]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".csv"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    assert read(write(tmp_path, suffix, ROWS)) == ROWS


def test_lines_under_the_name_json_are_read_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("\n\n" + "".join(json.dumps(r) + "\n" for r in ROWS))
    assert read(path) == ROWS


def test_a_folder_is_read_through_datasets(tmp_path: Path) -> None:
    write(tmp_path, ".jsonl", ROWS)
    assert read(tmp_path) == ROWS
    with pytest.raises(ValueError, match=r"cannot read data set .*nosuch"):
        read(tmp_path, split="nosuch")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1 << 20])
def test_a_json_list_is_read_in_parts_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(sources, "READ_CHARACTERS", size)
    assert read(write(tmp_path, ".json", ROWS)) == ROWS


@settings(deadline=None, max_examples=30)
@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=6) | st.integers() | st.none() | st.lists(st.text(max_size=2), max_size=2), max_size=3)))
def test_any_json_list(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(rows))
    assert read(path) == rows


@pytest.mark.parametrize(
    ("text", "said"), [('[{"a": 1}, {"b"', "object 2 of the list"), ('[{"a": 1} {"b": 2}', "does not end"), ("[{]", "object 1 of the list")]
)
def test_a_broken_json_list_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read(path)


def test_lines_are_numbered_as_an_editor_does(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n  \n{"a": 2}\nbroken\n')
    assert [n for n, _ in open_source(SourceConfig(path=str(path)), "train").rows()] == [1, 4, 5]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl.gz"])
def test_a_damaged_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, suffix, ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=f"{path.name} cannot be read"):
        read(path)


@pytest.mark.parametrize(
    ("path", "said"), [("ultrachatt", "did you mean 'ultrachat'"), ("none.jsonl", "no conversations at"), ("bundeld", "did you mean 'bundled'")]
)
def test_a_source_that_is_not_there_is_named(path: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        open_source(SourceConfig(path=path), "train")


def test_an_unknown_kind_of_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.xlsx"
    path.write_text("x")
    with pytest.raises(ValueError, match="unknown kind of file"):
        read(path)


def test_names_of_public_sets_and_presets_over_local_files(tmp_path: Path) -> None:
    found = open_source(SourceConfig(path="gsm8k"), "train")
    assert (found.hub, found.subsets, found.split, found.convert is not None) == ("openai/gsm8k", ("main",), "train", True)
    local = open_source(SourceConfig(path=str(write(tmp_path, ".jsonl", ROWS)), preset="gsm8k"), "train")
    assert local.convert is found.convert
    assert local.file is not None
    with pytest.raises(ValueError, match="unknown preset 'gsm9k'; did you mean 'gsm8k'"):
        open_source(SourceConfig(path="x.jsonl", preset="gsm9k"), "train")
    hub = open_source(SourceConfig(path="org/some-set", subset="s", split="test"), "train")
    assert (hub.hub, hub.subsets, hub.split) == ("org/some-set", ("s",), "test")


def test_bundled_has_a_file_for_each_split() -> None:
    found = [open_source(SourceConfig(path="bundled"), split).file for split in ("train", "held-out")]
    assert found == [bundled.FOLDER / "train.jsonl.gz", bundled.FOLDER / "held-out.jsonl.gz"]


@pytest.mark.parametrize(("weight", "passes"), [(0.3, 1), (1, 1), (2, 2), (2.5, 3)])
def test_chunks_are_numbered_and_repeat_by_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight: float, passes: int) -> None:
    monkeypatch.setattr(sources, "CHUNK_ROWS", 3)
    source = open_source(SourceConfig(path=str(write(tmp_path, ".jsonl", ROWS)), weight=float(weight)), "train")
    found = list(chunks([source, source]))
    assert [c.number for c in found] == list(range(len(found)))
    assert [(c.source, c.repeat, [n for n, _ in c.rows]) for c in found] == [
        (s, r, part) for s in (0, 1) for r in range(passes) for part in ([1, 2, 3], [4, 5, 6], [7])
    ]


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n")
    with pytest.raises(ValueError, match="holds no conversation: it is empty"):
        list(chunks([open_source(SourceConfig(path=str(path)), "train")]))
