"""The figures as one HTML page with inline SVG: no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from draftsmith.bench.run import BASELINE, SPECULATIVE

COLOURS = {SPECULATIVE: "#2563a8", BASELINE: "#b0b7c0"}
WIDTH, BAR, LABEL = 640, 18, 170
STYLE = """body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1c2430; background: #fff }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem } svg { max-width: 100%; height: auto } svg text { font: 13px system-ui, sans-serif; fill: #1c2430 }
table { border-collapse: collapse } th, td { border-bottom: 1px solid #d8dde3; padding: .25rem .7rem; text-align: right }
th:first-child, td:first-child { text-align: left } .warn { color: #9a4a00 } .key { display: inline-block; width: .8em; height: .8em }"""
Bars = Sequence[tuple[str, str, float, tuple[float, float] | None]]
"""Label, server, value, and an interval around it."""


def page(found: Mapping[str, Any]) -> str:
    """The page for what `report.build` made."""
    sections = [_title(found)]
    sections += [_chart(*chart) for chart in _charts(found) if chart[1]]
    sections += [_agreement(found["agreement"])] if found["agreement"] else []
    sections += [_remarks(found)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Serving benchmark</title><style>{STYLE}</style></head>\n<body>'
        + "\n".join(s for s in sections if s)
        + "</body></html>\n"
    )


def _title(found: Mapping[str, Any]) -> str:
    keys = "".join(
        f'<p><span class="key" style="background:{COLOURS[name]}"></span> {name}: {_server(server)}</p>' for name, server in found["servers"].items()
    )  # fmt: skip
    partial = "" if found["complete"] else f'<p class="warn">Partial: {escape(found["stopped"])}</p>'
    s = found["settings"]
    about = f"{found['prompts']['number']} prompts of {escape(found['prompts']['source'])}, at most {s['max_tokens']} tokens, temperature {s['temperature']:g}"
    return f"<h1>Serving benchmark</h1>{partial}<p>{about}</p>{keys}"


def _server(server: Mapping[str, Any]) -> str:
    engine = " ".join(s for s in (server["engine"], server["version"]) if s) or "unknown engine"
    return escape(f"{server['model']} at {server['url']} ({engine})")


def _charts(found: Mapping[str, Any]) -> list[tuple[str, Bars]]:
    sides = [(level, side, level[side]) for level in found["levels"] for side in (BASELINE, SPECULATIVE) if level.get(side, {}).get("answered")]
    charts: list[tuple[str, Bars]] = [
        ("Tokens per second, all requests together", [(level["level"], side, f["tokens_per_second"], None) for level, side, f in sides]),
        ("Time to first token, ms: p50 (line: to p90)", [_percentiles(level, side, f["time_to_first_token_ms"]) for level, side, f in sides]),
        (
            "Inter-token latency, ms: p50 (line: to p90)",
            [_percentiles(level, side, f["inter_token_latency_ms"]) for level, side, f in sides if f["inter_token_latency_ms"]],
        ),
        (
            "Speedup of a request, with 95 % interval over prompts",
            [(level["level"], SPECULATIVE, c["speedup"], tuple(c["interval"])) for level in found["levels"] if (c := level.get("comparison"))],
        ),
    ]
    rates = (found["acceptance"] or {}).get("position_rates") or []
    charts.append(("Accepted at drafted position / drafts, %", [(f"position {k}", SPECULATIVE, 100 * r, None) for k, r in enumerate(rates, 1)]))
    return charts


def _percentiles(level: Mapping[str, Any], side: str, spread: Mapping[str, float]) -> tuple[str, str, float, tuple[float, float]]:
    return level["level"], side, spread["p50"], (spread["p50"], spread["p90"])


def _chart(title: str, bars: Bars) -> str:
    """Horizontal bars, one a row, from 0."""
    top = max(max(value, interval[1] if interval else 0.0) for _, _, value, interval in bars) or 1.0
    scale = (WIDTH - LABEL - 70) / top
    rows = []
    for i, (label, side, value, interval) in enumerate(bars):
        y, end = i * (BAR + 6), LABEL + value * scale
        rows.append(f'<text x="{LABEL - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        rows.append(f'<rect x="{LABEL}" y="{y}" width="{value * scale:.1f}" height="{BAR}" fill="{COLOURS[side]}"/>')
        if interval is not None:
            low, high = (LABEL + edge * scale for edge in interval)
            rows.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + BAR / 2}" y2="{y + BAR / 2}" stroke="#1c2430" stroke-width="1.5"/>')
            end = max(end, high)
        rows.append(f'<text x="{end + 6:.1f}" y="{y + 14}">{value:.2f}</text>')
    height = len(bars) * (BAR + 6)
    return f'<h2>{escape(title)}</h2><svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" aria-label="{escape(title)}">{"".join(rows)}</svg>'


def _agreement(found: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(f['name'])}</td><td>{f['acceptance_length']:.3f}</td><td>{f['draft_tokens'] or '?'}</td>"
        f"<td>{' '.join(f'{r:.1%}' for r in f['position_rates'] or ())}</td></tr>"
        for f in found["figures"]
    )
    said = [*([found["missing"]] if "missing" in found else []), *found["differences"], *(f"Finding: {line}" for line in found["findings"])]
    checks = "".join(f"<li>{escape(line)}</li>" for line in found["check_first"])
    return (
        "<h2>Acceptance length, three times</h2><table><tr><th></th><th>length</th><th>drafted</th><th>accepted at position 1, 2, …</th></tr>"
        f"{rows}</table>{_lines(said)}" + (f"<p>Check first, in this order:</p><ol>{checks}</ol>" if checks else "")
    )


def _remarks(found: Mapping[str, Any]) -> str:
    said = []
    for level in found["levels"]:
        for side in (BASELINE, SPECULATIVE):
            f = level.get(side, {})
            lines = [f"{n} of {f['requests']} requests failed: {kind}" for kind, n in f.get("errors", {}).items()]
            lines += [f"{f['not_sent']} requests were not sent"] if f.get("not_sent") else []
            said += [f"{side}, {level['level']}: {line}" for line in [*lines, *f.get("remarks", ())]]
    return f"<h2>To be said</h2>{_lines(said)}" if said else ""


def _lines(said: Sequence[str]) -> str:
    return "".join(f'<p class="warn">{escape(line)}</p>' for line in said)
