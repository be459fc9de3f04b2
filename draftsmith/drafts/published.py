"""How drafts of one Llama-like block over captured features look in published checkpoints: names in the block, variants, layer ids. docs/export.md says where
each rule was read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.core.types import TargetShape

_BLOCK = ("self_attn.", "mlp.", "input_layernorm.", "hidden_norm.", "post_attention_layernorm.")


def in_block(name: str, prefix: str) -> str:
    """Our name of a tensor with the prefix that the block has there."""
    return f"{prefix}{name}" if name.startswith(_BLOCK) else name


def without_block(name: str) -> str:
    """The inverse of `in_block`, for both prefixes in use."""
    return next((name.removeprefix(prefix) for prefix in ("midlayer.", "layers.0.") if name.startswith(prefix)), name)


def refuse_variants(fields: Mapping[str, Any], shape: TargetShape) -> None:
    """Variants whose forward pass is another one. Raises ValueError naming it."""
    nested = fields.get("eagle_config") or {}
    body = fields.get("transformer_layer_config") or fields
    wrong = [
        f"{key} = {found}: {why}"
        for key, found, allowed, why in (
            ("norm_before_fc", nested.get("norm_before_fc", fields.get("norm_before_fc", False)), (False, None), "a norm before fc"),
            ("fc_norm", fields.get("fc_norm") or fields.get("use_aux_norm"), (False, None), "EAGLE-3.1: a norm for each captured layer"),
            ("norm_output", fields.get("norm_output") or nested.get("return_hidden_post_norm"), (False, None), "EAGLE-3.1: a normed recurrent state"),
            ("eagle_config.use_aux_hidden_state", nested.get("use_aux_hidden_state", True), (True,), "EAGLE-1 features"),
            ("num_hidden_layers", body.get("num_hidden_layers", 1), (1,), "more than one block"),
            ("target_hidden_size", fields.get("target_hidden_size"), (None, shape.hidden_size), f"the draft itself is {shape.hidden_size} wide"),
            ("hidden_act", body.get("hidden_act", "silu"), ("silu",), "another activation"),
            ("attention_bias", body.get("attention_bias", False), (False,), "projections with a bias"),
            ("bias", fields.get("bias", False), (False,), "fc with a bias"),
            ("model_type", body.get("model_type", "llama"), ("llama", "eagle"), "another kind of block"),
        )
        if found not in allowed
    ]
    if "speculators_model_type" in fields and "norm_before_residual" not in fields:
        wrong.append("norm_before_residual is missing: vLLM takes that for true, the speculators library for false; write which one it was trained with")
    if wrong:
        raise ValueError(f"this draft is of a variant that Draftsmith does not compute: {'; '.join(wrong)}")


def refusals(layers: list[int], shape: TargetShape, normed_residual: bool) -> dict[str, tuple[str, ...]]:
    """Why an engine cannot serve such a draft; docs/export.md says where each rule was read."""
    everywhere = [] if len(layers) > 1 else [f"draft.layers {layers}: with one captured block it leaves out fc; capture at least two"]
    plain_alone = [] if not normed_residual else ["draft.norm_before_residual: its draft class adds to the raw state; vLLM and llama.cpp read the setting"]
    rope = shape.rope.get("rope_type", "default")
    llama_cpp = [f"draft.layers {layers}: llama.cpp reads exactly three; capture three"] if len(layers) != 3 else []
    if rope not in ("default", "linear", "yarn", "llama3"):
        llama_cpp.append(f"rotary positions of type {rope}: llama.cpp's converter writes default, linear, yarn, llama3; choose another engine")
    return {"sglang": (*everywhere, *plain_alone), "vllm": (), "llama.cpp": tuple(llama_cpp), "tensorrt-llm": (*everywhere, *plain_alone)}


KEY = "eagle_aux_hidden_state_layer_ids"
_MEANINGS = {KEY: (1, "input of block L (vLLM, llama.cpp)"), f"eagle_config.{KEY}": (0, "output of block L (SGLang)")}
"""Where ids stand, how much they exceed ours there, and what they say."""
_EVERYWHERE = ("draft_vocab_size", "num_aux_hidden_states", "target_hidden_size", "d2t", "midlayer", "hidden_norm")
SGLANG_READS = {"spec_aux_hidden_state.py": ("eagle_config", KEY, "use_aux_hidden_state"), "llama_eagle3.py": (*_EVERYWHERE, "tie_word_embeddings")}
VLLM_READS = {"eagle3_utils.py": (KEY,), "llama_eagle3.py": (*_EVERYWHERE, "norm_before_residual")}
"""What these engines' classes for such drafts rely on, by file."""


def captured(fields: Mapping[str, Any], blocks: int) -> tuple[int, ...]:
    """See `Draft.published_layers`."""
    inputs, nested = _ids(fields)
    found = {tuple(ids) for ids in (inputs and [i - 1 for i in inputs], nested) if ids}
    if len(found) > 1:
        raise ValueError(
            f"the layer ids disagree: {KEY} {inputs} means outputs of blocks {[i - 1 for i in inputs or ()]}, eagle_config.{KEY} means outputs of blocks "
            f"{nested}; one of them is off, the top level must be one more than the nested one"
        )
    if found:
        return found.pop()
    if not blocks:
        raise ValueError(f"no {KEY}; the default depends on the number of the target's blocks: give the target")
    return 1, blocks // 2 - 1, blocks - 4


def layer_faults(fields: Mapping[str, Any], known: tuple[int, ...] | None, source: str, blocks: int | None) -> list[str]:
    """See `Draft.layer_faults`."""
    inputs, nested = _ids(fields)
    faults: list[str] = []
    if inputs is None:
        faults.append(f"{KEY} is missing: vLLM and llama.cpp would capture their default blocks")
    if nested is None and "transformer_layer_config" not in fields:
        faults.append(f"eagle_config.{KEY} is missing: SGLang would capture its default blocks")
    for (place, (shift, meaning)), ids in zip(_MEANINGS.items(), (inputs, nested), strict=True):
        if ids is None:
            continue
        if ids != sorted(set(ids)):
            faults.append(f"{place} {ids} is not strictly ascending: vLLM sorts ids, SGLang does not, and columns of fc would meet other blocks")
        if known is not None and ids != (expected := [i + shift for i in known]):
            faults.append(f"{place} is {ids}; id L there is the {meaning}, and {source} has outputs of blocks {list(known)}: expected {expected}")
        if blocks is not None and not all(shift <= i < blocks + shift for i in ids):
            faults.append(f"{place} {ids}: id L there is the {meaning}, and the target has {blocks} blocks")
    if known is None and inputs and nested and inputs != [i + 1 for i in nested]:
        faults.append(f"{KEY} {inputs} means outputs of blocks {[i - 1 for i in inputs]}, eagle_config.{KEY} outputs of blocks {nested}: one of them is off")
    return faults


def _ids(fields: Mapping[str, Any]) -> tuple[list[int] | None, list[int] | None]:
    return fields.get(KEY), (fields.get("eagle_config") or {}).get(KEY)
