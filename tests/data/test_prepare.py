"""Rows to samples: everything is counted, settings choose as they say, and the cache gives the same samples however it was filled."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data import cache, sources
from draftsmith.data.cache import ArrowSamples, fingerprint
from draftsmith.data.config import DataConfig
from draftsmith.data.prepare import ASKED_BY_BOTH, HELD_OUT, NOT_DRAWN, REPEATED, Figures, Job, open_job, place
from draftsmith.data.template import ChatTemplate

BAD = {
    "{": "that are no valid JSON",
    "[1]": "of no known shape",
    '{"messages": [{"role": "human", "content": "x"}]}': "with the unknown role 'human'",
    '{"messages": [{"role": "user", "content": "x"}]}': "without an assistant turn",
    '{"prompt": "x", "completion": ""}': "with answers of fewer than two tokens",
    '{"prompt": "\\ud800", "completion": "yes"}': "with a lone surrogate",
    '{"prompt": "' + "x" * 90 + '", "completion": "late"}': "with no answer within the maximum length",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pair(n: int | str) -> str:
    return json.dumps({"prompt": f"question {n}", "completion": f"answer {n}"})


def job(template: ChatTemplate, path: Path, lines: Sequence[str], **changes: Any) -> Job:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return open_job(DataConfig.model_validate({"train": str(path), **changes}), template, "train")


def rows(found: ArrowSamples) -> list[tuple[str, list[int], list[bool]]]:
    return [(s.id, s.input_ids.tolist(), s.loss_mask.tolist()) for s in found]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["good", *BAD]), min_size=1, max_size=30))
def test_read_is_kept_plus_dropped_with_first_places(template: ChatTemplate, tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    made = job(template, path, [pair(n) if line == "good" else line for n, line in enumerate(lines)], max_length=80)
    (chunk,) = sources.chunks(made.sources)
    done, figures = made.run(chunk)
    counts = figures.counts
    assert counts.read == len(lines) == counts.kept + counts.dropped
    assert [d.entry.name for d in done] == [f"line-{n}" for n, line in enumerate(lines, 1) if line == "good"]
    expected = {BAD[line]: (lines.count(line), lines.index(line) + 1) for line in set(lines) - {"good"}}
    found = counts.reasons
    assert {reason: number for reason, (number, _) in found.items()} == {reason: number for reason, (number, _) in expected.items()}
    assert all(found[reason][1].startswith(f"{path}:{line}") for reason, (_, line) in expected.items())
    assert Figures.of_row(json.loads(json.dumps(figures.to_row()))) == figures


def test_mixed_shapes_are_counted_apart(template: ChatTemplate, tmp_path: Path) -> None:
    lines = [pair(1), '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "yes"}]}', pair(2)]
    _, figures = cache.prepare(job(template, tmp_path / "rows.jsonl", lines))
    assert sorted(figures.shapes.values()) == [1, 2]
    assert {label.split(": ")[1].split(" ")[0] for label in figures.shapes} == {"prompt", "sharegpt"}


def test_an_override_of_the_shape_is_obeyed(template: ChatTemplate, tmp_path: Path) -> None:
    line = json.dumps({"text": "<|im_start|>assistant\nfrom text<|im_end|>", "prompt": "q", "completion": "from pair"})
    for shape, said in (("text", "from text<|im_end|>"), ("prompt", "from pair<|im_end|>")):
        (sample,), _ = cache.prepare(job(template, tmp_path / "rows.jsonl", [line], train=[{"path": str(tmp_path / "rows.jsonl"), "shape": shape}]))
        assert template.tokenizer.decode(sample.input_ids[sample.loss_mask].tolist()) == said


def test_strict_stops_at_the_first_bad_row_and_not_at_what_was_asked_for(template: ChatTemplate, tmp_path: Path) -> None:
    made = job(template, tmp_path / "rows.jsonl", [pair(1), pair(2), pair(1), "{"])
    with pytest.raises(ValueError, match=r"1 conversations that are no valid JSON \(first: .*rows.jsonl:4"):
        cache.prepare(made, strict=True)
    _, figures = cache.prepare(made)
    assert (figures.counts.kept, figures.counts.dropped) == (3, 1)
    with pytest.raises(ValueError, match="no valid JSON"):
        cache.prepare(made, strict=True)
    found, figures = cache.prepare(job(template, tmp_path / "others.jsonl", [pair(1), pair(2), pair(1)], deduplicate=True), strict=True)
    assert [s.id for s in found] == ["line-1", "line-2"]
    assert figures.counts.reasons == {REPEATED: (1, f"{tmp_path / 'others.jsonl'}:3")}
    assert figures.counts.read == figures.counts.kept + figures.counts.dropped


def test_nothing_left_is_an_error_with_reasons(template: ChatTemplate, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing left to train on: read 2 = kept 0 \+ dropped 2: 2 with answers of fewer than two tokens"):
        cache.prepare(job(template, tmp_path / "rows.jsonl", ['{"prompt": "x", "completion": ""}'] * 2))
    with pytest.raises(ValueError, match="nothing left"):
        cache.prepare(job(template, tmp_path / "zero.jsonl", ['{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}']))


def test_weights_draw_by_content_and_repeat(template: ChatTemplate, tmp_path: Path) -> None:
    lines = [pair(n) for n in range(200)]

    def drawn(weight: float, given: Sequence[str]) -> tuple[list[str], Figures]:
        path = tmp_path / "rows.jsonl"
        found, figures = cache.prepare(job(template, path, given, train=[{"path": str(path), "weight": weight}]))
        return [template.text(s.input_ids.tolist()) for s in found], figures

    quarter, figures = drawn(0.25, lines)
    assert 25 <= len(quarter) <= 75
    assert figures.counts.reasons[NOT_DRAWN][0] == 200 - len(quarter)
    again, _ = drawn(0.25, lines[::-1])
    assert again == quarter[::-1]
    half, _ = drawn(0.5, lines)
    assert set(quarter) < set(half)
    twice, _ = drawn(2.5, lines)
    assert twice == [*drawn(1.0, lines)[0] * 2, *half]


def test_a_share_is_held_out_and_the_same_question_is_never_on_both_sides(template: ChatTemplate, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"question {n % 50}", "completion": f"answer {n}"}) for n in range(100)]
    made = job(template, tmp_path / "rows.jsonl", lines, held_out_share=0.3)
    train, figures = cache.prepare(made)
    held_out, others = cache.prepare(open_job(made.config, template, "held-out"))
    assert not train.asked & held_out.asked
    assert len(train) + len(held_out) == 100
    assert 10 <= len(held_out) <= 50
    assert figures.counts.reasons[HELD_OUT][0] == len(held_out)
    assert others.counts.kept == len(held_out)


def test_what_a_held_out_file_asks_is_not_trained_on(template: ChatTemplate, tmp_path: Path) -> None:
    held_out, _ = cache.prepare(job(template, tmp_path / "held.jsonl", [json.dumps({"prompt": "question 2", "completion": "other"})]))
    made = job(template, tmp_path / "rows.jsonl", [pair(n) for n in range(4)])
    found, figures = cache.prepare(open_job(made.config, template, "train", held_out.asked))
    assert [s.id for s in found] == ["line-1", "line-2", "line-4"]
    assert figures.counts.reasons == {ASKED_BY_BOTH: (1, f"{tmp_path / 'rows.jsonl'}:3")}


@pytest.mark.parametrize(
    ("settings", "said", "cut"),
    [
        ({}, ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"], 0),
        ({"turns": "last"}, ["three<|im_end|>"], 0),
        ({"max_length": 72, "too_long": "token"}, ["one<|im_end|>", "two<|im_end|>", "th"], 4),
        ({"max_length": 72, "too_long": "turn"}, ["one<|im_end|>", "two<|im_end|>"], 27),
        ({"max_length": 23, "too_long": "turn"}, None, 0),
        ({"max_length": 75, "too_long": "drop"}, None, 0),
        ({"min_supervised": 14}, ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"], 0),
        ({"min_supervised": 15}, None, 0),
    ],
)
def test_settings_choose_turns_and_lengths(template: ChatTemplate, tmp_path: Path, settings: dict[str, Any], said: list[str] | None, cut: int) -> None:
    messages = [{"role": r, "content": t} for pair in (("u", "one"), ("u", "two"), ("u", "three")) for r, t in zip(("user", "assistant"), pair, strict=True)]
    made = job(template, tmp_path / "rows.jsonl", [json.dumps({"messages": messages})], **settings)
    if said is None:
        with pytest.raises(ValueError, match="nothing left"):
            cache.prepare(made)
        return
    found, _ = cache.prepare(made)
    tokens = found.tokens(0)
    assert [template.tokenizer.decode(tokens.ids[a:b].tolist()) for a, b in tokens.spans] == said
    whole = len(template.ids(made_messages(messages), prompt=False)) - 1
    assert found.cut_tokens == whole - len(tokens) == cut
    if settings.get("too_long") == "turn":
        assert tokens.spans[-1][1] == len(tokens)


def made_messages(messages: list[dict[str, str]]) -> list[Any]:
    from draftsmith.data.conversations import Message

    return [Message(m["role"], m["content"]) for m in messages]


def test_shards_processes_and_restarts_give_the_same_samples(template: ChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    lines = [pair(n) if n % 7 else "{" for n in range(40)]
    whole, figures = cache.prepare(job(template, tmp_path / "rows.jsonl", lines))
    expected = rows(whole)
    shutil.rmtree(own_cache)
    monkeypatch.setattr(sources, "CHUNK_ROWS", 6)
    parallel, other = cache.prepare(job(template, tmp_path / "rows.jsonl", lines, processes=2))
    assert rows(parallel) == expected
    assert other == figures
    (folder,) = (own_cache / "samples").iterdir()
    kept = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.arrow")}
    assert len(kept) == 7
    for name in ("done.json", "00003.json", "00005.json"):  # as if killed: a pair is whole only with its figures
        (folder / name).unlink()
    again, third = cache.prepare(job(template, tmp_path / "rows.jsonl", lines))
    assert (rows(again), third) == (expected, figures)
    made = {p.name for p in folder.glob("*.arrow") if p.stat().st_mtime_ns != kept[p.name]}
    assert made == {"00003.arrow", "00005.arrow"}


def test_rows_of_public_sets_reach_other_processes(template: ChatTemplate, tmp_path: Path) -> None:
    path = tmp_path / "math.jsonl"
    line = json.dumps({"problem": "q", "solution": "a b"})
    found, figures = cache.prepare(job(template, path, [line] * 3, train=[{"path": str(path), "preset": "math"}], processes=2))
    assert (len(found), figures.counts.kept) == (3, 3)


def test_processes_that_tokenize_import_neither_torch_nor_pandas(template: ChatTemplate, tmp_path: Path) -> None:
    """They would start in three times the time, each of them."""
    made = job(template, tmp_path / "rows.jsonl", [pair(1)])
    (chunk,) = sources.chunks(made.sources)
    (tmp_path / "work").write_bytes(pickle.dumps((cache._chunk_done, (made, tmp_path, chunk))))
    code = "import pickle, sys; f, a = pickle.load(open(sys.argv[1], 'rb')); print(f(*a).counts.kept, {'torch', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "work"], capture_output=True, text=True, check=True)
    assert done.stdout == "1 set()\n"


def test_the_fingerprint_names_everything_that_matters(template: ChatTemplate, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    base = job(template, path, [pair(1)])
    same = [{"processes": 3}, {"limit": 1}, {"deduplicate": True}]
    other: list[dict[str, Any]] = [{"max_length": 5}, {"turns": "last"}, {"too_long": "drop"}, {"min_supervised": 2}, {"thinking": False}]
    assert {fingerprint(job(template, path, [pair(1)], **s)) for s in same} == {fingerprint(base)}
    prints = [fingerprint(base), *(fingerprint(job(template, path, [pair(1)], **s)) for s in other), fingerprint(job(template, path, [pair(2)]))]
    changed = ChatTemplate(template.tokenizer, "x", template.jinja() + " ")
    varied = ChatTemplate(template.tokenizer, "x", None, {"a": 1})
    prints += [fingerprint(job(t, path, [pair(1)])) for t in (changed, varied)]
    assert len(set(prints)) == len(prints)


def test_spread_takes_whole_conversations(template: ChatTemplate, tmp_path: Path) -> None:
    found, _ = cache.prepare(job(template, tmp_path / "rows.jsonl", [pair(n) for n in range(10)]))
    assert [s.id for s in found.spread(2)] == ["line-3", "line-8"]
    assert found.spread(None) is found
    assert [s.id for s in found.spread(3)[1:]] == ["line-6", "line-9"]
    assert found.lengths.tolist() == [len(s) for s in found]
    assert [ids.tolist() for ids in found.supervised_ids()] == [s.input_ids[s.loss_mask].tolist() for s in found]


@settings(deadline=None)
@given(st.binary(min_size=16, max_size=16))
def test_places_are_stable_and_independent(content: bytes) -> None:
    assert 0 <= place(content, "weight") < 1
    assert place(content, "weight") == place(content, "weight") != place(content, "held out")


def test_places_are_even() -> None:
    found = [place(n.to_bytes(16, "big"), "weight") for n in range(2000)]
    assert np.abs(np.histogram(found, bins=4, range=(0, 1))[0] - 500).max() < 100
