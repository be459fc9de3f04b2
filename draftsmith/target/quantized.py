"""Quantized tensors of a target: float8 with scales is dequantized; packed integers are named and refused."""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor

_SCALES = ("_scale", "_scale_inv")
_FLOATS = ("float64", "float32", "float16", "bfloat16", "F64", "F32", "F16", "BF16")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "F8_E4M3", "F8_E5M2")


def packed_scheme(key: str, dtype: str, present: Container[str]) -> str | None:
    """The name of the scheme that packed a tensor, told by its siblings; None for plain numbers, and for float8 with a scale."""
    base = key.rpartition(".")[0]
    if key.endswith(".qweight"):
        return "GPTQ" if f"{base}.g_idx" in present else "AWQ or GPTQ"
    if key.endswith(".weight_packed"):
        return "compressed-tensors, NVFP4" if f"{base}.weight_global_scale" in present else "compressed-tensors"
    if f"{key}.quant_state.bitsandbytes__nf4" in present or f"{key}.absmax" in present:
        return "bitsandbytes 4-bit"
    if f"{base}.SCB" in present:
        return "bitsandbytes 8-bit"
    if dtype in ("uint8", "U8"):
        return "NVFP4 or MXFP4" if f"{base}.weight_scale" in present else "4-bit packed in bytes"
    if dtype in _FLOAT8:
        return None if scale_key(key, dtype, present) else "float8 without its scale"
    return None if dtype in _FLOATS or "_" in dtype or dtype.startswith(("Q", "IQ")) else "integers"


def scale_key(key: str, dtype: str, present: Container[str]) -> str | None:
    """The tensor that a float8 tensor is to be multiplied with; None for other dtypes."""
    if dtype not in _FLOAT8:
        return None
    return next((key + s for s in _SCALES if key + s in present), None)


def dequantized(tensor: Tensor, scale: Tensor, key: str) -> Tensor:
    """float8 times its scale, in bfloat16: one scale for all, one a row, or one a block of equal size (DeepSeek's 128 x 128).

    Raises ValueError when the scale's shape divides the tensor in no such way.
    """
    rows, columns = tensor.shape
    scale = scale.float()
    if scale.numel() == 1:
        return (tensor.float() * scale.reshape(())).bfloat16()
    if scale.numel() == rows and scale.shape[0] == rows:
        return (tensor.float() * scale.reshape(rows, 1)).bfloat16()
    if scale.ndim != 2 or scale.shape[0] > rows or scale.shape[1] > columns:
        raise ValueError(f"{key} is {tuple(tensor.shape)} in float8 and its scale is {tuple(scale.shape)}: expected one scale, one a row, or one a block")
    block = 128 if scale.shape == (-(-rows // 128), -(-columns // 128)) else -(-rows // scale.shape[0])
    wide = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(-(-columns // scale.shape[1]) if block != 128 else 128, 1)[:, :columns]
    return (tensor.float() * wide).bfloat16()
