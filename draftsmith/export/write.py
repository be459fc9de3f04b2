"""Write a draft as one directory that SGLang and vLLM read, read it back, and require the same proposals.

Names and config fields come from the draft's own `layout()`; the file formats are config.json and model.safetensors. `d2t` and `t2d` travel inside, as does the
target's embedding (SGLang replaces it by the target's own, vLLM reads it).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from draftsmith.core.config import Config
from draftsmith.core.disk import new_folder, write_bytes, write_text
from draftsmith.core.types import Features
from draftsmith.drafts import DRAFTS
from draftsmith.drafts.base import Context, Draft, Sampling
from draftsmith.target.weights import Target

_EMBEDDING = "embed_tokens.weight"
_PLACES = 8
"""Proposals compared per sample."""


class ExportConfig(Config):
    """What the shipped checkpoint looks like."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the tensors; float32 proposes exactly what the checkpoint proposes."""


def export(draft: Draft, target: Target, folder: Path, config: ExportConfig, samples: Sequence[Features], width: int) -> int:
    """Write, read back, compare. Returns how many proposals were compared.

    Raises ValueError when the directory, read back, proposes anything else than the draft; nothing is left in place then.
    """
    layout = draft.layout()
    dtype = getattr(torch, config.dtype)
    plain = draft.plain_state()
    tensors = {theirs: _cast(plain[ours], dtype) for ours, theirs in layout.names.items()}
    tensors[_EMBEDDING] = _cast(target.embedding_VH, dtype)
    fields = dict(layout.config) | {"dtype": config.dtype, "torch_dtype": config.dtype}
    with new_folder(folder) as aside:
        write_bytes(aside / "model.safetensors", save(tensors, metadata={"format": "pt"}))
        write_text(aside / "config.json", json.dumps(fields, indent=2) + "\n")
        return compare(read(aside), _rounded(draft, dtype), target, samples, width)


def read(folder: Path) -> Draft:
    """A draft from an exported directory. Raises ValueError for a missing file, field or tensor, or an unknown tensor."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no exported draft: it has no config.json")
    fields = json.loads(path.read_text(encoding="utf-8"))
    kinds = {kind.architecture: kind for kind in DRAFTS.values()}
    name = (fields.get("architectures") or ["none"])[0]
    if name not in kinds:
        raise ValueError(f"{path}: architecture {name}; expected one of {', '.join(kinds)}")
    draft = kinds[name].from_engine(fields)
    tensors = _tensors(folder / "model.safetensors")
    names = draft.layout().names
    lacking = sorted(set(names.values()) - set(tensors))
    unknown = sorted(set(tensors) - set(names.values()) - {_EMBEDDING})
    if lacking or unknown:
        raise ValueError(f"{folder}/model.safetensors: missing tensors {lacking or 'none'}, unknown tensors {unknown or 'none'}")
    sizes = [(names[ours], list(tensors[names[ours]].shape), list(own.shape)) for ours, own in draft.plain_state().items()]
    wrong = [f"{name} is {found}, config.json asks for {asked}" for name, found, asked in sizes if found != asked]
    if wrong:
        raise ValueError(f"{folder}/model.safetensors: sizes of tensors do not fit: {'; '.join(wrong)}")
    draft.load_plain_state({ours: tensors[theirs] for ours, theirs in names.items()})
    return draft.eval()


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}): it is missing, truncated or not a safetensors file") from error


def compare(one: Draft, other: Draft, target: Target, samples: Sequence[Features], width: int) -> int:
    """Require equal proposals at several places of every sample. Returns how many were compared; raises ValueError at the first difference."""
    compared = 0
    for features in samples:
        for stop in torch.linspace(1, len(features) - 1, _PLACES).long().unique().tolist():
            context = _context(features, stop)
            first, second = (d.propose(context, d.start(1), target, width, Sampling()).tokens_BW for d in (one, other))
            if not torch.equal(first, second):
                raise ValueError(
                    f"the exported draft proposes {first.tolist()[0]} where the checkpoint proposes {second.tolist()[0]} (sample "
                    f"{features.sample.id!r}, token {stop}); the export is wrong and was not kept"
                )
            compared += 1
    return compared


def _context(features: Features, stop: int) -> Context:
    """What a draft knows after the first `stop` tokens and the one that follows."""
    place = torch.arange(stop)[None]
    hidden = features.hidden_TF[None, :stop].float()
    return Context(hidden, features.sample.input_ids[None, 1 : stop + 1], place, torch.ones_like(place, dtype=torch.bool))


def _rounded(draft: Draft, dtype: torch.dtype) -> Draft:
    """The draft on the CPU with its weights rounded as the export rounds them."""
    copied = copy.deepcopy(draft).cpu().eval()
    copied.load_state_dict({k: _cast(v, dtype).to(v.dtype) for k, v in copied.state_dict().items()})
    return copied


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().to(dtype if tensor.is_floating_point() else tensor.dtype)
