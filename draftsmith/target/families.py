"""What a target's model class says about itself: where its parts are, and what it does with the head's product.

No table of families. The class is built on the meta device (no memory, a fraction of a second) from the configuration; embedding, head, blocks and norm are
found by structure, and what is done with the head's product is read from its behaviour (rules.py). A family that is new is right, or it is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from draftsmith.target.rules import LogitRule, NormRule, logit_rule, norm_rule

_MAPPINGS: tuple[Any, ...] = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)


@dataclass(frozen=True)
class Anatomy:
    """Names of a class's parts, as in its `state_dict`, and its rules."""

    model: PreTrainedModel
    embedding: str
    head: str
    head_bias: str | None
    blocks: str
    norm: NormRule | None
    norm_module: str | None
    rule: LogitRule
    tied: bool

    @property
    def architecture(self) -> str:
        """Name of the class."""
        return type(self.model).__name__


def model_class(config: PreTrainedConfig, name: str) -> Any:
    """The class that generates text under this configuration.

    The one that the checkpoint names, else the auto mapping's. Raises ValueError for encoder-decoders, encoders, classifiers and unknown families.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name}: {config.model_type} is an encoder-decoder; a draft needs a causal language model (decoder only)")
    written = (config.architectures or [""])[0]
    # A mapping denies that it holds some of the configurations that it gives a class for, so it is asked for the class.
    known = [c for m in _MAPPINGS for c in _classes(m.get(type(config), ()))]
    known = known or _text_class(config, written)
    if not known:
        raise ValueError(
            f"{name}: {config.model_type} is no causal language model that transformers {transformers.__version__} knows, so its head and logit rule would be "
            "guesses; a newer transformers may know it"
        )
    chosen = next((c for c in known if c.__name__ == written), None)
    if chosen is None:
        _refuse_others(written, known[0].__name__, config, name)
        chosen = known[0]
    if "Diffusion" in chosen.__name__:
        raise ValueError(f"{name}: {chosen.__name__} fills in blocks of tokens together; a draft needs a causal language model, which predicts the next one")
    return chosen


def _refuse_others(written: str, expected: str, config: PreTrainedConfig, name: str) -> None:
    """Checkpoints of classes without a language-model head, and encoders."""
    heads = ("Classification", "RewardModel", "QuestionAnswering", "Retrieval", "Regression", "Choice")
    if any(word in written for word in heads):
        raise ValueError(f"{name} is a {written}: it has no language-model head; a draft needs a {expected}")
    if written.endswith("ForMaskedLM") or (getattr(config, "is_decoder", None) is False and "Bert" in expected):
        raise ValueError(f"{name}: {config.model_type} is an encoder (masked language model); a draft needs a causal language model (decoder only)")


def _classes(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _text_class(config: PreTrainedConfig, written: str) -> list[Any]:
    """The text half of a wrapper, saved alone: its configuration is in no mapping, its class is, under the wrapper's."""
    if any(written in _classes(names) for m in _MAPPINGS for names in m._model_mapping.values()):
        found = getattr(transformers, written)
        return [found] if found.config_class is type(config) else []
    return []


def config_for(kind: Any, config: PreTrainedConfig) -> PreTrainedConfig:
    """What a class is built from: the configuration, or the part of a wrapper's that the text class takes."""
    inner = kind.config_class is not type(config) and kind.config_class in (config.sub_configs or {}).values()
    return copy.deepcopy(config.get_text_config() if inner else config)


def setting(config: PreTrainedConfig, name: str, otherwise: Any = None) -> Any:
    """A field of a configuration; the first block's where blocks differ in it (Gemma-4's head sizes)."""
    try:
        return getattr(config, name, otherwise)
    except RuntimeError:
        return getattr(config.per_layer_config[0], name, otherwise)


def skeleton(config: PreTrainedConfig, name: str) -> PreTrainedModel:
    """The model on the meta device: all structure, no weights. Raises ValueError when the class does not take the configuration."""
    kind = model_class(config, name)
    try:
        with torch.device("meta"), init.no_init_weights():
            return kind(config_for(kind, config)).eval()
    except ImportError as error:
        raise ValueError(f"{name}: {kind.__name__} needs a library that is not installed: {str(error).strip()}") from error
    except Exception as error:
        raise ValueError(f"{name}: {kind.__name__} cannot be built from its config.json ({type(error).__name__}: {error}): the file is damaged") from error


def anatomy(model: PreTrainedModel, name: str) -> Anatomy:
    """Find the parts of a model, on the meta device or real. Raises ValueError, with the reason, for a model without one of them."""
    names = {id(m): n for n, m in model.named_modules()}
    speaker = speaker_of(model, name)
    embedding, head = _embedding(speaker, name), head_of(speaker, name)
    _require_plain(speaker, head, name)
    blocks = blocks_of(speaker, name)
    width = head.weight.shape[1]
    norm_module = _final_norm(owner_of(speaker, blocks), blocks, width)
    rule = logit_rule(speaker, head, list(_bodies(speaker, blocks)), name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    head_name = names[id(head)]
    bias = f"{head_name}.bias" if f"{head_name}.bias" in parameters and getattr(head, "bias", None) is not None else None
    norm = None if norm_module is None else norm_rule(norm_module, names[id(norm_module)], width)
    return Anatomy(
        model=model,
        embedding=_stored(model, f"{names[id(embedding)]}.weight"),
        head=f"{head_name}.weight",
        head_bias=None if bias is None else _stored(model, bias),
        blocks=names[id(blocks)],
        norm=norm,
        norm_module=None if norm_module is None else names[id(norm_module)],
        rule=rule,
        tied=_tied(model, f"{head_name}.weight"),
    )


def _stored(model: PreTrainedModel, name: str) -> str:
    """The name under which a parameter is saved: of tied ones, the one that the others are tied to."""
    return (getattr(model, "all_tied_weights_keys", None) or {}).get(name, name)


def _tied(model: PreTrainedModel, head: str) -> bool:
    """Whether the class ties its head under this configuration; read from what it says of its parameters, whichever config holds the flag."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return head in tied


def _embedding(model: PreTrainedModel, name: str) -> nn.Module:
    with suppress(NotImplementedError, AttributeError):
        found = model.get_input_embeddings()
        if isinstance(getattr(found, "weight", None), Tensor):
            return found
    raise ValueError(f"{name}: {type(model).__name__} has no table of token embeddings; it is no language model over tokens")


def head_of(model: PreTrainedModel, name: str) -> Any:
    """The module whose product becomes logits. Raises ValueError when the class has none, or several."""
    found = _output(model)
    if isinstance(found, nn.ModuleList):
        raise ValueError(f"{name}: {type(model).__name__} has {len(found)} heads (one a codebook); a draft needs a target with one")
    if not isinstance(getattr(found, "weight", None), Tensor):
        raise ValueError(f"{name}: {type(model).__name__} has no language-model head")
    return found


def _require_plain(model: PreTrainedModel, head: nn.Module, name: str) -> None:
    """The head multiplies and adds its bias, nothing else. Raises ValueError for one that does more, which the logit rule cannot say."""
    if type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"{name}: the head of {type(model).__name__} is a {type(head).__name__} with {', '.join(n for n, _ in head.named_parameters())}, which does more "
            "than multiply; its logits would be other ones than head @ last"
        )


def _output(model: PreTrainedModel) -> Any:
    with suppress(NotImplementedError, AttributeError):
        return model.get_output_embeddings()
    return None


def speaker_of(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The innermost model that holds the head, the embedding and the blocks: the text model inside a multi-modal wrapper, or the model itself.

    It takes token ids alone, where a wrapper may demand an image. Raises ValueError when nothing in the model has a language-model head.
    """
    own = _output(model)
    inside = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not model and _output(m) is not None]
    for candidate in reversed(inside):
        if own is None or _output(candidate) is own:
            with suppress(ValueError):
                _embedding(candidate, name)
                blocks_of(candidate, name)
                return candidate
    head_of(model, name)
    return model


def blocks_of(model: PreTrainedModel, name: str) -> nn.ModuleList:
    """The list of decoder blocks: nearest to the embedding, one with as many entries as the config has layers, else the only list of blocks.

    Raises ValueError when there is none, or several that may be meant.
    """
    body = model.get_decoder()
    body = body if isinstance(body, nn.Module) else model
    config: Any = getattr(body, "config", model.config)
    count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    for scope in [body] if count is None else _around(model, _embedding(model, name)):
        named = [(n, m) for n, m in scope.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
        lists = sorted(named, key=lambda pair: pair[0].count("."))
        whole = [(n, m) for n, m in lists if isinstance(m[0], GradientCheckpointingLayer)]
        fits = [(n, m) for n, m in whole if len(m) == count] or [(n, m) for n, m in lists if len(m) == count] or whole
        level = [(n, m) for n, m in fits if n.count(".") == fits[0][0].count(".")]
        if len(level) > 1:
            raise ValueError(
                f"{name}: {type(model).__name__} has no one list of decoder blocks ({', '.join(n for n, _ in level)} are {len(level)} lists): "
                "what the output of its block i is has no answer, so it cannot be tapped"
            )
        if level:
            return level[0][1]
    raise ValueError(f"{name}: no list of {count} decoder blocks found in {type(body).__name__}; it cannot be tapped")


def _around(model: nn.Module, part: nn.Module) -> list[nn.Module]:
    """The modules that hold `part`, innermost first."""
    return [m for m in model.modules() if m is not part and any(inner is part for inner in m.modules())][::-1]


def owner_of(model: nn.Module, part: nn.Module) -> nn.Module:
    """The module that has `part` as a child."""
    return next(m for m in model.modules() if any(child is part for child in m.children()))


def _final_norm(owner: nn.Module, blocks: nn.ModuleList, width: int) -> nn.Module | None:
    """The last norm beside the blocks; None for bodies that end without one."""
    siblings = list(owner.named_children())
    place = next(i for i, (_, child) in enumerate(siblings) if child is blocks)
    norms = [(i, n, m) for i, (n, m) in enumerate(siblings) if "norm" in type(m).__name__.lower() and _width(m) in (width, None)]
    norms = [(i, n, m) for i, n, m in norms if not ("layer" in n and "emb" in n)]  # on the embeddings, though declared behind the blocks
    behind = [m for i, _, m in norms if i > place]
    final = [m for _, n, m in norms if n in ("norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "final_norm", "f_norm")]
    chosen = behind or final
    return chosen[-1] if chosen else None


def _width(norm: nn.Module) -> int | None:
    weight = getattr(norm, "weight", None)
    return weight.shape[-1] if isinstance(weight, Tensor) and weight.ndim == 1 else None


def _bodies(model: PreTrainedModel, blocks: nn.ModuleList) -> Iterator[nn.Module]:
    """Modules that may stand for everything before the head, outermost first."""
    seen: set[int] = {id(model)}
    for body in (model.base_model, model.get_decoder(), owner_of(model, blocks)):
        if isinstance(body, nn.Module) and id(body) not in seen:
            seen.add(id(body))
            yield body
