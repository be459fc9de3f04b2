"""What was measured, as one JSON object, and as tables for people."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

from draftsmith.bench.agreement import SERVED, Figure, agreement, of_report
from draftsmith.bench.counters import LLAMA, SGLANG, VLLM, Speculation
from draftsmith.bench.figures import compare, row, spread, summary
from draftsmith.bench.run import BASELINE, SPECULATIVE, BenchSettings, Measured, Results, Side
from draftsmith.core.log import say, table, warn
from draftsmith.data.conversations import Conversation

FLAGS = {
    VLLM: "start it with --speculative-config", SGLANG: "start it with --speculative-algorithm",
    LLAMA: "start it with a draft (--model-draft), and with --metrics for its counters",
}  # fmt: skip

LAG_MS = 10.0
"""Above it, the client's own lateness is told."""
LATENCIES = {"time_to_first_token_ms": "first token", "inter_token_latency_ms": "between tokens", "pause_ms": "between arrivals"}


def acceptance_of(measured: Measured) -> tuple[Speculation | None, list[str]]:
    """The engine's own counts for one level, by difference or summed over our replies, and what is to be said of them."""
    before, after = measured.before, measured.after
    remarks = _traffic(measured)
    own = [a.speculation for a in measured.answers if a.error is None and a.speculation is not None]
    if before.speculation is not None and after.speculation is not None:
        try:
            found = after.speculation.since(before.speculation)
        except ValueError as error:
            return None, [*remarks, str(error)]
        if found.drafts == 0:
            return None, [*remarks, "the server counts speculation, but drafted nothing"]
        return found, remarks
    if own:
        silent = sum(a.error is None for a in measured.answers) - len(own)
        return reduce(add, own), [*remarks, f"{silent} replies do not say what was accepted"] if silent else remarks
    if after.lifetime_length is not None:
        return None, [*remarks, f"{SGLANG} says {after.lifetime_length:.3f} on average since it was started, all traffic included; not of this run alone"]
    if before.speculation is not None:
        return None, [*remarks, "the server's counters could not be read at the end"]
    hint = FLAGS.get(before.engine or "", "known are the counters of " + ", ".join(FLAGS))
    return None, [*remarks, f"no speculation: the server has no counters of it ({hint})"]


def _traffic(measured: Measured) -> list[str]:
    """Whether the server worked for others meanwhile."""
    before, after = measured.before, measured.after
    remarks = [f"{before.running} requests of others were running when the level started"] if before.running else []
    if before.generated is None or after.generated is None:
        return remarks
    ours = sum(a.tokens or 0 for a in measured.answers)
    others = after.generated - before.generated - ours
    whole = all(a.error is None for a in measured.answers)
    if others > 0 and whole:
        remarks.append(f"other traffic: the server generated {others:,} tokens more than our {ours:,}; its counters and our latencies include it")
    return remarks


def build(
    results: Results, settings: BenchSettings, prompts: Sequence[Conversation], source: str, compared: Mapping[str, Any] | None
) -> dict[str, Any]:  # fmt: skip
    """Everything, for JSON. `compared`: a run's report.json for the three numbers."""
    levels = [_level([m for m in results.measured if m.level == level], settings) for level in settings.levels]
    found = {
        "complete": results.stopped is None, "stopped": results.stopped,
        "settings": {
            "max_tokens": settings.max_tokens, "temperature": settings.temperature, "seed": settings.seed, "warm_up": settings.warm_up,
        },
        "prompts": {
            "source": source, "number": len(prompts), "by_kind": dict(Counter(p.kind for p in prompts)),
            "digest": hashlib.sha256("\n".join(p.id for p in prompts).encode()).hexdigest()[:16],
        },
        "servers": {side.name: _server(side) for side in results.sides}, "levels": [level for level in levels if level],
        "acceptance": _overall(results), "agreement": None,
        "requests": [row(a, m.level.name, m.side) for m in results.measured for a in m.answers],
    }  # fmt: skip
    if compared is not None:
        found["agreement"] = _agreement(found, compared, settings)
    return found


def _server(side: Side) -> dict[str, Any]:
    return {"url": side.client.url, "model": side.model, "engine": side.engine, "version": side.version}


def _level(measured: Sequence[Measured], settings: BenchSettings) -> dict[str, Any]:
    if not measured:
        return {}
    level = measured[0].level
    found: dict[str, Any] = {"level": level.name, "concurrency": level.concurrency, "rate": level.rate}
    for m in measured:
        counts, remarks = acceptance_of(m)
        if m.side == BASELINE:
            remarks = [r for r in remarks if not r.startswith("no speculation")]
            remarks += ["the baseline speculates too: are both addresses right?"] if counts is not None else []
        lag = spread(m.lags)
        if lag is not None and lag["p90"] > LAG_MS:
            remarks.append(f"this machine was busy: one in ten events was handled {lag['p90']:.0f} ms late or more, and latencies include that")
        found[m.side] = summary(m.answers, m.planned) | {"client_lag_ms": lag, "acceptance": counts and counts.as_dict(), "remarks": remarks}
    sides = {m.side: m.answers for m in measured}
    if len(sides) == 2:
        found["comparison"] = compare(sides[SPECULATIVE], sides[BASELINE], settings.temperature, settings.seed)
    return found


def _overall(results: Results) -> dict[str, Any] | None:
    found = [counts for m in results.measured if m.side == SPECULATIVE and (counts := acceptance_of(m)[0]) is not None]
    return reduce(add, found).as_dict() if found else None


def _agreement(found: Mapping[str, Any], compared: Mapping[str, Any], settings: BenchSettings) -> dict[str, Any]:
    figures = of_report(compared)
    served = found["acceptance"]
    if served is None:
        remarks = [r for level in found["levels"] for r in level.get(SPECULATIVE, {}).get("remarks", ())]
        return agreement(figures) | {"missing": f"{SERVED}: nothing, {remarks[0] if remarks else 'no level was finished'}"}
    rates = served["position_rates"]
    figure = Figure(
        SERVED, served["acceptance_length"], None if rates is None else tuple(rates), served["draft_tokens"], found["prompts"]["number"],
        settings.temperature, found["prompts"]["by_kind"],
    )  # fmt: skip
    return agreement([*figures, figure])


def show(found: Mapping[str, Any]) -> None:
    """Print tables: load, comparison, acceptance, the three numbers, and what is to be said."""
    about = f"{found['prompts']['number']} prompts of {found['prompts']['source']}, at most {found['settings']['max_tokens']} tokens"
    sides = [(f"{level['level']}, {side}", level[side]) for level in found["levels"] for side in (BASELINE, SPECULATIVE) if side in level]
    table(about, ["", "answered", "tokens/s", "of a request", "acceptance length"], [_rates_of(name, f) for name, f in sides])
    rows = [[name, *(_three(f[what]) for what in LATENCIES)] for name, f in sides if f["answered"]]
    if rows:
        table("Milliseconds: median / 90 % / 99 %", ["", *LATENCIES.values()], rows)
    rows = [_compared(level) for level in found["levels"] if level.get("comparison")]
    if rows:
        table("With speculation against without", ["level", "prompts", "speedup", "95 % interval", "all tokens/s", "equal outputs"], rows)
    if found["acceptance"] is not None:
        _show_acceptance(found["acceptance"])
    if found["agreement"] is not None:
        _show_agreement(found["agreement"])
    for level in found["levels"]:
        for side in (BASELINE, SPECULATIVE):
            for remark in _remarks(level.get(side, {})):
                warn(f"{side}, {level['level']}: {remark}")


def _rates_of(name: str, f: Mapping[str, Any]) -> list[str]:
    length = f"{f['acceptance']['acceptance_length']:.2f}" if f["acceptance"] else ""
    rates = [f"{f['tokens_per_second']:.1f}", f"{f['tokens_per_second_per_request']['p50']:.1f}"] if f["answered"] else ["", ""]
    return [name, f"{f['answered']}/{f['requests']}", *rates, length]


def _three(spread: Mapping[str, float] | None) -> str:
    return "" if spread is None else " / ".join(f"{spread[p]:.0f}" if spread[p] >= 10 else f"{spread[p]:.1f}" for p in ("p50", "p90", "p99"))


def _compared(level: Mapping[str, Any]) -> list[str]:
    c = level["comparison"]
    low, high = c["interval"]
    total = level[SPECULATIVE]["tokens_per_second"] / level[BASELINE]["tokens_per_second"]
    same = "not compared (temperature)" if c["identical_outputs"] is None else f"{c['identical_outputs']}/{c['prompts']}"
    return [level["level"], str(c["prompts"]), f"{c['speedup']:.2f}", f"{low:.2f} to {high:.2f}", f"{total:.2f}", same]


def _show_acceptance(a: Mapping[str, Any]) -> None:
    rates = a["position_rates"]
    say(f"acceptance length {a['acceptance_length']:.3f}: {a['accepted']:,} accepted in {a['drafts']:,} drafts" + _drafted(a))
    if rates is not None:
        say("accepted at position 1, 2, …: " + ", ".join(f"{r:.1%}" for r in rates))
    if a["engine_length"] is not None:
        say(f"by the engine's own rule: {a['engine_length']:.3f}")
    say(f"counted as {a['rule']}")


def _drafted(a: Mapping[str, Any]) -> str:
    return "" if a["drafted"] is None else f" of {a['drafted']:,} tokens"


def _show_agreement(found: Mapping[str, Any]) -> None:
    rows = [[f["name"], f"{f['acceptance_length']:.3f}", f["draft_tokens"] or "?", _rates(f["position_rates"])] for f in found["figures"]]
    table("Acceptance length", ["", "length", "drafted", "accepted at position 1, 2, …"], rows)
    for line in [*([found["missing"]] if "missing" in found else []), *found["differences"]]:
        warn(line)
    for line in found["findings"]:
        warn(f"finding: {line}")
    if found["check_first"]:
        say("Check first, in this order:")
        for number, line in enumerate(found["check_first"], 1):
            say(f"  {number}. {line}")


def _rates(rates: Sequence[float] | None) -> str:
    return "" if rates is None else " ".join(f"{r:.1%}" for r in rates)


def _remarks(figures: Mapping[str, Any]) -> list[str]:
    failed = [f"{n} requests failed: {kind} {figures['first_messages'][kind]}".rstrip() for kind, n in figures.get("errors", {}).items()]
    unsent = [f"{figures['not_sent']} requests were not sent"] if figures.get("not_sent") else []
    return [*failed, *unsent, *figures.get("remarks", ())]
