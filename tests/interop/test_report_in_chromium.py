"""The report's page in a real browser: nothing complains or asks the network, all text is readable in both themes, nothing is wider than the window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chromium import Page, browse
from test_page_in_chromium import CONTRAST

from draftsmith.core.env import chromium
from draftsmith.data.template import ChatTemplate
from draftsmith.drafts.base import Tree
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.decode import Decoder
from draftsmith.eval.page import html
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.report import evaluate
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

PROGRAM = chromium()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium on the PATH; DRAFTSMITH_CHROMIUM names one elsewhere (npm pack @sparticuz/chromium holds one)"),
]
HOSTILE = "</div></details><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'> مرحبا"


@pytest.fixture(scope="module")
def tab(target_model: TargetModel, target: Target, template: ChatTemplate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert PROGRAM is not None
    torch.manual_seed(5)
    draft = Eagle3(Eagle3Config(vocab_size=259, layers=(1, 2, 4)), target.shape).eval()
    prompts = [Prompt(f"{HOSTILE}{n}", ("a", "b", HOSTILE)[n % 3], tuple(template.encode(f"{HOSTILE} {n}").tolist())) for n in range(6)]
    config = EvalConfig(width=4, max_new=20, batch=6, timed_prompts=1, timed_tokens=8, rounds=1, tree=Tree(nodes=30, top_k=6, depth=3))
    report = evaluate(Decoder(target_model, target, ()), Decoder(target_model, target, (), draft, 4), prompts, config)
    folder = tmp_path_factory.mktemp("report")
    (folder / "report.html").write_text(html(report | {"target": HOSTILE, "draft": "eagle3"}, template), encoding="utf-8")
    with browse(PROGRAM, folder / "profile") as page:
        page.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
        page.call("Page.navigate", url=(folder / "report.html").as_uri())
        page.until("document.readyState === 'complete' && document.querySelectorAll('figure').length > 0")
        yield page


def test_nothing_complains_runs_or_asks_the_network(tab: Page) -> None:
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith("file:")] == []
    assert tab.js("window.pwned ?? null") is None
    assert tab.js("document.querySelectorAll('script, img').length") == 0
    assert tab.js("document.querySelector('h1').textContent").endswith(HOSTILE)


def test_charts_and_marks_are_drawn(tab: Page) -> None:
    assert tab.js("document.querySelectorAll('figure svg rect').length") > 20
    assert tab.js("Math.max(...[...document.querySelectorAll('figure svg .bar')].map(e => e.getBoundingClientRect().height))") > 20
    assert tab.js("document.querySelectorAll('svg.plot polyline.line').length") == 4
    assert tab.js("document.querySelectorAll('svg.plot circle.ring').length") == 2
    assert "line-through" in tab.js("getComputedStyle(document.querySelector('.answer del')).textDecorationLine")
    assert "inset" in tab.js("getComputedStyle(document.querySelector('.answer ins')).boxShadow")


def test_both_themes_are_readable(tab: Page, tmp_path: Path) -> None:
    grounds = []
    for preferred in ("light", "dark"):
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": preferred}])
        found = tab.js(CONTRAST.replace("getComputedStyle(e).color", "(e.namespaceURI.endsWith('svg') ? getComputedStyle(e).fill : getComputedStyle(e).color)"))
        assert len(found) > 150
        assert [f for f in found if f[0] < 4.5] == []
        grounds.append(tab.js("getComputedStyle(document.body).backgroundColor"))
        tab.screenshot(tmp_path / f"{preferred}.png")
        assert (tmp_path / f"{preferred}.png").stat().st_size > 10_000
    assert grounds[0] != grounds[1]


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(tab: Page, width: int) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    assert tab.js("document.documentElement.scrollWidth") <= width
