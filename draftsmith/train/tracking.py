"""Logs of a run: `metrics.jsonl` holds what is the same on every repetition, `timing.jsonl` what this machine took."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.core.disk import append_text, write_text
from draftsmith.core.types import Ratio


class Tracker:
    """Appends JSON lines; a resumed run first drops lines of steps after its checkpoint, so that none is doubled."""

    def __init__(self, run: Path, resumed_step: int, tensorboard: bool) -> None:
        """Raises ValueError when TensorBoard is asked for but not installed."""
        run.mkdir(parents=True, exist_ok=True)
        self._files = {name: run / f"{name}.jsonl" for name in ("metrics", "timing")}
        for path in self._files.values():
            _truncate(path, resumed_step)
        self._board = _tensorboard(run, resumed_step) if tensorboard else None

    def log(self, step: int, metrics: Mapping[str, Any], timing: Mapping[str, Any], kind: str = "train") -> None:
        """One line in each file."""
        for name, values in (("metrics", metrics), ("timing", timing)):
            if values:
                append_text(self._files[name], json.dumps({"step": step, "kind": kind, **values}) + "\n")
        if self._board is not None:
            for name, value in {**metrics, **timing}.items():
                for i, x in enumerate(value if isinstance(value, list) else [value]):
                    if x is not None:
                        self._board.add_scalar(f"{kind}/{name}" + (f"/{i + 1}" if isinstance(value, list) else ""), x, step)


def plain(metrics: Mapping[str, Ratio]) -> dict[str, Any]:
    """Ratios divided: numbers and lists for JSON (None where there is no value)."""
    return {name: _number(ratio.value.tolist()) for name, ratio in metrics.items()}


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(v) for v in value]
    return None if value != value else round(value, 6)


def _truncate(path: Path, step: int) -> None:
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    write_text(path, "".join(kept))


def _tensorboard(run: Path, step: int) -> Any:
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise ValueError("train.tensorboard needs the package tensorboard: pip install 'draftsmith[tensorboard]'") from error
    return module.SummaryWriter(run / "tensorboard", purge_step=step + 1)
