"""The page: every figure stands in it, it is well formed, asks for nothing, and text from servers stays text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from draftsmith.bench.agreement import CHECKS, Figure, agreement
from draftsmith.bench.picture import page

VOID = {"meta", "br"}
HOSTILE = "<script>alert(1)</script>"


def figures(**changes: Any) -> dict[str, Any]:
    spread = {"mean": 21.0, "p50": 20.0, "p90": 40.0, "p99": 60.0}
    return {
        "requests": 9, "answered": 8, "errors": {"HTTP 500": 1}, "first_messages": {"HTTP 500": HOSTILE}, "not_sent": 0, "tokens_per_second": 123.4,
        "time_to_first_token_ms": spread, "inter_token_latency_ms": spread, "acceptance": None, "remarks": [HOSTILE],
    } | changes  # fmt: skip


def everything(**changes: Any) -> dict[str, Any]:
    rates = (0.61, 0.32)
    compared = agreement([Figure("decoded by our evaluator", 2.5, (0.9, 0.6), 2), Figure("measured in the engine", 1.93, rates, 2)])
    return {
        "complete": True, "stopped": None, "settings": {"max_tokens": 64, "temperature": 0.0},
        "prompts": {"source": HOSTILE, "number": 9, "by_kind": {}},
        "servers": {
            "baseline": {"url": "http://b/v1", "model": "m&m", "engine": None, "version": None},
            "speculative": {"url": "http://a/v1", "model": HOSTILE, "engine": "vLLM", "version": "0.32.0"},
        },
        "levels": [
            {
                "level": "4 at a time", "baseline": figures(tokens_per_second=61.7), "speculative": figures(),
                "comparison": {"speedup": 1.87, "interval": [1.5, 2.25]},
            },
        ],
        "acceptance": {"position_rates": list(rates)}, "agreement": compared,
    } | changes  # fmt: skip


class Checked(HTMLParser):
    """Tags must close in order; bars are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.bars: list[dict[str, str | None]] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "rect":
            self.bars.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(found: dict[str, Any]) -> Checked:
    checked = Checked()
    checked.feed(page(found))
    assert checked.open == []
    return checked


def test_all_figures_stand_in_the_page() -> None:
    found = read(everything())
    for text in ["123.40", "61.70", "1.87", "61.00", "32.00", "2.500", "1.930", "vLLM 0.32.0", "unknown engine", "m&m", "1 of 9 requests failed: HTTP 500"]:
        assert text in found.text
    assert all(check in found.text for check in CHECKS)


def test_bars_are_as_long_as_their_values() -> None:
    speeds = [float(bar["width"] or 0) for bar in read(everything()).bars[:2]]
    assert speeds[0] / speeds[1] == pytest.approx(0.5, abs=0.001)


def test_nothing_is_fetched_and_hostile_text_stays_text() -> None:
    text = page(everything())
    found = read(everything())
    assert HOSTILE in found.text
    assert not found.tags & {"script", "img", "link", "iframe"}
    assert re.search(r"(src|href)\s*=|url\(|@import", text) is None


def test_a_partial_result_without_figures() -> None:
    level = {
        "level": "1 at a time",
        "speculative": {"requests": 9, "answered": 0, "errors": {"HTTP 500": 2}, "first_messages": {}, "not_sent": 7, "remarks": []},
    }
    found = read(everything(complete=False, stopped="it died", levels=[level], acceptance=None, agreement=None))
    assert "Partial: it died" in found.text
    assert "7 requests were not sent" in found.text
    assert found.bars == []
