"""Token ids of ASCII text out of a dictionary of words: the ids of the tokenizer, without asking it about a word twice.

Byte-level BPE tokenizers (GPT-2's, Llama 3's, Qwen's and their kin) cut text into words by one regular expression and merge within words only. Text repeats
its words, so most of the tokenizer's work is done already. The library caches merges too, but spends most of its time on regular expression, normalization
and offsets. Only ASCII is looked up: there, letters, digits and spaces are the same to every regular expression engine and every version of Unicode.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers.models import BPE

KNOWN = 100_000
"""Words remembered at most; they take about 30 MB."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` splits by on its own (tokenizers, `pre_tokenizers/byte_level.rs`)."""
PROBES = (
    "It's 12345 o'clock, we'LL see:\r\n\r\n\tdef f(x):\n        return x**2  # trailing  \n\n\n  a", "".join(map(chr, range(128))), "", "\n", "  ", " \n x",
    "".join(chr(i) + chr(j) for i in range(0, 128, 3) for j in range(1, 128, 7)),
)  # fmt: skip
"""Texts whose ids must be the tokenizer's before a dictionary is used."""


class Words:
    """The dictionary of one tokenizer. `backend` is a `tokenizers.Tokenizer`, `pattern` what it cuts words by."""

    def __init__(self, backend: Any, pattern: str) -> None:
        self._pattern = re.compile(_in_ascii(pattern), re.ASCII)
        self._model = backend.model
        self._known: dict[str, list[int]] = {}

    @staticmethod
    def of(backend: Any) -> Words | None:
        """The dictionary of a tokenizer that cuts words in the way described above; None for others."""
        pattern = _pattern(backend)
        if pattern is None:
            return None
        try:
            words = Words(backend, pattern)
        except (re.error, KeyError):
            return None
        same = all(words.ids(text) == backend.encode(text, add_special_tokens=False).ids for text in PROBES)
        return words if same and not words._pattern.groups else None

    def ids(self, text: str) -> list[int] | None:
        """Token ids of a text without marks; None when it is not ASCII, or has characters that belong to no word."""
        if not text.isascii():
            return None
        found: list[int] = []
        length, known = 0, self._known
        for word in self._pattern.findall(text):
            length += len(word)
            ids = known.get(word)
            found += self._learn(word) if ids is None else ids
        return found if length == len(text) else None

    def _learn(self, word: str) -> list[int]:
        if len(self._known) >= KNOWN:
            self._known.clear()
        ids = [token.id for token in self._model.tokenize(word.translate(_BYTES))]
        if len(word) <= 64:
            self._known[word] = ids
        return ids


def _pattern(backend: Any) -> str | None:
    """What a byte-level BPE tokenizer cuts words by; None for every other kind."""
    model, before, normalizer = backend.model, _step(backend.pre_tokenizer), _step(backend.normalizer)
    plain = isinstance(model, BPE) and not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
    if not plain or normalizer.get("type") not in (None, "NFC") or any(t.normalized for t in backend.get_added_tokens_decoder().values()):
        return None  # NFC leaves ASCII as it is
    steps = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2 if last["use_regex"] else None
    split = steps[0]
    isolated = len(steps) == 2 and split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"] and not last["use_regex"]
    return split["pattern"].get("Regex") if isolated else None


def _step(step: Any) -> dict[str, Any]:
    """A step's settings, as pickling keeps them: the JSON of the whole tokenizer has its vocabulary too, which takes half a second for Qwen's."""
    return json.loads(step.__getstate__()) if step is not None else {}


def _in_ascii(pattern: str) -> str:
    r"""The pattern for ASCII text, `\p{L}` and its kin written out, for `re`, which is faster. Raises KeyError for classes that are not in `_CLASSES`."""
    parts: list[str] = []
    inside = False
    for token in re.findall(r"\\p\{\w+\}|\\.|.", pattern, re.DOTALL):
        inside = token == "[" if not inside else token != "]"
        if token.startswith(r"\p"):
            letters = _CLASSES[token[3:-1]]
            token = letters if inside else f"[{letters}]" if letters else r"[^\s\S]"
        parts.append(token)
    return "".join(parts)


_CLASSES = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
"""Classes of Unicode as far as they reach into ASCII."""
_HIDDEN = [*range(33), 127]
_BYTES = {byte: 256 + n for n, byte in enumerate(_HIDDEN)}
"""Byte-level BPE writes bytes that do not print as letters from U+0100 on (GPT-2's `bytes_to_unicode`)."""
