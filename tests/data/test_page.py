"""The page holds exactly the samples: ids, masks, texts, counts; what it leaves out it says; nothing in the data can become markup."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import templates
from templates import changed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith import prepare as preparing
from draftsmith.data import cache, page
from draftsmith.data.cache import ArrowSamples
from draftsmith.data.config import DataConfig
from draftsmith.data.prepare import Figures, open_job
from draftsmith.data.template import ChatTemplate
from draftsmith.target import smollm2

HOSTILE = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'> {{IDS}} <!-- & &lt; \u2028"
TEXTS = ("plain text", "日本語 and 👩\u200d🚀🎉", "مرحبا \u202e over", "  two  \n\n\t\u0007 end ", "\ufeffmark \ufffd", HOSTILE)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))


def talk(n: int, text: str, answer: str | None = None) -> dict[str, Any]:
    messages = [("user", text), ("assistant", answer or f"yes: {text}"), ("user", "more?"), ("assistant", f"{n} times")]
    return {"id": f"talk-{n} {text}", "kind": "odd" if n % 2 else "even", "messages": [{"role": r, "content": c} for r, c in messages]}


def prepared(template: ChatTemplate, folder: Path, rows: list[Any], **changes: Any) -> tuple[ArrowSamples, Figures]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return cache.prepare(open_job(DataConfig.model_validate({"train": str(file), **changes}), template, "train"))


def blocks(path: Path) -> tuple[dict[str, Any], list[int]]:
    """What a page holds, read as its description says."""
    found = dict(re.findall(r'<script type="text/plain" id="(head|ids)">([A-Za-z0-9+/=]*)</script>', path.read_text(encoding="utf-8")))
    return json.loads(gzip.decompress(base64.b64decode(found["head"]))), unpacked(gzip.decompress(base64.b64decode(found["ids"])))


def unpacked(packed: bytes) -> list[int]:
    numbers, value, shift = [], 0, 0
    for byte in packed:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(value)
            value = shift = 0
    return numbers


def as_bytes(piece: str | list[int]) -> bytes:
    return piece.encode() if isinstance(piece, str) else bytes(piece)


def real(_: ChatTemplate) -> ChatTemplate:
    """SmolLM2's tokenizer: merges within characters."""
    return ChatTemplate.load(str(smollm2.directory()))


def words(_: ChatTemplate) -> ChatTemplate:
    """A tokenizer in the manner of SentencePiece: `▁` for spaces, single bytes for what it does not know."""
    text = [*"abcdefghijklmnopqrstuvwxyz:?_0123456789", "▁", "▁yes", "▁plain"]
    vocab = {c: i for i, c in enumerate(["<unk>", *[f"<0x{b:02X}>" for b in range(256)], *text])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    jinja = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    jinja += "{% if add_generation_prompt %}assistant:{% endif %}"
    return ChatTemplate(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=jinja), "words")


@pytest.mark.parametrize("of", [lambda t: t, words, pytest.param(real, marks=pytest.mark.slow)])
def test_ids_masks_and_texts_come_back(template: ChatTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: Any) -> None:
    with monkeypatch.context() as shared:  # where the real target was converted before
        shared.delenv("DRAFTSMITH_CACHE")
        template = of(template)
    samples, figures = prepared(template, tmp_path, [talk(n, text) for n, text in enumerate(TEXTS)])
    page.write(tmp_path / "page.html", {"train": (samples, figures)}, template, "title")
    head, ranks = blocks(tmp_path / "page.html")
    assert len(head["samples"]) == len(samples) == len(TEXTS)
    start = 0
    for row, sample in zip(head["samples"], samples, strict=True):
        own = ranks[start : start + row["length"]]
        start += row["length"]
        mask = np.zeros(row["length"], bool)
        for a, b in zip(row["spans"][::2], row["spans"][1::2], strict=True):
            mask[a:b] = True
        assert [head["ids"][r] for r in own] == sample.input_ids.tolist()
        assert mask.tolist() == sample.loss_mask.tolist()
        assert row["supervised"] == mask.sum()
        text = template.tokenizer.decode(sample.input_ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert b"".join(as_bytes(head["pieces"][r]) for r in own).decode() == text
        assert [head["ids"][r] in template.special_ids for r in own] == [r in head["marks"] for r in own]
    assert start == len(ranks)


def test_pieces_are_text_where_they_can_be(template: ChatTemplate, tmp_path: Path) -> None:
    page.write(tmp_path / "page.html", {"train": prepared(template, tmp_path, [talk(0, "é🎉")])}, template, "title")
    pieces = blocks(tmp_path / "page.html")[0]["pieces"]
    assert sorted(p for p in pieces if isinstance(p, list)) == [[b] for b in sorted(set("é🎉".encode()))]
    assert {"a", "\n", "<|im_start|>"} < {p for p in pieces if isinstance(p, str)}


def test_numbers_of_every_width() -> None:
    numbers = [0, 1, 127, 128, 16383, 16384, 2097151, 2097152, 2**28 - 1]
    packed = page.leb128(np.array(numbers))
    assert len(packed) == 3 * 1 + 2 * 2 + 2 * 3 + 2 * 4
    assert unpacked(packed) == numbers


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, attrs))


def tags(text: str) -> list[Any]:
    parser = Tags()
    parser.feed(text)
    return parser.seen


def test_data_never_becomes_markup(template: ChatTemplate, tmp_path: Path) -> None:
    for name, text in (("tame", "tame"), ("hostile", HOSTILE)):
        page.write(tmp_path / f"{name}.html", {text: prepared(template, tmp_path, [talk(1, text) | {"kind": text}])}, template, text)
    hostile = (tmp_path / "hostile.html").read_text(encoding="utf-8")
    assert tags(hostile) == tags((tmp_path / "tame.html").read_text(encoding="utf-8")) != []
    assert "pwned" not in hostile
    head, _ = blocks(tmp_path / "hostile.html")
    assert (head["title"], head["samples"][0]["kind"], head["splits"][0]["name"]) == (HOSTILE, HOSTILE, HOSTILE)


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    text = page.TEMPLATE.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|\bsrc=|\bhref=|fetch\(|XMLHttpRequest|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_counts_are_those_of_the_preparation(template: ChatTemplate, tmp_path: Path) -> None:
    rows: list[Any] = [talk(n, "x" * 30 * n) for n in range(1, 5)] + [{"messages": []}, [1], talk(9, "y" * 400)]
    samples, figures = prepared(template, tmp_path, rows, max_length=150)
    page.write(tmp_path / "page.html", {"train": (samples, figures)}, template, "title")
    head, ranks = blocks(tmp_path / "page.html")
    (split,) = head["splits"]
    assert split["read"] == 7 == split["kept"] + split["dropped"]
    assert split["dropped"] == sum(number for _, number, _ in split["reasons"]) >= 3
    assert split["samples"] == sum(n for _, n in split["lengths"]) == len(samples) == len(head["samples"])
    assert split["tokens"] == len(ranks) == sum(map(len, samples))
    assert split["supervised"] == sum(int(s.loss_mask.sum()) for s in samples) == sum(s["supervised"] for s in head["samples"])
    assert split["cut"] == samples.cut_tokens == sum(s["cut"] for s in head["samples"]) > 0
    assert [s["cut"] > 0 for s in head["samples"]] == [s["length"] == 150 for s in head["samples"]]
    assert split["coverage"][-1][1] == 1.0
    assert {s["kind"] for s in head["samples"]} == {"odd", "even"}
    assert head["note"] == ""


def test_all_samples_of_a_cut_conversation_say_so(template: ChatTemplate, tmp_path: Path) -> None:
    rewriting = changed(template, templates.STRIPS_THINKING)
    answer = "<think>" + "a" * 100 + "</think>b"  # the second turn is asked without the thinking: two samples, the first of them too long
    samples, figures = prepared(rewriting, tmp_path, [talk(1, "one", answer), talk(2, "two")], max_length=130)
    page.write(tmp_path / "page.html", {"train": (samples, figures)}, rewriting, "title")
    cut = [(s["id"].partition(" ")[0], s["cut"]) for s in blocks(tmp_path / "page.html")[0]["samples"]]
    assert samples.cut_tokens > 0
    assert cut == [("talk-1", samples.cut_tokens)] * 2 + [("talk-2", 0)]


def test_too_many_tokens_are_thinned_out_and_said(template: ChatTemplate, tmp_path: Path) -> None:
    samples, figures = prepared(template, tmp_path, [talk(n, "x" * (n % 7)) for n in range(40)])
    line = page.write(tmp_path / "page.html", {"train": (samples, figures)}, template, "title", most_tokens=1000)
    head, ranks = blocks(tmp_path / "page.html")
    assert 300 < len(ranks) <= 1000
    step = int(re.search(r"every (\d+)(st|nd|rd|th) of each split", head["note"])[1])  # type: ignore[index]
    assert [s["id"] for s in head["samples"]] == [s.id for s in samples[::step]]
    assert f"holds {len(head['samples'])} of 40 samples" in head["note"]
    assert line.startswith(f"{len(head['samples'])} of 40 samples")
    assert head["splits"][0]["samples"] == 40
    assert head["splits"][0]["tokens"] == sum(map(len, samples))


def test_the_size_that_is_said_is_the_size(template: ChatTemplate, tmp_path: Path) -> None:
    line = page.write(tmp_path / "page.html", {"train": prepared(template, tmp_path, [talk(n, "word " * n) for n in range(60)])}, template, "title")
    size = len((tmp_path / "page.html").read_bytes())
    data = size - len(page.TEMPLATE.read_bytes()) + len("{{HEAD}}{{IDS}}")
    assert f"{size / 1e6:.1f} MB, {data / len(blocks(tmp_path / 'page.html')[1]):.2f} bytes a token" in line
    again = page.write(tmp_path / "again.html", {"train": prepared(template, tmp_path, [talk(n, "word " * n) for n in range(60)])}, template, "title")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "page.html").read_bytes()
    assert again.replace("again", "page") == line


CHATML = {"system": "<|im_start|>system", "user": "<|im_start|>user", "assistant": "<|im_start|>assistant", "tool": "<|im_start|>tool"}
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}{% elif m['role'] == 'assistant' %}[/INST] {{ m['content'] }}"
    "{{ eos_token }}{% else %}{{ raise_exception('users and assistants alone') }}{% endif %}{% endfor %}{% if add_generation_prompt %}[/INST]{% endif %}"
)
TOOLS_OF_USERS = (
    "{% for m in messages %}<|im_start|>{% if m['role'] == 'tool' %}user\n<tool_response>\n{% else %}{{ m['role'] }}\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("jinja", "expected"),
    [
        (templates.DEFAULT_SYSTEM, CHATML),
        (templates.REFUSES_SYSTEM, {k: v for k, v in CHATML.items() if k != "system"}),
        (templates.NO_END, {r: f"{r}:" for r in CHATML}),
        (INST, {"user": "[INST]", "assistant": "[/INST]"}),
        (TOOLS_OF_USERS, CHATML | {"tool": "<|im_start|>user\n<tool_response>"}),
    ],
)
def test_headers_of_roles_are_found_by_asking_the_template(template: ChatTemplate, jinja: str, expected: dict[str, str]) -> None:
    assert page.headers(changed(template, jinja)) == expected


def test_a_first_token_of_the_template_is_no_part_of_a_header(template: ChatTemplate) -> None:
    chatml = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    chatml = "{{ bos_token }}" + chatml + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    for bos in ("<|endoftext|>", "<|im_start|>"):
        opened = changed(template, chatml if bos != "<|im_start|>" else chatml.removeprefix("{{ bos_token }}"))
        opened.tokenizer.bos_token = bos
        assert page.headers(opened) == CHATML


def test_turns_begin_at_their_headers(template: ChatTemplate, tmp_path: Path) -> None:
    row = {"messages": [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "user"), ("assistant", "ok"), ("tool", "é"), ("assistant", "yes"))]}
    samples, figures = prepared(template, tmp_path, [row])
    page.write(tmp_path / "page.html", {"train": (samples, figures)}, template, "title")
    head, _ = blocks(tmp_path / "page.html")
    turns = head["samples"][0]["turns"]
    assert [head["roles"][r] for r in turns[1::2]] == ["system", "user", "assistant", "tool", "assistant"]
    mark = template.encode("<|im_start|>").tolist()
    assert turns[::2] == [i for i, t in enumerate(samples[0].input_ids.tolist()) if [t] == mark]


def test_text_before_the_first_header_is_nobodys(template: ChatTemplate, tmp_path: Path) -> None:
    samples, figures = prepared(template, tmp_path, [{"text": "ab<|im_start|>assistant\nyes<|im_end|>"}])
    page.write(tmp_path / "page.html", {"train": (samples, figures)}, template, "title")
    head, _ = blocks(tmp_path / "page.html")
    assert head["samples"][0]["turns"] == [0, head["roles"].index("start"), 2, head["roles"].index("assistant")]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return sum(w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def contrast(a: str, b: str) -> float:
    """As WCAG 2.2 defines it, from 1 to 21."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_what_a_known_pair_has() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


TEXT_ON = {
    "ground": ("text", "quiet", "warn", "accent", "system", "user", "assistant", "tool", "start"), "panel": ("text", "quiet", "warn"),
    "learned": ("text",), "other": ("quiet",), "hit": ("text",), "tip": ("tip-text",),
}  # fmt: skip
SHAPES_ON = {
    "ground": ("learned-line", "hit-line", "control", "accent"),
    "panel": ("control", "learned-line"),
    "learned": ("learned-line",),
    "hit": ("hit-line",),
}


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_reach_wcag_aa(theme: int) -> None:
    named = re.findall(r"--([a-z-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", page.TEMPLATE.read_text(encoding="utf-8"))
    colours = {name: both[theme] for name, *both in named}
    assert set(colours) == {*TEXT_ON, *SHAPES_ON, "line", *(c for group in (*TEXT_ON.values(), *SHAPES_ON.values()) for c in group)}
    weak = {(c, on): contrast(colours[c], colours[on]) for on, group in TEXT_ON.items() for c in group if contrast(colours[c], colours[on]) < 4.5}
    weak |= {(c, on): contrast(colours[c], colours[on]) for on, group in SHAPES_ON.items() for c in group if contrast(colours[c], colours[on]) < 3}
    assert weak == {}


def test_the_command_writes_the_page_and_replaces_none_unasked(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, html = tmp_path / "rows.jsonl", tmp_path / "page.html"
    rows.write_text("".join(json.dumps(talk(n, f"x{n}")) + "\n" for n in range(20)))
    inputs = [str(rows), "data.held_out_share=0.3"]
    preparing.prepare(inputs, str(tiny_target), html=html)
    head, _ = blocks(html)
    assert [s["name"] for s in head["splits"]] == ["train", "held-out"]
    assert sorted(s["id"] for s in head["samples"]) == sorted(f"talk-{n} x{n}" for n in range(20))
    assert f"20 of 20 samples in {html}" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"page.html exists; name another file, or add --force"):
        preparing.prepare(inputs, str(tiny_target), html=html)
    with pytest.raises(ValueError, match=r"--html .*page.txt: expected a name that ends in .html"):
        preparing.prepare(inputs, str(tiny_target), html=tmp_path / "page.txt")
    preparing.prepare(inputs, str(tiny_target), html=html, force=True)
