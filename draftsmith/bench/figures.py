"""Answers to figures: latencies, rates, errors by kind, and two servers compared with confidence intervals over prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from draftsmith.bench.stream import Answer

RESAMPLES = 4000
BLOCK = 4_000_000
"""Numbers held at once while resampling."""
CONFIDENCE = 0.95
PERCENTILES = (50, 90, 99)
MS = 1000.0


def summary(answers: Sequence[Answer], planned: int) -> dict[str, Any]:
    """Figures of one server at one level; `planned`: requests that were to be sent. planned = answered + errors + not sent.

    Rates count answered requests alone. `wall_seconds`: from the first request sent to the last answer's end.
    """
    good = [a for a in answers if a.error is None]
    errors = Counter(a.error for a in answers if a.error is not None)
    found: dict[str, Any] = {
        "requests": planned, "answered": len(good), "errors": dict(errors.most_common()), "not_sent": planned - len(answers),
        "first_messages": {kind: next(a.said for a in answers if a.error == kind) for kind in errors},
    }  # fmt: skip
    assert found["requests"] == found["answered"] + sum(errors.values()) + found["not_sent"]
    if not good:
        return found
    wall = max(a.ended for a in good) - min(a.sent for a in good)
    tokens = sum(a.tokens or 0 for a in good)
    gaps = [gap for a in good for gap in a.token_gaps()]
    per_request = [_rate(a) for a in good if a.seconds > 0]
    return found | {
        "wall_seconds": round(wall, 4), "completion_tokens": tokens, "prompt_tokens": sum(a.prompt_tokens or 0 for a in good),
        "requests_per_second": round(len(good) / wall, 4), "tokens_per_second": round(tokens / wall, 3),
        "tokens_per_second_per_request": spread(per_request, 1.0),
        "time_to_first_token_ms": spread([a.first_token for a in good]),
        "inter_token_latency_ms": spread([s for s, _ in gaps], MS, [n for _, n in gaps]),
        "pause_ms": spread([p for a in good for p in a.pauses()]),
        "tokens_per_arrival": round(tokens / sum(len(a.arrivals) for a in good), 4),
        "cut_by_length": sum(a.finish == "length" for a in good),
    }  # fmt: skip


def spread(values: Sequence[float], factor: float = MS, counts: Sequence[int] | None = None) -> dict[str, float] | None:
    """Mean and percentiles (linear between neighbours) of `values` times `factor`, each taken `counts` times; None of nothing."""
    if not values:
        return None
    all_values = np.repeat(np.asarray(values, np.float64), counts if counts is not None else 1) * factor
    found = {"mean": float(all_values.mean())} | {f"p{p}": float(np.percentile(all_values, p)) for p in PERCENTILES}
    return {name: round(value, 4) for name, value in found.items()}


def compare(speculative: Sequence[Answer], baseline: Sequence[Answer], temperature: float, seed: int) -> dict[str, Any] | None:
    """The same prompts on two servers. None when no prompt was answered by both.

    `speedup`: tokens per second of a request, over all prompts answered by both; its interval is a bootstrap over prompts, which are drawn in pairs.
    """
    ours, theirs = ({a.prompt: a for a in answers if a.error is None} for answers in (speculative, baseline))
    both = [name for name in ours if name in theirs]
    if not both:
        return None
    numbers = np.asarray([[ours[n].seconds, ours[n].tokens or 0, theirs[n].seconds, theirs[n].tokens or 0] for n in both], np.float64)
    different = [n for n in both if ours[n].text != theirs[n].text]
    low, high = bootstrap(numbers, seed)
    return {
        "prompts": len(both), "speedup": round(_speedup(numbers.sum(0)), 4), "interval": [round(low, 4), round(high, 4)], "confidence": CONFIDENCE,
        "same_tokens": int((numbers[:, 1] == numbers[:, 3]).sum()),
        "identical_outputs": None if temperature > 0 else len(both) - len(different),
        "differing": [] if temperature > 0 else [_difference(ours[n], theirs[n]) for n in different],
    }  # fmt: skip


def bootstrap(numbers: np.ndarray, seed: int) -> tuple[float, float]:
    """Percentile interval of the speedup over resampled rows: seconds and tokens with speculation, seconds and tokens without."""
    draw, count = np.random.default_rng(seed), len(numbers)
    block = max(1, BLOCK // count)
    times = (draw.multinomial(count, np.full(count, 1 / count), min(block, RESAMPLES - done)) for done in range(0, RESAMPLES, block))
    sums = np.concatenate([drawn @ numbers for drawn in times])
    found = (sums[:, 1] / sums[:, 0]) / (sums[:, 3] / sums[:, 2])
    edge = 100 * (1 - CONFIDENCE) / 2
    return float(np.percentile(found, edge)), float(np.percentile(found, 100 - edge))


def _speedup(sums: np.ndarray) -> float:
    return float((sums[1] / sums[0]) / (sums[3] / sums[2]))


def _rate(answer: Answer) -> float:
    return (answer.tokens or 0) / answer.seconds


def _difference(ours: Answer, theirs: Answer) -> dict[str, Any]:
    place = next((i for i, (a, b) in enumerate(zip(ours.text, theirs.text, strict=False)) if a != b), min(len(ours.text), len(theirs.text)))
    return {"prompt": ours.prompt, "from_character": place, "speculative": ours.text, "baseline": theirs.text}


def row(answer: Answer, level: str, server: str) -> dict[str, Any]:
    """One request for JSON, seconds after the start of its level."""
    arrived = bool(answer.arrivals)
    return {
        "level": level, "server": server, "prompt": answer.prompt, "kind": answer.kind, "due": round(answer.due, 6), "sent": round(answer.sent, 6),
        "first_token": round(answer.first_token, 6) if arrived else None, "seconds": round(answer.seconds, 6) if arrived else None,
        "ended": round(answer.ended, 6), "tokens": answer.tokens, "prompt_tokens": answer.prompt_tokens, "arrivals": len(answer.arrivals),
        "finish": answer.finish, "error": answer.error, "said": answer.said,
    }  # fmt: skip
