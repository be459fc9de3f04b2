"""Figures against plain loops over single tokens and prompts."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from draftsmith.bench import figures
from draftsmith.bench.figures import bootstrap, compare, row, spread, summary
from draftsmith.bench.stream import Answer, Arrival


def answer(name: str, seconds: float, tokens: int, text: str = "same", sent: float = 0.0, due: float | None = None) -> Answer:
    """Two tokens an arrival behind the first, evenly spaced from 0.1 s after it was sent on."""
    counts = [1, *range(3, tokens + 1, 2)] if tokens % 2 else [2, *range(4, tokens + 1, 2)]
    step = (seconds - 0.1) / max(len(counts) - 1, 1)
    arrivals = tuple(Arrival(sent + 0.1 + i * step, n) for i, n in enumerate(counts))
    return Answer(name, "all", sent if due is None else due, sent, sent + seconds + 0.01, arrivals, text, tokens, 5, "stop")


def percentile(values: list[float], percent: float) -> float:
    """Linear between neighbours, by hand."""
    ordered, place = sorted(values), percent / 100 * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def test_a_summary_by_brute_force() -> None:
    draw = random.Random(5)
    answers = [answer(f"p{i}", draw.uniform(1, 3), draw.randint(2, 40), sent=i * 0.3, due=i * 0.3 - draw.choice([0, 0.05])) for i in range(23)]
    failed = [Answer(f"f{i}", "all", 0.0, -9.0, 99.0, error=e, said=f"said {i}") for i, e in enumerate(["HTTP 500", "HTTP 429", "HTTP 500"])]
    found = summary([*answers[:9], *failed, *answers[9:]], 30)
    assert (found["requests"], found["answered"], found["errors"], found["not_sent"]) == (30, 23, {"HTTP 500": 2, "HTTP 429": 1}, 4)
    assert found["first_messages"] == {"HTTP 500": "said 0", "HTTP 429": "said 1"}
    first = [1000 * (a.arrivals[0].at - a.due) for a in answers]
    tokens = []
    for a in answers:
        for i in range(1, len(a.arrivals)):
            n = (a.arrivals[i].counted or 0) - (a.arrivals[i - 1].counted or 0)
            tokens += [1000 * (a.arrivals[i].at - a.arrivals[i - 1].at) / n for _ in range(n)]
    for name, values in (("time_to_first_token_ms", first), ("inter_token_latency_ms", tokens)):
        assert found[name]["mean"] == pytest.approx(statistics.mean(values), abs=1e-3)
        for percent in (50, 90, 99):
            assert found[name][f"p{percent}"] == pytest.approx(percentile(values, percent), abs=1e-3)
    total = sum(a.tokens or 0 for a in answers)
    wall = max(a.ended for a in answers) - 0.0
    assert found["completion_tokens"] == total
    assert found["prompt_tokens"] == 23 * 5
    assert found["tokens_per_second"] == pytest.approx(total / wall, rel=1e-3)
    assert found["requests_per_second"] == pytest.approx(23 / wall, rel=1e-3)
    assert found["tokens_per_arrival"] == pytest.approx(total / sum(len(a.arrivals) for a in answers), abs=1e-3)
    each = [(a.tokens or 0) / (a.arrivals[-1].at - a.due) for a in answers]
    assert found["tokens_per_second_per_request"]["p90"] == pytest.approx(percentile(each, 90), abs=1e-3)


def test_nothing_answered_has_no_rates() -> None:
    found = summary([Answer("a", "all", 0, 0, 1, error="HTTP 500", said="boom")], 3)
    assert found == {"requests": 3, "answered": 0, "errors": {"HTTP 500": 1}, "not_sent": 2, "first_messages": {"HTTP 500": "boom"}}
    assert spread([]) is None


def test_the_interval_is_a_bootstrap_over_prompts_in_pairs() -> None:
    """The same drawn rows, resampled by a plain loop with another generator: ends within the noise of resampling."""
    draw = np.random.default_rng(2)
    base = draw.uniform(1, 4, 60)
    numbers = np.stack([base / draw.uniform(1.2, 2.4, 60), np.full(60, 32), base, np.full(60, 32)], 1)
    plain = random.Random(9)
    found = []
    for _ in range(3000):
        rows = [numbers[plain.randrange(60)] for _ in range(60)]
        found.append((sum(r[1] for r in rows) / sum(r[0] for r in rows)) / (sum(r[3] for r in rows) / sum(r[2] for r in rows)))
    low, high = bootstrap(numbers, 0)
    assert (low, high) == (pytest.approx(percentile(found, 2.5), rel=0.02), pytest.approx(percentile(found, 97.5), rel=0.02))
    assert bootstrap(numbers, 0) == (low, high)


def test_intervals_cover_the_truth_about_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts drawn 200 times from one population whose speedup is 2: about 95 % of the intervals hold it."""
    monkeypatch.setattr(figures, "RESAMPLES", 400)
    draw = np.random.default_rng(11)
    hits = 0
    for trial in range(200):
        base = draw.lognormal(0, 0.5, 40)
        numbers = np.stack([base / 2 * draw.lognormal(-0.02, 0.2, 40), np.full(40, 9), base, np.full(40, 9)], 1)
        low, high = bootstrap(numbers, trial)
        hits += low <= 2 <= high
    assert 176 <= hits <= 200


def test_two_servers_compared() -> None:
    ours = [answer("a", 1.0, 11), answer("b", 2.0, 21, "other text"), answer("c", 1.0, 11), answer("only ours", 1.0, 5)]
    theirs = [answer("c", 3.0, 11), answer("b", 3.0, 21, "other word"), answer("a", 2.0, 11), Answer("d", "all", 0, 0, 1, error="HTTP 500")]
    found = compare(ours, theirs, 0.0, 0)
    assert found is not None
    assert (found["prompts"], found["same_tokens"], found["identical_outputs"]) == (3, 3, 2)
    assert found["speedup"] == pytest.approx((43 / 4.0) / (43 / 8.0), abs=1e-3)
    assert found["interval"][0] <= found["speedup"] <= found["interval"][1]
    (difference,) = found["differing"]
    assert (difference["prompt"], difference["from_character"], difference["speculative"]) == ("b", 6, "other text")


def test_a_speedup_per_token_where_lengths_differ() -> None:
    """Twice the tokens in the same time is twice as fast."""
    found = compare([answer("a", 2.0, 40)], [answer("a", 2.0, 20, "shorter")], 0.0, 0)
    assert found is not None
    assert (found["speedup"], found["same_tokens"], found["identical_outputs"]) == (pytest.approx(2.0), 0, 0)


def test_sampled_outputs_are_not_compared() -> None:
    found = compare([answer("a", 1.0, 5)], [answer("a", 1.0, 5, "other")], 0.7, 0)
    assert found is not None
    assert (found["identical_outputs"], found["differing"]) == (None, [])
    assert compare([answer("a", 1.0, 5)], [answer("b", 1.0, 5)], 0.0, 0) is None


def test_a_request_as_a_row() -> None:
    found = row(answer("a", 1.0, 5, sent=2.0, due=1.5), "1 at a time", "baseline")
    assert (found["first_token"], found["seconds"], found["tokens"], found["arrivals"]) == (0.6, 1.5, 5, 3)
    nothing = row(Answer("a", "all", 0, 0, 1, error="HTTP 500", said="boom"), "1 at a time", "baseline")
    assert (nothing["first_token"], nothing["seconds"], nothing["error"], nothing["said"]) == (None, None, "HTTP 500", "boom")
