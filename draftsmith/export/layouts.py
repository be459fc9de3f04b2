"""What every exported directory has in common: the engines and how they are started, and the fields of config.json that all drafts share, both ways.

What an engine wants of one algorithm is data that the draft gives (`Draft.layout`, `Draft.engines`). docs/export.md says in which file of which version each
rule was read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.core.types import TargetShape
from draftsmith.drafts.base import Draft, Form

EngineName = Literal["sglang", "vllm", "llama.cpp", "tensorrt-llm"]


@dataclass(frozen=True)
class Engine:
    """A serving engine in general."""

    title: str
    checked: str
    """The version whose source the rules were read in."""
    forms: tuple[Form, ...]
    """Forms of a directory that it reads."""
    serve: str
    """Commands that serve a target with a draft: {target}, {draft}, {method}, {width}, {steps} (width + 1), {options}."""
    package: str | None = None
    """Its Python package, where its rules can be looked up again."""
    families: frozenset[str] | None = None
    """Model types of targets that give it the states of inner blocks; None when that was not looked up."""


_SGLANG_FAMILIES = frozenset({
    "apertus", "deepseek_v2", "deepseek_v3", "deepseek_v32", "exaone_moe", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm4_moe",
    "glm4_moe_lite", "glm5_next_text", "glm_moe_dsa", "gpt_oss", "internlm3", "iquestcoder", "llama", "llama4_text", "longcat_flash", "mellum",
    "minimax_m2", "minimax_m3_vl_text", "ministral3", "mistral", "phi3", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text", "qwen4_exp_text", "sarvam_mla",
    "sarvam_moe",
})  # fmt: skip
"""Of the classes below srt/models of SGLang 0.5.23 that have or inherit set_eagle3_layers_to_capture, those that transformers knows."""


ENGINES: dict[EngineName, Engine] = {
    "sglang": Engine(
        "SGLang", "0.5.23", ("engine",),
        "python -m sglang.launch_server --model-path {target} --speculative-algorithm {method} --speculative-draft-model-path {draft} \\\n"
        "  --speculative-num-steps {width} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps}",
        "sglang", _SGLANG_FAMILIES,
    ),
    "vllm": Engine(
        "vLLM", "0.32.0", ("engine", "speculators"),
        'vllm serve {target} --speculative-config \'{{"method": "{method}", "model": "{draft}", "num_speculative_tokens": {width}}}\'',
        "vllm",
    ),
    "llama.cpp": Engine(
        "llama.cpp", "as of llama-cpp-python 0.3.36", ("engine", "speculators"),
        "python convert_hf_to_gguf.py {draft} --target-model-dir {target} --outfile draft.gguf\n"
        "llama-server -m TARGET.gguf --spec-draft-model draft.gguf --spec-type {method} --spec-draft-n-max {width}",
    ),
    "tensorrt-llm": Engine(
        "TensorRT-LLM", "main, read in single files", ("engine",),
        "cat > speculative.yaml <<END\nspeculative_config:\n  decoding_type: {method}\n  max_draft_len: {width}\n"
        "  speculative_model: {draft}\n  {options}\nEND\n"
        "trtllm-serve {target} --extra_llm_api_options speculative.yaml",
    ),
}  # fmt: skip


def refusals(draft: type[Draft], config: Any, shape: TargetShape, form: Form) -> dict[EngineName, list[str]]:
    """Why each engine cannot serve such a draft in this form; an empty list for one that can."""
    made = draft.engines(config, shape)
    found: dict[EngineName, list[str]] = {}
    for name, engine in ENGINES.items():
        reasons = list(made[name].refused) if name in made else [f"{engine.title} has no such drafts; choose another engine"]
        if form not in engine.forms:
            reasons.append(f"export.format {form}: {engine.title} reads {' and '.join(engine.forms)}; choose export.format=engine")
        if engine.families is not None and shape.model_type not in engine.families:
            reasons.append(
                f"target of type {shape.model_type}: {engine.title} {engine.checked} gets no states of inner blocks from it; choose another engine, "
                "or look whether a newer one does"
            )
        found[name] = reasons
    return found


def require(engines: tuple[EngineName, ...], found: Mapping[EngineName, list[str]]) -> None:
    """Raises ValueError when an engine that a recipe names cannot serve the draft: each reason with what to change."""
    wrong = [f"  {name}: {reason}" for name in engines for reason in found[name]]
    if wrong:
        raise ValueError("export.engines names engines that cannot serve this draft:\n" + "\n".join(wrong))


def config_of(draft: Draft, form: Form, dtype: str, verifier: str, width: int) -> dict[str, Any]:
    """config.json. `verifier`: the target as a server would be given it, and `width` the draft length: both stand in the speculators form alone."""
    common = _shape_fields(draft.shape) | {"dtype": dtype, "torch_dtype": dtype}
    own = dict(draft.layout(form).config)
    if form == "engine":
        return {"architectures": own.pop("architectures"), "model_type": own.pop("model_type")} | common | own
    body = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1} | common
    method = {"proposal_type": "greedy", "speculative_tokens": width, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    verifier_fields = {"name_or_path": verifier, "architectures": []}
    return own | {
        "tie_word_embeddings": False, "dtype": dtype, "torch_dtype": dtype, "transformer_layer_config": body,
        "speculators_config": {
            "algorithm": own["speculators_model_type"], "default_proposal_method": "greedy", "proposal_methods": [method], "verifier": verifier_fields,
        },
    }  # fmt: skip


def _shape_fields(shape: TargetShape) -> dict[str, Any]:
    """Sizes and rotary positions, the latter in the old and the new spelling."""
    rope = turned(shape.rope)
    scaling = None if rope.get("rope_type", "default") == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "hidden_act": "silu", "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions, "rope_theta": rope.get("rope_theta", 10000.0), "rope_scaling": scaling, "rope_parameters": rope,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "vocab_size": shape.vocab_size,
        "bos_token_id": shape.bos_token_id, "eos_token_id": shape.eos_token_id,
    }  # fmt: skip


def shape_of(fields: Mapping[str, Any], blocks: int, where: str) -> TargetShape:
    """The sizes in a published config.json of any form; what a Llama configuration may leave out has Llama's default. `blocks`: of the target, 0 when not
    known. Raises ValueError naming a field that is missing."""
    body = fields.get("transformer_layer_config", fields)
    try:
        heads = body["num_attention_heads"]
        return TargetShape(
            hidden_size=body["hidden_size"], vocab_size=body["vocab_size"], layers=blocks, heads=heads, kv_heads=body.get("num_key_value_heads") or heads,
            head_dim=body.get("head_dim") or body["hidden_size"] // heads, intermediate_size=body["intermediate_size"], norm_eps=body["rms_norm_eps"],
            max_positions=body["max_position_embeddings"], rope=rope_of(body), bos_token_id=_first(body.get("bos_token_id")),
            eos_token_id=_first(body.get("eos_token_id")),
        )  # fmt: skip
    except KeyError as error:
        raise ValueError(f"{where} lacks {error}") from error


def rope_of(body: Mapping[str, Any], legacy: bool = False) -> dict[str, Any]:
    """Rotary positions as an engine reads them: `rope_parameters`, or else (and with `legacy`) `rope_theta` and `rope_scaling`."""
    rope = dict(body.get("rope_parameters") or {})
    if not rope or legacy:
        rope = {"rope_type": "default", "rope_theta": float(body.get("rope_theta") or 10000.0)} | dict(body.get("rope_scaling") or {})
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    return rope


def turned(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions of a draft: it turns whole heads, also where its target turns a share of them, and an engine would heed that share."""
    plain = rope.get("rope_type", "default") == "default"
    return {k: v for k, v in rope.items() if not (plain and k == "partial_rotary_factor")}


def _first(value: Any) -> int | None:
    return value[0] if isinstance(value, list) else value


def serve_command(name: EngineName, draft: type[Draft], config: Any, shape: TargetShape, target: str, folder: str, width: int) -> str:
    """What to type to serve a target with a draft of this kind."""
    made = draft.engines(config, shape)[name]
    return ENGINES[name].serve.format(target=target, draft=folder, method=made.method, width=width, steps=width + 1, options=made.options)


def as_json(value: Mapping[str, Any]) -> str:
    """As the files of an export are written."""
    return json.dumps(value, indent=2) + "\n"
