"""A GGUF file's header: configuration, and where its tensors lie, without walking through its vocabulary.

The `gguf` package makes several arrays for every entry of the vocabulary: 10 to 23 s for SmolLM2's 49,152 on two shared cores, of which a target needs
none. transformers' reader skips over them in 0.2 s; where its configuration parser insists on the `gguf` package, it is given a copy of the header that
has no vocabulary.
"""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, PreTrainedConfig

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, struct.error)
"""What a damaged file makes the readers raise."""


def gguf_header(file: Path) -> Any:
    """transformers' `GgufHeader`: architecture, and name, shape, type and place of every tensor.

    Raises ValueError when it is no GGUF file, or shorter than its header says, or one part of several.
    """
    from transformers.integrations.gguf import GgufHeader, read_gguf_metadata

    try:
        header = GgufHeader.from_file(str(file))
        parts = read_gguf_metadata(str(file))[0].get("split.count", 1)
    except UNREADABLE as error:
        raise ValueError(f"{file} cannot be read as GGUF ({error}): it is truncated or another kind of file; download it again") from error
    needed = header.data_start + max((t.offset + t.nbytes for t in header.tensors), default=0)
    if file.stat().st_size < needed:
        raise ValueError(f"{file} is truncated: it has {file.stat().st_size:,} bytes, and its header names {needed:,}; download it again")
    if parts > 1:
        raise ValueError(f"{file} is one of {parts} parts of a model: merge them into one file (llama-gguf-split --merge) and give that")
    return header


def gguf_config(file: Path) -> PreTrainedConfig:
    """The configuration as the installed transformers reads it. Raises ValueError for an architecture that it does not know."""
    header = gguf_header(file)
    try:
        with tempfile.TemporaryDirectory() as folder:
            slim = _without_vocabulary(file, header, Path(folder) / file.name)
            config = AutoConfig.from_pretrained((slim or file).parent, gguf_file=file.name)
    except ImportError as error:
        raise ValueError(f"{file}: reading GGUF needs an extra: pip install 'draftsmith[gguf]' ({error})") from error
    except UNREADABLE as error:
        raise ValueError(f"{file} is not understood by the installed transformers as GGUF: {error}") from error
    config.name_or_path = str(file.parent)
    return config


def _without_vocabulary(file: Path, header: Any, to: Path) -> Path | None:
    """A GGUF file with the same settings and tensor names, no tokens and no numbers; None where that would lose the vocabulary's size."""
    from gguf import GGUFWriter
    from transformers.integrations import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, read_gguf_metadata

    metadata, names = read_gguf_metadata(str(file))
    architecture, tokens = header.architecture, metadata.get("tokenizer.ggml.tokens")
    if architecture in GGUF_CONFIG_ARCHS or "vocab_size" not in GGUF_CONFIG_MAPPING.get(architecture, {}):
        return None
    settings = {k: v for k, v in metadata.items() if not k.startswith("tokenizer.") or k.endswith("_token_id")}
    if tokens is not None:
        settings.setdefault(f"{architecture}.vocab_size", tokens)
    writer = GGUFWriter(to, architecture)
    for key, value in settings.items():
        if key != "general.architecture" and value not in ("", []):
            writer.add_key_value(key, value, _kind(value))
    for name in names:
        writer.add_tensor(name, np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def _kind(value: Any) -> Any:
    """The widest type that holds a value: the reader makes the same Python number of every width."""
    from gguf import GGUFValueType

    kinds = {bool: GGUFValueType.BOOL, float: GGUFValueType.FLOAT64, str: GGUFValueType.STRING, list: GGUFValueType.ARRAY}
    return kinds.get(type(value), GGUFValueType.INT64)
