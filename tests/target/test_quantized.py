"""Packed heads are named and replaced through head_from; float8 is dequantized as a loop would; quantized bodies do not matter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import saved
from families import PLAIN, SIZES
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.target.finder import Keys
from draftsmith.target.quantized import dequantized
from draftsmith.target.weights import Target

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
V, H = 97, 32


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def float8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


SCHEMES: dict[str, tuple[str, dict[str, Tensor]]] = {
    "awq": ("AWQ or GPTQ", {".qweight": ints(H, 13), ".qzeros": ints(1, 13), ".scales": torch.ones(1, V)}),
    "gptq": ("GPTQ", {".qweight": ints(4, V), ".qzeros": ints(1, 13), ".scales": torch.ones(1, V), ".g_idx": ints(H)}),
    "compressed-tensors": ("compressed-tensors", {".weight_packed": ints(V, 4), ".weight_scale": torch.ones(V, 1), ".weight_shape": ints(2)}),
    "nvfp4 (compressed-tensors)": (
        "compressed-tensors, NVFP4",
        {".weight_packed": ints(V, 16, dtype=torch.uint8), ".weight_scale": float8(V, 2), ".weight_global_scale": torch.ones(1)},
    ),
    "nvfp4 (modelopt)": ("NVFP4", {".weight": ints(V, 16, dtype=torch.uint8), ".weight_scale": float8(V, 2), ".weight_scale_2": torch.ones(())}),
    "mxfp4": ("MXFP4", {".weight": ints(V, 16, dtype=torch.uint8), ".weight_scale": ints(V, 1, dtype=torch.uint8)}),
    "mxfp4 (blocks)": ("MXFP4", {".weight_blocks": ints(V, 1, 16, dtype=torch.uint8), ".weight_scales": ints(V, 1, dtype=torch.uint8)}),
    "bitsandbytes nf4": (
        "bitsandbytes 4-bit",
        {".weight": ints(1552, 1, dtype=torch.uint8), ".weight.absmax": torch.ones(49), ".weight.quant_state.bitsandbytes__nf4": ints(90, dtype=torch.uint8)},
    ),
    "bitsandbytes fp4": (
        "bitsandbytes 4-bit",
        {".weight": ints(1552, 1, dtype=torch.uint8), ".weight.quant_state.bitsandbytes__fp4": ints(90, dtype=torch.uint8)},
    ),
    "bitsandbytes int8": ("bitsandbytes 8-bit", {".weight": ints(V, H, dtype=torch.int8), ".SCB": torch.ones(V)}),
    "int8": ("8-bit integers", {".weight": ints(V, H, dtype=torch.int8), ".weight_scale": torch.ones(V, 1)}),
    "hqq": ("HQQ", {".W_q": ints(V, 16, dtype=torch.uint8), ".meta_scale": torch.ones(1)}),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unquantized, untied Llama."""
    return saved(PLAIN["llama"](), tmp_path_factory.mktemp("quantized") / "plain")


@pytest.fixture
def changed(plain: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy with tensors put in the place of others, and settings in its config.json."""

    def make(name: str, removed: tuple[str, ...], put: dict[str, Tensor], **settings: Any) -> Path:
        folder = Path(shutil.copytree(plain, tmp_path / name))
        tensors = {k: v for k, v in load_file(plain / "model.safetensors").items() if k not in removed}
        save_file(tensors | put, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))
        return folder

    return make


def packed(scheme: str, base: str = "lm_head") -> dict[str, Tensor]:
    return {base + suffix: tensor for suffix, tensor in SCHEMES[scheme][1].items()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_packed_head_is_named_and_head_from_gives_the_unquantized_logits(scheme: str, changed: Callable[..., Path], plain: Path) -> None:
    folder = changed("packed", (HEAD,), packed(scheme))
    with pytest.raises(ValueError, match=r"packed: lm_head\.\w+") as raised:
        Target.load(str(folder))
    assert f"is packed ({SCHEMES[scheme][0]}, stored as" in str(raised.value)
    assert "Give the unquantized checkpoint of the same model" in str(raised.value)
    assert "target.head_from: <directory or hub id>" in str(raised.value)
    own, through = Target.load(str(plain)), Target.load(str(folder), head_from=str(plain))
    last = torch.randn(5, H, generator=torch.Generator().manual_seed(3))
    assert torch.equal(through.logits(last), own.logits(last))
    assert torch.equal(through.embed(torch.arange(V)), own.embed(torch.arange(V)))
    assert torch.equal(through.norm_H, own.norm_H)
    assert through.name == str(folder)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_embedding_is_named_too(scheme: str, tied: bool, changed: Callable[..., Path], plain: Path) -> None:
    """With a tied flag and no head it is the head as well."""
    removed = (EMBEDDING, HEAD) if tied else (EMBEDDING,)
    folder = changed("packed", removed, packed(scheme, "model.embed_tokens"), tie_word_embeddings=tied)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.\w+ is packed \(") as raised:
        Target.load(str(folder))
    assert SCHEMES[scheme][0] in str(raised.value)


@pytest.mark.parametrize("prefix", ["module.", "language_model."])
def test_a_packed_head_under_an_unknown_prefix_is_no_absent_head(prefix: str, changed: Callable[..., Path], plain: Path) -> None:
    tensors = {prefix + k: v for k, v in load_file(plain / "model.safetensors").items() if k != HEAD}
    folder = changed("packed", tuple(load_file(plain / "model.safetensors")), tensors | packed("awq", prefix + "lm_head"))
    with pytest.raises(ValueError, match=rf"{prefix}lm_head\.qweight is packed \(AWQ or GPTQ"):
        Target.load(str(folder))


@pytest.mark.parametrize("put", ["lm_head.base_layer.weight", "lm_head.lora_A.weight", "lm_head.vptq_indices", "lm_head.weight.some_new_scheme"])
def test_a_head_in_an_unknown_form_is_refused_and_not_replaced_by_the_embedding(put: str, changed: Callable[..., Path]) -> None:
    folder = changed("unknown", (HEAD,), {put: torch.ones(V, H)})
    with pytest.raises(ValueError, match=rf"{put} stands where the head should, in a form that is not known.*target\.head_from.*target\.head_key"):
        Target.load(str(folder))


def test_a_quantized_body_under_a_plain_head_just_works(changed: Callable[..., Path], plain: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    body = {f"{name}{suffix}": tensor for suffix, tensor in SCHEMES["awq"][1].items()}
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True, "modules_to_not_convert": ["lm_head"]}
    folder = changed("body", (name + ".weight",), body, quantization_config=quantization)
    own, target = Target.load(str(plain)), Target.load(str(folder))
    assert torch.equal(target.head_VH, own.head_VH)
    assert target.fingerprint != own.fingerprint


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "compressed-tensors", "fp8", "mxfp4", "modelopt"])
def test_no_quantization_config_stops_the_loader(method: str, changed: Callable[..., Path]) -> None:
    """Also those whose libraries are not installed: nothing is run."""
    extra = {"bits": 4} if method == "gptq" else {"load_in_4bit": True} if method == "bitsandbytes" else {}
    assert Target.load(str(changed("q", (), {}, quantization_config={"quant_method": method} | extra))).head_VH.shape == (V, H)


# ---- head_from ----


def test_a_head_from_of_another_size_is_named(changed: Callable[..., Path], tmp_path: Path) -> None:
    folder = changed("packed", (HEAD,), packed("awq"))
    other = saved(LlamaConfig(**(SIZES | {"vocab_size": 101}), tie_word_embeddings=False), tmp_path / "other")
    with pytest.raises(ValueError, match=r"other, given as target\.head_from: model\.embed_tokens\.weight is \(101, 32\).*packed/config\.json .*\(97, 32\)"):
        Target.load(str(folder), head_from=str(other))


def test_a_head_from_that_is_packed_itself_is_named(changed: Callable[..., Path]) -> None:
    one, two = changed("one", (HEAD,), packed("awq")), changed("two", (HEAD,), packed("gptq"))
    with pytest.raises(ValueError, match=r"two: lm_head\.qweight is packed \(GPTQ.*given as target\.head_from, which must be the unquantized .*one"):
        Target.load(str(one), head_from=str(two))


def test_the_fingerprint_is_of_the_packed_checkpoint_and_of_the_head_that_was_given(changed: Callable[..., Path], plain: Path) -> None:
    """Features come from the packed body, the head from elsewhere: another of either is another target."""
    folder = changed("packed", (HEAD,), packed("awq"))
    body = changed("body", (HEAD,), packed("awq") | {"model.layers.1.mlp.up_proj.weight": torch.ones(48, 32)})
    head = changed("head", (HEAD,), {HEAD: torch.ones(V, H)})
    loads = [(folder, plain), (body, plain), (folder, head), (plain, None)]
    assert len({Target.load(str(a), head_from=None if b is None else str(b)).fingerprint for a, b in loads}) == 4


def test_keys_name_tensors_of_head_from(changed: Callable[..., Path], plain: Path) -> None:
    folder = changed("packed", (HEAD,), packed("awq"))
    other = changed("other", (HEAD,), {"strange.head": torch.full((V, H), 2.0), "lm_head.qweight": ints(H, 13)})
    target = Target.load(str(folder), head_from=str(other), keys=Keys(head="strange.head"))
    assert torch.equal(target.head_VH, torch.full((V, H), 2.0))


# ---- float8 ----


def by_loop(tensor: Tensor, scale: Callable[[int, int], Tensor]) -> Tensor:
    out = torch.empty(tensor.shape, dtype=torch.bfloat16)
    for r in range(tensor.shape[0]):
        for c in range(tensor.shape[1]):
            out[r, c] = (tensor[r, c].float() * scale(r, c)).bfloat16()
    return out


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("kind", ["one", "one in a list", "a row", "a row, in a column", "a block"])
def test_a_float8_head_is_dequantized_as_by_a_loop(dtype: torch.dtype, suffix: str, kind: str, changed: Callable[..., Path]) -> None:
    stored = float8(V, H, dtype=dtype)
    g = torch.Generator().manual_seed(2)
    scales = {"one": torch.tensor(0.37), "one in a list": torch.tensor([0.37]), "a row": torch.rand(V, generator=g) + 0.1}
    scales |= {"a row, in a column": scales["a row"][:, None], "a block": torch.rand(7, 2, generator=g) + 0.1}
    scale = scales[kind].contiguous()
    at = {"a block": lambda r, c: scale[r // 16, c // 24]}.get(
        kind, (lambda r, _: scale.reshape(-1)[r]) if scale.numel() == V else lambda *_: scale.reshape(())
    )
    settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 24]}} if kind == "a block" else {}
    target = Target.load(str(changed("fp8", (HEAD,), {HEAD: stored, HEAD + suffix: scale}, **settings)))
    assert target.head_VH.dtype == torch.bfloat16
    assert torch.equal(target.head_VH, by_loop(stored, at))


def test_blocks_are_128_by_128_where_nothing_else_is_said_and_may_be_cut_off() -> None:
    stored, scale = float8(300, 200), torch.rand(3, 2)
    assert torch.equal(dequantized(stored, scale, "head", (128, 128)), by_loop(stored, lambda r, c: scale[r // 128, c // 128]))


def test_a_float8_scale_that_fits_nothing_is_named(changed: Callable[..., Path]) -> None:
    folder = changed("fp8", (HEAD,), {HEAD: float8(V, H), HEAD + "_scale_inv": torch.ones(5, 2)})
    with pytest.raises(ValueError, match=r"lm_head\.weight is 97 x 32 in float8 and its scale is \(5, 2\): expected one scale.*128 x 128.*weight_block_size"):
        Target.load(str(folder))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_without_a_scale_is_refused(dtype: torch.dtype, changed: Callable[..., Path], plain: Path) -> None:
    folder = changed("fp8", (HEAD,), {HEAD: float8(V, H, dtype=dtype)})
    with pytest.raises(ValueError, match=r"lm_head\.weight is float8 .* and its scale, lm_head\.weight_scale or .* is not in the files.*target\.head_from:"):
        Target.load(str(folder))
    assert Target.load(str(folder), head_from=str(plain)).head_VH.dtype == torch.float32


def test_a_float8_embedding_without_a_head_is_read_once_and_shared(changed: Callable[..., Path]) -> None:
    stored, scale = float8(V, H), torch.rand(V, 1) + 0.5
    target = Target.load(str(changed("fp8", (HEAD, EMBEDDING), {EMBEDDING: stored, EMBEDDING + "_scale": scale}, tie_word_embeddings=True)))
    assert torch.equal(target.embedding_VH, by_loop(stored, lambda r, _: scale[r, 0]))
    assert target.head_VH is target.embedding_VH
    assert target.found.read.tensors == V * H + V * 4 + H * 4


# ---- GGUF ----


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_quantized_types_of_gguf_are_dequantized(kind: str, plain: Path, tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize

    tensors = load_file(plain / "model.safetensors")
    names = {EMBEDDING: "token_embd.weight", HEAD: "output.weight", "model.norm.weight": "output_norm.weight"}
    names |= {"model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight"}
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    sizes = {"block_count": 4, "context_length": 512, "embedding_length": H, "feed_forward_length": 48, "head_count": 4, "head_count_kv": 2, "vocab_size": V}
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_layer_norm_rms_eps(1e-6)
    stored = {}
    for name, key in names.items():
        as_type = GGMLQuantizationType.F32 if "norm" in key else GGMLQuantizationType[kind]
        stored[key] = quantize(tensors[name].numpy(), as_type)
        writer.add_tensor(key, stored[key], raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target = Target.load(str(tmp_path / "tiny.gguf"))
    for found, key in ((target.embedding_VH, "token_embd.weight"), (target.head_VH, "output.weight")):
        assert torch.equal(found, torch.from_numpy(dequantize(stored[key], GGMLQuantizationType[kind])))
    assert torch.equal(target.norm_H, tensors["model.norm.weight"])
