"""Where rows come from: files, public sets by name, data sets on the hub. Rows stream; nothing holds a whole file."""

from __future__ import annotations

import codecs
import csv
import difflib
import gzip
import hashlib
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from draftsmith.core.disk import sha256
from draftsmith.data import bundled
from draftsmith.data.config import SourceConfig
from draftsmith.data.presets import PRESETS
from draftsmith.data.shapes import Converter

CHUNK_ROWS, CHUNK_BYTES = 1_000, 16 << 20
READ_CHARACTERS = 1 << 20
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
Raw = bytes | Mapping[str, Any]
"""A row as it was read: a line of JSONL, not parsed yet, or an object."""


@dataclass(frozen=True)
class Source:
    """One place that rows come from. `name` stands in messages before the row's number; `convert` is set for public sets."""

    name: str
    config: SourceConfig
    file: Path | None = None
    hub: str | None = None
    subsets: tuple[str | None, ...] = (None,)
    split: str = "train"
    convert: Converter | None = None

    def rows(self) -> Iterator[tuple[int, Raw]]:
        """Rows with their line (JSONL) or place, from 1 on. Raises ValueError when the source cannot be read as a whole."""
        if self.hub is not None:
            return _hub_rows(self.hub, self.subsets, self.split)
        assert self.file is not None
        return _file_rows(self.file)

    def digest(self) -> str:
        """Changes when the rows do: a file's SHA-256; of a hub data set, what `datasets` identifies its version by."""
        if self.file is not None:
            return sha256(self.file)
        assert self.hub is not None
        hashes = [str(_hub(lambda library, s=s: library.load_dataset_builder(self.hub, s), self.hub).hash) for s in self.subsets]
        return hashlib.sha256(" ".join([self.hub, self.split, *hashes]).encode()).hexdigest()


@dataclass(frozen=True)
class Chunk:
    """Neighbouring rows of one source: the unit of work, of parallelism and of resuming. `repeat` counts passes over the source."""

    number: int
    source: int
    repeat: int
    rows: tuple[tuple[int, Raw], ...]


def open_source(config: SourceConfig, split: str) -> Source:
    """Find out what a path means; `split` (train or held-out) chooses among the bundled files. Raises ValueError with the nearest known name."""
    path = config.path
    preset = PRESETS.get(config.preset or path)
    if config.preset is not None and preset is None:
        raise ValueError(f"unknown preset {config.preset!r}; {_near(config.preset)}")
    if path == "bundled":
        return Source("bundled", config, bundled.FOLDER / f"{split}.jsonl.gz")
    if path in PRESETS and preset is not None and not Path(path).exists():
        subsets = (config.subset,) if config.subset else preset.subsets
        return Source(path, config, None, preset.hub, subsets, config.split or preset.split, preset.convert)
    convert = preset.convert if preset else None
    if Path(path).is_file():
        return Source(path, config, Path(path), convert=convert)
    if Path(path).is_dir() or (_HUB_ID.fullmatch(path) and not path.endswith((*SUFFIXES, ".gz"))):
        return Source(path, config, None, path, (config.subset,), config.split or "train", convert)
    raise ValueError(f"no conversations at {path}: expected a {', '.join(SUFFIXES)} file, the id of a hub data set, or a public set's name; {_near(path)}")


def chunks(sources: Iterable[Source]) -> Iterator[Chunk]:
    """All rows in order, in chunks whose borders depend on the rows alone. Raises ValueError for an empty source."""
    number = 0
    for place, source in enumerate(sources):
        for repeat in range(max(1, -int(-source.config.weight // 1))):
            rows: list[tuple[int, Raw]] = []
            size = seen = 0
            for row in source.rows():
                rows.append(row)
                size += len(row[1]) if isinstance(row[1], bytes) else sum(len(v) for v in row[1].values() if isinstance(v, str))
                seen += 1
                if len(rows) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                    yield Chunk(number, place, repeat, tuple(rows))
                    number, rows, size = number + 1, [], 0
            if rows:
                yield Chunk(number, place, repeat, tuple(rows))
                number += 1
            if not seen:
                raise ValueError(f"{source.name} holds no conversation: it is empty")


def _near(path: str) -> str:
    names = [*PRESETS, "bundled", *(str(p) for p in Path(path).parent.glob("*") if p.name.endswith((*SUFFIXES, ".gz")))]
    near = difflib.get_close_matches(path, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"public sets: {', '.join(PRESETS)}"


def _file_rows(path: Path) -> Iterator[tuple[int, Raw]]:
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    readers = {".jsonl": _lines, ".ndjson": _lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    if suffix not in readers:
        raise ValueError(f"{path}: unknown kind of file {suffix!r}; expected {', '.join(SUFFIXES)}")
    return readers[suffix](path)


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield cast(IO[bytes], file)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): it is truncated, no gzip file, or no UTF-8 text") from error


def _lines(path: Path) -> Iterator[tuple[int, Raw]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                yield number, line


def _json(path: Path) -> Iterator[tuple[int, Raw]]:
    """A list of objects, read one by one; a file of lines under this name is read as such."""
    with _open(path) as file:
        first = next((byte for byte in iter(lambda: file.read(1), b"") if not byte.isspace() and byte not in b"\xef\xbb\xbf"), b"")
    if first != b"[":
        yield from _lines(path)
        return
    decoder, buffer, number = json.JSONDecoder(), "", 0
    with _open(path) as file:
        text = codecs.getreader("utf-8-sig")(file)
        buffer = text.read(READ_CHARACTERS).lstrip()[1:]
        while True:
            buffer = buffer.lstrip(" \t\r\n,")
            if buffer.startswith("]"):
                return
            try:
                row, end = decoder.raw_decode(buffer)
                complete = end < len(buffer)
            except ValueError as error:
                row, end, complete, problem = None, 0, False, error
            else:
                problem = None
            if complete:
                number, buffer = number + 1, buffer[end:]
                yield number, row if isinstance(row, Mapping) else json.dumps(row).encode()
                continue
            more = text.read(max(READ_CHARACTERS, len(buffer)))
            if not more:
                raise ValueError(f"{path}: object {number + 1} of the list is not valid JSON ({problem or 'the list does not end'})")
            buffer += more


def _csv(path: Path) -> Iterator[tuple[int, Raw]]:
    csv.field_size_limit(sys.maxsize)
    with _open(path) as file:
        lines = (line.decode("utf-8") for line in file)
        reader = csv.DictReader(lines)
        for row in reader:
            yield reader.line_num, {key.removeprefix("\ufeff"): value for key, value in row.items() if key is not None}


def _parquet(path: Path) -> Iterator[tuple[int, Raw]]:
    import pyarrow
    from pyarrow import parquet

    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error


def _hub_rows(hub: str, subsets: tuple[str | None, ...], split: str) -> Iterator[tuple[int, Raw]]:
    number = 0
    for subset in subsets:
        for row in _hub(lambda library, s=subset: library.load_dataset(hub, s, split=split, streaming=True), hub):
            number += 1
            yield number, row


def _hub(ask: Any, hub: str) -> Any:
    """Through `datasets`, which reads the hub and local folders. Raises ValueError with its reason."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"data set {hub!r} is read through the package datasets; install it with: pip install 'draftsmith[hub]'") from error
    try:
        return ask(datasets)
    except Exception as error:  # it raises a dozen kinds: no such set, no such split, no network, gated
        raise ValueError(
            f"cannot read data set {hub!r}: {type(error).__name__}: {str(error)[:300]}; check its id, or give a file with its rows (a public set's with its "
            "preset: data.train={path: FILE, preset: NAME})"
        ) from error
