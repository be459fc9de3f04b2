"""Published drafts: a directory's config.json and tensors, whoever wrote it, and a draft made of them.

Read are `*.safetensors` (one file or shards) and `pytorch_model.bin`; configurations of the engines' form and of the speculators form.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.core.types import TargetShape
from draftsmith.drafts import DRAFTS
from draftsmith.drafts.base import Draft, Form
from draftsmith.export.layouts import shape_of

CONFIG, FACTS = "config.json", "draftsmith.json"
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Published:
    """What lies in a directory."""

    folder: Path
    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    """By the names in the files."""
    facts: dict[str, Any]
    """draftsmith.json; empty when another tool wrote the directory."""

    @property
    def form(self) -> Form:
        return "speculators" if "speculators_model_type" in self.fields else "engine"

    @property
    def digest(self) -> str:
        """Sixteen hex digits of its tensors, by our names."""
        found = hashlib.sha256()
        for name, tensor in sorted(ours(self).items()):
            found.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]

    @property
    def kind(self) -> type[Draft]:
        """The algorithm. Raises ValueError for one that is not read."""
        found = next((kind for kind in DRAFTS.values() if kind.recognises(self.fields)), None)
        if found is None:
            name = (self.fields.get("architectures") or ["none"])[0]
            raise ValueError(f"{self.folder / CONFIG}: a draft of architecture {name} is none that Draftsmith reads; it reads {', '.join(DRAFTS)}")
        return found


def fields_in(folder: Path) -> dict[str, Any]:
    """config.json. Raises ValueError when it is missing or no JSON object."""
    found = _json(folder / CONFIG)
    if found is None:
        raise ValueError(f"{folder} is no exported draft: it has no {CONFIG}")
    return found


def published(folder: Path, weights: bool = True) -> Published:
    """A directory as it lies, its tensors only with `weights`. Raises ValueError for a missing, damaged or doubled file."""
    return Published(folder, fields_in(folder), _tensors(folder) if weights else {}, _json(folder / FACTS) or {})


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def _tensors(folder: Path) -> dict[str, Tensor]:
    paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not paths:
        raise ValueError(f"{folder / 'model.safetensors'} is missing: {folder} has no weights (*.safetensors or pytorch_model.bin)")
    found: dict[str, Tensor] = {}
    for path in paths:
        try:
            some = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise ValueError(f"{path} cannot be read ({error}): it is truncated or no such file") from error
        if twice := sorted(set(found) & set(some)):
            raise ValueError(f"{path}: tensors that another file of the directory also holds: {', '.join(twice)}; keep one of the files")
        found |= some
    return found


def read(folder: Path, target: TargetShape | None = None, config: Any = None) -> Draft:
    """A draft from a published directory, with the training settings of `config` (default ones when absent).

    With the shape of `target`, its hidden size and vocabulary are required to be the same, and its number of blocks gives default layer ids.
    Raises ValueError for a missing file, field or tensor, an unknown tensor, sizes that do not fit, a wrong vocabulary map, or a variant that is not known.
    """
    return assemble(published(folder), target, config)


def empty(found: Published, target: TargetShape | None = None, config: Any = None, layers: tuple[int, ...] | None = None) -> Draft:
    """The draft that a configuration describes, on the meta device; `layers`, where they are known, stand in for those in it. Raises ValueError as `read`."""
    kind, where = found.kind, str(found.folder / CONFIG)
    blocks = target.layers if target is not None else found.facts.get("target", {}).get("layers", 0)
    family = target.model_type if target is not None else found.facts.get("target", {}).get("model_type", "llama")
    shape = replace(shape_of(found.fields, blocks, where), model_type=family)
    for name, ours in (("hidden size", "hidden_size"), ("vocabulary", "vocab_size")):
        if target is not None and getattr(shape, ours) != getattr(target, ours):
            raise ValueError(
                f"{found.folder} is a draft of another target: its {name} is {getattr(shape, ours):,}, this target's is {getattr(target, ours):,}; "
                "give the target that it was trained for"
            )
    try:
        layers = layers or kind.published_layers(found.fields, blocks)
        with torch.device("meta"):
            return kind.from_engine(found.fields, replace(shape, layers=blocks or layers[-1] + 1), config or kind.config_class(), layers)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def assemble(found: Published, target: TargetShape | None = None, config: Any = None) -> Draft:
    """`read` for a directory that was opened before."""
    sketch = empty(found, target, config)
    draft = type(sketch)(sketch.config, sketch.shape)
    expected = draft.plain_state()
    tensors = with_tables(ours(found), draft.shape.vocab_size, expected, found.folder)
    _require_names(found, tensors, expected)
    wrong = [
        f"{name} is {list(tensors[name].shape)}, {CONFIG} asks for {list(own.shape)}" for name, own in expected.items() if tensors[name].shape != own.shape
    ]
    if wrong:
        raise ValueError(f"{found.folder}: sizes of tensors do not fit: {'; '.join(wrong)}")
    draft.load_plain_state({name: tensors[name].to(own.dtype) for name, own in expected.items()})
    return draft.eval()


def require_embedding(found: Published, embedding_VH: Tensor) -> None:
    """Raises ValueError when a draft brings an embedding that is not the target's: Draftsmith's drafts embed with the target's."""
    there = found.tensors.get(EMBEDDING)
    if there is None:
        return
    rows = embedding_VH[: len(there)].cpu().float()
    if there.shape != rows.shape or not torch.allclose(there.float(), rows, rtol=1e-2, atol=1e-3):
        raise ValueError(
            f"{found.folder}: its {EMBEDDING} is not the target's: either this is a draft of another target, or it was trained with an embedding of its own, "
            "which Draftsmith's drafts do not have"
        )


def ours(found: Published) -> dict[str, Tensor]:
    """The tensors by our names. Raises ValueError when one is there under two names."""
    named: dict[str, Tensor] = {}
    for theirs, tensor in found.tensors.items():
        name = found.kind.published_name(theirs)
        if name in named:
            raise ValueError(f"{found.folder}: tensor {name} is there twice, under two names (one is {theirs}); engines take either, keep one")
        named[name] = tensor
    return named


def _require_names(found: Published, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    theirs = {found.kind.published_name(name): name for name in found.tensors}
    lacking = sorted(set(expected) - set(tensors))
    unknown = sorted(theirs[name] for name in set(tensors) - set(expected) - {EMBEDDING})
    if lacking or unknown:
        near = {name: difflib.get_close_matches(name, lacking, n=1, cutoff=0.5) for name in unknown}
        hint = "".join(f"; is {name} meant as {close[0]}?" for name, close in near.items() if close)
        raise ValueError(f"{found.folder}: missing tensors {lacking or 'none'}, unknown tensors {unknown or 'none'}{hint}")


def with_tables(tensors: Mapping[str, Tensor], vocab_size: int, expected: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """With the tables of the draft vocabulary that follow from others: no d2t in a draft of the whole vocabulary is the identity, t2d follows from d2t.

    Raises ValueError for tables that are wrong, or missing where the vocabulary is pruned.
    """
    if "d2t" not in expected:
        return dict(tensors)
    size = len(expected["d2t"])
    if "d2t" not in tensors and size < vocab_size:
        raise ValueError(f"{folder}: {missing_map(folder, size, vocab_size)}")
    d2t = tensors["d2t"] if "d2t" in tensors else torch.zeros(size, dtype=torch.long)
    if faults := map_faults(d2t, tensors.get("t2d"), size, vocab_size):
        raise ValueError(f"{folder}: {'; '.join(faults)}")
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[d2t.long() + torch.arange(size)] = True
    return dict(tensors) | {"d2t": d2t.long(), "t2d": t2d}


def missing_map(folder: Path, size: int, vocab_size: int) -> str:
    """What to say of a pruned vocabulary without its map, and of a side file that may hold it."""
    known = {CONFIG, FACTS, "README.md"}
    beside = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name not in known and p.suffix in (".pt", ".bin", ".npy", ".json", ".pth"))
    hint = f"; engines read none of the files beside it ({', '.join(beside)}): put the map into the weights" if beside else ""
    return f"d2t is missing: the draft has {size:,} of {vocab_size:,} ids, and engines would take draft ids for the first target ids{hint}"


def map_faults(d2t: Tensor, t2d: Tensor | None, size: int, vocab_size: int) -> list[str]:
    """What is wrong with a draft vocabulary: `d2t` is an offset, target id = draft id + d2t[draft id]; `t2d` marks the target's ids that are in it."""
    if d2t.shape != (size,) or d2t.is_floating_point():
        return [f"d2t is {list(d2t.shape)} of {d2t.dtype}, expected {size:,} whole numbers"]
    places = torch.arange(size)
    ids = d2t.long() + places
    if size > 1 and int(d2t[0]) >= 0 and bool((d2t[1:] > d2t[:-1]).all()) and _absolute(d2t, t2d, vocab_size):
        return ["d2t holds target ids; engines add the draft id to it: subtract 0, 1, 2, … from its entries"]
    faults: list[str] = []
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()[:, 0]
    if len(outside):
        faults.append(f"d2t names {len(outside):,} ids outside 0 … {vocab_size - 1:,}, first draft id {int(outside[0])} -> {int(ids[outside[0]])}")
    values, counts = ids.unique(return_counts=True)
    if len(values) < size:
        faults.append(f"d2t names {size - len(values):,} target ids twice, first {int(values[counts > 1][0])}")
    if t2d is not None and not faults:
        if t2d.shape != (vocab_size,):
            return [f"t2d is {list(t2d.shape)}, expected {vocab_size:,} values"]
        if not torch.equal(t2d.bool().nonzero()[:, 0], values):
            faults.append("t2d marks other ids than d2t names: further training would learn other tokens than engines draft")
    return faults


def _absolute(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> bool:
    """Whether ascending values are the marked ids themselves, or ids that would leave the vocabulary as offsets."""
    if t2d is not None and t2d.shape == (vocab_size,) and torch.equal(t2d.bool().nonzero()[:, 0], d2t.long()):
        return True
    return int(d2t[-1]) + len(d2t) > vocab_size and int(d2t[-1]) < vocab_size
