"""Quantized tensors of a target: float8 with scales is dequantized; packed ones are named and refused."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

_SUFFIXES = {
    ".qweight": "AWQ or GPTQ",
    ".weight_packed": "compressed-tensors",
    ".weight_blocks": "MXFP4",
    ".W_q": "HQQ",
    ".weight._data": "quanto",
    ".weight_qdata": "torchao",
    ".codes": "AQLM",
}
"""Names under which a packed matrix is stored instead of `.weight`."""
_SCALES = ("_scale", "_scale_inv")
_FLOATS = ("float64", "float32", "float16", "bfloat16", "F64", "F32", "F16", "BF16")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "F8_E4M3", "F8_E5M2")
_BLOCK = (128, 128)
"""DeepSeek's, where the configuration does not say."""
_CHUNK_ROWS = 8192


def plain_name(key: str) -> str:
    """The name that a packed tensor would have if it were not packed."""
    return next((key.removesuffix(s) + ".weight" for s in _SUFFIXES if key.endswith(s)), key)


def packed_scheme(key: str, dtype: str, present: Container[str]) -> str | None:
    """The name of the scheme that packed a tensor, told by its siblings; None for plain numbers and for float8."""
    base = plain_name(key).rpartition(".")[0]
    if key.endswith(".qweight"):
        return "GPTQ" if f"{base}.g_idx" in present else "AWQ or GPTQ" if f"{base}.qzeros" in present else "packed integers"
    if key.endswith(".weight_packed") and f"{base}.weight_global_scale" in present:
        return "compressed-tensors, NVFP4"
    if key != plain_name(key):
        return next(name for suffix, name in _SUFFIXES.items() if key.endswith(suffix))
    if f"{base}.SCB" in present:
        return "bitsandbytes 8-bit"
    if any(f"{key}.{part}" in present for part in ("absmax", "quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")):
        return "bitsandbytes 4-bit"
    if f"{base}.weight_scale_2" in present:
        return "NVFP4" if dtype in ("uint8", "U8") else None
    if dtype in ("uint8", "U8"):
        return "MXFP4" if f"{base}.weight_scale" in present else "4-bit packed in bytes"
    if dtype in _FLOATS or dtype in _FLOAT8:
        return None
    return "8-bit integers" if dtype in ("int8", "I8") else "integers"


def is_float8(dtype: str) -> bool:
    """Whether a stored dtype means nothing without a scale."""
    return dtype in _FLOAT8


def scale_key(key: str, present: Container[str]) -> str | None:
    """The tensor that a float8 tensor is to be multiplied with."""
    return next((key + s for s in _SCALES if key + s in present), None)


def block_of(config: Any) -> tuple[int, int]:
    """Rows and columns that share a scale, as the configuration says (`weight_block_size`, or compressed-tensors' `block_structure`), else 128 x 128."""
    found = getattr(config, "quantization_config", None) or getattr(config.get_text_config(decoder=True), "quantization_config", None) or {}
    found = found if isinstance(found, dict) else found.to_dict()
    weights = [(group or {}).get("weights") or {} for group in (found.get("config_groups") or {}).values()]
    blocks = [found.get("weight_block_size"), *(w.get("block_structure") for w in weights)]
    return next(((int(b[0]), int(b[1])) for b in blocks if isinstance(b, list | tuple) and len(b) == 2), _BLOCK)


def dequantized(tensor: Tensor, scale: Tensor, key: str, block: tuple[int, int]) -> Tensor:
    """float8 times its scale, in bfloat16: one scale for all, one a row, or one a block (the last ones may be cut off).

    Raises ValueError when the scale's shape is none of these.
    """
    rows, columns = tensor.shape
    scale = scale.float()
    if scale.numel() == 1:
        scale, block = scale.reshape(1, 1), (rows, columns)
    elif scale.shape in ((rows,), (rows, 1)):
        scale, block = scale.reshape(rows, 1), (1, columns)
    elif tuple(scale.shape) != (-(-rows // block[0]), -(-columns // block[1])):
        raise ValueError(
            f"{key} is {rows} x {columns} in float8 and its scale is {tuple(scale.shape)}: expected one scale, one a row, or one a block of "
            f"{block[0]} x {block[1]} (quantization_config.weight_block_size in config.json says which)"
        )
    column_block = torch.arange(columns) // block[1]
    made = torch.empty(rows, columns, dtype=torch.bfloat16)
    for start in range(0, rows, _CHUNK_ROWS):
        some = torch.arange(start, min(start + _CHUNK_ROWS, rows))
        made[some] = (tensor[start : start + len(some)].float() * scale[some // block[0]][:, column_block]).bfloat16()
    return made
