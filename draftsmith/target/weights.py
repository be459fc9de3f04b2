"""`Target`: the frozen embedding, final norm and head of a checkpoint, read without building the model.

Only the needed tensors are read, memory-mapped, in their stored dtype. No key needs to be named: with a head tensor on disk that one is the head;
without one the embedding is, whatever the tie flag says.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from draftsmith.core.types import TargetShape

_EMBEDDING = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "embeddings.weight", "tok_embeddings.weight")
_HEAD = ("lm_head.weight", "embed_out.weight", "output.weight")
_NORM = ("model.norm.weight", "norm.weight", "ln_f.weight", "final_layernorm.weight", "final_layer_norm.weight", "norm_f.weight")
_OTHER_RULES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier", "dim_model_base")
"""Config keys of families whose logits are not `head @ last`; `TargetModel.check` refuses them until their rule is here."""


@dataclass
class Target:
    """What every loss and every draft borrows from the target: `embed`, `logits`, the norm to start from, and its sizes.

    Never a submodule of a draft, so that a draft's `state_dict()` holds exactly what is trained.
    """

    name: str
    shape: TargetShape
    embedding_VH: Tensor
    head_VH: Tensor
    norm_H: Tensor
    tied: bool
    fingerprint: str
    _rows: tuple[Tensor | None, Tensor] | None = field(default=None, repr=False)

    @staticmethod
    def load(where: str, device: str = "cpu", dtype: torch.dtype | None = None) -> Target:
        """Read from a directory.

        Raises ValueError when it does not exist, holds no weights, lacks the tensors (the closest keys are listed), or is
        no causal language model; also when the logit rule of its family is not a plain product.
        """
        require_directory(where)
        folder = Path(where)
        config = _config(folder)
        files = _files(folder)
        embedding = _pick(files, _EMBEDDING, "embedding")
        head = _find(files, _HEAD)
        norm = _pick(files, _NORM, "final norm")
        embedding_VH = _read(files, embedding)
        head_VH = embedding_VH if head is None else _read(files, head)
        shape = _shape(config)
        if embedding_VH.shape[1] != shape.hidden_size or head_VH.shape[1] != shape.hidden_size:
            raise ValueError(
                f"{where}: embedding {tuple(embedding_VH.shape)} and head {tuple(head_VH.shape)} do not fit hidden_size {shape.hidden_size} of config.json"
            )
        parts = [embedding_VH.to(device, dtype), head_VH.to(device, dtype), _read(files, norm).to(device, dtype)]
        if head is None:
            parts[1] = parts[0]
        return Target(where, shape, *parts, tied=head is None, fingerprint=_fingerprint(config, files))

    def embed(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n H"]:
        """Rows of the embedding, in its stored dtype."""
        return self.embedding_VH[ids]

    def logits(self, last: Float[Tensor, "*n H"], ids_D: Int[Tensor, " D"] | None = None) -> Float[Tensor, "*n D"]:
        """The target's next-token logits, over all of its vocabulary or over `ids_D` alone, in the dtype of `last`."""
        return last @ self.rows(ids_D, last.dtype).T

    def rows(self, ids_D: Int[Tensor, " D"] | None, dtype: torch.dtype) -> Float[Tensor, "D H"]:
        """Rows of the head; the last selection is kept, since a draft always asks for the same one."""
        if ids_D is None and self.head_VH.dtype == dtype:
            return self.head_VH
        kept = self._rows
        if kept is None or kept[0] is not ids_D or kept[1].dtype != dtype:
            self._rows = kept = (ids_D, (self.head_VH if ids_D is None else self.head_VH[ids_D]).to(dtype))
        return kept[1]


def require_directory(where: str) -> None:
    """Raises ValueError, with the closest sibling, when a target is no directory."""
    if not Path(where).is_dir():
        raise ValueError(f"no such target: {where!r} is not a directory{_near(Path(where))}; expected a Hugging Face checkpoint directory")


def _near(folder: Path) -> str:
    siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
    near = difflib.get_close_matches(folder.name, siblings, n=1)
    return f" (did you mean {folder.with_name(near[0])}?)" if near else ""


def _config(folder: Path) -> PreTrainedConfig:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no Hugging Face checkpoint: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}/config.json is not understood by the installed transformers: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{folder}: {config.model_type} is an encoder-decoder; a draft needs a causal language model")
    rules = [k for k in _OTHER_RULES if getattr(config.get_text_config(), k, None) not in (None, 1, 1.0, False)]
    if rules:
        raise ValueError(f"{folder}: the logit rule of {config.model_type} ({', '.join(rules)}) is not supported yet")
    return config


def _files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _weight_map(index)
        missing = sorted({f for f in weight_map.values() if not (folder / f).is_file()})
        if missing:
            raise ValueError(f"{index} names {missing[0]}, which is not there ({len(missing)} missing): download it again")
        return {key: folder / file for key, file in weight_map.items()}
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as opened:
                files |= dict.fromkeys(opened.keys(), path)
        except Exception as error:
            raise ValueError(f"{path} cannot be read ({error}): it is truncated or not a safetensors file") from error
    if not files:
        raise ValueError(f"{folder} holds no weights: no *.safetensors file")
    return files


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(key): str(file) for key, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({type(error).__name__}: {error}): download it again") from error


def _find(files: Mapping[str, Path], names: tuple[str, ...]) -> str | None:
    """The shortest key that ends in one of the names, in their order."""
    for name in names:
        found = sorted((k for k in files if k == name or k.endswith("." + name)), key=len)
        found = [k for k in found if ".layers." not in k and "vision" not in k and ".h." not in k]
        if found:
            return found[0]
    return None


def _pick(files: Mapping[str, Path], names: tuple[str, ...], what: str) -> str:
    key = _find(files, names)
    if key is None:
        near = difflib.get_close_matches(names[0], list(files), n=3, cutoff=0.3)
        raise ValueError(f"no {what} found: looked for keys ending in {', '.join(names)}; closest keys: {', '.join(near) or 'none'}")
    return key


def _read(files: Mapping[str, Path], key: str) -> Tensor:
    try:
        with safe_open(files[key], framework="pt") as opened:
            return opened.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{files[key]} cannot be read ({error}): it is truncated or lacks {key}; download it again") from error


def _shape(config: PreTrainedConfig) -> TargetShape:
    text = config.get_text_config()
    rope = dict(text.rope_parameters or {})
    if any(isinstance(v, dict) for v in rope.values()):
        rope = dict(rope.get("full_attention") or next(v for v in rope.values() if isinstance(v, dict)))
    ends = text.eos_token_id
    return TargetShape(
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        layers=text.num_hidden_layers,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        norm_eps=getattr(text, "rms_norm_eps", 1e-5),
        max_positions=text.max_position_embeddings,
        rope=rope or {"rope_type": "default", "rope_theta": 10000.0},
        model_type=text.model_type,
        bos_token_id=text.bos_token_id,
        eos_token_id=ends[0] if isinstance(ends, list) else ends,
    )


def _fingerprint(config: PreTrainedConfig, files: Mapping[str, Path]) -> str:
    """Tells targets apart: their configuration, and the first row of every tensor."""
    skipped = ("_name_or_path", "transformers_version", "dtype")
    digest = hashlib.sha256(json.dumps({k: v for k, v in config.to_dict().items() if k not in skipped}, sort_keys=True, default=str).encode())
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as opened:
            for key in sorted(opened.keys()):
                row = opened.get_slice(key)[:1] if opened.get_slice(key).get_shape() else opened.get_tensor(key)
                digest.update(key.encode() + row.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
