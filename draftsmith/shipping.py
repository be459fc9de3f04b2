"""The stages behind training, glued: export the draft of a run, verify an exported directory, import a published draft."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.core.disk import new_folder
from draftsmith.core.log import say, table
from draftsmith.core.types import Features
from draftsmith.data.config import Sources
from draftsmith.data.show import describe
from draftsmith.data.template import ChatTemplate
from draftsmith.eval.prompts import spread
from draftsmith.export.card import Origin
from draftsmith.export.layouts import ENGINES, EngineName
from draftsmith.export.read import Published, assemble, published, read, require_embedding
from draftsmith.export.verify import Check, Subject, verify
from draftsmith.export.write import ExportConfig, export, require_equal, write
from draftsmith.pipeline import Run, load_target, load_template, resolved
from draftsmith.target.config import TargetConfig

COMPARED = 8
"""Held-out samples on which proposals are compared."""


def export_run(run: Run, folder: Path | None = None) -> Path:
    """Ship the best checkpoint; its proposals are compared on held-out samples before it is put in place."""
    draft, step = run.best_draft()
    folder = folder or run.folder / "export"
    target = load_target(run.chosen, "cpu", None)
    compared = export(draft.cpu(), target, folder, run.recipe.export, _samples(run), run.recipe.eval.width, origin(run, step))
    say(f"exported step {step:,} to {folder}: read back, {compared} proposals equal the checkpoint's")
    return folder


def origin(run: Run, step: int) -> Origin:
    """What the run knows of its draft."""
    report = run.folder / "report.json"
    judged: dict[str, Any] | None = json.loads(report.read_text()) if report.is_file() else None
    training: dict[str, Any] = {"trained": f"{step:,} of {run.recipe.train.steps:,} steps"} if step else {}
    if run.recipe.draft.init_from is not None:
        training["started from"] = run.recipe.draft.init_from
    data = run.recipe.data
    splits = (("train", data.train, run.train), ("held out", data.held_out, run.held_out))
    lines = tuple(f"{name}: {_paths(sources)}; {describe(*found)}" for name, sources, found in splits)
    return Origin(
        run.chosen.where, run.chosen.revision, tokenizer_fingerprint(run.template), lines, training, run.resolved_recipe,
        judged if judged is not None and judged.get("step") == step else None,
    )  # fmt: skip


def _paths(sources: Sources) -> str:
    return ", ".join(source.path for source in sources)


def _samples(run: Run) -> list[Features]:
    maker = run.capture()
    return [maker(sample) for sample in spread(run.samples("held-out"), COMPARED)]


def tokenizer_fingerprint(template: ChatTemplate) -> str:
    """Sixteen hex digits of which token every id is."""
    vocabulary = template.tokenizer.get_vocab()
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()[:16]


def verify_directory(folder: Path, target: str | None, run: Run | None, engines: Sequence[str], environment: Path | None) -> bool:
    """Check an exported directory, print a table, and say whether every check that could be made passed."""
    unknown = [name for name in engines if name not in ENGINES]
    if unknown:
        raise ValueError(f"--engine {unknown[0]}: expected one of {', '.join(ENGINES)}")
    asked: tuple[EngineName, ...] = tuple(name for name in ENGINES if engines.count(name))
    chosen = run.chosen if run is not None and target is None else None if target is None else resolved(TargetConfig(where=target))

    def subject(found: Published) -> Subject:
        known = None if chosen is None else load_target(chosen, "cpu", None)
        tokens = None if chosen is None else tokenizer_fingerprint(load_template(chosen))
        width = found.facts.get("draft_tokens", 5)
        if run is None:
            return Subject(found, known, tokens, width=width, engines=asked, environment=environment)
        draft = run.best_draft()[0].cpu()
        wanted = asked or run.recipe.export.engines
        return Subject(found, known, tokens, draft, _samples(run), width, wanted, environment)

    checks = verify(folder, subject)
    show(folder, checks)
    return all(check.outcome != "failed" for check in checks)


def show(folder: Path, checks: list[Check]) -> None:
    """A table of outcomes, then every fault in full."""
    table(f"{folder}", ["check", "outcome"], [[check.name, check.outcome] for check in checks])
    for check in checks:
        if check.detail:
            say(f"{check.outcome}: {check.name}: {check.detail}")
    counts = {outcome: sum(check.outcome == outcome for check in checks) for outcome in ("passed", "failed", "skipped")}
    say(f"{len(checks)} checks: " + ", ".join(f"{number} {outcome}" for outcome, number in counts.items()))


def import_draft(folder: Path, to: Path, target: str) -> None:
    """Write a published draft as Draftsmith exports its own, read back and compared bit for bit. Raises ValueError for one that is not of this target."""
    chosen = resolved(TargetConfig(where=target))
    weights = load_target(chosen, "cpu", None)
    found = published(folder)
    require_embedding(found, weights.embedding_VH)
    draft = assemble(found, weights.shape)
    known = Origin(chosen.where, chosen.revision, tokenizer_fingerprint(load_template(chosen)), training={"imported from": str(folder)})
    with new_folder(to) as aside:
        write(draft, weights, aside, ExportConfig(), found.facts.get("draft_tokens", 5), known, to)
        require_equal(read(aside, weights.shape), draft, aside)
    say(f"imported {folder} ({found.form} form, {len(found.tensors)} tensors) to {to}, float32")
    say(f"evaluate it, or train from it, with a recipe in which draft.init_from is {to}")
