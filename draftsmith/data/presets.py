"""Public sets that drafts are trained on, by name: where they lie on the Hugging Face hub, and how their rows read.

Hub ids, splits and columns follow the data scripts of SpecForge (`scripts/prepare_data.py`, `prepare_nemotron_post_training_v2.py`) and speculators
(`SOURCE_DATASET_CONFIGS`), and the sets' cards; docs/data.md says what was compared. The licence is what the card states, `SEE_CARD` where no copy of the
card with a licence was found. Read it before you use a set, above all where answers come from another company's model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from draftsmith.data.conversations import RowError, short
from draftsmith.data.shapes import SHAPES, Converter, Item, pair


@dataclass(frozen=True)
class Preset:
    """One public set. `hub` is its id, `subsets` its configurations (all are read, one after the other)."""

    hub: str
    convert: Converter
    license: str
    split: str = "train"
    subsets: tuple[str | None, ...] = (None,)


def _columns(asked: str, answered: str, row: Mapping[str, Any], default: str) -> tuple[str, Item]:
    """Question and answer in columns of these names."""
    missing = [name for name in (asked, answered) if name not in row]
    if missing:
        raise RowError(f"without `{missing[0]}`", f"expected columns `{asked}` and `{answered}`, got {', '.join(map(str, row))}")
    return pair(row, default, row[asked], row[answered])


def _math_qa(row: Mapping[str, Any], default: str) -> tuple[str, Item]:
    """A problem with its choices, answered by the rationale."""
    if not all(isinstance(row.get(key), str) for key in ("Problem", "options", "Rationale")):
        raise RowError("without `Problem`, `options` or `Rationale`", f"expected `Problem`, `options` and `Rationale` as text, got {short(dict(row))}")
    return pair(row, default, f"{row['Problem']}\n{row['options']}", row["Rationale"])


def _nemotron(row: Mapping[str, Any], default: str) -> tuple[str, Item]:
    """`messages`; tools, where offered, stand in `metadata`, an object written as text. Older versions have `input` (messages) and `output`."""
    if "messages" not in row:
        return pair(row, default, row.get("input"), row.get("output"), row.get("system_prompt"))
    metadata: Any = row.get("metadata") or {}
    try:
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    except ValueError as error:
        raise RowError("with `metadata` that is no JSON object", f"`metadata` must be a JSON object, got {short(metadata)}") from error
    tools = metadata.get("tools") if isinstance(metadata, Mapping) else None
    return SHAPES["messages"].convert({**row, "tools": tools} if tools else row, default)


_messages, _sharegpt, _alpaca = (SHAPES[name].convert for name in ("messages", "sharegpt", "alpaca"))
SEE_CARD = "see its card"
_MATH = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra", "precalculus")

PRESETS: dict[str, Preset] = {
    "ultrachat": Preset("HuggingFaceH4/ultrachat_200k", _messages, "MIT", split="train_sft"),
    "sharegpt": Preset("Aeala/ShareGPT_Vicuna_unfiltered", _sharegpt, "Apache-2.0"),
    "perfectblend": Preset("mlabonne/open-perfectblend", _sharegpt, "Apache-2.0"),
    "perfectblend-llama-3.1-8b": Preset("frankleeeee/PerfectBlend-Regenerated-Llama-3.1-8B-Instruct", _sharegpt, SEE_CARD),
    "perfectblend-llama-3.3-70b": Preset("frankleeeee/PerfectBlend-Regenerated-Llama-3.3-70B-Instruct", _sharegpt, SEE_CARD),
    "magpie": Preset("Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", _sharegpt, SEE_CARD),
    "magpie-qwen2.5": Preset("Magpie-Align/Magpie-Qwen2.5-Pro-1M-v0.1", _sharegpt, SEE_CARD),
    "opencodeinstruct": Preset("nvidia/OpenCodeInstruct", partial(_columns, "input", "output"), "CC-BY-4.0"),
    "codealpaca": Preset("sahil2801/CodeAlpaca-20k", _alpaca, "CC-BY-4.0"),
    "magicoder-evol": Preset("ise-uiuc/Magicoder-Evol-Instruct-110K", partial(_columns, "instruction", "response"), "Apache-2.0"),
    "opencoder": Preset("OpenCoder-LLM/opc-sft-stage1", partial(_columns, "instruction", "output"), "MIT", subsets=("largescale_diverse_instruct",)),
    "gsm8k": Preset("openai/gsm8k", partial(_columns, "question", "answer"), "MIT", subsets=("main",)),
    "math": Preset("EleutherAI/hendrycks_math", partial(_columns, "problem", "solution"), "MIT", subsets=_MATH),
    "math-qa": Preset("regisss/math_qa", _math_qa, "Apache-2.0"),  # allenai/math_qa without its loading script, which `datasets` refuses
    "camel-physics": Preset("camel-ai/physics", partial(_columns, "message_1", "message_2"), SEE_CARD),
    "nemotron-post-training": Preset("nvidia/Nemotron-Post-Training-Dataset-v2", _nemotron, "CC-BY-4.0", split="chat"),
    "nemotron-post-training-v1": Preset("nvidia/Nemotron-Post-Training-Dataset-v1", _nemotron, "CC-BY-4.0", split="chat"),
    "llama-nemotron": Preset("nvidia/Llama-Nemotron-Post-Training-Dataset", _nemotron, "CC-BY-4.0", split="chat", subsets=("SFT",)),
    "hermes-function-calling": Preset("NousResearch/hermes-function-calling-v1", _sharegpt, "Apache-2.0", subsets=("func_calling",)),
}
