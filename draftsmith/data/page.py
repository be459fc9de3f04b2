"""Prepared samples as one HTML file to browse: every token, its id, and whether it is learned from. `page.html` is the page; this file fills in the data.

The page holds two blocks of gzip in base64. `head` is JSON: the counts, the pieces of text that the ids in use stand for, and a row for each sample. `ids` has
all token ids as places in the table of pieces, the most frequent first, in LEB128: a token costs about one byte. Base64 needs no escaping, and the page writes
text into its document as text only, so whatever the data holds stays text.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftsmith.core.disk import write_text
from draftsmith.data.cache import ArrowSamples
from draftsmith.data.conversations import Message
from draftsmith.data.prepare import Figures
from draftsmith.data.show import coverage, histogram
from draftsmith.data.template import PROBE, ChatTemplate, TemplateError

TEMPLATE = Path(__file__).with_name("page.html")
MOST_TOKENS = 5_000_000
"""Most tokens in one page: about 5 MB, which a browser opens within seconds. More samples are thinned out evenly, and the page says so."""
ROLES = ("start", "system", "user", "assistant", "tool")
"""Who speaks in a turn; `start` is what stands before the first one that the template's headers tell."""
BYTES = {c: b for b, c in bytes_to_unicode().items()}
"""Byte-level tokenizers write bytes as these characters."""


def write(path: Path, found: Mapping[str, tuple[ArrowSamples, Figures]], template: ChatTemplate, title: str, most_tokens: int = MOST_TOKENS) -> str:
    """Write the page for samples and figures by split. Returns a line for people: what it holds, and its size."""
    step = _step([samples.lengths for samples, _ in found.values()], most_tokens)
    chosen = {split: range(0, len(samples), step) for split, (samples, _) in found.items()}
    ids = np.concatenate([found[split][0].tokens(i).ids for split, places in chosen.items() for i in places])
    table, ranks = by_frequency(ids)
    pieces = pieces_of(table.tolist(), template)
    finder = TurnFinder(headers(template), pieces)
    samples, start = [], 0
    for split, places in chosen.items():
        for row in _rows(split, found[split][0], places):
            stop = start + row["length"]
            samples.append(row | {"turns": finder.turns(ranks[start:stop])})
            start = stop
    total = sum(len(samples) for samples, _ in found.values())
    note = "" if step == 1 else (
        f"This page holds {len(samples):,} of {total:,} samples, every {_nth(step)} of each split, to stay below {most_tokens:,} tokens. "
        "The counts above are those of all samples."
    )  # fmt: skip
    head = {
        "title": title, "note": note, "roles": ROLES, "samples": samples, "ids": table.tolist(), "pieces": [_as_json(p) for p in pieces],
        "marks": [i for i, token in enumerate(table.tolist()) if token in template.special_ids],
        "splits": [_summary(split, *of, template) for split, of in found.items()],
    }  # fmt: skip
    blocks = {"HEAD": _block(json.dumps(head, separators=(",", ":")).encode()), "IDS": _block(leb128(ranks))}
    page = TEMPLATE.read_text(encoding="utf-8")
    for name, block in blocks.items():
        page = page.replace(f"{{{{{name}}}}}", block)
    write_text(path, page)
    data = sum(map(len, blocks.values()))
    return f"{len(samples):,} of {total:,} samples in {path}: {len(page) / 1e6:.1f} MB, {data / len(ids):.2f} bytes a token"


def by_frequency(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids in use, the most frequent first, and each token as its place among them."""
    counts = np.bincount(ids)
    table = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    place = np.zeros(len(counts), np.int64)
    place[table] = np.arange(len(table))
    return table, place[ids]


def leb128(numbers: np.ndarray) -> bytes:
    """Numbers below 2**28, seven bits a byte, the low ones first; the high bit says that another byte follows."""
    widths = np.searchsorted([1 << 7, 1 << 14, 1 << 21], numbers, side="right") + 1
    ends = np.cumsum(widths)
    out = np.zeros(int(ends[-1]), np.uint8)
    for k in range(4):
        there = widths > k
        out[(ends - widths)[there] + k] = (numbers[there] >> (7 * k) & 127) | np.where(widths[there] > k + 1, 128, 0)
    return out.tobytes()


def pieces_of(ids: Sequence[int], template: ChatTemplate) -> list[bytes]:
    """The bytes that each id adds to a text when it stands inside one; joined they are the text, also where a character is spread over tokens."""
    tokenizer: Any = template.tokenizer
    before = int(template.encode("a")[-1])
    shared = len(tokenizer.decode([before]))
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    texts = tokenizer.batch_decode([[before, i] for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    found = [added.get(i, text[shared:]) for i, text in zip(ids, texts, strict=True)]
    # A token that is no whole UTF-8 decodes to replacement characters; its name tells its bytes.
    names = {i: str(tokenizer.convert_ids_to_tokens(i)) for i, text in zip(ids, found, strict=True) if "\ufffd" in text and i not in added}
    return [_bytes_of(names[i], text) if i in names else text.encode() for i, text in zip(ids, found, strict=True)]


def _bytes_of(name: str, text: str) -> bytes:
    if one := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return bytes.fromhex(one[1])
    return bytes(BYTES[c] for c in name) if all(c in BYTES for c in name) else text.encode()


def headers(template: ChatTemplate) -> dict[str, str]:
    """What opens a turn of each role, as far as the template can be asked and says it differently for different roles."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    asked, answer, called = Message("user", "a"), Message("assistant", "b"), Message("assistant", "", tool_calls=(call,))
    found = {"assistant": template.header}
    for role, before, after in (("user", [asked, answer], []), ("system", [], [asked]), ("tool", [asked, called], [])):
        try:
            text = template.render([[*before, Message(role, PROBE, tool_call_id="c"), *after]], prompt=False)[0]
            known = template.render([before], prompt=False)[0] if before else ""
        except TemplateError:
            continue
        found[role] = text[len(known) :].partition(PROBE)[0] if PROBE in text and text.startswith(known) else ""
    start = str(template.tokenizer.bos_token or "")
    whole = {role: text.strip() for role, text in found.items()}
    if not whole.get("user", "").startswith(start):  # then it opens the conversation, not each turn
        whole["system"] = whole.get("system", "").removeprefix(start).strip()
    # The first line is enough, and the rest may depend on the conversation, unless it alone tells two roles apart.
    first = {role: text.partition("\n")[0] for role, text in whole.items()}
    chosen: dict[str, str] = {}
    for role in first:
        text = whole[role] if first[role] in chosen.values() else first[role]
        if text and text not in chosen.values():
            chosen[role] = text
    return chosen


@dataclass(frozen=True)
class TurnFinder:
    """Finds where turns begin: at the headers of the template."""

    headers: Mapping[str, str]
    pieces: Sequence[bytes]

    def turns(self, ranks: np.ndarray) -> list[int]:
        """First token of each turn and its place in `ROLES`, one after the other."""
        parts = [self.pieces[r] for r in ranks.tolist()]
        starts = np.cumsum([0, *map(len, parts)])
        by_text = {text.encode(): ROLES.index(role) for role, text in self.headers.items()}
        longest_first = sorted(by_text, key=len, reverse=True)
        pattern = re.compile(b"|".join(map(re.escape, longest_first)) or b"(?!)")
        found = {int(np.searchsorted(starts, m.start(), side="right")) - 1: by_text[m.group()] for m in pattern.finditer(b"".join(parts))}
        return [n for pair in sorted(({0: 0} | found).items()) for n in pair]


def _rows(split: str, samples: ArrowSamples, places: Sequence[int]) -> list[dict[str, Any]]:
    """What the page knows of each sample. `cut`: tokens that its conversation lost, counted by the cache at the conversation's first sample."""
    table, rows = samples.table, samples.rows
    edges = samples.conversations
    cut = np.repeat(table["cut"].to_numpy()[rows][edges[:-1]], np.diff(edges))
    found = []
    for i in places:
        row, tokens = int(rows[i]), samples.tokens(i)
        text = {name: table[name][row].as_py() for name in ("id", "kind", "where")}
        spans = [n for span in tokens.spans for n in span]
        found.append(text | {"split": split, "length": len(tokens), "supervised": tokens.supervised, "cut": int(cut[i]), "spans": spans})
    return found


def _summary(split: str, samples: ArrowSamples, figures: Figures, template: ChatTemplate) -> dict[str, Any]:
    counts = figures.counts
    return {
        "name": split, "read": counts.read, "kept": counts.kept, "dropped": counts.dropped, "shapes": list(figures.shapes.items()),
        "reasons": [[reason, number, first] for reason, (number, first) in counts.reasons.items()], "samples": len(samples),
        "tokens": int(samples.lengths.sum()), "supervised": sum(map(len, samples.supervised_ids())), "cut": samples.cut_tokens,
        "lengths": histogram(samples), "coverage": coverage(samples, template),
    }  # fmt: skip


def _step(lengths: Sequence[np.ndarray], most_tokens: int) -> int:
    """The smallest distance between shown samples at which their tokens are few enough; at least the first of each split is shown."""
    step = max(1, -(-int(sum(n.sum() for n in lengths)) // most_tokens))
    while sum(int(n[::step].sum()) for n in lengths) > most_tokens and step < max(map(len, lengths)):
        step += 1
    return step


def _nth(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _as_json(piece: bytes) -> str | list[int]:
    """Text, or the bytes of a piece that is no whole UTF-8."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _block(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()
