"""Tokenized samples on disk, in Arrow: made once for the same rows, tokenizer, template and settings, by several processes, restartable.

A folder `samples/<fingerprint>` of the cache directory holds one pair of files for each chunk of rows (`00000.arrow`, `00000.json`) and, when all are there,
`done.json`. A killed call leaves whole pairs behind; the next one makes only what is missing. Of calls at the same time, one makes them and the others wait.
Reading maps the files into memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa
from pyarrow import compute

from draftsmith.core.disk import PARTIAL, explained, write_bytes, write_text
from draftsmith.core.env import cache_dir, tokenize_in_one_thread
from draftsmith.core.log import progress, say
from draftsmith.data.prepare import CHOSEN, REPEATED, Done, Figures, Job
from draftsmith.data.samples import Tokens
from draftsmith.data.sources import Chunk, chunks

if TYPE_CHECKING:
    from draftsmith.core.types import Sample

VERSION = 2
"""Raise it when the same input comes to give other samples."""
NOT_IN_THE_SAMPLES = {"processes", "limit", "held_out_features", "max_answer", "train", "held_out", "deduplicate"}
"""Settings that do not change what a chunk gives; sources are identified by content."""
SCHEMA = pa.schema(
    [
        ("id", pa.string()), ("kind", pa.string()), ("where", pa.string()), ("conversation", pa.int32()), ("cut", pa.int32()),
        ("asked", pa.binary(16)), ("content", pa.binary(16)),
        ("input_ids", pa.list_(pa.int32())), ("spans", pa.list_(pa.int32())),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class ArrowSamples(Sequence["Sample"]):
    """Samples of a prepared split, read when they are asked for. `rows` are the chosen rows of the table, in order."""

    table: pa.Table
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = int(self.rows[index])
        return self.tokens(index).sample(self.table["id"][row].as_py())

    def tokens(self, index: int) -> Tokens:
        """Ids and ranges of one sample."""
        row = int(self.rows[index])
        spans = self.table["spans"][row].values.to_numpy().tolist()
        return Tokens(self.table["input_ids"][row].values.to_numpy(), tuple(zip(spans[::2], spans[1::2], strict=True)))

    @cached_property
    def conversations(self) -> np.ndarray:
        """Places of each conversation's first sample, and the number of samples at the end."""
        number = self.table["conversation"].to_numpy()[self.rows]
        return np.append(np.flatnonzero(np.append(True, number[1:] != number[:-1])[: len(number)]), len(number))

    def spread(self, count: int | None) -> ArrowSamples:
        """The samples of this many conversations at even distances; all when None."""
        total = len(self.conversations) - 1
        if count is None or count >= total:
            return self
        chosen = [int((i + 0.5) * total / count) for i in range(count)]
        places = np.concatenate([np.arange(self.conversations[c], self.conversations[c + 1]) for c in chosen])
        return ArrowSamples(self.table, self.rows[places])

    @cached_property
    def asked(self) -> frozenset[bytes]:
        """Hashes of what the conversations ask."""
        return frozenset(self.table["asked"].take(_numbers(self.rows)).to_pylist())

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample."""
        found = compute.call_function("list_value_length", [self.table["input_ids"]])
        return found.to_numpy()[self.rows].astype(np.int64)

    @cached_property
    def cut_tokens(self) -> int:
        """Tokens that were cut off at the maximum length."""
        return int(self.table["cut"].to_numpy()[self.rows].sum())

    def supervised_ids(self) -> Iterator[np.ndarray]:
        """Ids to learn from, sample by sample."""
        for i in range(len(self)):
            tokens = self.tokens(i)
            yield np.concatenate([tokens.ids[a:b] for a, b in tokens.spans])


def fingerprint(job: Job) -> str:
    """Of everything that the samples depend on: rows, tokenizer, template, settings, the code's version."""
    assert job.template is not None, "only a job that renders has samples to keep"
    tokenizer: Any = job.template.tokenizer
    vocabulary = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    parts = {
        "version": VERSION,
        "sources": [[s.name, s.digest(), s.config.model_dump(mode="json"), s.subsets, s.split] for s in job.sources],
        "tokenizer": [hashlib.sha256(vocabulary.encode()).hexdigest(), {k: str(v) for k, v in tokenizer.special_tokens_map.items()}],
        "template": [job.template.jinja(), job.template.jinja([{"type": "function"}]), job.template.variables],
        "settings": job.config.model_dump(mode="json", exclude=NOT_IN_THE_SAMPLES),
        "split": job.split if job.config.held_out_share is not None else "",
        "excluded": hashlib.sha256(b"".join(sorted(job.excluded))).hexdigest(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def prepare(job: Job, strict: bool = False, title: str = "prepare") -> tuple[ArrowSamples, Figures]:
    """The samples of a job and what became of every row, from the cache as far as it is there.

    Raises ValueError when nothing is left to train on, when nothing is supervised, and with `strict` for the first row that is dropped for another
    reason than a setting's.
    """
    folder = cache_dir() / "samples" / fingerprint(job)
    finished = folder / "done.json"
    if not finished.exists():
        with _alone(folder):
            if not finished.exists():
                _make(job, folder, strict, title)
    figures, tables = Figures(), []
    for number in range(json.loads(finished.read_text())["chunks"]):
        figures += Figures.of_row(json.loads((folder / f"{number:05d}.json").read_text()))
        _require_strict(figures, strict)
        with pa.memory_map(str(folder / f"{number:05d}.arrow")) as file:
            tables.append(pa.ipc.open_file(file).read_all())
    table = _numbered(tables)
    rows = _without_repeats(table, figures) if job.config.deduplicate else np.arange(len(table))
    if not len(rows):
        raise ValueError(f"nothing left to train on: {figures.counts.describe()}")
    return ArrowSamples(table, rows), figures


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While no other process makes these samples; one that is killed makes way. Raises DiskError."""
    lock = folder / "lock"
    with explained(lock):
        folder.mkdir(parents=True, exist_ok=True)
        file = lock.open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another call makes the same samples ({folder}); waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(job: Job, folder: Path, strict: bool, title: str) -> None:
    """All chunks that are not there yet."""
    for half in folder.glob(f"*{PARTIAL}"):  # of a killed call
        half.unlink(missing_ok=True)
    count = 0
    with progress(title, None, "conversations") as advance:
        for number, figures in _results(job, folder):
            count = number + 1
            advance(figures.counts.read)
            _require_strict(figures, strict)
    write_text(folder / "done.json", json.dumps({"chunks": count}))


def _results(job: Job, folder: Path) -> Iterator[tuple[int, Figures]]:
    """Figures of each chunk in order; at most two chunks a process are under way, so memory does not grow with the rows."""
    if job.config.processes == 1:
        for chunk in chunks(job.sources):
            yield chunk.number, _chunk_done(job, folder, chunk)
        return
    # A server that has imported everything and has no threads: each process is a fork of it, which costs little time and memory.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.tokenization_utils_tokenizers"])
    waiting: deque[tuple[int, Future[Figures] | Figures]] = deque()
    with ProcessPoolExecutor(job.config.processes, context, _start, (job, folder)) as pool:
        try:
            for chunk in chunks(job.sources):
                made = _made(folder, chunk.number)
                waiting.append((chunk.number, pool.submit(_work, chunk) if made is None else made))
                if len(waiting) > 2 * job.config.processes:
                    yield _result(*waiting.popleft())
            while waiting:
                yield _result(*waiting.popleft())
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"one of {job.config.processes} processes was killed, most often because memory ran out. What is finished is kept in {folder}: run the "
                "same command again with fewer of them (--processes, data.processes), and it goes on from there"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _result(number: int, found: Future[Figures] | Figures) -> tuple[int, Figures]:
    return number, found.result() if isinstance(found, Future) else found


def _made(folder: Path, number: int) -> Figures | None:
    """The figures of a chunk whose pair of files is there."""
    file = folder / f"{number:05d}.json"
    return Figures.of_row(json.loads(file.read_text())) if file.exists() else None


_own: list[tuple[Job, Path]] = []
"""In a process of the pool: what it works on."""


def _start(job: Job, folder: Path) -> None:
    tokenize_in_one_thread()  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _own.append((job, folder))


def _end_with_parent() -> None:
    """A killed call cannot end its pool, whose processes would wait for work forever, or write into files of the next call."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(chunk: Chunk) -> Figures:
    return _chunk_done(*_own[0], chunk)


def _chunk_done(job: Job, folder: Path, chunk: Chunk) -> Figures:
    """Make one chunk's pair of files, or read its figures."""
    if (made := _made(folder, chunk.number)) is not None:
        return made
    done, figures = job.run(chunk)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(_table(done))
    # A process outlives a killed call by an instant, while the next call may be at the same chunk.
    writer = f".{os.getpid()}"
    write_bytes(folder / f"{chunk.number:05d}.arrow", sink.getvalue().to_pybytes(), writer)
    write_bytes(folder / f"{chunk.number:05d}.json", json.dumps(figures.to_row()).encode(), writer)
    return figures


def _table(done: Sequence[Done]) -> pa.Table:
    rows = [(d, n, name, tokens) for place, d in enumerate(done) for n, (name, tokens) in enumerate(d.samples)]
    numbers = [place for place, d in enumerate(done) for _ in d.samples]
    spans = [np.array(t.spans, np.int32).reshape(-1) for *_, t in rows]
    columns = [
        _strings([name for _, _, name, _ in rows]), _strings([d.entry.kind for d, *_ in rows]), _strings([d.entry.where for d, *_ in rows]),
        _numbers(np.array(numbers, np.int32)), _numbers(np.array([d.cut if n == 0 else 0 for d, n, *_ in rows], np.int32)),
        _hashes([d.entry.asked for d, *_ in rows]), _hashes([d.entry.content for d, *_ in rows]), _lists([t.ids for *_, t in rows]), _lists(spans),
    ]  # fmt: skip
    return pa.table(columns, schema=SCHEMA)


# `pa.array` would import pandas where it is installed, for half a second in every process; from here to `_lists`, columns are made without it.


def _numbers(values: np.ndarray) -> pa.Array:
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _hashes(values: Sequence[bytes]) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(16), len(values), [None, pa.py_buffer(b"".join(values))])


def _strings(values: Sequence[str]) -> pa.Array:
    encoded = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def _lists(arrays: Sequence[np.ndarray]) -> pa.Array:
    """A column of lists, without a Python object for every number."""
    offsets = np.cumsum([0, *map(len, arrays)]).astype(np.int32)
    values = np.concatenate(arrays).astype(np.int32) if arrays else np.empty(0, np.int32)
    return pa.ListArray.from_arrays(_numbers(offsets), _numbers(values))


def _numbered(tables: Sequence[pa.Table]) -> pa.Table:
    """One table, conversations numbered through."""
    found, start = [], 0
    for table in tables:
        numbers = table["conversation"].to_numpy() + start
        start = int(numbers[-1]) + 1 if len(numbers) else start
        found.append(table.set_column(table.schema.get_field_index("conversation"), "conversation", _numbers(numbers.astype(np.int32))))
    return pa.concat_tables(found) if found else SCHEMA.empty_table()


def _without_repeats(table: pa.Table, figures: Figures) -> np.ndarray:
    """Rows of the first of equal conversations; the others are counted as dropped."""
    numbers, seen = table["conversation"].to_numpy(), set()
    starts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)])
    keep = np.ones(len(numbers), bool)
    contents = table["content"].take(_numbers(starts)).to_pylist()
    for (start, stop), content in zip(pairwise([*starts.tolist(), len(numbers)]), contents, strict=True):
        if content in seen:
            keep[start:stop] = False
            figures.counts.kept -= 1
            figures.counts.drop(REPEATED, table["where"][start].as_py())
        seen.add(content)
    return np.flatnonzero(keep)


def _require_strict(figures: Figures, strict: bool) -> None:
    bad = {reason: found for reason, found in figures.counts.reasons.items() if reason not in CHOSEN}
    if strict and bad:
        reason, (number, first) = next(iter(bad.items()))
        raise ValueError(f"{number} conversations {reason} (first: {first}); repair or remove them, or leave out --strict to drop and count them")
