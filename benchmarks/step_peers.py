"""The EAGLE-3 steps of published packages, out of their own public classes, doing what their trainers do.

`pip install --no-deps --target .peers specforge==0.2.0 speculators==0.9.0` beside this file. What they import for other purposes and is not here is
stood in for: clients of inference servers in speculators, and Triton, which SpecForge's loss needs on a GPU; on a CPU its own reference of the same loss runs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step_cases import LAYERS, STEPS, Inputs, Shape, target_tensors
from transformers import LlamaConfig

PEERS = Path(__file__).parent / ".peers"


class _Absent(types.ModuleType):
    """A module that is imported and never used."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (), {})
        return lambda *given, **_: given[0] if given and callable(given[0]) else None


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `roots` and everything below them, whatever it is called."""

    def __init__(self, roots: tuple[str, ...]) -> None:
        self.roots = roots

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self.roots else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _import(name: str, *absent: str) -> Any:
    """Import from `.peers` while `absent` packages are stood in for."""
    if not PEERS.is_dir():
        raise SystemExit(f"no peers: pip install --no-deps --target {PEERS} specforge==0.2.0 speculators==0.9.0")
    importlib.import_module("torch._inductor.compile_fx")  # looks for Triton, and must not find the stand-in
    sys.path.insert(0, str(PEERS))
    stand_ins = _StandIns(absent)
    sys.meta_path.insert(0, stand_ins)
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path.remove(stand_ins)
        for module in [m for m in sys.modules if m.split(".")[0] in absent]:
            del sys.modules[module]


def _config(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=shape.hidden, vocab_size=shape.vocab, num_hidden_layers=1, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, intermediate_size=shape.intermediate, max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=False,
        draft_vocab_size=shape.draft_vocab, target_hidden_size=shape.hidden, pad_token_id=0, norm_output=True,
    )  # fmt: skip


def _maps(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft vocabulary is the first ids."""
    return torch.arange(shape.vocab) < shape.draft_vocab, torch.zeros(shape.draft_vocab, dtype=torch.long)


def specforge(shape: Shape, given: Inputs, dtype: torch.dtype) -> tuple[Callable[[], None], Any]:
    """SpecForge's OnlineEagle3Model with its compact teacher, as its offline strategy calls it, and its optimizer."""
    eagle3 = _import("specforge.algorithms.eagle3.model", "triton")
    drafts = importlib.import_module("specforge.modeling.draft.llama3_eagle")
    loss = importlib.import_module("specforge.core.loss")

    class Reference:
        apply = staticmethod(loss._compute_loss)

    eagle3.LogSoftmaxLoss = Reference
    head, _ = target_tensors(shape, dtype)
    draft = drafts.LlamaForCausalLMEagle3(_config(shape), attention_backend="sdpa").to(dtype)
    draft.t2d, draft.d2t = _maps(shape)
    draft.embed_tokens.weight.data.copy_(head)
    draft.embed_tokens.weight.requires_grad_(False)
    model = eagle3.OnlineEagle3Model(draft, length=STEPS, attention_backend="sdpa")
    optimizer = importlib.import_module("specforge.optimizer").BF16Optimizer(draft, lr=1e-4, max_grad_norm=1.0, total_steps=1000)
    # Its head's `preprocess`: tokens, teacher and mask one to the left.
    shifted = {"input_ids": given.ids_N.roll(-1)[None], "loss_mask": given.mask_N.roll(-1)[None, :, None].long()}
    teacher = given.last_NH[None].roll(-1, dims=1)

    def step() -> None:
        losses, *_ = model(
            **shifted, attention_mask=torch.ones(1, shape.tokens, dtype=torch.bool), target=None, hidden_states=given.hidden_NF[None],
            target_hidden_for_compact=teacher, target_head_weight=head,
        )  # fmt: skip
        sum(0.8**i * one for i, one in enumerate(losses)).backward()
        optimizer.step()

    return step, draft


def speculators(shape: Shape, given: Inputs, dtype: torch.dtype) -> tuple[Callable[[], None], Any]:
    """speculators' Eagle3DraftModel under autocast, with its own KL loss and AdamW."""
    module = _import("speculators.models.eagle3.core", "openai", "hs_connectors")
    config = importlib.import_module("speculators.models.eagle3.config")
    base, proposals = (importlib.import_module(f"speculators.{name}") for name in ("config", "proposals.greedy"))
    head, norm = target_tensors(shape, torch.float32)
    layer = _config(shape)
    layer._attn_implementation = "eager"  # flex attention has no backward on a CPU
    plan = base.SpeculatorsConfig(
        algorithm="eagle3", proposal_methods=[proposals.GreedyTokenProposalConfig(speculative_tokens=STEPS)], default_proposal_method="greedy",
        verifier=base.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )  # fmt: skip
    draft = module.Eagle3DraftModel(
        config.Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=shape.draft_vocab, norm_before_residual=False, speculators_config=plan,
            eagle_aux_hidden_state_layer_ids=list(range(LAYERS)),
        )
    )  # fmt: skip
    draft.t2d, draft.d2t = _maps(shape)
    for weight, rows in ((draft.embed_tokens, head), (draft.lm_head, head[: shape.draft_vocab]), (draft.verifier_lm_head, head[: shape.draft_vocab])):
        weight.weight.data.copy_(rows)
    draft.verifier_norm.weight.data.copy_(norm)
    draft.lm_head.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-4)
    losses = importlib.import_module("speculators.losses").resolve_loss_config("kl_div", "eager")
    fields = {
        "input_ids": given.ids_N[None, 1:], "hidden_states": given.hidden_NF[None, :-1], "verifier_last_hidden_states": given.last_NH[None, 1:],
        "loss_mask": given.mask_N[None, 1:], "position_ids": torch.arange(1, shape.tokens)[None],
        "document_ids": torch.zeros(1, shape.tokens - 1, dtype=torch.long),
    }  # fmt: skip

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            _, loss, _ = draft(**fields, ttt_steps=STEPS, ttt_step_loss_decay=1.0, loss_config=losses)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()

    return step, draft


PEER_STEPS = {"specforge": specforge, "speculators": speculators}
