"""Tensors of a checkpoint by name, each read alone: safetensors (memory-mapped), `.bin` (weights only, memory-mapped) and GGUF.

A checkpoint is a list of groups in the order in which transformers would look for weights; a group is what one index, or the files of one kind
without an index, hold. A tensor may be asked for in all of them, because some published checkpoints are complete in one group only.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.target.place import GgufPlace, HubPlace, Place


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
    """Tensor names that belong together, with the file that holds each."""

    def __init__(self, place: Place, name: str) -> None:
        self.place, self.name = place, name
        self.file_of: dict[str, str] = {}

    @abstractmethod
    def shape(self, key: str) -> tuple[tuple[int, ...], str]:
        """Shape and stored dtype of a tensor, from headers alone."""

    @abstractmethod
    def sample(self, key: str) -> bytes:
        """The first row's bytes (of experts stacked in one tensor, the first one's): enough to tell one training of a model from another."""

    @abstractmethod
    def list_files(self) -> None:
        """Add what the files hold and an index does not name."""

    @abstractmethod
    def read(self, key: str, read: Read) -> Tensor:
        """One tensor in its stored dtype, counted. Raises ValueError for a missing or damaged file."""


class Safetensors(Group):
    """One index and its shards, or files without an index."""

    def __init__(self, place: Place, name: str, file_of: Mapping[str, str] | None, files: list[str]) -> None:
        super().__init__(place, name)
        self._open: dict[str, Any] = {}
        if file_of is not None:
            self.file_of = dict(file_of)
        else:
            for file in files:
                self.file_of |= dict.fromkeys(self._opened(file).keys(), file)

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            path = _shard(self, file)
            try:
                self._open[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise ValueError(f"{path} cannot be read ({error}): it is truncated or not a safetensors file; download it again") from error
        return self._open[file]

    def shape(self, key: str) -> tuple[tuple[int, ...], str]:
        part = self._slice(key)
        return tuple(part.get_shape()), str(part.get_dtype())

    def read(self, key: str, read: Read) -> Tensor:
        self._slice(key)
        tensor = self._opened(self.file_of[key]).get_tensor(key)
        with self.place.path(self.file_of[key]).open("rb") as file:
            read.file(self.file_of[key], 8 + int.from_bytes(file.read(8), "little"))
        read.tensors += tensor.nbytes
        return tensor

    def list_files(self) -> None:
        for file in sorted(set(self.file_of.values())):
            for key in self._opened(file).keys():  # noqa: SIM118 - no mapping
                self.file_of.setdefault(key, file)

    def sample(self, key: str) -> bytes:
        part = self._slice(key)
        return _bytes(part[_FIRST[: max(1, len(part.get_shape()) - 1)]] if part.get_shape() else part[:])

    def _slice(self, key: str) -> Any:
        try:
            return self._opened(self.file_of[key]).get_slice(key)
        except SafetensorError as error:
            said = f"{self.place.name}/{self.name} says that {self.file_of[key]} holds {key!r}, and it does not"
            raise ValueError(f"{said} ({error}): download both again") from error


class PickledTensors(Group):
    """`pytorch_model.bin`, whole or in shards. Nothing but tensors is unpickled."""

    def __init__(self, place: Place, name: str, file_of: Mapping[str, str] | None, files: list[str]) -> None:
        super().__init__(place, name)
        self._loaded: dict[str, dict[str, Tensor]] = {}
        if file_of is not None:
            self.file_of = dict(file_of)
        else:
            for file in files:
                self.file_of |= dict.fromkeys(self._tensors(file), file)

    def _tensors(self, file: str) -> dict[str, Tensor]:
        if file not in self._loaded:
            path = _shard(self, file)
            try:
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
            except pickle.UnpicklingError as error:
                raise ValueError(
                    f"{path} holds pickled code, or objects other than tensors, and is not loaded: running it could do anything. Convert it to "
                    f"safetensors where you trust it ({str(error).splitlines()[0]})"
                ) from error
            except (OSError, RuntimeError, EOFError, ValueError) as error:
                raise ValueError(f"{path} cannot be read ({error}): it is truncated or no PyTorch file; download it again") from error
            inner = found.get("state_dict", found) if isinstance(found, Mapping) else {}
            self._loaded[file] = {str(k): v for k, v in inner.items() if isinstance(v, Tensor)}
        return self._loaded[file]

    def list_files(self) -> None:
        for file in sorted(set(self.file_of.values())):
            for key in self._tensors(file):
                self.file_of.setdefault(key, file)

    def sample(self, key: str) -> bytes:
        tensor = self._tensor(key)
        return _bytes(tensor[_FIRST[: max(1, tensor.ndim - 1)]] if tensor.ndim else tensor)

    def _tensor(self, key: str) -> Tensor:
        tensors = self._tensors(self.file_of[key])
        if key not in tensors:
            raise ValueError(f"{self.place.name}/{self.name} says that {self.file_of[key]} holds {key!r}, and it does not: download both again")
        return tensors[key]

    def shape(self, key: str) -> tuple[tuple[int, ...], str]:
        tensor = self._tensor(key)
        return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    def read(self, key: str, read: Read) -> Tensor:
        tensor = self._tensor(key)
        path = self.place.path(self.file_of[key])
        pickled = sum(i.file_size for i in zipfile.ZipFile(path).infolist() if i.filename.endswith(".pkl")) if zipfile.is_zipfile(path) else 0
        read.file(self.file_of[key], pickled)
        read.tensors += tensor.nbytes
        return tensor.contiguous()


class Gguf(Group):
    """A GGUF file, under the names that llama.cpp gives; quantized tensors are dequantized to float32."""

    def __init__(self, place: GgufPlace) -> None:
        super().__init__(place, place.file.name)
        from gguf import GGUFReader

        try:
            reader = GGUFReader(place.file)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ValueError(f"{place.file} cannot be read as GGUF ({error}): it is truncated or another kind of file") from error
        self._tensors = {t.name: t for t in reader.tensors}
        self._header = int(reader.data_offset)
        self.architecture = str(reader.fields["general.architecture"].contents())
        self.file_of = dict.fromkeys(self._tensors, place.file.name)

    def shape(self, key: str) -> tuple[tuple[int, ...], str]:
        tensor = self._tensors[key]
        return tuple(int(n) for n in reversed(tensor.shape)), str(tensor.tensor_type.name)

    def list_files(self) -> None:
        """All are listed."""

    def sample(self, key: str) -> bytes:
        return self._tensors[key].data[:1].tobytes()

    def read(self, key: str, read: Read) -> Tensor:
        from gguf import dequantize
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        tensor = self._tensors[key]
        read.file(self.name, self._header)
        read.tensors += int(tensor.n_bytes)
        values = dequantize(tensor.data, tensor.tensor_type)
        # llama.cpp stores some families' tensors shifted (Gemma's norms have their 1 added); transformers' own table says which.
        processor = TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)(config={})
        changed = processor.process(weights=values, name=key, tensor_key_mapping={}, parsed_parameters={"tensors": {}})
        return torch.from_numpy(changed.weights.copy())


_FIRST = (slice(0, 1),) * 8


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _shard(group: Group, file: str) -> Path:
    if file not in group.place.files():
        raise ValueError(f"{group.place.name}: {group.name} names {file}, which is not there: the checkpoint is incomplete; download it again")
    return group.place.path(file)


def groups(place: Place) -> list[Group]:
    """All groups, first the one that transformers would load.

    Raises ValueError when there are no weights, or when an index or a header is damaged.
    """
    if isinstance(place, GgufPlace):
        return [Gguf(place)]
    found = list(_groups(place))
    if not found:
        raise ValueError(f"{place.name} holds no weights: expected *.safetensors or *.bin files; it has {', '.join(sorted(place.files())[:6])}")
    return found


def _groups(place: Place) -> Iterator[Group]:
    present = sorted(place.files())
    for suffix, kind in ((".safetensors", Safetensors), (".bin", PickledTensors)):
        files = [f for f in present if f.endswith(suffix) and "/" not in f and _holds_weights(f)]
        standard = "model.safetensors" if suffix == ".safetensors" else "pytorch_model.bin"
        indexed: set[str] = set()
        for index in sorted((f for f in present if f.endswith(f"{suffix}.index.json")), key=lambda f: (f != f"{standard}.index.json", f)):
            weight_map = _weight_map(place.path(index))
            _require_shards(place, index, set(weight_map.values()), set(present))
            indexed |= set(weight_map.values())
            yield kind(place, index, weight_map, [])
        loose = [f for f in files if f not in indexed]
        whole = [f for f in loose if f == standard]
        native = [f for f in loose if f.startswith("consolidated")]
        rest = [f for f in loose if f not in whole and f not in native]
        for names in (whole, rest, native):
            if names:
                yield kind(place, ", ".join(names[:3]), None, names)


def _require_shards(place: Place, index: str, shards: set[str], present: set[str]) -> None:
    """Also of shards that are not needed here: the same files must give a whole model when features are captured."""
    missing = sorted(shards - present)
    if missing and not isinstance(place, HubPlace):
        raise ValueError(
            f"{place.name}/{index} names {missing[0]}, which is not there ({len(missing)} missing): the checkpoint is incomplete; download it again"
        )


def _holds_weights(file: str) -> bool:
    return not any(word in file for word in ("training_args", "optimizer", "scheduler", "adapter_model", "rng_state"))


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(key): str(file) for key, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({type(error).__name__}: {error}): download it again") from error
