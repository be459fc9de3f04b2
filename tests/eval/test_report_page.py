"""The page of the report: one file without scripts or addresses, charts that say what the report says, and text that stays text."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from draftsmith.data.template import ChatTemplate
from draftsmith.drafts.base import Tree
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.eval import charts
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.decode import Decoder
from draftsmith.eval.page import html
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.report import evaluate
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

HOSTILE = "</details><script>window.pwned = 1</script><img src=x onerror=1>&amp;"


@pytest.fixture(scope="module")
def report(target_model: TargetModel, target: Target, template: ChatTemplate) -> dict[str, Any]:
    torch.manual_seed(5)
    draft = Eagle3(Eagle3Config(vocab_size=259, layers=(1, 2, 4)), target.shape).eval()
    prompts = [Prompt(f"{HOSTILE}{n}", (HOSTILE, "plain")[n % 2], tuple(template.encode(f"{HOSTILE} question {n}").tolist())) for n in range(4)]
    config = EvalConfig(width=3, max_new=16, batch=4, timed_prompts=1, timed_tokens=8, rounds=1, tree=Tree(nodes=30, top_k=6, depth=3))
    found = evaluate(Decoder(target_model, target, ()), Decoder(target_model, target, (), draft, 3), prompts, config)
    return found | {"target": HOSTILE, "draft": "eagle3", "sets": {HOSTILE: {"read": 4, "kept": 4, "dropped": 0, "reasons": {}}}}


@pytest.fixture(scope="module")
def page(report: dict[str, Any], template: ChatTemplate) -> str:
    return html(report, template)


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_is_one_file_that_runs_nothing_and_asks_nobody(page: str) -> None:
    """Prompts, categories and the target's name are markup here, and none of it becomes a tag."""
    parser = Tags()
    parser.feed(page)
    assert not {"script", "img", "link", "iframe", "object"} & {tag for tag, _ in parser.found}
    named = {name for _, attributes in parser.found for name in attributes}
    assert not {n for n in named if n.startswith("on") or n in ("src", "href", "srcset", "style")}
    assert "default-src 'none'" in next(a["content"] or "" for t, a in parser.found if t == "meta" and "http-equiv" in a)
    style = page.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "{{" not in page


def test_every_figure_of_the_report_is_on_the_page(page: str, report: dict[str, Any]) -> None:
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    for found in (report["of_chains"], report["of_trees"]):
        for figures in found["by_kind"].values():
            assert f"{figures['acceptance_length']:.2f}" in text
        for point in found["curve"]:
            assert f"{point['verify_ms']:.1f}" in text
    assert "all equal to plain greedy" in text
    assert f"{report['speedup']:.2f}" in text
    for example in report["of_chains"]["examples"]:
        assert example["id"] in text


def test_accepted_rejected_and_own_tokens_are_marked_apart(page: str, report: dict[str, Any], template: ChatTemplate) -> None:
    """The marked text put together again is each answer; rejected tokens are set apart from it."""
    chains, trees = page.split("Answers decoded with trees")
    for part, key in ((chains.split("Answers decoded with chains")[1], "of_chains"), (trees.split("<h2>All figures")[0], "of_trees")):
        answers = re.findall(r'<div class="answer">(.*?)</div>', part, re.DOTALL)
        examples = report[key]["examples"]
        assert len(answers) == len(examples)
        for answer, example in zip(answers, examples, strict=True):
            for tag, place in (("ins", 0), ("del", 1)):
                count = sum(len(one[place]) for one in example["passes"])
                assert len(re.findall(f"<{tag}>", answer)) == count
        assert sum(answer.count("<del>") for answer in answers) > 0
        if key == "of_trees":
            assert sum(answer.count("<ins>") for answer in answers) > 0


def svg_of(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])


def test_bars_are_as_high_as_their_shares() -> None:
    svg = svg_of(charts.bars("a <b>", "4 prompts", [("@1", 1.0), ("@2", 0.25), ("@3", 0.0)]))
    heights = [float(r.attrib["height"]) for r in svg.iter("rect")]
    room = charts.HEIGHT - charts.TOP - charts.BOTTOM
    assert heights == pytest.approx([room, room / 4, 0], abs=0.06)
    feet = [float(r.attrib["y"]) + float(r.attrib["height"]) for r in svg.iter("rect")]
    assert feet == pytest.approx([charts.TOP + room] * 3, abs=0.11)
    assert [t.text for t in svg.iter("text")] == ["100%", "@1", "25%", "@2", "0%", "@3"]


def test_lines_go_through_their_points_and_names_do_not_cover_each_other() -> None:
    lines = [charts.Line(f"line {n}", [(1, 1.0), (2, 1.5 + 0.01 * n)], (2, 1.2) if n == 0 else None) for n in range(4)]
    svg = svg_of(charts.curves(lines))
    drawn = [e for e in svg.iter("polyline") if e.attrib["class"].startswith("line")]
    assert len(drawn) == 4
    (x1, y1), (x2, y2) = ([float(v) for v in pair.split(",")] for pair in drawn[0].attrib["points"].split())
    plain = next(e for e in svg.iter("line") if e.attrib["class"] == "one")
    assert y1 == float(plain.attrib["y1"]), "a speedup of 1 lies on the line of plain decoding"
    assert x1 < x2
    assert y2 < y1
    (ring,) = (e for e in svg.iter("circle") if "ring" in e.attrib["class"])
    assert float(ring.attrib["cx"]) == x2
    assert y2 < float(ring.attrib["cy"]) < y1
    names = sorted(float(e.attrib["y"]) for e in svg.iter("text") if e.attrib["class"].startswith("label"))
    assert all(b - a >= charts.NAME_HEIGHT - 0.11 for a, b in pairwise(names))


def test_a_report_read_from_its_file_gives_the_same_page(page: str, report: dict[str, Any], template: ChatTemplate) -> None:
    assert html(json.loads(json.dumps(report)), template) == page
