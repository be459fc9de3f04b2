"""The trained draft, shipped once for all engines, and what our evaluator says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engines import environment
from serving import MAX_NEW, PROMPTS, WIDTH, missing, trained_run

from draftsmith.eval.decode import Decoded
from draftsmith.eval.prompts import Prompt
from draftsmith.export.read import read
from draftsmith.pipeline import Run, decoders, evaluation_prompts
from draftsmith.shipping import export_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Session fixtures come before all others: without any engine nothing may be trained."""
    if not environment().is_dir():
        missing("an engine")
    return trained_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def shipped(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported anew by the code under test."""
    return export_run(run, tmp_path_factory.mktemp("shipped") / "export")


@pytest.fixture(scope="session")
def prompts(run: Run) -> list[Prompt]:
    """Held-out ones."""
    found, _ = evaluation_prompts(run)
    assert len(found) == PROMPTS
    return found


@pytest.fixture(scope="session")
def ours(run: Run, shipped: Path, prompts: list[Prompt]) -> list[Decoded]:
    """Our evaluator, with the draft read back from the export, on the same prompts with the same limits, in float32."""
    _, speculative = decoders(run, read(shipped))
    return replace(speculative, width=WIDTH).decode([p.token_ids for p in prompts], MAX_NEW)
