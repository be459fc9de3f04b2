from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import command_line as cli
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith import pipeline
from draftsmith.core.config import load
from draftsmith.core.types import FeatureBatch, Features, FeatureSpec, Sample
from draftsmith.data import samples as rendering
from draftsmith.features.live import LiveSource
from draftsmith.features.source import Source
from draftsmith.pipeline import Run
from draftsmith.recipe import Recipe
from draftsmith.target.capture import Capture


class Numbers(Source):
    """Samples that are recognised by their id; the one numbered `bad` cannot be read."""

    def __init__(self, lengths: Sequence[int], bad: int = -1) -> None:
        self._lengths, self._bad = lengths, bad

    @property
    def lengths(self) -> Sequence[int]:
        return self._lengths

    def sample(self, index: int) -> Sample:
        return Sample(str(index), torch.zeros(self._lengths[index], dtype=torch.long), torch.ones(self._lengths[index], dtype=torch.bool))

    def features(self, index: int) -> Features:
        if index == self._bad:
            raise RuntimeError("sample cannot be read")
        n = self._lengths[index]
        return Features(self.sample(index), torch.zeros(n, 2), torch.zeros(n, 1), torch.zeros(n, dtype=torch.int32))


def workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "draftsmith-source"]


def ids(batches: Sequence[FeatureBatch]) -> list[tuple[str, ...]]:
    return [b.ids for b in batches]


def take(source: Source, n: int, *arguments: int) -> list[tuple[str, ...]]:
    stream = source.stream(*arguments)
    found = ids(list(islice(stream, n)))
    stream.close()
    return found


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(LENGTHS, st.integers(0, 99), st.integers(0, 40))
def test_a_stream_from_n_is_the_stream_without_its_first_n(lengths: list[int], seed: int, start: int) -> None:
    """Across the ends of epochs too."""
    source = Numbers(lengths)
    assert take(source, 8, 10, seed, start) == take(source, start + 8, 10, seed)[start:]
    assert workers() == []


@given(LENGTHS, st.integers(0, 99))
def test_every_epoch_of_a_stream_holds_every_sample_once(lengths: list[int], seed: int) -> None:
    source = Numbers(lengths)
    counts = [len(source.epoch(10, seed, e)) for e in range(3)]
    stream = take(source, sum(counts), 10, seed)
    for n in counts:
        assert sorted(int(i) for batch in stream[:n] for i in batch) == list(range(len(lengths)))
        stream = stream[n:]


@given(LENGTHS, st.integers(1, 20))
def test_in_order_is_every_sample_once_in_the_order_of_the_data(lengths: list[int], room: int) -> None:
    assert [int(i) for batch in Numbers(lengths).in_order(room) for i in batch.ids] == list(range(len(lengths)))
    assert workers() == []


def test_streams_differ_by_seed_and_repeat_for_the_same() -> None:
    source = Numbers([3] * 20)
    assert take(source, 30, 9, 1) == take(source, 30, 9, 1)
    assert take(source, 30, 9, 1) != take(source, 30, 9, 2)


def test_an_error_of_the_producing_thread_surfaces_after_the_batches_before_it() -> None:
    stream = Numbers([2] * 10, bad=7).in_order(4)
    seen = []
    with pytest.raises(RuntimeError, match="sample cannot be read"):
        seen.extend(batch.ids for batch in stream)
    assert seen == [("0", "1"), ("2", "3"), ("4", "5")]
    assert workers() == []


def test_an_error_names_the_place_where_it_happened() -> None:
    """The traceback reaches into the source, not only to the queue."""
    with pytest.raises(RuntimeError) as caught:
        list(Numbers([2], bad=0).in_order(4))
    assert "features" in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_a_closed_stream_leaves_no_thread(taken: int) -> None:
    stream = Numbers([2] * 10).stream(4, 0)
    for _ in range(taken):
        next(stream)
    assert len(workers()) == 1
    stream.close()
    assert workers() == []


def test_a_stream_that_was_never_started_has_no_thread() -> None:
    stream = Numbers([2] * 10).stream(4, 0)
    assert workers() == []
    stream.close()
    assert workers() == []


def test_only_one_batch_is_made_ahead() -> None:
    """The consumer holds one, one is ready, and one at most is being put down."""
    made: list[int] = []

    class Counting(Numbers):
        def features(self, index: int) -> Features:
            made.append(index)
            return super().features(index)

    stream = Counting([4] * 100).in_order(4)
    for n in range(1, 30):
        next(stream)
        assert len(made) <= n + 2
    stream.close()
    assert len(made) <= 31


def trained(folder: Path, target: Path, talks: list, kind: str, **train: object) -> tuple[Path, Run]:
    recipe = cli.write_recipe(folder, target, talks, kind, **train)
    run = Run(load(Recipe, recipe))
    if kind == "files":
        pipeline.capture(run)
    pipeline.train(run)
    return folder / "run", run


def test_files_and_live_give_the_same_training_bit_for_bit(tmp_path: Path, tiny_target: Path, talks: list) -> None:
    """Through the trainer: the whole log, held-out lines included, and the last weights and moments."""
    runs = {kind: trained(tmp_path / kind, tiny_target, talks, kind, steps=16, evaluate_every=8)[0] for kind in ("files", "live")}
    assert not (runs["live"] / "features").exists()
    logs = {kind: (run / "metrics.jsonl").read_bytes() for kind, run in runs.items()}
    assert logs["files"] == logs["live"]
    losses = [json.loads(line)["loss"] for line in logs["live"].splitlines()]
    assert len(set(losses)) > 10
    assert cli.contents(runs["files"] / "checkpoints") == cli.contents(runs["live"] / "checkpoints")
    assert workers() == []


def test_files_and_live_hold_the_same_features(tmp_path: Path, tiny_target: Path, talks: list) -> None:
    recipe = cli.write_recipe(tmp_path, tiny_target, talks)
    run = Run(load(Recipe, recipe))
    pipeline.capture(run)
    files, live = pipeline.source(run, "train", None), pipeline.source(run, "train", run.capture())
    assert list(files.lengths) == list(live.lengths)
    for i in range(len(live)):
        a, b = files.features(i), live.features(i)
        assert a.sample.id == b.sample.id
        assert torch.equal(a.sample.input_ids, b.sample.input_ids)
        assert torch.equal(a.sample.loss_mask, b.sample.loss_mask)
        assert a.hidden_TF.dtype == b.hidden_TF.dtype == torch.float32
        assert torch.equal(a.hidden_TF, b.hidden_TF)
        assert torch.equal(a.last_TH, b.last_TH)
        assert torch.equal(a.argmax_T, b.argmax_T)


def test_two_live_streams_do_not_disturb_each_other(target, target_model, template, talks: list) -> None:
    """As when held-out features are captured while the next training batch is: both passes are made to meet inside the target."""
    capture = Capture(target_model, target, FeatureSpec((1, 2), "float32"))
    found = rendering.prepare(talks, template, 200).samples
    source = LiveSource(capture, found)
    wanted = [capture(s).hidden_TF for s in found]
    meeting = threading.Barrier(2)

    def wait(*_: object) -> None:
        with suppress(threading.BrokenBarrierError):  # one at a time is fine too
            meeting.wait(timeout=0.5)

    handle = target_model.blocks[1].register_forward_hook(wait)
    try:
        one, other = source.in_order(1), source.in_order(1)
        got: list[FeatureBatch] = []
        second = threading.Thread(target=lambda: got.extend(islice(other, 3)))
        second.start()
        mine = list(islice(one, 3))
        second.join()
    finally:
        handle.remove()
        meeting.abort()
    assert len(got) == 3
    for i, (a, b) in enumerate(zip(mine, got, strict=True)):
        assert torch.equal(a.hidden_NF, wanted[i])
        assert torch.equal(b.hidden_NF, wanted[i])


def test_a_training_that_fails_leaves_no_thread(tmp_path: Path, tiny_target: Path, talks: list) -> None:
    """While the exception, and with it the trainer's frame, is still held."""
    run = Run(load(Recipe, cli.write_recipe(tmp_path, tiny_target, talks, "live", steps=4, checkpoint_every=1)))
    blocked = tmp_path / "run" / "checkpoints"
    blocked.parent.mkdir()
    blocked.write_text("a file where the folder should be")
    with pytest.raises(OSError, match="checkpoints") as caught:
        pipeline.train(run)
    assert caught.value is not None
    assert workers() == []
