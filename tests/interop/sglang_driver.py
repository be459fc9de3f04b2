"""Runs under the engines' Python, without Draftsmith: SGLang's own draft class loads exports on a CPU, and drafts with them.

`python sglang_driver.py ASKED.json ANSWERED.json`. ASKED: {"wheel": the unpacked wheel, "target", "drafts": directories by name, "width", "cases": safetensors
with next.I `[T]` and hidden.I `[T, F]`}; ANSWERED by the same names: {"read": parameters that each tensor went to, "unset": parameters that none filled,
"captured": blocks of the target whose inputs are captured, "proposals"}.

Modules that are not installed are replaced in this process alone. All of SGLang's code that runs is its own but one method: its attention back ends want a
server's key-value pool, so `RadixAttention.forward` is plain causal attention here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# transformers looks for torchvision when these are imported: before the stubs exist, so that it finds none.
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor  # noqa: F401

ABSENT = ("IPython", "gguf", "orjson", "torchvision")
"""Imported by SGLang at its top, and used by nothing that runs here."""


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds absent modules; whatever is imported from them is a class that does nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _nothing  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class Nothing(type):
    """Its classes have every attribute: another such class."""

    def __getattr__(cls, name: str) -> Nothing:
        return _nothing(name)


def _nothing(name: str) -> Nothing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing(name, (), {})


def start(target: str) -> None:
    """What a server of one process sets up before it builds models."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path=target, device="cpu", dtype="float32", attention_backend="torch_native"), role="scheduler", ranks=SpawnRanks(0))
    init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/meeting", 0, "gloo")
    initialize_model_parallel(backend="gloo")


def build(draft: str) -> Any:
    """The draft class, its parameters filled with NaN."""
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

    model = LlamaForCausalLMEagle3(AutoConfig.from_pretrained(draft))
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model


def load(model: Any, tensors: dict[str, Tensor]) -> tuple[dict[str, list[str]], list[str]]:
    """Give the tensors one by one; which parameters each one filled, and which are left with a NaN."""
    read = {}
    for name, tensor in tensors.items():
        before = {n: int(p.isnan().sum()) for n, p in model.named_parameters()}
        mapped = model.hot_token_id is not None
        model.load_weights([(name, tensor)])
        read[name] = [n for n, p in model.named_parameters() if int(p.isnan().sum()) != before[n]]
        if model.hot_token_id is not None and not mapped:
            read[name].append("hot_token_id")
    return read, [n for n, p in model.named_parameters() if bool(p.isnan().any())]


def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, *_given: Any, **_named: Any) -> Tensor:
    """`RadixAttention.forward` over one sequence without a cache."""
    heads = [x.view(1, len(x), -1, layer.head_dim).transpose(1, 2) for x in (q, k, v)]
    return scaled_dot_product_attention(*heads, is_causal=True, scale=layer.scaling, enable_gqa=True).transpose(1, 2).reshape(len(q), -1)


@torch.inference_mode()
def propose(model: Any, next_T: Tensor, hidden_TF: Tensor, width: int) -> list[int]:
    """A chain, each step run over the whole sequence: fused features of the tokens that are known, then the model's own states."""
    state_TH = model.model.fc(hidden_TF)
    ids_T, drafted = next_T, []
    for _ in range(width):
        batch = SimpleNamespace(spec_info=SimpleNamespace(hidden_states=state_TH), mm_input_embeds=None, forward_mode=SimpleNamespace(
            is_extend=lambda: True, is_decode=lambda: False, is_draft_extend_v2=lambda: False), contains_mm_inputs=lambda: False)  # fmt: skip
        normed_TH, (aux_TH,) = model.model(ids_T, torch.arange(len(ids_T)), batch)
        logits = normed_TH[-1] @ model.lm_head.weight.T
        token = model.hot_token_id[logits[: len(model.hot_token_id)].argmax()]  # rows of the head are padded
        drafted.append(int(token))
        ids_T, state_TH = torch.cat((ids_T, token[None])), torch.cat((state_TH, aux_TH[-1:]))
    return drafted


def captured(draft: str) -> list[int]:
    """What the target's own method makes of the ids that SGLang's model runner reads (model_runner_components/spec_aux_hidden_state.py)."""
    from sglang.srt.models.llama import LlamaForCausalLM

    target = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), model=SimpleNamespace())
    LlamaForCausalLM.set_eagle3_layers_to_capture(target, AutoConfig.from_pretrained(draft).eagle_config["eagle_aux_hidden_state_layer_ids"])
    return target.model.layers_to_capture


def answer(draft: str, cases: dict[str, Tensor], width: int) -> dict[str, Any]:
    """Build, load, draft."""
    model = build(draft)
    read, unset = load(model, load_file(Path(draft) / "model.safetensors"))
    proposals = [propose(model, cases[f"next.{i}"], cases[f"hidden.{i}"], width) for i in range(len(cases) // 2)] if model.hot_token_id is not None else []
    return {"read": read, "unset": unset, "captured": captured(draft), "proposals": proposals}


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """All drafts, in one process."""
    sys.meta_path.append(Stubs())
    sys.path.insert(0, asked["wheel"])
    from sglang.srt.layers.radix_attention import RadixAttention

    RadixAttention.forward = attend
    start(asked["target"])
    cases = load_file(asked["cases"])
    return {name: answer(draft, cases, asked["width"]) for name, draft in asked["drafts"].items()}


if __name__ == "__main__":
    source, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(main(json.loads(source.read_text()))))
