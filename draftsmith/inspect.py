"""`draftsmith inspect`: what a target is, where its parts lie and why, and what could go wrong, before anything expensive starts."""

from __future__ import annotations

import textwrap
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from draftsmith.core.log import console, say
from draftsmith.core.types import TargetShape
from draftsmith.data.template import ChatTemplate
from draftsmith.drafts import DRAFTS
from draftsmith.features.files import bytes_needed
from draftsmith.pipeline import keys_of, load_target, load_template
from draftsmith.target.config import TargetConfig
from draftsmith.target.families import Anatomy, anatomy, owner_of, skeleton
from draftsmith.target.finder import Finder, Part
from draftsmith.target.model import TargetModel
from draftsmith.target.place import HubPlace, locate
from draftsmith.target.rules import embedding_scale
from draftsmith.target.tensors import groups
from draftsmith.target.weights import Target, shape_of


def inspect(chosen: TargetConfig) -> dict[str, Any]:
    """Everything found about a resolved target, as plain data.

    Tensors that cannot be used (packed, missing, damaged) are told under `problem`, beside all that was found without them; what depends on them is None.
    Raises ValueError where there is no target at all: no such place, no config.json, no causal language model that transformers knows.
    """
    place = locate(chosen.where, chosen.revision)
    config = place.config()
    parts = anatomy(skeleton(config, place.name), place.name)
    found: dict[str, Any] = {
        "target": chosen.where,
        "revision": chosen.revision,
        "head_from": chosen.head_from,
        "architecture": parts.architecture,
        "model_type": config.model_type,
        "problem": None,
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same notes are among the concerns
            target = load_target(chosen, "cpu", None)
    except ValueError as error:
        concerns: list[str] = []
        shape = shape_of(config, parts, parts.model.get_parameter(parts.head))
        found |= _unread(chosen, parts) | {"problem": str(error)}
    else:
        concerns = list(target.found.notes)
        shape = target.shape
        found |= _read(target)
    found["norm_rule"] = None if parts.norm is None else parts.norm.describe()
    found["logit_rule"] = parts.rule.describe(parts.head_bias is not None)
    tied = parts.tied if found["tied"] is None else found["tied"]
    head = parts.model.get_parameter(parts.head)
    found["parameters"] = sum(p.numel() for p in parts.model.parameters()) - (head.numel() if tied else 0)
    found |= _sizes(shape, config, parts)
    found["captures"] = _captures(shape, parts, concerns)
    found["tokenizer"] = _tokenizer(chosen, shape, concerns)
    return found | {"concerns": [*concerns, *_families_concerns(parts, found)]}


def _read(target: Target) -> dict[str, Any]:
    """Where the parts of a target lie that could be loaded."""
    found = target.found
    place = target.places[-1]
    return {
        "embedding": _part(found.embedding),
        "head": _part(found.head) | {"why": found.why},
        "head_bias": None if found.head_bias is None else _part(found.head_bias),
        "norm": None if found.norm is None else _part(found.norm),
        "tied": target.tied,
        "tie_flag": found.tied,
        "rows": {"embedding": target.embedding_VH.shape[0], "head": target.head_VH.shape[0]},
        "files_read": found.read.files,
        "bytes_read": found.read.tensors + found.read.headers,
        "bytes": None if isinstance(place, HubPlace) else sum(place.path(f).stat().st_size for f in set(groups(place)[0].file_of.values())),
    }


def _unread(chosen: TargetConfig, parts: Anatomy) -> dict[str, Any]:
    """As many parts as can be named without reading them: the first that cannot is what the problem is about."""
    named: dict[str, Any] = dict.fromkeys(("embedding", "head", "head_bias", "norm", "tied", "rows", "files_read", "bytes_read", "bytes"))
    with suppress(ValueError):
        place = locate(chosen.where, chosen.revision) if chosen.head_from is None else locate(chosen.head_from)
        finder = Finder(place, parts, keys_of(chosen))
        embedding = finder.embedding()
        named["embedding"] = _part(embedding)
        head = finder.head(embedding)
        named["head"] = None if head is None else _part(head) | {"why": "a head tensor on disk"}
        norm = finder.norm()
        named["norm"] = None if norm is None else _part(norm)
    return named | {"tie_flag": parts.tied}


def _part(part: Part) -> dict[str, Any]:
    return {"key": part.key, "file": part.file, "shape": list(part.shape), "dtype": part.dtype, "parameter": part.parameter}


def _sizes(shape: TargetShape, config: PreTrainedConfig, parts: Anatomy) -> dict[str, Any]:
    model = TargetModel(parts.model)
    quantization: Any = getattr(config, "quantization_config", None)
    method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else getattr(quantization, "quant_method", None)
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "layers": shape.layers,
        "heads": {"query": shape.heads, "key_value": shape.kv_heads, "size": shape.head_dim},
        "context": shape.max_positions,
        "rope": dict(shape.rope) if getattr(config.get_text_config(decoder=True), "rope_parameters", None) else None,
        "embedding_scale": _embedding_scale(model),
        "window": model.window,
        "recurrent": model.recurrent,
        "multimodal": model.speaker is not parts.model,
        "quantized": None if quantization is None else str(getattr(method, "value", method)),
    }


def _embedding_scale(model: TargetModel) -> float | None:
    """What the body multiplies embeddings with; None when it does something else with them."""
    body, embedding = owner_of(model.speaker, model.blocks), model.speaker.get_input_embeddings()
    if not isinstance(embedding, nn.Module):
        return None
    inner = [m for m in body.children() if m not in (embedding, model.blocks) and any(True for _ in (*m.parameters(), *m.buffers()))]
    return embedding_scale(body, embedding, model.blocks[0], inner)


def _captures(shape: TargetShape, parts: Anatomy, concerns: list[str]) -> dict[str, Any]:
    """What every draft captures by default, what a token of it takes on disk, and how large the draft is."""
    rows: dict[str, Any] = {}
    width = parts.model.get_parameter(parts.head).shape[1]
    if width != shape.hidden_size:
        concerns.append(f"the head multiplies states of width {width}, the blocks' are {shape.hidden_size} wide: no draft here takes both")
        return rows
    for kind, draft in DRAFTS.items():
        config: Any = draft.config_class()
        try:
            spec = draft.needs(config, shape)
            rows[kind] = {"layers": list(spec.layers), "dtype": spec.dtype, "bytes_per_token": (each := bytes_needed(spec, shape.hidden_size, 1))}
            rows[kind]["gb_per_million_tokens"] = round(each / 1000, 3)
            with torch.device("meta"):
                rows[kind]["draft_parameters"] = sum(p.numel() for p in draft(config, shape).parameters())
        except ValueError as error:
            concerns.append(f"a recipe needs settings of its own for {kind}: {error}")
    return rows


def _tokenizer(chosen: TargetConfig, shape: TargetShape, concerns: list[str]) -> dict[str, Any] | None:
    """Vocabulary, padding rows, special tokens and chat template; None without a tokenizer that has one."""
    try:
        template = load_template(chosen)
    except ValueError as error:
        concerns.append(f"no stage but this one can run: {error}")
        return None
    tokenizer: Any = template.tokenizer
    used = max(tokenizer.get_vocab().values()) + 1
    padding = shape.vocab_size - used
    try:
        template.require_rows(shape.vocab_size, chosen.where)
    except ValueError as error:
        concerns.append(f"no stage but this one can run: {error}")
    if padding > 0:
        concerns.append(f"{padding:,} rows at the end of the head belong to no token (padding): a draft vocabulary never holds them, the target's softmax does")
    return {
        "ids": used,
        "padding_rows": max(padding, 0),
        "bos": tokenizer.bos_token,
        "eos": tokenizer.eos_token,
        "pad": tokenizer.pad_token,
        "ends_a_turn": [str(tokenizer.convert_ids_to_tokens(i)) for i in _ends(template, concerns)],
        "chat_template": _abilities(template, concerns),
    }


def _ends(template: ChatTemplate, concerns: list[str]) -> tuple[int, ...]:
    try:
        ends = template.end_ids
    except ValueError as error:
        concerns.append(f"the chat template does not render a plain question and answer: {error}")
        return ()
    if not ends:
        concerns.append("neither the tokenizer nor the chat template has a token that ends a turn: answers run to their longest length")
    return ends


def _abilities(template: ChatTemplate, concerns: list[str]) -> dict[str, bool]:
    found = template.abilities()
    if not found["generation_prompt"]:
        concerns.append("the chat template opens no assistant turn (it ignores add_generation_prompt): check that a server prompts the same way")
    return found


def _families_concerns(parts: Anatomy, found: dict[str, Any]) -> list[str]:
    """What the class itself gives reason to mind."""
    concerns: list[str] = []
    if parts.rule.cap is not None or parts.rule.scale != 1 or parts.head_bias is not None:
        concerns.append(
            "logits are more than head @ last: Draftsmith trains and verifies under the whole rule, and an engine that leaves it out "
            + ("chooses other tokens" if parts.head_bias is not None else "chooses the same greedy tokens, but samples from another distribution")
        )
    if found["embedding_scale"] not in (None, 1):
        concerns.append(f"the body multiplies embeddings by {found['embedding_scale']:.6g}: a draft is given the stored rows, as serving engines do")
    if found["window"] is not None:
        concerns.append(
            f"sliding-window attention ({found['window']:,} tokens back): where answers may reach beyond it, prompts are decoded one by one, which is slower"
        )
    if found["recurrent"]:
        concerns.append(
            "recurrent blocks: features can be captured and a draft trained, but quickstart, regenerate --local and eval cannot decode with this target yet"
        )
    if found["multimodal"]:
        concerns.append("a multi-modal model: its text part alone is run, so conversations with images or sound are not captured")
    if found["quantized"] is not None:
        concerns.append("the body is quantized: capture and eval run it through transformers, which may ask for the scheme's own library and a GPU")
    return concerns


def show(found: dict[str, Any]) -> None:
    """A page for people: names to the left, never broken; paths whole; then what could go wrong."""
    width = min(console.width, 110)
    for line in [found["target"], _wrapped("", _title(found), width), ""]:
        say(line)
    for name, text in [*_where(found), *_what(found), *_costs(found), *_speech(found["tokenizer"])]:
        say(_wrapped(f"{name:<14}", text, width))
    say("")
    for concern in found["concerns"]:
        say(_wrapped("! ", concern, width))
    if not found["concerns"] and found["problem"] is None:
        say("Nothing is known that could go wrong with this target.")


def _wrapped(label: str, text: str, width: int) -> str:
    return textwrap.fill(text, width, initial_indent=label, subsequent_indent=" " * len(label), break_long_words=False, break_on_hyphens=False)


def _title(found: dict[str, Any]) -> str:
    return (
        f"{found['architecture']} ({found['model_type']}), {_count(found['parameters'])} parameters: {found['layers']} blocks of width "
        f"{found['hidden_size']:,}" + (f", revision {found['revision']}" if found["revision"] else "")
    )


def _count(number: float) -> str:
    return next(f"{number / size:.3g}{unit}" for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")) if number >= size or size == 1)


def _where(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Where the parts lie, and why the head is the head."""
    flag = f"tie flag {'on' if found['tie_flag'] else 'off'}"
    rows = [("embedding", _line(found["embedding"]))]
    if found["head"] is not None:
        same = found["embedding"] is not None and found["head"]["key"] == found["embedding"]["key"]
        rows.append(("head", f"{found['head']['why'] if same else _line(found['head'])}; {flag}"))
    else:
        rows.append(("head", f"unknown ({flag})"))
    if found["head_bias"] is not None:
        rows.append(("head bias", _line(found["head_bias"])))
    if found["norm"] is not None or found["norm_rule"] is not None:
        rows.append(("final norm", "; ".join(text for text in (_line(found["norm"]) if found["norm"] else "", found["norm_rule"] or "") if text)))
    if found["head_from"] is not None:
        rows.append(("read from", found["head_from"]))
    if found["bytes_read"] is not None:
        whole = "" if found["bytes"] is None else f" of {_bytes(found['bytes'])}"
        rows.append(("read", f"{_bytes(found['bytes_read'])}{whole}, from {', '.join(Path(f).name for f in found['files_read'])}"))
    return rows


def _what(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Rules and sizes."""
    heads = found["heads"]
    window = f"; windows of {found['window']:,}" if found["window"] else ""
    ids = "" if found["tokenizer"] is None else f", {found['tokenizer']['ids']:,} ids in the tokenizer"
    padding = found["tokenizer"] and found["tokenizer"]["padding_rows"]
    rows = [
        ("logits", found["logit_rule"]),
        ("vocabulary", f"{found['vocab_size']:,} rows{ids}" + (f", {padding:,} rows of padding" if padding else "")),
        ("attention", f"{heads['query']} query and {heads['key_value']} key-value heads of {heads['size']}{window}"),
        ("context", f"{found['context']:,} positions; {_rope(found['rope'])}"),
    ]
    return rows + ([("quantized", str(found["quantized"]))] if found["quantized"] else [])


def _rope(rope: dict[str, Any] | None) -> str:
    if rope is None:
        return "no rotary positions (a draft has its own)"
    numbers = [(name, value) for name, value in rope.items() if isinstance(value, int | float)]
    settings = [f"{name.removeprefix('rope_')} {f'{value:,}'.removesuffix('.0')}" for name, value in numbers]
    return ", ".join([f"rope {rope.get('rope_type', 'default')}", *settings])


def _costs(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What a draft needs, with default settings."""
    rows = []
    for kind, capture in found["captures"].items():
        size = f"; a draft of {_count(capture['draft_parameters'])} parameters" if "draft_parameters" in capture else ""
        blocks = ", ".join(map(str, capture["layers"]))
        each = capture["bytes_per_token"]
        million = f"{capture['gb_per_million_tokens']:,.2g} GB a million tokens"
        rows.append((kind, f"captures blocks {blocks} and the last state: {each:,} bytes a token in {capture['dtype']}, {million}{size}"))
    return rows


def _speech(tokenizer: dict[str, Any] | None) -> list[tuple[str, str]]:
    if tokenizer is None:
        return [("chat template", "none")]
    able = {name.replace("_", " "): on for name, on in tokenizer["chat_template"].items()}
    named = {word: ", ".join(name for name, on in able.items() if on is answer) for word, answer in (("yes", True), ("no", False))}
    ends = ", ".join(tokenizer["ends_a_turn"]) or "nothing"
    return [
        ("tokens", f"BOS {tokenizer['bos']}, EOS {tokenizer['eos']}, padding {tokenizer['pad']}; a turn ends with {ends}"),
        ("chat template", "; ".join(f"{word}: {names}" for word, names in named.items() if names)),
    ]


def _line(part: dict[str, Any] | None) -> str:
    if part is None:
        return "not found"
    return f"{part['key']}  {' x '.join(f'{n:,}' for n in part['shape'])}  {part['dtype']}  in {Path(part['file']).name}"


def _bytes(number: int) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB" if number >= 1e5 else f"{number:,} bytes"
