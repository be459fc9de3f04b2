"""The report as tables: on the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.core import log

Report = Mapping[str, Any]
WAYS = {"of_chains": "chain", "of_trees": "tree"}


@dataclass(frozen=True)
class Table:
    """A title, and rows of text under names; the first column is text, the others are figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def markdown(self) -> str:
        """As a table of GitHub's Markdown."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return "\n".join([f"**{_escaped(self.title)}**", "", *("| " + " | ".join(_escaped(str(c)) for c in line) + " |" for line in lines), ""])


def _escaped(text: str) -> str:
    """Category names are the user's: none of their characters may end a cell or a line."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def show(report: Report) -> None:
    """Print the report's tables, and what to use."""
    for one in tables(report):
        log.table(one.title, one.columns, one.rows)
    log.say(advice(report))


def markdown(report: Report) -> str:
    """report.md: a title, the advice, and all tables."""
    head = f"# Acceptance of {report.get('draft', 'a draft')} for {report.get('target', 'a target')}"
    return "\n\n".join([head, advice(report), *(t.markdown() for t in tables(report))]).rstrip() + "\n"


def tables(report: Report) -> list[Table]:
    """Every table of the report."""
    found = [_acceptance(report, key, way) for key, way in WAYS.items() if key in report]
    found += [_curve(report[key], way) for key, way in WAYS.items() if key in report]
    return [*found, _race(report), *([_sets(report)] if "sets" in report else [])]


def advice(report: Report) -> str:
    """What to draft on this machine, predicted and measured; and why there are no trees where they were asked for."""
    lines = []
    for key, way in WAYS.items():
        if key in report:
            clock, drafted = report[key]["wall_clock"], report[key]["recommended"]
            lines.append(f"One prompt at a time: a {way} of {drafted} drafted, speedup {clock['speedup']:.2f} ({clock['predicted_speedup']:.2f} predicted).")
            many = report[key]["batch_curve"]
            if many is not None:
                point = max(many["points"], key=lambda p: p["speedup"])
                lines.append(f"{many['rows']} prompts together: a {way} of {point['drafted']}, speedup {point['speedup']:.2f} predicted.")
    lines += [f"No trees: {report['no_trees']}."] if report.get("no_trees") else []
    lines += ["Where a speedup is below 1, plain decoding is faster."] if any(" 0." in line for line in lines) else []
    return " ".join(lines)


def _acceptance(report: Report, key: str, way: str) -> Table:
    found = report[key]
    depth = len(found["acceptance"]["position_rates"])
    size = f"{depth} drafted tokens" if way == "chain" else "tree of {nodes} tokens, top_k {top_k}, depth {depth}".format(**found["width"])
    how = "greedy" if not report["temperature"] else f"temperature {report['temperature']:g}"
    columns = ["prompts", "number", "acceptance length", *(f"@{k}" for k in range(1, depth + 1))]
    rows = [[kind, a["prompts"], *_rates(a)] for kind, a in found["by_kind"].items()]
    rows.append(["all", report["prompts"], *_rates(found["acceptance"])])
    return Table(f"{size}, {how}, {report['dtype']}; @k: accepted at position k / passes", columns, rows)


def _rates(acceptance: Mapping[str, Any]) -> list[str]:
    return [f"{acceptance['acceptance_length']:.2f}", *(f"{r:.0%}" for r in acceptance["position_rates"])]


def _curve(found: Mapping[str, Any], way: str) -> Table:
    many = found["batch_curve"]
    columns = [f"drafted ({way})", "acceptance length", "draft ms", "verify ms", "speedup"]
    rows: list[list[object]] = [["none", "1.00", "", f"{found['plain_ms']:.1f}", "1.00"], *(_point(p) for p in found["curve"])]
    if many is not None:
        columns += [f"draft ms x{many['rows']}", f"verify ms x{many['rows']}", f"speedup x{many['rows']}"]
        added: list[list[object]] = [["", f"{many['plain_ms']:.1f}", "1.00"], *(_point(p)[2:] for p in many["points"])]
        rows = [[*row, *more] for row, more in zip(rows, added, strict=True)]
    return Table("Predicted on this machine: median cost of a pass, and speedup" + (f"; x{many['rows']}: prompts together" if many else ""), columns, rows)


def _point(point: Mapping[str, Any]) -> list[object]:
    return [point["drafted"], f"{point['acceptance_length']:.2f}", f"{point['draft_ms']:.1f}", f"{point['verify_ms']:.1f}", f"{point['speedup']:.2f}"]


def _race(report: Report) -> Table:
    """Measured: one prompt at a time, and all prompts in batches."""
    clock, chain = report["wall_clock"], report["of_chains"]
    same = "drawn" if report["greedy_identical"] is None else f"{_all_but(report['differing_prompts'])} equal to plain greedy"
    rows: list[list[object]] = [["plain", f"{clock['plain_tokens_per_second']:.1f}", "1.00", f"{report['plain_batched_tokens_per_second']:.1f}", "1.00", ""]]
    for key, way in WAYS.items():
        if key in report:
            one = report[key]
            speed = [f"{one['wall_clock']['tokens_per_second']:.1f}", f"{one['wall_clock']['speedup']:.2f}"]
            whole = one["width"]["nodes"] if way == "tree" else one["width"]
            batched = [f"{one['batched_tokens_per_second']:.1f}", f"{one['batched_speedup']:.2f}"]
            rows.append([f"{way}, {one['recommended']} drafted ({whole} in batches)", *speed, *batched, same])
    title = (
        f"Measured: {clock['prompts']} prompts one at a time; all in batches of up to {chain['batch']}, until the last answer ends; {report['threads']} threads"
    )
    return Table(title, ["decoding", "tokens/s", "speedup", "tokens/s in batches", "speedup", "outputs"], rows)


def _all_but(differing: Sequence[str]) -> str:
    return f"all but {len(differing)}" if differing else "all"


def _sets(report: Report) -> Table:
    def why(counts: Mapping[str, Any]) -> str:
        return "; ".join(f"{number} {reason}" for reason, (number, _) in counts["reasons"].items())

    rows = [[name, counts["read"], counts["kept"], counts["dropped"], why(counts)] for name, counts in report["sets"].items()]
    return Table("Where prompts came from", ["set", "read", "asked", "left out", "why"], rows)
