"""Tensors of a checkpoint by name, each read alone: safetensors (memory-mapped), `.bin` (weights only, memory-mapped) and GGUF.

A checkpoint is a list of groups in the order in which transformers would look for weights; a group is what one index, or the files of one kind
without an index, hold. A tensor may be asked for in all of them, because some published checkpoints are complete in one group only; a group that
nobody asks opens, and downloads, nothing.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.core_model_loading import WeightConverter

from draftsmith.target.gguf_header import gguf_header
from draftsmith.target.place import GgufPlace, HubPlace, Place

_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)(\..*)")
_SAMPLE = 1 << 16
"""Bytes of a row that are enough to tell one training from another."""
_NO_WEIGHTS = re.compile(r"training_args|optimizer|scheduler|adapter|rng_state|random_states|scaler|tokenizer")
"""Leftovers of training beside the weights."""


@dataclass
class Read:
    """What was read so far: whole tensors, and the headers that say where they lie."""

    tensors: int = 0
    headers: int = 0
    files: list[str] = field(default_factory=list)

    def file(self, name: str, header: int) -> None:
        """Count a file's header once."""
        if name not in self.files:
            self.files.append(name)
            self.headers += header


class Group(ABC):
    """Tensor names that belong together, with the file that holds each: from an index, or from the headers of `files`."""

    def __init__(self, place: Place, index: str | None, files: list[str]) -> None:
        self.place, self.index, self.files = place, index, files
        self.name = index or ", ".join(files[:3])
        self.opened: dict[str, Any] = {}

    @cached_property
    def file_of(self) -> dict[str, str]:
        """The file of every tensor. Raises ValueError when an index or a header is damaged, or two files hold the same tensor."""
        if self.index is not None:
            return _weight_map(self.place.path(self.index))
        _require_all_parts(self.place, self.files)
        found: dict[str, str] = {}
        for file in self.files:
            for key in self.keys(file):
                if key in found:
                    raise ValueError(
                        f"{self.place.name}: {found[key]} and {file} both hold {key!r}, and no index says which is meant: "
                        "keep one of them, or rename the right one to model.safetensors"
                    )
                found[key] = file
        return found

    @abstractmethod
    def keys(self, file: str) -> list[str]:
        """Names of the tensors in a file."""

    @abstractmethod
    def shape(self, key: str) -> tuple[tuple[int, ...], str]:
        """Shape and stored dtype of a tensor, from headers alone."""

    @abstractmethod
    def sample(self, key: str) -> bytes:
        """The first row's bytes (of experts stacked in one tensor, the first one's): enough to tell one training of a model from another."""

    @abstractmethod
    def read(self, key: str, read: Read) -> Tensor:
        """One tensor in its stored dtype, counted. Raises ValueError for a missing or damaged file."""

    def list_files(self) -> None:
        """Add to `file_of` what the files hold and an index does not name."""
        for file in sorted(set(self.file_of.values())):
            for key in self.keys(file):
                self.file_of.setdefault(key, file)

    def close(self) -> None:
        """Let go of all files; tensors that were read stay valid, and what is asked for later opens them again."""
        self.opened.clear()

    def disk_path(self, file: str) -> Path:
        """A file of the group on this machine. Raises ValueError when it is not there."""
        if not self.place.has(file) and not isinstance(self.place, HubPlace):
            raise ValueError(f"{self.place.name}: {self.name} names {file}, which is not there: the checkpoint is incomplete; download it again")
        return self.place.path(file)

    def not_held(self, key: str, file: str) -> ValueError:
        """The error of an index that is wrong."""
        return ValueError(f"{self.place.name}: {self.name} says that {file} holds {key!r}, and it does not: download both again")


@dataclass(frozen=True)
class _Header:
    """A safetensors file's header: dtype, shape and place of every tensor; the places count from `start`."""

    path: Path
    start: int
    tensors: Mapping[str, Any]


class Safetensors(Group):
    """One index and its shards, or files without an index.

    The library checks a file and reads no tensor: it maps the whole file as private memory, which the system refuses for one larger than its memory.
    """

    def _opened(self, file: str) -> _Header:
        if file not in self.opened:
            path = self.disk_path(file)
            try:
                with safe_open(path, framework="numpy"), path.open("rb") as raw:  # the library checks that header and size agree
                    size = int.from_bytes(raw.read(8), "little")
                    self.opened[file] = _Header(path, 8 + size, json.loads(raw.read(size)))
            except (SafetensorError, OSError, ValueError) as error:
                raise _unreadable(path, str(error)) from error
        return self.opened[file]

    def keys(self, file: str) -> list[str]:
        return [k for k in self._opened(file).tensors if k != "__metadata__"]

    def shape(self, key: str) -> tuple[tuple[int, ...], str]:
        part = self._place(key)[1]
        return tuple(part["shape"]), part["dtype"]

    def read(self, key: str, read: Read) -> Tensor:
        header, part = self._place(key)
        if part["dtype"] not in _DTYPES:
            raise ValueError(f"{header.path}: {key} is stored as {part['dtype']}, which holds no plain numbers")
        first, end = (header.start + n for n in part["data_offsets"])
        read.file(self.file_of[key], header.start)
        read.tensors += end - first
        return _mapped(header.path, first, end - first).view(_DTYPES[part["dtype"]]).view(part["shape"])

    def sample(self, key: str) -> bytes:
        header, part = self._place(key)
        first, end = part["data_offsets"]
        with header.path.open("rb") as file:
            file.seek(header.start + first)
            return file.read(min(_SAMPLE, (end - first) // max(1, math.prod(part["shape"][:-1]))))

    def _place(self, key: str) -> tuple[_Header, Any]:
        file = self.file_of[key]
        header = self._opened(file)
        if key not in header.tensors:
            raise self.not_held(key, file)
        return header, header.tensors[key]


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def _mapped(path: Path, first: int, size: int) -> Tensor:
    """Bytes of a file as a tensor, paged in where they are looked at. Writing to it would not change the file."""
    try:
        storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=first + size)
    except RuntimeError:  # the system may refuse to map what is larger than its memory; the tensor alone may well fit
        return torch.from_numpy(np.fromfile(path, np.uint8, size, offset=first))
    found = torch.empty(0, dtype=torch.uint8).set_(storage, first, (size,), (1,))
    return found if first % 8 == 0 else found.clone()  # behind a header of odd length no dtype fits


class PickledTensors(Group):
    """`pytorch_model.bin`, whole or in shards. Nothing but tensors is unpickled."""

    def _tensors(self, file: str) -> dict[str, Tensor]:
        if file not in self.opened:
            found = _unpickled(self.disk_path(file))
            inner = found.get("state_dict", found) if isinstance(found, Mapping) else {}
            self.opened[file] = {str(k): v for k, v in inner.items() if isinstance(v, Tensor)}
        return self.opened[file]

    def keys(self, file: str) -> list[str]:
        return list(self._tensors(file))

    def sample(self, key: str) -> bytes:
        return _first_row(self._tensor(key))

    def _tensor(self, key: str) -> Tensor:
        file = self.file_of[key]
        if key not in self._tensors(file):
            raise self.not_held(key, file)
        return self._tensors(file)[key]

    def shape(self, key: str) -> tuple[tuple[int, ...], str]:
        tensor = self._tensor(key)
        return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    def read(self, key: str, read: Read) -> Tensor:
        tensor = self._tensor(key)
        path = self.place.path(self.file_of[key])
        with path.open("rb") as file:
            pickled = sum(i.file_size for i in zipfile.ZipFile(file).infolist() if i.filename.endswith(".pkl")) if zipfile.is_zipfile(file) else 0
        read.file(self.file_of[key], pickled)
        read.tensors += tensor.nbytes
        return tensor.contiguous()


def _unpickled(path: Path) -> Any:
    with path.open("rb") as file:
        start = file.read(64)
    zipped = zipfile.is_zipfile(path)
    if not start.startswith(b"\x80") and not zipped:
        raise _unreadable(path, "its end is missing" if start.startswith(b"PK") else f"it starts with {start[:12]!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle protocol; what matters is refused below
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # bytes from anywhere make the unpickler raise anything
        refused = [line for line in str(error).splitlines() if any(word in line for word in _CODE)]
        if isinstance(error, pickle.UnpicklingError) and refused:
            raise ValueError(
                f"{path} holds pickled code, or objects other than tensors, and is not loaded: running it could do anything. Convert it to "
                f"safetensors where you trust it ({refused[0].strip()})"
            ) from error
        if "unable to mmap" in str(error):
            raise ValueError(f"{path} is larger than this machine can map ({path.stat().st_size / 1e9:,.0f} GB): convert it to safetensors") from error
        raise _unreadable(path, (str(error).strip().splitlines() or [type(error).__name__])[0]) from error


_CODE = ("GLOBAL", "Unsupported operand", "Can only build")
"""What torch's unpickler says of anything but tensors."""


def _unreadable(path: Path, why: str) -> ValueError:
    with path.open("rb") as file:
        pointer = file.read(64).startswith(b"version https://git-lfs")
    advice = "it is a Git LFS pointer, not the file: git lfs pull" if pointer else "it is truncated or another kind of file; download it again"
    return ValueError(f"{path} cannot be read ({why}): {advice}")


class Gguf(Group):
    """A GGUF file, under the names that llama.cpp gives; quantized tensors are dequantized to float32."""

    def __init__(self, place: GgufPlace) -> None:
        super().__init__(place, None, [place.file.name])
        self._header = gguf_header(place.file)
        self._tensors = {t.name: t for t in self._header.tensors}

    def keys(self, file: str) -> list[str]:
        return list(self._tensors)

    def shape(self, key: str) -> tuple[tuple[int, ...], str]:
        from gguf import GGMLQuantizationType

        tensor = self._tensors[key]
        return tuple(tensor.shape), GGMLQuantizationType(tensor.ggml_type).name

    def sample(self, key: str) -> bytes:
        rows = self._tensors[key].shape[0] if len(self._tensors[key].shape) > 1 else 1
        return self._stored(key)[: self._tensors[key].nbytes // rows].tobytes()

    def read(self, key: str, read: Read) -> Tensor:
        from gguf import GGMLQuantizationType, dequantize

        tensor = self._tensors[key]
        read.file(self.name, self._header.data_start)
        read.tensors += tensor.nbytes
        kind = GGMLQuantizationType(tensor.ggml_type)
        values = dequantize(self._stored(key).reshape(*tensor.shape[:-1], -1), kind)
        plain = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind.name, torch.float32)
        values = values if values.flags.writeable else values.copy()  # plain numbers come as a view of the file
        return self._as_in_transformers(key, torch.from_numpy(values)).to(plain)

    def _stored(self, key: str) -> np.ndarray:
        tensor = self._tensors[key]
        return np.memmap(self.place.path(self.files[0]), np.uint8, "r", self._header.data_start + tensor.offset, (tensor.nbytes,))

    def _as_in_transformers(self, key: str, values: Tensor) -> Tensor:
        """llama.cpp stores some families' tensors shifted (Gemma's norms have their 1 added); transformers' own tables say which."""
        from transformers.integrations.gguf import get_gguf_conversion_mapping, is_gguf_arch_supported
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        architecture = self._header.architecture
        if not is_gguf_arch_supported(architecture):
            processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
            made = processor.process(weights=values.numpy(), name=key, tensor_key_mapping={}, parsed_parameters={"tensors": {}})
            return torch.from_numpy(np.ascontiguousarray(made.weights))
        for rule in get_gguf_conversion_mapping(architecture, self.place.config()):
            if isinstance(rule, WeightConverter) and any(re.search(p, key) for p in rule.source_patterns):
                for operation in rule.operations:
                    changed: Any = operation.convert({key: values}, [key], [key])
                    values = changed[key]
        return values


def _first_row(tensor: Tensor) -> bytes:
    while tensor.ndim > 1:
        tensor = tensor[0]
    return tensor.reshape(-1)[: _SAMPLE // tensor.element_size()].contiguous().view(torch.uint8).numpy().tobytes()


def groups(place: Place) -> list[Group]:
    """All groups, first the one that transformers would load.

    Raises ValueError when there are no weights, or when an index names files that are not there.
    """
    if isinstance(place, GgufPlace):
        return [Gguf(place)]
    found = list(_groups(place))
    if not found and isinstance(place, HubPlace) and place.snapshot.unreachable:
        raise ValueError(
            f"{place.name}: none of its weights is cached, and the hub cannot be reached ({place.snapshot.unreachable}). "
            f"Cached of it: {', '.join(place.files())}"
        )
    if not found:
        raise ValueError(f"{place.name} holds no weights: expected *.safetensors or *.bin files; it has {', '.join(sorted(place.files())[:6])}")
    whole = [g for g in found if not _missing(g)]
    # Mistral publishes the same weights twice, and where its index is incomplete the consolidated file need not be.
    if not any(g.index is None and g.files[0].startswith("consolidated") for g in whole):
        for group in found:
            _require_shards(group)
    return whole


def _groups(place: Place) -> Iterator[Group]:
    present = sorted(place.files())
    kinds: list[tuple[str, str, type[Safetensors] | type[PickledTensors]]] = [
        (".safetensors", "model.safetensors", Safetensors),
        (".bin", "pytorch_model.bin", PickledTensors),
    ]
    for suffix, standard, kind in kinds:
        files = [f for f in present if f.endswith(suffix) and "/" not in f and not _NO_WEIGHTS.search(f)]
        if suffix == ".bin" and isinstance(place, HubPlace) and any(f.endswith(".safetensors") for f in present):
            return  # the same weights again: nothing that is worth a second download
        if standard in files:
            yield kind(place, None, [standard])
        indices = sorted((f for f in present if f.endswith(f"{suffix}.index.json") and "/" not in f), key=lambda f: (f != f"{standard}.index.json", f))
        yield from (kind(place, index, []) for index in indices)
        indexed = {f for i in indices for f in _weight_map(place.path(i)).values()}
        loose = [f for f in files if f not in indexed and f != standard]
        native = [f for f in loose if f.startswith("consolidated")]
        for names in ([f for f in loose if f not in native], native):
            if names:
                yield kind(place, None, names)


def _missing(group: Group) -> list[str]:
    """Shards that an index names and that are not there; on a hub, fetching tells."""
    if group.index is None or isinstance(group.place, HubPlace):
        return []
    return sorted(f for f in set(group.file_of.values()) if not group.place.has(f))


def _require_shards(group: Group) -> None:
    """Also of shards that are not needed here: the same files must give a whole model when features are captured."""
    missing = _missing(group)
    if missing:
        raise ValueError(
            f"{group.place.name}/{group.index} names {missing[0]}, which is not there ({len(missing)} missing): the checkpoint is incomplete; download it again"
        )


def _require_all_parts(place: Place, files: list[str]) -> None:
    """Raises ValueError when files that number themselves are not all there: without an index, a missing head would look like a tied one."""
    parts = [m.groups() for f in files if (m := _NUMBERED.fullmatch(f))]
    for stem, _, total, end in parts:
        there = {int(p[1]) for p in parts if (p[0], p[2], p[3]) == (stem, total, end)}
        absent = sorted(set(range(1, int(total) + 1)) - there)
        if absent and 0 not in there:
            raise ValueError(
                f"{place.name} has no index and lacks part {absent[0]} of {stem}-*-of-{total}{end} ({len(absent)} missing): the checkpoint is incomplete; "
                "download it again"
            )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(key): str(file) for key, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({type(error).__name__}: {error}): download it again") from error
