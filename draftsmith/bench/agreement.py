"""Three numbers side by side: acceptance length simulated in training, decoded by our evaluator, measured in the engine. A gap is a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

GAP = 0.05
"""Relative difference of two acceptance lengths above which it is a finding."""
SIMULATED, DECODED, SERVED = "simulated in training", "decoded by our evaluator", "measured in the engine"
CHECKS = (
    "layer ids: does the engine capture the same blocks? An id means a block's output in SGLang and a block's input in vLLM and llama.cpp",
    "tensors that are missing or that the engine's log says it ignored: fc, norm, lm_head, d2t",
    "vocabulary map: d2t is an offset (target id = draft id + d2t[draft id]) and stands in the same file as the other tensors",
    "an unnormed state: captured features are not passed through the final norm; the state that recurs is the one that training used",
    "another chat template or tokenizer: compare the engine's prompt token ids with ours",
    "sampling temperature: at a temperature above 0 fewer drafted tokens are accepted; the report is greedy",
    "draft length: the engine's number of speculative tokens against the report's draft_tokens",
    "dtype: the report decodes in float32 unless it says otherwise; bfloat16 moves near ties",
)
"""What to check first, in this order."""


@dataclass(frozen=True)
class Figure:
    """One acceptance length, with the rates of its drafted positions and what it was measured on, as far as that is known."""

    name: str
    length: float
    position_rates: tuple[float, ...] | None = None
    draft_tokens: int | None = None
    prompts: int | None = None
    temperature: float | None = None
    kinds: Mapping[str, int] | None = None

    def at(self, width: int) -> float:
        """The length at a smaller number of drafted tokens, from the rates of the first positions."""
        assert self.position_rates is not None
        return 1 + sum(self.position_rates[:width])


def of_report(report: Mapping[str, Any]) -> list[Figure]:
    """What a run's report.json says. Raises ValueError for what is no report."""
    try:
        acceptance, length = report["acceptance"], float(report["acceptance_length"])
        rates, width = tuple(float(r) for r in acceptance["position_rates"]), int(report["draft_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no report of `draftsmith eval`: it has no {error}; expected acceptance_length, draft_tokens and acceptance.position_rates") from None
    decoded = Figure(DECODED, length, rates, width, report.get("prompts"), report.get("temperature"), _kinds(report))
    simulated = report.get("simulated_acceptance_length")
    if simulated is None:
        return [decoded]
    return [Figure(SIMULATED, float(simulated), draft_tokens=report.get("simulated_draft_tokens")), decoded]


def agreement(figures: Sequence[Figure]) -> dict[str, Any]:
    """Compare neighbours in the order given. Returns for JSON: figures, `differences` (what makes them less comparable), `findings` (gaps above 5 %),
    `check_first` (empty without a finding).

    Two figures of different draft lengths are compared over the positions that both have, and not at all where rates are not known.
    """
    differences: list[str] = []
    findings: list[str] = []
    gaps: list[dict[str, Any]] = []
    for a, b in pairwise(figures):
        differences += _differences(a, b)
        lengths = _comparable(a, b)
        if lengths is None:
            differences.append(f"{a.name} and {b.name} are not compared: other draft lengths, and no rates by position to bring them to one")
            continue
        before, after = lengths
        gap = after / before - 1
        gaps.append({"from": a.name, "to": b.name, "lengths": [round(before, 4), round(after, 4)], "gap": round(gap, 4)})
        if abs(gap) > GAP:
            findings.append(f"{b.name} {after:.2f}, {a.name} {before:.2f}: {gap:+.1%}{_where(a, b)}")
    return {
        "figures": [
            {
                "name": f.name, "acceptance_length": f.length, "draft_tokens": f.draft_tokens,
                "position_rates": None if f.position_rates is None else list(f.position_rates),
            }
            for f in figures
        ],
        "gaps": gaps, "differences": differences, "findings": findings, "check_first": list(CHECKS) if findings else [],
    }  # fmt: skip


def _comparable(a: Figure, b: Figure) -> tuple[float, float] | None:
    if a.draft_tokens is None or b.draft_tokens is None or a.draft_tokens == b.draft_tokens:
        return a.length, b.length
    if a.position_rates is None or b.position_rates is None:
        return None
    width = min(len(a.position_rates), len(b.position_rates))
    return a.at(width), b.at(width)


def _differences(a: Figure, b: Figure) -> list[str]:
    said: list[str] = []
    both = f"{a.name} and {b.name}"
    if None not in (a.draft_tokens, b.draft_tokens) and a.draft_tokens != b.draft_tokens:
        said.append(f"{both}: {a.draft_tokens} and {b.draft_tokens} drafted tokens; compared over the first {min(a.draft_tokens or 0, b.draft_tokens or 0)}")
    elif a.draft_tokens != b.draft_tokens:
        untold, told = (a, b) if a.draft_tokens is None else (b, a)
        said.append(f"{both}: the number of drafted tokens is known for {told.name} ({told.draft_tokens}) and not for {untold.name}")
    if None not in (a.prompts, b.prompts) and a.prompts != b.prompts:
        said.append(f"{both}: {a.prompts} and {b.prompts} prompts, so not the same ones")
    elif a.kinds is not None and b.kinds is not None and a.kinds != b.kinds:
        said.append(f"{both}: {a.prompts} prompts each, but not the same ones: {_listed(a.kinds)} and {_listed(b.kinds)}")
    if None not in (a.temperature, b.temperature) and a.temperature != b.temperature:
        said.append(f"{both}: temperature {a.temperature:g} and {b.temperature:g}")
    return said


def _kinds(report: Mapping[str, Any]) -> dict[str, int] | None:
    kinds = report.get("by_kind")
    return {kind: int(figures["prompts"]) for kind, figures in kinds.items()} if kinds else None


def _listed(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))


def _where(a: Figure, b: Figure) -> str:
    """At which drafted position the two part."""
    if not a.position_rates or not b.position_rates:
        return ""
    pairs = enumerate(zip(a.position_rates, b.position_rates, strict=False), 1)
    return next((f"; they part at position {k}: {x:.0%} and {y:.0%}" for k, (x, y) in pairs if abs(y - x) > GAP * max(x, y)), "")
