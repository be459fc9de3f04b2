"""A trained draft, shipped, and what an engine made of it beside what our evaluator says: the parts that tests of several engines share."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import ROOT, environment

from draftsmith.core.config import load, parse
from draftsmith.eval.acceptance import Acceptance
from draftsmith.eval.decode import Decoded
from draftsmith.pipeline import Run, capture, train
from draftsmith.quickstart import RECIPE
from draftsmith.recipe import Recipe

WIDTH, MAX_NEW, PROMPTS = 5, 48, 40
TOLERANCE = 0.03
"""Relative difference of acceptance length and position rates that counts as agreement."""
FEW = 2
"""Accepted tokens of a position that may be more or fewer: 3 % of a few dozen is none, and one near tie that rounds the other way moves one or two."""
SMALL = ("data.limit=48", "data.held_out_features=12", "draft.steps=3", "train.steps=80", "train.evaluate_every=80", f"eval.prompts={PROMPTS}")


def missing(what: str) -> None:
    """Skips, or fails where `make test-engines` has promised that the engines are there."""
    text = f"{what} is not in {environment()}: run `make engines` (about 4 GB), or set DRAFTSMITH_ENGINES to such an environment"
    if os.environ.get("DRAFTSMITH_ENGINES_REQUIRED"):
        pytest.fail(text)
    pytest.skip(text)


def require(package: str) -> None:
    """The engines' environment has this Python package."""
    if not any(environment().glob(f"lib/python*/site-packages/{package}")):
        missing(package)


def drive(driver: str, asked: dict[str, Any], folder: Path, settings: dict[str, str]) -> dict[str, Any]:
    """Run a driver of this folder under the engines' Python, with environment variables `settings`. Returns what it wrote; a failure shows its log's end."""
    source, result, log = (folder / f"{driver}.{part}" for part in ("asked.json", "answered.json", "log"))
    source.write_text(json.dumps(asked))
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [environment() / "bin" / "python", Path(__file__).with_name(f"{driver}.py"), source, result]
    with log.open("w") as output:
        done = subprocess.run([str(part) for part in command], env=clean | {"HF_HUB_OFFLINE": "1"} | settings, stdout=output, stderr=output, check=False)
    assert done.returncode == 0, log.read_text()[-4000:]
    return json.loads(result.read_text())


def trained_run(folder: Path) -> Run:
    """The quickstart's run, where CI or a user left one; otherwise a small draft is trained in `folder`."""
    for name in ("ci", "quickstart"):
        recipe = ROOT / "runs" / name / "run.yaml"
        if (recipe.parent / "export" / "config.json").exists():
            found = load(Recipe, recipe)
            return Run(found.model_copy(update={"run": str(recipe.parent), "eval": found.eval.model_copy(update={"prompts": PROMPTS})}))
    run = Run(parse(Recipe, RECIPE.read_text(), [f"run={folder}", *SMALL], str(RECIPE)))
    capture(run)
    train(run)
    return run


@dataclass(frozen=True)
class Served:
    """What an engine answered, passes counted as our evaluator counts them, and its own totals where it has them."""

    answers: tuple[Decoded, ...]
    counters: dict[str, Any]
    layers: dict[str, Any]


def cut(accepted: Sequence[int], length: int) -> list[int]:
    """Accepted tokens of each pass as our evaluator counts them, from an engine that counts them before an answer is cut at its end.

    The answer has `length` tokens; the first comes from the prompt's pass. A pass that accepts a tokens adds a + 1; in the last one an end token or the
    limit may leave fewer, and only those that became part of the answer count here.
    """
    counted, written = [], 1
    for n in accepted:
        counted.append(min(n, length - written))
        written += min(n + 1, length - written)
    return counted


def disagreements(ours: Sequence[Decoded], theirs: Sequence[Decoded], width: int = WIDTH) -> list[str]:
    """What an engine accepts otherwise than our evaluator: acceptance length, rate of each position, passes of single answers. Empty when they agree."""
    one, other = Acceptance.of(ours, width), Acceptance.of(theirs, width)
    found = []
    if abs(other.length - one.length) > TOLERANCE * one.length:
        found.append(f"acceptance length {other.length:.4f}, here {one.length:.4f}")
    for k in range(1, width + 1):
        mine, served = (sum(figures.histogram[k:]) for figures in (one, other))
        rates = served / max(other.steps, 1), mine / max(one.steps, 1)
        if abs(rates[0] - rates[1]) > max(TOLERANCE * rates[1], FEW / max(one.steps, 1)):
            found.append(f"position {k}: accepted {served} of {other.steps}, here {mine} of {one.steps}")
    differing = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a.accepted != b.accepted]
    if len(differing) > len(ours) // 10:
        found.append(f"passes of {len(differing)} of {len(ours)} answers accept other numbers of tokens")
    return found
