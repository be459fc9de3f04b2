"""The report as one HTML file: no script, no network. `page.html` is the frame and its styles; charts are SVG written here, by `charts.py`.

Whatever comes from prompts and answers is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from draftsmith.data.page import pieces_of
from draftsmith.data.template import ChatTemplate
from draftsmith.eval import charts
from draftsmith.eval.show import WAYS, Report, Table, advice, tables

FRAME = Path(__file__).with_name("page.html")
PROMPT_TOKENS = 120
"""The end of a prompt that is shown."""


def html(report: Report, template: ChatTemplate) -> str:
    """The page for a report of `evaluate`, with the names of target and draft that a run adds."""
    title = f"{report.get('draft', 'draft')} for {report.get('target', 'the target')}"
    parts = [_header(title, report), *(_way(report, key, way) for key, way in WAYS.items() if key in report)]
    parts.append(_section("Speedup by drafted tokens", advice(report), charts.curves(_lines(report))))
    parts += [_examples(report[key], way, template) for key, way in WAYS.items() if key in report]
    parts.append(_section("All figures", "", "".join(_table(t) for t in tables(report))))
    return FRAME.read_text(encoding="utf-8").replace("{{TITLE}}", escape(title)).replace("{{BODY}}", "\n".join(parts))


def _header(title: str, report: Report) -> str:
    identical = report["greedy_identical"]
    outputs = "drawn from the target" if identical is None else "all equal to plain greedy" if identical else f"{len(report['differing_prompts'])} differ"
    how = "greedy" if not report["temperature"] else f"temperature {report['temperature']:g}"
    figures = [(f"{report['of_chains']['acceptance']['acceptance_length']:.2f}", f"acceptance length, chains of {report['draft_tokens']}")]
    if "of_trees" in report:
        trees = report["of_trees"]
        figures.append((f"{trees['acceptance']['acceptance_length']:.2f}", f"acceptance length, trees of {trees['width']['nodes']}"))
    for key, way in WAYS.items():
        if key in report:
            figures.append((f"{report[key]['wall_clock']['speedup']:.2f}", f"speedup measured, {way} of {report[key]['recommended']}"))
    boxes = "".join(f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in figures)
    state = "quiet" if identical is None else "good" if identical else "bad"
    asked = f"{_many(report['prompts'], 'prompt')}, {how}, {report['dtype']}"
    told = f'<p>{escape(asked)}; <span class="{state}">outputs {escape(outputs)}</span></p>'
    return f'<header><h1>{escape(title)}</h1>{told}<div class="figures">{boxes}</div></header>'


def _way(report: Report, key: str, way: str) -> str:
    found = report[key]
    panels = [(kind, a) for kind, a in found["by_kind"].items()]
    panels = [("all", found["acceptance"] | {"prompts": report["prompts"]}), *(panels if len(panels) > 1 else [])]
    drawn = "".join(charts.bars(f"{kind}: {a['acceptance_length']:.2f}", _many(a["prompts"], "prompt"), _percent(a["position_rates"])) for kind, a in panels)
    note = f"Share of passes that accepted the token at each position of the {way}, by category, with the acceptance length: 1 + accepted / passes."
    steps = found["acceptance"]["steps"]
    shares = [(str(n), count / max(steps, 1)) for n, count in enumerate(found["acceptance"]["histogram"])]
    histogram = charts.bars("Accepted a pass", _many(steps, "pass", "es"), shares)
    label = "Chains" if way == "chain" else "Trees"
    return _section(f"{label}: acceptance by position and category", note, f'<div class="panels">{drawn}{histogram}</div>')


def _many(number: int, one: str, ending: str = "s") -> str:
    return f"{number:,} {one}{'' if number == 1 else ending}"


def _percent(rates: Sequence[float]) -> list[tuple[str, float]]:
    return [(f"@{k}", rate) for k, rate in enumerate(rates, start=1)]


def _lines(report: Report) -> list[charts.Line]:
    """Predicted speedups, and the measured ones as single points."""
    found: list[charts.Line] = []
    for key, way in WAYS.items():
        if key not in report:
            continue
        one = report[key]
        measured = (one["recommended"], one["wall_clock"]["speedup"])
        found.append(charts.Line(f"{way}, one prompt", [(p["drafted"], p["speedup"]) for p in one["curve"]], measured))
        if one["batch_curve"] is not None:
            many = one["batch_curve"]
            found.append(charts.Line(f"{way}, {many['rows']} prompts together", [(p["drafted"], p["speedup"]) for p in many["points"]]))
    return found


def _examples(found: Mapping[str, Any], way: str, template: ChatTemplate) -> str:
    ids = sorted({i for e in found["examples"] for i in _ids(e)})
    pieces = dict(zip(ids, pieces_of(ids, template), strict=True))

    def text(tokens: Sequence[int]) -> str:
        return escape(b"".join(pieces[i] for i in tokens).decode(errors="replace"))

    shown = []
    for example in found["examples"]:
        cut = example["prompt"][-PROMPT_TOKENS:]
        answer = [f"<span>{text(example['first'])}</span>"]
        for accepted, rejected, own in example["passes"]:
            answer.append("".join(f"<ins>{text([i])}</ins>" for i in accepted))
            answer.append("".join(f"<del>{text([i]).replace(chr(10), '⏎')}</del>" for i in rejected))  # what was rejected breaks no line
            answer.append(f"<span>{text(own)}</span>" if own else "")
        before = "…" if len(cut) < len(example["prompt"]) else ""
        shown.append(
            f'<details open><summary>{escape(example["id"])} <span class="quiet">{escape(example["kind"])}</span></summary>'
            f'<div class="asked">{before}{text(cut)}</div><div class="answer">{"".join(answer)}</div></details>'
        )
    offered = "what else was drafted" if way == "chain" else "what was offered where the accepted branch ended"
    legend = f"<ins>Drafted and accepted</ins>, <del>drafted and rejected</del> ({offered}), and without a mark the target's own token that each pass adds."
    return _section(f"Answers decoded with {way}s", "", f'<p class="answer legend">{legend}</p>{"".join(shown)}')


def _ids(example: Mapping[str, Any]) -> list[int]:
    return [*example["prompt"], *example["first"], *(i for one in example["passes"] for part in one for i in part)]


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(str(c))}</th>" for c in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in table.rows)
    return f'<div class="wide"><table><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _section(title: str, note: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>" + (f'<p class="quiet">{escape(note)}</p>' if note else "") + f"{body}</section>"
