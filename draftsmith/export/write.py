"""Write a draft as one directory that serving engines read, read it back, and require the same tensors and the same proposals.

config.json and model.safetensors are for engines: names and fields come from the draft's own `layout()`, `d2t` and `t2d` travel inside, as does the target's
embedding (SGLang and TensorRT-LLM replace it by the target's own, vLLM and llama.cpp read it). draftsmith.json is for `draftsmith verify`, README.md for
people.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save

from draftsmith.core.config import Config
from draftsmith.core.disk import new_folder, write_bytes, write_text
from draftsmith.core.types import Features
from draftsmith.drafts import DRAFTS
from draftsmith.drafts.base import Context, Draft, Form, Sampling
from draftsmith.export import layouts
from draftsmith.export.card import Origin, card
from draftsmith.export.layouts import EngineName
from draftsmith.export.read import CONFIG, EMBEDDING, FACTS, read
from draftsmith.target.weights import Target

FORMAT_VERSION = 1
_PLACES = 8
"""Proposals compared per sample."""


class ExportConfig(Config):
    """What the shipped checkpoint looks like."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the tensors; float32 proposes exactly what the checkpoint proposes."""
    engines: tuple[EngineName, ...] = ()
    """Engines that must be able to serve the draft: sglang, vllm, llama.cpp, tensorrt-llm. Settings that one of them cannot serve are refused before
    anything is captured or trained. The directory is the same for all of them."""
    format: Form = "engine"
    """engine: what every engine reads. speculators: the form of the speculators library, which vLLM and llama.cpp read."""


def export(draft: Draft, target: Target, folder: Path, config: ExportConfig, samples: Sequence[Features], width: int, origin: Origin | None = None) -> int:
    """Write, read back, compare. Returns how many proposals were compared.

    Raises ValueError when a named engine cannot serve the draft, or when the directory, read back, proposes anything else than the draft; nothing is left
    in place then.
    """
    origin = origin or Origin(target.name)
    layouts.require(config.engines, layouts.refusals(type(draft), draft.config, draft.shape, config.format))
    dtype = getattr(torch, config.dtype)
    with new_folder(folder) as aside:
        write(draft, target, aside, config, width, origin, folder)
        again, rounded = read(aside, target.shape), _rounded(draft, dtype)
        require_equal(again, rounded, aside)
        return compare(again, rounded, target, samples, width)


def write(draft: Draft, target: Target, aside: Path, config: ExportConfig, width: int, origin: Origin, folder: Path) -> None:
    """The four files into `aside`, which will be called `folder`."""
    dtype = getattr(torch, config.dtype)
    plain = draft.plain_state()
    tensors = {theirs: _cast(plain[ours], dtype) for ours, theirs in draft.layout(config.format).names.items()}
    tensors[EMBEDDING] = _cast(target.embedding_VH[: draft.shape.vocab_size], dtype)
    data = save(tensors, metadata={"format": "pt"})
    write_bytes(aside / "model.safetensors", data)
    described = layouts.as_json(layouts.config_of(draft, config.format, config.dtype, origin.target, width))
    write_text(aside / CONFIG, described)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in (("model.safetensors", data), (CONFIG, described.encode()))}
    facts = facts_of(draft, target, config, width, origin) | {"sha256": sums}
    write_text(aside / FACTS, layouts.as_json(facts))
    write_text(aside / "README.md", card(draft, facts, origin, folder))


def facts_of(draft: Draft, target: Target, config: ExportConfig, width: int, origin: Origin) -> dict[str, Any]:
    """draftsmith.json: what a directory is of, for machines."""
    shape = target.shape
    return {
        "format_version": FORMAT_VERSION,
        "draftsmith": importlib.metadata.version("draftsmith"),
        "draft": next(name for name, kind in DRAFTS.items() if type(draft) is kind),
        "format": config.format,
        "dtype": config.dtype,
        "layers": {"ids": list(draft.layers), "meaning": "output of decoder block i, counted from 0, before the final norm"},
        "draft_tokens": width,
        "target": {
            "name": origin.target, "revision": origin.revision, "fingerprint": target.fingerprint, "tokenizer": origin.tokenizer,
            "hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size, "layers": shape.layers, "model_type": shape.model_type,
        },
    }  # fmt: skip


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
                    f"{features.sample.id!r}, token {stop}); the directory is wrong: do not serve it"
                )
            compared += 1
    return compared


def require_equal(again: Draft, written: Draft, folder: Path) -> None:
    """Bit for bit: rounding on the way in would hide behind equal proposals."""
    plain = written.plain_state()
    for name, tensor in again.plain_state().items():
        if not torch.equal(tensor, plain[name]):
            raise ValueError(f"{folder}: tensor {name}, read back, differs from the draft's; the directory is wrong: do not serve it")


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
