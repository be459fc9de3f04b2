"""Everything of `draftsmith bench` around the measuring: prompts, the run's report, files to write, and what becomes of a partial result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.bench import picture, report
from draftsmith.bench.agreement import of_report
from draftsmith.bench.run import SPECULATIVE, BenchSettings, measure, split
from draftsmith.core.disk import write_text
from draftsmith.core.log import Interrupted, say
from draftsmith.data import bundled
from draftsmith.data.conversations import Conversation


@dataclass(frozen=True)
class Outputs:
    """A run's report to compare with, and files to write; None: not asked for."""

    report: Path | None = None
    out: Path | None = None
    html: Path | None = None


def bench(asked: Sequence[Conversation] | None, source: str, number: int | None, settings: BenchSettings, outputs: Outputs) -> dict[str, Any]:
    """Measure, print, write and return the figures; `asked` None: the bundled held-out prompts, with the recorded answers of earlier turns.

    Raises ValueError for bad input, and, after everything was written, when the measurement is partial or nothing was answered; Interrupted after Ctrl-C.
    """
    compared = _read(outputs.report)
    conversations = bundled.conversations("held-out") if asked is None else asked
    source = "the bundled held-out set" if asked is None else source
    _ = settings.answers  # refuses bad values before anything is asked
    prompts, warm_up = split(conversations, number, settings.warm_up)
    results = measure(prompts, warm_up, settings)
    found = report.build(results, settings, prompts, source, compared)
    report.show(found)
    _write(found, outputs)
    _require_whole(found, outputs)
    return found


def _read(path: Path | None) -> Mapping[str, Any] | None:
    """A report.json, refused before anything is measured if it is none."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        of_report(found)
    except FileNotFoundError:
        raise ValueError(f"--report {path}: no such file; `draftsmith eval` writes report.json into the folder of a run") from None
    except ValueError as error:
        raise ValueError(f"--report {path}: {error}") from None
    return found


def _write(found: Mapping[str, Any], outputs: Outputs) -> None:
    if outputs.out is not None:
        write_text(outputs.out, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        say(f"all figures: {outputs.out}")
    if outputs.html is not None:
        write_text(outputs.html, picture.page(found))
        say(f"the picture: {outputs.html}")


def _require_whole(found: Mapping[str, Any], outputs: Outputs) -> None:
    kept = f"; what was measured is in {outputs.out}, marked as partial" if outputs.out is not None else "; what was measured stands above"
    if found["stopped"] == "stopped by Ctrl-C":
        raise Interrupted(f"stopped{kept}")
    if found["stopped"]:
        raise ValueError(f"{found['stopped']}{kept}")
    for level in found["levels"]:
        for side in found["servers"]:
            if not level[side]["answered"]:
                kind, count = next(iter(level[side]["errors"].items()))
                name = "" if len(found["servers"]) == 1 and side == SPECULATIVE else f"{side} server, "
                raise ValueError(f"{name}{level['level']}: no request was answered; {count} x {kind} {level[side]['first_messages'][kind]}".rstrip())
