"""Odd checkpoints of tiny families, and what must be found in them: an oracle from the head rule alone, which looks at no code of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM as Causal
from transformers import AutoModelForImageTextToText as Multi
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MiniCPM3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2VLConfig,
)

VOCAB, WIDTH = 61, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.5, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
VISION = {"depth": 1, "embed_dim": 8, "num_heads": 2, "hidden_size": WIDTH, "patch_size": 4, "mlp_ratio": 2}
SIGLIP = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8, "dim_model_base": 8}


@dataclass(frozen=True)
class Family:
    """How a family's files name its parts (target-heads.md), and its tie flag where config.json has none."""

    config: Callable[[], PreTrainedConfig]
    body: str = "model."
    embedding: str = "embed_tokens.weight"
    norm: str = "norm.weight"
    head: str = "lm_head.weight"
    bias: str | None = None
    tied: bool = False
    shifted: float = 0.0
    """What its norm adds to the stored weight."""
    auto: Any = Causal


FAMILIES = {
    "llama": Family(lambda: LlamaConfig(**SIZES)),
    "qwen2": Family(lambda: Qwen2Config(**SIZES)),
    "gemma2": Family(lambda: Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0), tied=True, shifted=1.0),
    "gemma3": Family(lambda: Gemma3TextConfig(**SIZES, head_dim=8), tied=True, shifted=1.0),
    "cohere": Family(lambda: CohereConfig(**SIZES, logit_scale=0.25), tied=True),
    "granite": Family(lambda: GraniteConfig(**SIZES, logits_scaling=4.0)),
    "phi": Family(lambda: PhiConfig(**SIZES), norm="final_layernorm.weight", bias="lm_head.bias"),
    "gpt2": Family(
        lambda: GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=64), "transformer.", "wte.weight", "ln_f.weight", tied=True
    ),
    "neox": Family(
        lambda: GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
        "gpt_neox.", "embed_in.weight", "final_layer_norm.weight", "embed_out.weight",
    ),
    "minicpm3": Family(lambda: MiniCPM3Config(**SIZES, **LATENT), tied=True),
    "qwen2-vl": Family(lambda: Qwen2VLConfig(text_config=SIZES | {"rope_parameters": ROPE}, vision_config=VISION), auto=Multi),
    "gemma3-mm": Family(
        lambda: Gemma3Config(text_config=SIZES | {"head_dim": 8}, vision_config=SIGLIP, mm_tokens_per_image=1),
        "language_model.model.", head="language_model.lm_head.weight", tied=True, shifted=1.0, auto=Multi,
    ),
}  # fmt: skip
PREFIXES = (
    None, None, ("model.", ""), ("language_model.model.", "language_model."), ("model.language_model.", ""), ("thinker.model.", "thinker."),
    ("backbone.", ""), ("transformer.", ""), ("module.model.", "module."), ("base_model.model.model.", "base_model.model."), ("", ""),
)  # fmt: skip
"""Of the body and of the head; None: the family's own."""
EXTRAS: dict[str, tuple[int, ...]] = {
    "talker.lm_head.weight": (VOCAB, WIDTH), "talker.model.embed_tokens.weight": (VOCAB, WIDTH), "talker.model.norm.weight": (WIDTH,),
    "mtp.lm_head.weight": (VOCAB, WIDTH), "mtp.norm.weight": (WIDTH,), "mtp.layers.0.embed_tokens.weight": (VOCAB, WIDTH),
    "model.layers.0.norm.weight": (WIDTH,), "model.layers.2.embed_tokens.weight": (VOCAB, WIDTH), "model.layers.2.shared_head.head.weight": (VOCAB, WIDTH),
    "model.layers.2.shared_head.norm.weight": (WIDTH,), "vision.norm.weight": (WIDTH,), "vision_tower.embeddings.weight": (VOCAB, WIDTH),
    "eagle3.lm_head.weight": (VOCAB, WIDTH), "draft_model.lm_head.weight": (VOCAB, WIDTH), "draft_model.embed_tokens.weight": (VOCAB, WIDTH),
    "medusa_heads.0.lm_head.weight": (VOCAB, WIDTH), "aux.output.weight": (VOCAB, WIDTH), "aux.lm_head.weight": (VOCAB, WIDTH),
    "aux.embed_tokens.weight": (VOCAB, WIDTH), "aux.norm.weight": (WIDTH,), "value_head.weight": (1, WIDTH), "score.weight": (2, WIDTH),
    "code_predictor.lm_head.0.weight": (VOCAB, WIDTH), "audio_tower.embed_tokens.weight": (VOCAB, WIDTH), "lm_head.input_scale": (1,),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One odd checkpoint."""

    family: str
    head: str
    flag: str
    prefix: tuple[str, str] | None
    extras: frozenset[str]
    missing: str | None
    misshapen: str | None
    files: int
    suffix: str
    index: str | None
    seed: int


def cases() -> st.SearchStrategy[Case]:
    """Half of them without a fault, so that finding is tried as often as refusing."""
    rare = st.sampled_from(("embedding", "norm", "bias"))
    return st.builds(
        Case,
        family=st.sampled_from(tuple(FAMILIES)),
        head=st.sampled_from(("absent", "equal", "different")),
        flag=st.sampled_from(("true", "false", "absent", "text")),
        prefix=st.sampled_from(PREFIXES),
        extras=st.frozensets(st.sampled_from(tuple(EXTRAS)), max_size=6),
        missing=st.one_of(*[st.none()] * 5, rare),
        misshapen=st.one_of(*[st.none()] * 5, rare, st.just("head")),
        files=st.integers(1, 3),
        suffix=st.sampled_from((".safetensors", ".safetensors", ".bin")),
        index=st.one_of(*[st.none()] * 5, st.sampled_from(("swapped", "lost", "unlisted"))),
        seed=st.integers(0, 9),
    )


@dataclass(frozen=True)
class Truth:
    """What the rule demands: the tensors, or, with faults, an error that names one of them."""

    parts: dict[str, Tensor]
    faults: frozenset[str]
    warns: bool | None
    """Of a head that differs under a tied flag; None: the flag's level is a matter of the family."""


@cache
def genuine(family: str) -> tuple[str, dict[str, Tensor]]:
    """config.json and a family's whole body under its own names, norms and biases included."""
    import tempfile

    from safetensors.torch import load_file

    known = FAMILIES[family]
    torch.manual_seed(5)
    model = known.auto.from_config(known.config(), dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p += 0.3 * torch.randn_like(p)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = {k: v.clone() for k, v in load_file(Path(folder) / "model.safetensors").items()}
        return (Path(folder) / "config.json").read_text(), tensors


def write(case: Case, folder: Path) -> Truth:
    """Write the checkpoint; returns what must be found in it."""
    family, (config, tensors) = FAMILIES[case.family], genuine(case.family)
    g = torch.Generator().manual_seed(case.seed)
    own = {"embedding": family.body + family.embedding, "norm": family.body + family.norm, "head": family.head, "bias": family.bias}
    tensors = {k: v for k, v in tensors.items() if k != family.head}
    if case.head != "absent":
        tensors[family.head] = tensors[own["embedding"]].clone() if case.head == "equal" else torch.randn(VOCAB, WIDTH, generator=g)
    place = {k: _moved(k, family, case.prefix) for k in tensors}
    parts = {role: tensors[key] for role, key in own.items() if key in tensors}
    faults: set[str] = set()
    if case.misshapen in parts and case.misshapen != case.missing:
        faults.add("misshapen")
        tensors[str(own[case.misshapen])] = parts[case.misshapen][:-3].contiguous()
    if case.missing in parts:
        faults.add("missing")
        del tensors[str(own[case.missing])]
    found = {place[k]: v for k, v in tensors.items()}
    found |= {k: torch.randn(EXTRAS[k], generator=g) for k in sorted(case.extras) if k not in found}
    needed = [place[k] for k in own.values() if k in tensors]
    faults |= _write_files(case, folder, found, needed, place.get(family.head), g)
    (folder / "config.json").write_text(_flagged(config, case.flag))
    tied = {"true": True, "false": False, "absent": family.tied, "text": None}[case.flag]
    warns = None if tied is None else tied and case.head == "different"
    return Truth(parts | ({} if "head" in parts else {"head": parts["embedding"]}), frozenset(faults), warns)


def _moved(key: str, family: Family, prefix: tuple[str, str] | None) -> str:
    if prefix is None:
        return key
    if key.startswith(family.body):
        return prefix[0] + key.removeprefix(family.body)
    return prefix[1] + key.rpartition("lm_head.")[1] + key.rpartition("lm_head.")[2] if key in (family.head, family.bias) else key


def _flagged(config: str, flag: str) -> str:
    settings = json.loads(config)
    settings.pop("tie_word_embeddings", None)
    settings.get("text_config", {}).pop("tie_word_embeddings", None)
    if flag == "text" and "text_config" in settings:
        settings["text_config"]["tie_word_embeddings"] = True
    elif flag in ("true", "false"):
        settings["tie_word_embeddings"] = flag == "true"
    return json.dumps(settings)


def _write_files(case: Case, folder: Path, tensors: dict[str, Tensor], needed: list[str], head: str | None, g: torch.Generator) -> set[str]:
    """Spread over files at random; returns the fault that the index was given, if one."""
    stem = "model" if case.suffix == ".safetensors" else "pytorch_model"
    names = [f"{stem}-{i + 1:05}-of-{case.files:05}{case.suffix}" for i in range(case.files)] if case.files > 1 else [stem + case.suffix]
    where = {k: names[int(torch.randint(case.files, (1,), generator=g))] for k in sorted(tensors)}
    for name in names:
        held = {k: tensors[k].contiguous().clone() for k, f in where.items() if f == name}
        if case.suffix == ".bin":
            torch.save(held, folder / name)
        else:
            save_file(held, folder / name, metadata={"format": "pt"})
    if case.files == 1:
        return set()
    weight_map, faults = dict(where), set()
    used = sorted(set(where.values()))
    if case.index == "swapped" and len(used) > 1 and needed:
        key = needed[case.seed % len(needed)]
        weight_map[key] = next(n for n in used if n != where[key])
        faults = {"swapped"}
    elif case.index == "lost":
        (folder / used[0]).unlink()
        faults = {"lost"}
    elif case.index == "unlisted" and head is not None and head in where and sum(f == where[head] for f in where.values()) > 1:
        del weight_map[head]
    (folder / f"{stem}{case.suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return faults
