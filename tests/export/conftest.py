"""A draft with no idle part, its export, and a way to plant faults in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import CONFIG, LAYERS, ORIGIN, WIDTH, tiny_draft
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.core.types import Features, FeatureSpec, Sample
from draftsmith.drafts.eagle3 import Eagle3
from draftsmith.export.write import export
from draftsmith.target.capture import Capture
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target


@pytest.fixture(scope="module")
def found(target_model: TargetModel, target: Target) -> list[Features]:
    generator = torch.Generator().manual_seed(2)
    capture = Capture(target_model, target, FeatureSpec(LAYERS, "float32"))
    rows = [torch.randint(3, 259, (n,), generator=generator) for n in (12, 2, 23, 31)]
    return [capture(Sample(f"s{i}", ids, torch.arange(len(ids)) >= len(ids) // 2)) for i, ids in enumerate(rows)]


@pytest.fixture(scope="module")
def draft(target: Target, found: list[Features]) -> Eagle3:
    return tiny_draft(target, found)


@pytest.fixture(scope="module")
def folder(draft: Eagle3, target: Target, found: list[Features], tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("export") / "draft"
    export(draft, target, where, CONFIG, found, WIDTH, ORIGIN)
    return where


@pytest.fixture
def fields(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture
def copied(tmp_path: Path, fields: dict[str, Any], tensors: dict[str, Tensor]) -> Callable[[dict[str, Any] | None, dict[str, Tensor] | None], Path]:
    """Write the directory with other fields or tensors; None leaves a file out."""

    def write(changed: dict[str, Any] | None = fields, other: dict[str, Tensor] | None = tensors) -> Path:
        if changed is not None:
            (tmp_path / "config.json").write_text(json.dumps(changed))
        if other is not None:
            save_file(other, tmp_path / "model.safetensors")
        return tmp_path

    return write
