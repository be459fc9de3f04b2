"""The real ones: SmolLM2's own weights, and random weights under Qwen2.5-0.5B's published configuration, in one file and in shards. No flags anywhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers import initialization as init

from draftsmith.target import smollm2
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

QWEN2_5_0_5B = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_cache": True,
    "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
"""config.json of Qwen/Qwen2.5-0.5B, but for what names the class, the dtype and the library."""
SHARD = 150 * 10**6
IDS = torch.tensor([[1, 4093, 338, 260, 3575, 282, 11, 2], [7, 6, 5, 4, 3, 2, 1, 0]])


def logits_agree(folder: Path) -> Target:
    """Captured states under the head and rule that were found give the model's own logits in float32."""
    target, model = Target.load(str(folder), "cpu", torch.float32), TargetModel.load(str(folder), torch.float32)
    torch.testing.assert_close(target.logits(model.run(IDS).last_BQH), model.own_logits(IDS), rtol=1e-5, atol=1e-5)
    return target


def test_smollm2() -> None:
    target = logits_agree(smollm2.directory())
    assert target.tied
    assert target.found.head.key == "model.embed_tokens.weight"
    assert (target.shape.vocab_size, target.shape.hidden_size, target.shape.layers) == (49152, 576, 30)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The same weights twice, 1 GB each: one file without an index, and shards."""
    root = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    with init.no_init_weights():
        model = Qwen2ForCausalLM(Qwen2Config(**QWEN2_5_0_5B)).bfloat16()
    model.tie_weights()
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.05, 0.05)
    for name, size in (("one", "10GB"), ("shards", SHARD)):
        model.save_pretrained(root / name, max_shard_size=size)
    del model
    yield {name: root / name for name in ("one", "shards")}
    shutil.rmtree(root)


@pytest.mark.slow
def test_qwen_in_one_file_and_in_shards(qwen: dict[str, Path]) -> None:
    assert [p.name for p in qwen["one"].glob("*.safetensors*")] == ["model.safetensors"]
    assert len(list(qwen["shards"].glob("*.safetensors"))) > 3
    with safe_open(qwen["one"] / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a mapping
        embedding = file.get_tensor("model.embed_tokens.weight")
    for folder in qwen.values():
        target = Target.load(str(folder))
        assert target.tied
        assert torch.equal(target.head_VH, embedding)
        assert target.head_VH.dtype == torch.bfloat16
        needed = embedding.nbytes + 896 * 2
        assert needed <= target.found.read.tensors + target.found.read.headers < needed + 200_000
    assert Target.load(str(qwen["one"])).fingerprint == Target.load(str(qwen["shards"])).fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "shards"])
def test_qwens_logits_are_its_own(qwen: dict[str, Path], layout: str) -> None:
    logits_agree(qwen[layout])
