"""The page in a real browser: tokens, ids, search, filters, keys, themes, contrast as computed, and hostile text that stays text."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from chromium import Page, browse

from draftsmith.core.env import chromium
from draftsmith.core.types import Sample
from draftsmith.data import cache, page
from draftsmith.data.config import DataConfig
from draftsmith.data.prepare import Figures, open_job
from draftsmith.data.template import ChatTemplate

PROGRAM = chromium()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium on the PATH; DRAFTSMITH_CHROMIUM names one elsewhere (npm pack @sparticuz/chromium holds one)"),
]
TAG = "<img/src=x/onerror=window.pwned=1>"
"""A token of its own: markup in one piece, without a character that is drawn specially."""
HOSTILE = f"</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'><b>{TAG}"
STRANGE = "👩\u200d🚀 é\n  two  spaces \u202eover\u202c\ttab \u0007 مرحبا"


@dataclass(frozen=True)
class Shown:
    """A page in the browser, and the samples that were written into it."""

    tab: Page
    samples: list[Sample]
    figures: Figures
    template: ChatTemplate

    def open(self, name: str) -> Sample:
        """Show a sample by its id."""
        index = next(n for n, s in enumerate(self.samples) if s.id == name)
        self.tab.js(f"open({index})")
        self.tab.until(f"$('name').textContent === {json.dumps(name)}")
        return self.samples[index]

    def search(self, text: str, where: str = "text") -> str:
        """Search as typed; the line that says what was found."""
        self.tab.js(f"$('where').value = {json.dumps(where)}; $('query').value = {json.dumps(text)}; search()")
        return self.tab.js("$('status').textContent")


def rows() -> list[Any]:
    def row(name: str, kind: str, *turns: str) -> dict[str, Any]:
        return {"id": name, "kind": kind, "messages": [{"role": ("user", "assistant")[n % 2], "content": t} for n, t in enumerate(turns)]}

    many = [row(f"talk-{n}", "odd" if n % 2 else "even", f"question {n}", f"answer needle-{n}.", "more?", "No.") for n in range(300)]
    return [
        row("strange", "unicode", STRANGE, f"yes {STRANGE}"),
        row(f"name {HOSTILE}", HOSTILE, HOSTILE, HOSTILE),
        *many,
        row("long", "long", "count", "0123456789" * 900),
        [],
    ]


@pytest.fixture(scope="module")
def shown(template: ChatTemplate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    assert PROGRAM is not None
    tokenizer = copy.deepcopy(template.tokenizer)
    tokenizer.add_tokens([TAG])
    template = ChatTemplate(tokenizer, "with a tag")
    folder = tmp_path_factory.mktemp("page")
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows()), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_CACHE", str(folder / "cache"))
        job = open_job(DataConfig.model_validate({"train": str(folder / "rows.jsonl"), "max_length": 6000}), template, "train")
        samples, figures = cache.prepare(job)
    page.write(folder / "page.html", {"train": (samples, figures)}, template, f"Title {HOSTILE}")
    with browse(PROGRAM, folder / "profile") as tab:
        tab.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
        tab.call("Page.navigate", url=(folder / "page.html").as_uri())
        tab.until("typeof head === 'object' && document.querySelector('#rows button') !== null")
        yield Shown(tab, list(samples), figures, template)


@pytest.fixture(autouse=True)
def quiet(shown: Shown) -> Iterator[None]:
    """No test leaves a search, a filter, or a complaint of the browser behind."""
    shown.tab.js(
        "for (const id of ['split', 'kind', 'order', 'query']) $(id).value = ''; $('low').value = 0; $('high').value = 100; $('cut').checked = false; search()"
    )
    yield
    assert shown.tab.complaints == []
    assert [r for r in shown.tab.requests if not r.startswith("file:")] == []
    assert len(shown.tab.requests) == 1
    assert shown.tab.js("typeof window.pwned") == "undefined"


def drawn(tab: Page) -> list[Any]:
    """Position, supervision, mark and text of each token in the document."""
    script = "[...document.querySelectorAll('#tokens .t')].map(e => [Number(e.dataset.i), e.classList.contains('s'), e.classList.contains('m'), e.textContent])"
    return tab.js(script)


def test_every_token_is_drawn_as_it_is_supervised(shown: Shown) -> None:
    sample = shown.open("talk-7")
    tokens = drawn(shown.tab)
    assert [t[0] for t in tokens] == list(range(len(sample)))
    assert [t[1] for t in tokens] == sample.loss_mask.tolist()
    assert [t[2] for t in tokens] == [i in shown.template.special_ids for i in sample.input_ids.tolist()]
    assert "".join(t[3] for t in tokens) == shown.template.tokenizer.decode(sample.input_ids.tolist())
    assert shown.tab.js("[...document.querySelectorAll('.turn h3')].map(e => e.firstChild.data)") == ["user", "assistant", "user", "assistant"]
    assert f"{len(sample)} tokens, {int(sample.loss_mask.sum())} supervised" in shown.tab.js("$('facts').textContent")


def test_a_character_over_several_tokens_is_whole(shown: Shown) -> None:
    sample = shown.open("strange")
    tokens = drawn(shown.tab)
    assert len(tokens) == len(sample)  # one a byte
    first = next(n for n, t in enumerate(tokens) if "👩" in t[3])
    assert [t[3] for t in tokens[first : first + 4]] == ["👩", "", "", ""]
    assert shown.tab.js(f"[1, 2, 3].map(n => document.querySelector(`[data-i='${{{first} + n}}'] .c`).dataset.c)") == ["⋯"] * 3
    shown.tab.js(f"document.querySelector('[data-i=\"{first + 1}\"]').focus()")
    assert shown.tab.js("$('tip').textContent").startswith('bytes 9Fpart of "👩" · id ')
    assert "\ufffd" not in shown.tab.js("document.body.innerText")


def test_what_cannot_be_seen_is_named_and_does_not_act(shown: Shown) -> None:
    shown.open("strange")
    named = shown.tab.js("[...document.querySelectorAll('#tokens .c.u')].map(e => e.dataset.c)")
    assert named == ["U+200D", "U+202E", "U+202C", "U+0007"] * 2
    assert not set("\u200d\u202e\u202c\u0007") & set(shown.tab.js("$('tokens').textContent"))
    assert shown.tab.js("[...document.querySelectorAll('#tokens .c')].filter(e => e.dataset.c === '→').length") == 2
    # dots: two spaces that begin a line, two in a row, none between words
    assert shown.tab.js("document.querySelectorAll('.turn.user .sp').length") == 4
    assert shown.tab.js("getComputedStyle(document.querySelector('.body')).unicodeBidi") == "plaintext"


def test_bytes_that_are_no_text_are_shown_as_bytes(shown: Shown) -> None:
    shown.open("strange")
    alone = next(n for n, i in enumerate(shown.samples[0].input_ids.tolist()) if shown.template.tokenizer.convert_ids_to_tokens(i) == "Ł")  # byte 9F
    assert shown.tab.js(f"spell({alone}, {alone + 1})[0].charCodeAt(0).toString(16)") == "dc9f"
    assert (
        shown.tab.js(
            f"(e => {{ fill(e, spell({alone}, {alone + 1})[0]); return e.firstChild.nextSibling?.dataset.c ?? e.firstChild.dataset.c }})(make('p', ''))"
        )
        == "9F"
    )


def test_ids_and_places_appear_on_hover_and_on_focus(shown: Shown) -> None:
    sample = shown.open("talk-7")
    for number in (3, len(sample) - 1):
        piece = shown.template.tokenizer.decode([int(sample.input_ids[number])])
        expected = [f'"{piece}"', f"id {int(sample.input_ids[number])} · position {number} · {'learned from' if sample.loss_mask[number] else 'only read'}"]
        shown.tab.js("document.activeElement.blur(); hide()")
        shown.tab.hover(f"#tokens [data-i='{number}']")
        shown.tab.until("!$('tip').hidden")
        assert all(e in shown.tab.js("$('tip').textContent") for e in expected)
        shown.tab.hover("#name")
        shown.tab.until("$('tip').hidden")
        shown.tab.js(f"document.querySelector(\"#tokens [data-i='{number}']\").focus()")
        assert all(e in shown.tab.js("$('tip').textContent") for e in expected)
        assert shown.tab.js("document.activeElement.getAttribute('aria-describedby')") == "tip"


def test_keys_move_between_tokens_turns_and_samples(shown: Shown) -> None:
    sample = shown.open("talk-7")
    place = "Number(document.activeElement.dataset.i ?? -1)"
    shown.tab.js("document.querySelector('#tokens [tabindex=\"0\"]').focus()")
    assert shown.tab.js(place) == 0
    for key, code, expected in (("ArrowRight", 39, 1), ("ArrowRight", 39, 2), ("ArrowLeft", 37, 1), ("End", 35, len(sample) - 1), ("Home", 36, 0)):
        shown.tab.key(key, code)
        assert shown.tab.js(place) == expected
    shown.tab.key("ArrowDown", 40)
    assert shown.tab.js("document.activeElement.closest('.turn').className") == "turn assistant"
    assert shown.tab.js("document.querySelectorAll('#tokens [tabindex=\"0\"]').length") == 1
    shown.tab.key("j", 74)
    assert shown.tab.js("$('name').textContent") == "talk-8"
    shown.tab.key("k", 75)
    assert shown.tab.js("$('name').textContent") == "talk-7"
    shown.tab.key("/", 191)
    assert shown.tab.js("document.activeElement.id") == "query"
    shown.tab.js("document.activeElement.blur()")


def test_search_finds_text_ids_and_names(shown: Shown) -> None:
    assert shown.search("NEEDLE-29") == "11 hits in 11 samples, here 1 of 1"
    assert shown.tab.js("$('name').textContent") == "talk-29"
    assert shown.tab.js("[...document.querySelectorAll('#tokens .h')].map(e => e.textContent).join('')") == "needle-29"
    shown.tab.key("n", 78)
    assert shown.tab.js("$('name').textContent") == "talk-290"
    assert shown.search("(needle.*") == "0 hits in 0 samples"
    assert shown.tab.js("$('name').textContent") == "No sample fits"
    assert shown.search("مرحبا") == "2 hits in 1 sample, here 1 of 2"
    question = int(shown.template.encode("?")[0])
    count = sum(int((s.input_ids == question).sum()) for s in shown.samples)
    assert shown.search(str(question), "token").startswith(f"{count} hits in 300 samples")
    assert shown.search("99999", "token") == "0 hits in 0 samples"
    assert shown.search("TALK-12", "name") == "11 samples"
    assert shown.tab.js("$('count').textContent") == f"11 of {len(shown.samples)}"


def test_filters_keep_what_they_say(shown: Shown) -> None:
    def left(script: str) -> list[int]:
        shown.tab.js(f"{script}; filter()")
        return shown.tab.js("view")

    share = [float(s.loss_mask.float().mean()) for s in shown.samples]
    assert left("$('kind').value = 'odd'") == [n for n, s in enumerate(shown.samples) if s.id.startswith("talk-") and int(s.id[5:]) % 2]
    assert left("$('kind').value = ''; $('low').value = 40; $('high').value = 60") == [n for n, x in enumerate(share) if 0.4 <= x <= 0.6]
    assert left("$('low').value = 0; $('high').value = 100; $('cut').checked = true") == [len(shown.samples) - 1]
    assert "tokens of this conversation were cut" in shown.tab.js("$('facts').textContent")
    assert left("$('cut').checked = false; $('order').value = 'length'")[0] == len(shown.samples) - 1
    assert share[left("$('order').value = 'share'")[0]] == pytest.approx(min(share))


def test_only_what_is_near_is_in_the_document(shown: Shown) -> None:
    sample = shown.open("long")
    assert len(sample) == 6000
    shown.tab.js("scrollTo(0, 0); draw(0)")
    assert shown.tab.js("document.querySelectorAll('#rows button').length") < 40
    assert 1500 <= shown.tab.js("drawn") < 6000
    shown.tab.js("$('more').scrollIntoView()")
    shown.tab.until("drawn >= 3000")
    shown.tab.js("dispatchEvent(new Event('beforeprint'))")
    assert len(drawn(shown.tab)) == 6000
    assert shown.tab.js("$('more').textContent") == ""


def test_hostile_text_stays_text(shown: Shown) -> None:
    shown.open(f"name {HOSTILE}")
    assert TAG in [t[3] for t in drawn(shown.tab)]
    assert HOSTILE in shown.tab.js("$('tokens').textContent")
    assert shown.tab.js("document.querySelectorAll('img, main b:not(#rows b), script').length") == 1  # its own script
    assert shown.tab.js("document.title") == f"Title {HOSTILE}" == shown.tab.js("$('title').textContent")
    assert HOSTILE in shown.tab.js("[...$('kind').options].map(o => o.text)")


def test_the_summary_adds_up(shown: Shown) -> None:
    text = shown.tab.js("$('summary').innerText").replace("\n", " ")
    counts = shown.figures.counts
    assert f"{counts.read} read" in text
    assert f"= {counts.kept} kept" in text
    assert f"+ {counts.dropped} dropped" in text
    assert counts.read == counts.kept + counts.dropped == 304
    (reason,) = counts.reasons
    assert f"dropped {reason}" in text


CONTRAST = """
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgb = c => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const linear = v => v / 255 <= .04045 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = c => .2126 * linear(c[0]) + .7152 * linear(c[1]) + .0722 * linear(c[2]);
  const ground = e => { const c = rgb(getComputedStyle(e).backgroundColor); return c[3] === 255 || !e.parentElement ? c : ground(e.parentElement); };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    if (!e.checkVisibility() || ["SCRIPT", "NOSCRIPT", "OPTION"].includes(e.tagName) || e.disabled) continue;
    const text = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || e.dataset.c;
    if (!text) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    found.push([(a + .05) / (b + .05), `${e.tagName}.${e.className}`]);
  }
  return found;
})()
"""


def test_both_themes_are_readable_and_toggle(shown: Shown) -> None:
    shown.open("strange")
    assert shown.search("two").startswith("2 hits")
    grounds = []
    for preferred in ("light", "dark"):
        shown.tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": preferred}])
        found = shown.tab.js(CONTRAST)
        assert len(found) > 100
        assert [f for f in found if f[0] < 4.5] == []
        grounds.append(shown.tab.js("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]
    shown.tab.js("$('theme').click()")
    assert shown.tab.js("getComputedStyle(document.body).backgroundColor") == grounds[0]
    assert shown.tab.js("$('theme').textContent") == "Dark"
    shown.tab.key("t", 84)
    assert shown.tab.js("getComputedStyle(document.body).backgroundColor") == grounds[1]
    shown.tab.js("delete document.documentElement.dataset.theme; label()")
    shown.tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])


def test_supervision_and_roles_differ_in_form_too(shown: Shown) -> None:
    shown.open("talk-7")
    line = "getComputedStyle(document.querySelector('#tokens .t{}')).boxShadow"
    assert "inset" in shown.tab.js(line.format(".s"))
    assert shown.tab.js(line.format(":not(.s)")) == "none"
    bars = shown.tab.js("['system', 'user', 'assistant', 'tool'].map(r => getComputedStyle(document.querySelector(`#roles .${r}`)).borderLeftStyle)")
    assert len(set(bars)) == 4


def test_it_fits_a_narrow_window(shown: Shown) -> None:
    shown.open("talk-7")
    shown.tab.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=False)
    assert shown.tab.js("document.documentElement.scrollWidth") <= 390
    shown.tab.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
