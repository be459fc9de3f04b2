"""Features `files`: safetensors shards with a manifest that says what they are.

A feature set is opened under an `Identity` (which target, which layers, which samples, …); a difference is an error that names the field. Every shard carries a
checksum, verified when the set is opened. Shards are written whole or not at all, and a stopped capture continues after its last whole shard.

    features/manifest.json            identity, conventions, counts, shards with checksums
    features/shard-00000.safetensors  input_ids, loss_mask, argmax [S], hidden [S, F], last [S, H] of some samples, end to end
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from draftsmith.core.disk import sha256, write_bytes, write_text
from draftsmith.core.types import Features, FeatureSpec, Sample
from draftsmith.features.source import Source

FORMAT = 1
CONVENTIONS = {"layers": "output of decoder block i, 0-based, before the final norm", "last": "after the final norm, as the head multiplies it"}
SHARD_TOKENS = 16384


@dataclass(frozen=True)
class Identity:
    """What a feature set is of. Two sets are interchangeable iff all fields are equal."""

    target: str
    layers: tuple[int, ...]
    dtype: str
    compute: str
    template: str
    samples: str

    @staticmethod
    def of(target: str, spec: FeatureSpec, compute: str, template: str, samples: Sequence[Sample]) -> Identity:
        """`compute`: the dtype that the target ran in."""
        digest = hashlib.sha256()
        for s in samples:
            digest.update(s.id.encode() + s.input_ids.numpy().tobytes() + s.loss_mask.numpy().tobytes())
        return Identity(target, spec.layers, spec.dtype, compute, template, digest.hexdigest()[:16])


def write(folder: Path, identity: Identity, samples: Sequence[Sample], capture: Callable[[Sample], Features], done: Callable[[int], None]) -> None:
    """Capture all samples into shards; continues after the last whole shard of an earlier, stopped call.

    `done` is told the tokens of every finished sample. Raises DiskError when the disk is full, and ValueError when the folder
    holds a set of another identity.
    """
    manifest = _open_manifest(folder, identity)
    shards: list[dict[str, Any]] = manifest["shards"]
    start = sum(len(s["lengths"]) for s in shards)
    done(sum(n for s in shards for n in s["lengths"]))
    pending: list[Features] = []
    for sample in samples[start:]:
        pending.append(capture(sample))
        done(len(sample))
        if sum(map(len, pending)) >= SHARD_TOKENS:
            _write_shard(folder, manifest, pending)
            pending = []
    if pending:
        _write_shard(folder, manifest, pending)
    if not manifest["complete"]:
        _write_manifest(folder, manifest | {"complete": True})


def bytes_needed(spec: FeatureSpec, hidden_size: int, tokens: int) -> int:
    """Disk space of a feature set: (layers + 1) hidden vectors a token, two ids and a mask."""
    return tokens * ((len(spec.layers) + 1) * hidden_size * torch.finfo(getattr(torch, spec.dtype)).bits // 8 + 9)


def bytes_present(folder: Path) -> int:
    """Bytes of the shards that an earlier call left."""
    return sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))


def require_space(folder: Path, needed: int) -> None:
    """Refuse before the expensive work starts. Raises ValueError when the disk lacks room."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(f"{folder}: the features need {needed / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free; use data.limit or features.kind=live")


class FileSource(Source):
    """A complete feature set, memory-mapped."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        """Raises ValueError when the set is missing, unfinished, of another identity (the field is named), or damaged (the shard is named)."""
        manifest = _read_manifest(folder)
        _compare(folder, manifest, identity)
        if not manifest["complete"]:
            raise ValueError(f"{folder} is unfinished: run the capture command again, it continues")
        self._places: list[tuple[Any, str, int, int]] = []
        for shard in manifest["shards"]:
            path = folder / shard["file"]
            _verify(path, shard)
            opened = safe_open(path, framework="pt")
            start = 0
            for name, length in zip(shard["ids"], shard["lengths"], strict=True):
                self._places.append((opened, name, start, start + length))
                start += length

    @property
    def lengths(self) -> Sequence[int]:
        return [stop - start for _, _, start, stop in self._places]

    def sample(self, index: int) -> Sample:
        opened, name, start, stop = self._places[index]
        return Sample(name, opened.get_slice("input_ids")[start:stop].long(), opened.get_slice("loss_mask")[start:stop])

    def features(self, index: int) -> Features:
        opened, _, start, stop = self._places[index]
        hidden, last, argmax = (opened.get_slice(key)[start:stop] for key in ("hidden", "last", "argmax"))
        return Features(self.sample(index), hidden, last, argmax)


def _write_shard(folder: Path, manifest: dict[str, Any], features: Sequence[Features]) -> None:
    tensors = {
        "input_ids": torch.cat([f.sample.input_ids for f in features]).int(),
        "loss_mask": torch.cat([f.sample.loss_mask for f in features]),
        "argmax": torch.cat([f.argmax_T for f in features]),
        "hidden": torch.cat([f.hidden_TF for f in features]),
        "last": torch.cat([f.last_TH for f in features]),
    }
    data = save(tensors)
    name = f"shard-{len(manifest['shards']):05d}.safetensors"
    write_bytes(folder / name, data)
    entry = {
        "file": name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data),
        "ids": [f.sample.id for f in features], "lengths": [len(f) for f in features],
    }  # fmt: skip
    manifest["shards"].append(entry)
    _write_manifest(folder, manifest)


def _open_manifest(folder: Path, identity: Identity) -> dict[str, Any]:
    if (folder / "manifest.json").is_file():
        manifest = _read_manifest(folder)
        _compare(folder, manifest, identity)
        return manifest
    return {"format": FORMAT, "conventions": CONVENTIONS, "identity": asdict(identity), "shards": [], "complete": False}


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1))


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(f"no features at {folder}: it has no manifest.json; run `draftsmith capture` first, or set features.kind=live")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest.get("format") != FORMAT:
            raise ValueError(f"format {manifest.get('format')}, this version of Draftsmith reads {FORMAT}")
        lacking = {"identity", "conventions", "shards", "complete"} - set(manifest)
        if lacking:
            raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}; delete the feature folder and capture again") from error
    return manifest


def _compare(folder: Path, manifest: dict[str, Any], wanted: Identity) -> None:
    found = manifest["identity"] | {f"conventions.{name}": value for name, value in manifest["conventions"].items()}
    needed = json.loads(json.dumps(asdict(wanted))) | {f"conventions.{name}": value for name, value in CONVENTIONS.items()}
    for name, value in needed.items():
        if found.get(name) != value:
            raise ValueError(
                f"the features in {folder} were captured under another specification: {name} is {found.get(name)}, this run needs {value}. "
                "Choose another features.path, or delete the folder and capture again"
            )


def _verify(path: Path, shard: dict[str, Any]) -> None:
    size = path.stat().st_size if path.is_file() else 0
    if size != shard["bytes"]:
        raise ValueError(f"{path} is truncated or missing: {size:,} bytes, {shard['bytes']:,} expected; delete the feature folder and capture again")
    if sha256(path) != shard["sha256"]:
        raise ValueError(f"{path} is corrupt: its checksum differs from the manifest's; delete the feature folder and capture again")
