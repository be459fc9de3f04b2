"""llama.cpp: its converter reads an export, and its server drafts with the result: the outputs of plain decoding, and the acceptance that we measured.

`make engines` fetches the converter (out of llama-cpp-python's source package; DRAFTSMITH_LLAMA_CPP names another place) and a server (xllamacpp).

How the server counts (tools/server/server-context.cpp): a pass with r tokens left before the limit drafts at most r - 1, and none is drafted when one is
left; accepted are the drafted tokens that its sampler took.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import environment
from gguf import GGUFReader
from safetensors.torch import load_file
from serving import MAX_NEW, TOLERANCE, WIDTH, drive, missing, require
from torch import Tensor

from draftsmith.eval.decode import Decoded
from draftsmith.eval.prompts import Prompt
from draftsmith.pipeline import Run

pytestmark = [pytest.mark.interop, pytest.mark.slow]

SERVED = 12
"""Prompts for the server, which answers one by one."""
NAMES = {
    "embed_tokens": "token_embd", "fc": "fc", "lm_head": "output", "norm": "output_norm", "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.input_layernorm": "blk.0.attn_norm", "midlayer.post_attention_layernorm": "blk.0.ffn_norm", "midlayer.mlp.down_proj": "blk.0.ffn_down",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate", "midlayer.mlp.up_proj": "blk.0.ffn_up", "midlayer.self_attn.q_proj": "blk.0.attn_q",
    "midlayer.self_attn.k_proj": "blk.0.attn_k", "midlayer.self_attn.v_proj": "blk.0.attn_v", "midlayer.self_attn.o_proj": "blk.0.attn_output",
}  # fmt: skip


@dataclass(frozen=True)
class Converted:
    """Both models as GGUF files."""

    target: Path
    draft: Path


@pytest.fixture(scope="module")
def converter() -> Path:
    place = Path(os.environ.get("DRAFTSMITH_LLAMA_CPP") or environment() / "llama.cpp")
    script = place / "convert_hf_to_gguf.py"
    if not script.is_file():
        missing(f"llama.cpp's converter ({script})")
    return script


@pytest.fixture(scope="module")
def converted(converter: Path, run: Run, shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    place = tmp_path_factory.mktemp("gguf")
    found = Converted(place / "target.gguf", place / "draft.gguf")
    for source, out, more in ((Path(run.chosen.where), found.target, ()), (shipped, found.draft, ("--target-model-dir", run.chosen.where))):
        command = [environment() / "bin" / "python", converter, source, "--outtype", "f32", "--outfile", out, *more]
        environ = os.environ | {"PYTHONPATH": str(converter.parent / "gguf-py")}
        done = subprocess.run([str(part) for part in command], env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return found


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head as llama.cpp's rotary positions pair them: neighbours instead of halves."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def test_every_tensor_and_field_arrives(run: Run, shipped: Path, converted: Converted) -> None:
    reader, tensors = GGUFReader(converted.draft), load_file(shipped / "model.safetensors")
    arrived = {t.name: t for t in reader.tensors}
    assert set(arrived) == {f"{name}.weight" for name in NAMES.values()} | {"d2t"}
    assert {name.removesuffix(".weight") for name in tensors} - {"d2t", "t2d"} == set(NAMES)
    absolute = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert torch.equal(torch.tensor(arrived["d2t"].data), absolute), "offsets become ids"
    shape = run.target.shape
    for ours, theirs in NAMES.items():
        heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}.get(ours.rpartition(".")[2])
        tensor = tensors[f"{ours}.weight"] if heads is None else interleaved(tensors[f"{ours}.weight"], heads)
        assert torch.equal(torch.tensor(arrived[f"{theirs}.weight"].data), tensor), ours
    fields = {
        "general.architecture": "eagle3", "eagle3.target_layers": [i + 1 for i in run.spec.layers], "eagle3.target_hidden_size": shape.hidden_size,
        "eagle3.norm_before_residual": False, "eagle3.norm_before_fc": False, "eagle3.block_count": 1, "eagle3.vocab_size": shape.vocab_size,
        "eagle3.attention.head_count": shape.heads, "eagle3.attention.head_count_kv": shape.kv_heads, "eagle3.attention.key_length": shape.head_dim,
        "eagle3.rope.freq_base": pytest.approx(shape.rope["rope_theta"]), "eagle3.attention.layer_norm_rms_epsilon": pytest.approx(shape.norm_eps),
    }  # fmt: skip
    assert {name: reader.fields[name].contents() for name in fields} == fields


@pytest.fixture(scope="module")
def ask(converted: Converted, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Lets llama.cpp's server answer, with or without the draft."""
    require("xllamacpp")

    def answers(draft: bool) -> list[dict[str, Any]]:
        asked = {"target": str(converted.target), "draft": str(converted.draft) if draft else None, "width": WIDTH, "max_new": MAX_NEW}
        asked["prompts"] = [list(p.token_ids) for p in prompts[:SERVED]]
        return drive("llamacpp_driver", asked, tmp_path_factory.mktemp("llamacpp"), {})["answers"]

    return answers


def expected(answers: Sequence[Decoded]) -> tuple[int, int]:
    """Drafted and accepted tokens as the server would count these passes, which ours counts to the limit."""
    drafted = accepted = 0
    for answer in answers:
        written = 1
        for n in answer.accepted:
            room = min(WIDTH, MAX_NEW - written - 1)
            drafted, accepted, written = drafted + room, accepted + min(n, room), written + n + 1
    return drafted, accepted


def test_the_server_answers_and_accepts_as_our_evaluator(ask: Any, ours: list[Decoded]) -> None:
    plain, served = ask(draft=False), ask(draft=True)
    assert [a["token_ids"] for a in served] == [a["token_ids"] for a in plain]
    drafted, accepted = expected(ours[:SERVED])
    counts = sum(a["drafted"] for a in served), sum(a["accepted"] for a in served)
    print(f"llama.cpp: drafted, accepted {counts}; here {(drafted, accepted)}")
    assert counts == (pytest.approx(drafted, rel=TOLERANCE), pytest.approx(accepted, rel=TOLERANCE))
