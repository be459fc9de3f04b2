"""README.md of an export: what the draft is of, how it was made, what was measured, how to serve it. Nothing stands in it that the run does not know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.drafts.base import Draft
from draftsmith.export.layouts import ENGINES, refusals, serve_command


@dataclass(frozen=True)
class Origin:
    """Where a draft comes from."""

    target: str
    """As a server would be given it: a hub id or a directory."""
    revision: str | None = None
    tokenizer: str | None = None
    """Fingerprint of the target's tokenizer; None when nobody looked."""
    data: tuple[str, ...] = ()
    """One line for each split: sources and counts."""
    training: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = ""
    """The resolved recipe, as YAML."""
    report: Mapping[str, Any] | None = None
    """report.json of the run, when it was judged."""


def card(draft: Draft, facts: Mapping[str, Any], origin: Origin, folder: Path) -> str:
    """The text; `folder` is where the export will lie."""
    target = facts["target"]
    rows = {
        "target": f"{target['name']}" + (f" at {target['revision']}" if target["revision"] else ""),
        "its shape": f"{target['layers']} blocks of width {target['hidden_size']:,}, {target['vocab_size']:,} ids ({target['model_type']})",
        "its fingerprint": f"{target['fingerprint']}; tokenizer {target['tokenizer'] or 'not recorded'}",
        "algorithm": facts["draft"],
        "captured": f"outputs of blocks {', '.join(map(str, draft.layers))} (counted from 0), before the final norm",
        "parameters": f"{sum(p.numel() for p in draft.parameters()) / 1e6:.2f}M, {facts['dtype']}, {facts['format']} format",
        **{name: str(value) for name, value in origin.training.items()},
        "made with": f"Draftsmith {facts['draftsmith']}",
    }
    parts = [
        f"# A draft for {Path(target['name']).name}\n\nIt proposes tokens that the target verifies in one pass (speculative decoding); it is no language model "
        "of its own, and of use with this target alone.",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]),
        _measured(origin.report, facts["draft_tokens"]),
        "## Data\n\n" + ("\n".join(f"* {line}" for line in origin.data) or "Not recorded."),
        _serving(draft, facts, origin.report, folder),
        "## Check\n\n    draftsmith verify " + str(folder) + f" --target {target['name']}",
        "## Licence\n\nNot chosen here. The embedding in the weights is the target's: the target's licence applies to it, and the data may have its own terms. "
        "Whoever publishes this directory states a licence in this place.",
    ]
    if origin.recipe:
        parts.append(f"## Recipe\n\n```yaml\n{origin.recipe.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _measured(report: Mapping[str, Any] | None, width: int) -> str:
    if report is None:
        return "## Measured\n\nNothing: this draft was not judged before it was exported (`draftsmith eval`)."
    rates = ", ".join(f"{rate:.1%}" for rate in report["acceptance"]["position_rates"])
    outputs = {
        True: "Outputs were equal to the target's own greedy output for all of them.",
        False: "Outputs were NOT equal to the target's own greedy output everywhere.",
        None: "Tokens were drawn, so outputs were not compared.",
    }[report["greedy_identical"]]
    lines = [
        f"Acceptance length **{report['acceptance_length']:.2f}** tokens a verification pass (the bonus token counts), over {report['prompts']} "
        f"prompts, {report['draft_tokens']} drafted tokens, temperature {report['temperature']:g} ({report['acceptance_rule']}), {report['dtype']}.",
        f"Accepted at each position, of all passes: {rates}. {outputs}",
    ]
    if report.get("simulated_acceptance_length") is not None:
        lines.append(f"The simulation at training time said {report['simulated_acceptance_length']:.2f}.")
    return "## Measured\n\n" + "\n".join(lines)


def _serving(draft: Draft, facts: Mapping[str, Any], report: Mapping[str, Any] | None, folder: Path) -> str:
    """Commands for each engine that can serve it, reasons for those that cannot."""
    found = refusals(type(draft), draft.config, draft.shape, facts["format"])
    target, width = facts["target"]["name"], (report or {}).get("best_width", facts["draft_tokens"])
    why = "predicted to be fastest on the machine that judged it" if report is not None and "best_width" in report else "the recipe's, not measured"
    lines = [
        f"## Serve\n\nRules were read in the versions named. The draft length of {width} is {why}; another machine may want another one. "
        "Draftsmith's own tests run vLLM, and llama.cpp's converter and server; the commands of SGLang and TensorRT-LLM follow their sources "
        "and were not run."
    ]
    for name, engine in ENGINES.items():
        lines.append(f"**{engine.title}** ({engine.checked})")
        if found[name]:
            lines.append("Cannot serve it: " + "; ".join(found[name]) + ".")
        else:
            lines.append(f"```sh\n{serve_command(name, type(draft), draft.config, draft.shape, target, str(folder), width)}\n```")
    return "\n\n".join(lines)
