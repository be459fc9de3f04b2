"""`draftsmith inspect`: what a target is, where its parts lie and why, and what could go wrong, before anything expensive starts."""

from __future__ import annotations

import warnings
from typing import Any

from rich.console import Console
from rich.table import Table

from draftsmith.data.template import ChatTemplate
from draftsmith.drafts import DRAFTS
from draftsmith.features.files import bytes_needed
from draftsmith.pipeline import load_target, load_template
from draftsmith.target.config import TargetConfig
from draftsmith.target.finder import Part
from draftsmith.target.weights import Target


def inspect(chosen: TargetConfig) -> dict[str, Any]:
    """Everything found about a resolved target, as plain data. Raises ValueError where `Target.load` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same notes are part of the result
        target = load_target(chosen, "cpu", None)
    found = target.found
    concerns = list(found.notes)
    return {
        "target": chosen.where,
        "revision": chosen.revision,
        "architecture": found.architecture,
        "model_type": target.shape.model_type,
        "embedding": _part(found.embedding),
        "head": _part(found.head) | {"why": found.why},
        "head_bias": None if found.head_bias is None else _part(found.head_bias),
        "norm": None if found.norm is None else _part(found.norm),
        "norm_rule": found.norm_rule,
        "tied": target.tied,
        "tie_flag": found.tied,
        "logit_rule": target.rule.describe(),
        "vocab_size": target.shape.vocab_size,
        "hidden_size": target.shape.hidden_size,
        "layers": target.shape.layers,
        "rows": {"embedding": target.embedding_VH.shape[0], "head": target.head_VH.shape[0]},
        "files_read": found.read.files,
        "bytes_read": found.read.tensors + found.read.headers,
        "captures": _captures(target, concerns),
        "tokenizer": _tokenizer(chosen, target, concerns),
        "concerns": concerns,
    }


def _part(part: Part) -> dict[str, Any]:
    return {"key": part.key, "file": part.file, "shape": list(part.shape), "dtype": part.dtype, "parameter": part.parameter}


def _captures(target: Target, concerns: list[str]) -> dict[str, Any]:
    """Default capture layers of every draft, and what a token of features takes on disk."""
    rows: dict[str, Any] = {}
    for kind, draft in DRAFTS.items():
        try:
            spec = draft.needs(draft.config_class(), target.shape)
        except ValueError as error:
            concerns.append(f"{kind}: {error}")
            continue
        rows[kind] = {"layers": list(spec.layers), "dtype": spec.dtype, "bytes_per_token": bytes_needed(spec, target.shape.hidden_size, 1)}
    if target.head_VH.shape[1] != target.shape.hidden_size:
        concerns.append(
            f"the head multiplies states of width {target.head_VH.shape[1]}, the blocks' are {target.shape.hidden_size} wide: no draft here takes both"
        )
    return rows


def _tokenizer(chosen: TargetConfig, target: Target, concerns: list[str]) -> dict[str, Any]:
    """Vocabulary, padding rows, special tokens and chat template."""
    try:
        template = load_template(chosen)
        template.require_rows(target.shape.vocab_size, chosen.where)
    except ValueError as error:
        concerns.append(str(error))
        return {"chat_template": False}
    tokenizer: Any = template.tokenizer
    used = max(tokenizer.get_vocab().values()) + 1
    unused = target.shape.vocab_size - used
    if unused > 0:
        concerns.append(f"{unused:,} rows at the end of the head belong to no token (padding): their logits are computed and never supervised")
    return {
        "ids": used,
        "padding_rows": unused,
        "chat_template": True,
        "bos": tokenizer.bos_token,
        "eos": tokenizer.eos_token,
        "pad": tokenizer.pad_token,
        "ends_a_turn": _ends(template),
    }


def _ends(template: ChatTemplate) -> list[str]:
    return [str(template.tokenizer.convert_ids_to_tokens(i)) for i in template.end_ids]


def show(found: dict[str, Any]) -> None:
    """One table for people, with the concerns below it."""
    table = Table(show_header=False, title=f"{found['target']}: {found['architecture']}", title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = [(name, _line(found[name])) for name in ("embedding", "head", "head_bias", "norm") if found[name] is not None]
    rows.insert(2, ("why", found["head"]["why"]))
    rows += [
        ("norm rule", found["norm_rule"]),
        ("logit rule", f"logits = {found['logit_rule']}"),
        ("tied", f"{'yes' if found['tied'] else 'no'} (flag: {'on' if found['tie_flag'] else 'off'})"),
        ("sizes", f"hidden {found['hidden_size']:,}, {found['layers']} blocks, vocabulary {found['vocab_size']:,}"),
        ("read", f"{found['bytes_read'] / 1e6:,.1f} MB out of {', '.join(found['files_read'])}"),
    ]
    for kind, capture in found["captures"].items():
        rows.append((kind, f"captures blocks {', '.join(map(str, capture['layers']))}: {capture['bytes_per_token']:,} bytes a token in {capture['dtype']}"))
    if found["tokenizer"]["chat_template"]:
        rows.append(("tokenizer", "{ids:,} ids; BOS {bos}, EOS {eos}, padding {pad}; chat template".format(**found["tokenizer"])))
        rows.append(("a turn ends with", ", ".join(found["tokenizer"]["ends_a_turn"])))
    for name, text in rows:
        table.add_row(name, text)
    console = Console()
    console.print(table)
    for concern in found["concerns"]:
        console.print(f"! {concern}", markup=False, highlight=False)


def _line(part: dict[str, Any]) -> str:
    shape = " x ".join(f"{n:,}" for n in part["shape"])
    return f"{part['key']}  {shape}  {part['dtype']}  in {part['file']}"
