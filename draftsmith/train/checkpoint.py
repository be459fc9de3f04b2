"""Checkpoints: a folder each, whole or absent; the last few and the best are kept.

checkpoints/step-000200/draft.safetensors   float32 weights and the constants that go with them
checkpoints/step-000200/optimizer.pt        moments
checkpoints/step-000200/state.json          step, micro-batches consumed, best so far, and what the weights are of
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from draftsmith.core.disk import PARTIAL, new_folder, write_bytes, write_text

_STATE = "state.json"
_FILES = ("draft.safetensors", "optimizer.pt", _STATE)


@dataclass
class TrainState:
    """Where a run stands after `step` updates; `micro` counts consumed micro-batches, which is all that a source needs to go on."""

    step: int = 0
    micro: int = 0
    best_step: int = -1
    best_acceptance_length: float = 0.0
    drafted: int | None = None
    """Drafted tokens that it was simulated with; as many as training when None."""


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
            aside = folder(run, step).with_suffix(PARTIAL)
            folder(run, step).rename(aside)  # never half a checkpoint under a whole one's name
            shutil.rmtree(aside)


def steps(run: Path) -> list[int]:
    """Steps of the whole checkpoints of a run, ascending; half-written ones do not count."""
    found = [p for p in run.glob("checkpoints/step-*") if p.name.removeprefix("step-").isdigit()]
    return sorted(int(p.name.removeprefix("step-")) for p in found if all((p / name).is_file() for name in _FILES))


def clear_leftovers(run: Path) -> None:
    """Remove what a killed run left half-written."""
    for path in run.glob(f"checkpoints/*{PARTIAL}"):
        shutil.rmtree(path)


def read_state(run: Path, step: int) -> tuple[TrainState, dict[str, Any]]:
    """State and facts of a checkpoint."""
    path = folder(run, step) / _STATE
    try:
        stored = json.loads(path.read_text())
        return TrainState(**stored["train"]), stored["facts"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> ValueError:
    """What to say of a checkpoint file that cannot be read."""
    return ValueError(f"{path} is damaged ({error}); delete the folder {path.parent}, and the run continues from the checkpoint before it")


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
    except SafetensorError as error:
        raise damaged(path, error) from error
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the recipe's draft ({error}); resume with the recipe that made it, or choose another run folder") from error


def load_optimizer(run: Path, step: int, optimizer: torch.optim.Optimizer) -> None:
    """Moments, in float32 as they were saved."""
    path = folder(run, step) / "optimizer.pt"
    try:
        optimizer.load_state_dict(torch.load(path, weights_only=True))
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise damaged(path, error) from error


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
