"""Checkpoints: a folder each, whole or absent; the last few and the best are kept.

checkpoints/step-000200/draft.safetensors   float32 weights and the constants that go with them
checkpoints/step-000200/optimizer.pt        moments
checkpoints/step-000200/state.json          step, micro-batches consumed, best so far, and what the weights are of
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

from draftsmith.core.disk import new_folder, write_bytes, write_text

_STATE = "state.json"


@dataclass
class TrainState:
    """Where a run stands after `step` updates; `micro` counts consumed micro-batches, which is all that a source needs to go on."""

    step: int = 0
    micro: int = 0
    best_step: int = -1
    best_acceptance_length: float = 0.0


def folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"step-{step:06d}"


def save_checkpoint(run: Path, draft: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState, facts: Mapping[str, Any], keep: int) -> None:
    """Write aside, rename, then drop what is neither among the last `keep` nor the best. Raises DiskError on a full disk."""
    with new_folder(folder(run, state.step)) as aside:
        write_bytes(aside / "draft.safetensors", save({k: v.contiguous() for k, v in draft.state_dict().items()}))
        write_bytes(aside / "optimizer.pt", _torch_bytes(optimizer.state_dict()))
        write_text(aside / _STATE, json.dumps({"train": asdict(state), "facts": dict(facts)}, indent=1))
    for step in steps(run)[:-keep]:
        if step != state.best_step:
            shutil.rmtree(folder(run, step))


def steps(run: Path) -> list[int]:
    """Steps of the whole checkpoints of a run, ascending; half-written ones do not count."""
    found = run.glob(f"checkpoints/step-*/{_STATE}")
    return sorted(int(p.parent.name.removeprefix("step-")) for p in found if p.parent.name.removeprefix("step-").isdigit())


def read_state(run: Path, step: int) -> tuple[TrainState, dict[str, Any]]:
    """State and facts of a checkpoint."""
    stored = json.loads((folder(run, step) / _STATE).read_text())
    return TrainState(**stored["train"]), stored["facts"]


def require_same(run: Path, facts: Mapping[str, Any]) -> None:
    """Refuse to resume under other settings. Raises ValueError naming the first that differs; nothing to compare is fine."""
    found = steps(run)
    stored = read_state(run, found[-1])[1] if found else facts
    for name, value in facts.items():
        if stored.get(name) != value:
            raise ValueError(
                f"{folder(run, found[-1])} was trained with {name} = {stored.get(name)}, the recipe now says {value}; "
                "restore it to resume, or choose another run folder"
            )


def load_draft(run: Path, step: int, draft: nn.Module) -> None:
    """Weights into a draft of the same configuration. Raises ValueError when they do not fit."""
    path = folder(run, step) / "draft.safetensors"
    try:
        draft.load_state_dict(load_file(path))
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the recipe's draft ({error}); resume with the recipe that made it, or choose another run folder") from error


def load_optimizer(run: Path, step: int, optimizer: torch.optim.Optimizer) -> None:
    """Moments, in float32 as they were saved."""
    optimizer.load_state_dict(torch.load(folder(run, step) / "optimizer.pt", weights_only=True))


def best_step(run: Path) -> int:
    """The checkpoint with the longest simulated acceptance length. Raises ValueError when the run has none."""
    found = steps(run)
    if not found:
        raise ValueError(f"no checkpoint in {run / 'checkpoints'}: run `draftsmith train` first")
    state, _ = read_state(run, found[-1])
    return state.best_step if state.best_step in found else found[-1]


def _torch_bytes(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
