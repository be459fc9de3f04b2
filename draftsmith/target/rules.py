"""What a target's class does around its head, read from the class's own `forward`: the logit rule and the final norm.

The class stands on the meta device. Its body and its head are made to return known numbers, and what comes out tells the rule; a family that does
anything else than scale, cap, or forbid ids is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

_PROBE_ROWS = 8
_GRID = torch.tensor([0.0, 1e-3, -1e-3, 0.03, 0.4, -0.7, 1.0, 2.5, -3.0, 7.0, -12.0, 20.0, 31.0, -50.0, 90.0, -200.0, 600.0, -2e3, 1e5, -1e5])
"""Values that stand for the head's product: small ones show the scale, large ones the cap."""
_BANNED = -1e30


@dataclass(frozen=True)
class LogitRule:
    """logits = cap x tanh(scale x product / cap), or scale x product without a cap; `banned` ids never occur.

    The product is `last @ head + bias`; `pre` is what the class multiplies the final state with before the head, and `last` already has it.
    """

    scale: float = 1.0
    cap: float | None = None
    banned: tuple[int, ...] = ()
    pre: float | None = 1.0
    """None: layers of its own stand between the final norm and the head."""

    def __call__(self, product: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        """Apply to the head's product, in its dtype."""
        logits = product if self.scale == 1 else product * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def describe(self, bias: bool = False) -> str:
        """One line for people; `bias`: the head has one."""
        product = "head @ last + bias" if bias else "head @ last"
        scaled = product if self.scale == 1 else f"{self.scale:g} x ({product})" if bias else f"{self.scale:g} x {product}"
        capped = scaled if self.cap is None else f"{self.cap:g} x tanh({scaled} / {self.cap:g})"
        before = "" if self.pre == 1 else f"; last = {self.pre:g} x the normed state" if self.pre else "; last comes from layers behind the final norm"
        return capped + before + (f"; {len(self.banned):,} ids are never produced" if self.banned else "")


@dataclass(frozen=True)
class NormRule:
    """The final norm: `rms` or `layer`, its weight as stored plus `offset`; `weight` and `bias` are parameter names."""

    kind: str
    offset: float
    eps: float
    weight: str | None
    bias: str | None

    def describe(self) -> str:
        """One line for people."""
        weight = "no weight" if self.weight is None else "1 + weight" if self.offset else "weight"
        return f"{'RMS norm' if self.kind == 'rms' else 'layer norm'}, {weight}{', bias' if self.bias else ''}, eps {self.eps:g}"


@torch.no_grad()
def norm_rule(norm: nn.Module, name: str, width: int) -> NormRule | None:
    """Which norm a module is, by what it does to random numbers; None when it is none of the known ones."""
    eps = next((float(getattr(norm, k)) for k in ("variance_epsilon", "eps", "epsilon") if isinstance(getattr(norm, k, None), int | float)), 1e-6)
    real = copy.deepcopy(norm).to_empty(device="cpu").float()
    draw = torch.Generator().manual_seed(0)
    for p in real.parameters():
        p.copy_(torch.randn(p.shape, generator=draw))
    x = torch.randn(4, width, generator=draw)
    weight, bias = (v if isinstance(v := getattr(real, k, None), Tensor) else None for k in ("weight", "bias"))
    try:
        own = real(x)
    except Exception:
        return None
    plain = {"rms": x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), "layer": nn.functional.layer_norm(x, (width,), eps=eps)}
    for kind, normed in plain.items():
        for offset in (0.0, 1.0):
            scaled = normed if weight is None else normed * (weight + offset)
            if torch.allclose(scaled if bias is None else scaled + bias, own, rtol=1e-4, atol=1e-4):
                named = [None if v is None else f"{name}.{k}" for k, v in (("weight", weight), ("bias", bias))]
                return NormRule(kind, 0.0 if weight is None else offset, eps, named[0], named[1])
    return None


class _Outputs(tuple):
    """What a body returns, as far as heads look: the final states first, and nothing under any other name."""

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return self[0] if key == "last_hidden_state" else None


@contextmanager
def _forwards(replaced: dict[nn.Module, Any]) -> Iterator[None]:
    """Let these modules compute something else for a while."""
    try:
        for module, forward in replaced.items():
            module.forward = forward
        yield
    finally:
        for module in replaced:
            module.__dict__.pop("forward", None)


@torch.no_grad()
def logit_rule(model: PreTrainedModel, head: Any, bodies: Sequence[nn.Module], name: str) -> LogitRule:
    """Read the rule from the class's own `forward`: its body returns known states, its head a known product, and what comes out is compared.

    `bodies`: modules that may stand for everything before the head.
    Raises ValueError when the outcome is no function of the product alone, element by element, of the kinds that `LogitRule` knows.
    """
    rows, width = head.weight.shape
    product = _GRID[(torch.arange(_PROBE_ROWS)[:, None] * 7 + torch.arange(rows)) % len(_GRID)][None]
    known = torch.linspace(-1.5, 2.0, _PROBE_ROWS * width).view(1, _PROBE_ROWS, width)
    inner = torch.empty(1, _PROBE_ROWS, getattr(model.config.get_text_config(decoder=True), "hidden_size", width), device="meta")
    reasons = []
    # Where layers of the class's own stand between body and head, their weights are on the meta device: so are the states then.
    for body, state in ((b, s) for s in (known, inner) for b in bodies):
        seen: list[Tensor] = []

        def multiply(x: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(x)
            return product[..., -x.shape[-2] :, :].expand(*x.shape[:-1], rows) if x.ndim != 2 else product[0]

        forwards = {body: lambda *_args, _state=state, **_kwargs: _Outputs((_state,)), head: multiply}
        try:
            with _forwards(forwards):
                logits = model(input_ids=torch.ones(1, _PROBE_ROWS, dtype=torch.long, device=state.device)).logits
        except Exception as error:
            reasons.append(f"{type(body).__name__}: {type(error).__name__}: {error}")
            continue
        if len(seen) != 1 or not isinstance(logits, Tensor) or logits.is_meta:
            reasons.append(f"{type(body).__name__}: the head is {'not called' if not seen else f'called {len(seen)} times'}")
            continue
        if seen[0].is_meta and state is known:
            reasons.append(f"{type(body).__name__}: what the head multiplies does not come from it alone")
            continue
        rule = _fit(product[0, :, : logits.shape[-1]], logits[0].float(), _pre(state, seen[0]))
        if rule is not None:
            return rule
        reasons.append("its logits are no scaled or capped product of the head")
    why = "; ".join(dict.fromkeys(reasons))[:300]
    raise ValueError(f"{name}: the logit rule of {type(model).__name__} could not be read ({why}), and guessed logits would be wrong ones")


def _pre(state: Tensor, seen: Tensor) -> float | None:
    """The factor between the final state and what the head multiplies; None when it is not one factor."""
    if seen.is_meta or seen.shape != state.shape:
        return None
    factor = float((seen * state).sum() / state.square().sum())
    return round(factor, 9) if torch.allclose(seen, factor * state, rtol=1e-5, atol=1e-6) else None


def _fit(product: Tensor, logits: Tensor, pre: float | None) -> LogitRule | None:
    """The rule that turns one into the other, if it is one of ours."""
    banned_V = (logits < _BANNED).all(0)
    x, y = product[:, ~banned_V], logits[:, ~banned_V]
    small = x.abs() == 1e-3
    if not small.any():
        return None
    scale = float((y[small] / x[small]).double().mean())
    banned = tuple(banned_V.nonzero()[:, 0].tolist())
    if torch.allclose(y, scale * x, rtol=1e-5, atol=1e-6):
        return LogitRule(_rounded(scale), None, banned, pre)
    cap = float(y.abs().max())
    scale = float((cap * torch.atanh(y[small].double() / cap) / x[small].double()).mean()) if cap > 0 else scale
    if cap > 0 and torch.allclose(y, cap * torch.tanh(scale * x / cap), rtol=1e-4, atol=1e-5):
        return LogitRule(_rounded(scale), _rounded(cap), banned, pre)
    return None


class _Reached(Exception):
    """The first block was called."""


@torch.no_grad()
def embedding_scale(body: nn.Module, embedding: Any, first_block: nn.Module, inner: Sequence[nn.Module]) -> float | None:
    """What a body multiplies embeddings with before its first block, read from its `forward` on the meta device like the logit rule.

    `inner`: the body's children that compute nothing from embeddings alone (rotary positions, other blocks). None when it is not one factor.
    """
    known = torch.linspace(0.5, 1.5, 2 * embedding.weight.shape[1]).view(1, 2, -1)
    arrived: list[Any] = []

    def arrive(*given: Any, **named: Any) -> None:
        arrived.append(given[0] if given else named.get("hidden_states"))
        raise _Reached

    # An embedding that scales by itself keeps its factor on the meta device, and beside it as a plain number.
    looked_up = known * float(getattr(embedding, "scalar_embed_scale", 1.0))
    stubs: dict[nn.Module, Any] = {module: lambda *_given, **_named: (known, known) for module in inner}
    try:
        with _forwards(stubs | {embedding: lambda *_given: looked_up, first_block: arrive}):
            body(input_ids=torch.ones(1, 2, dtype=torch.long))
    except _Reached:
        pass
    except Exception:
        return None
    if not arrived or not isinstance(arrived[0], Tensor) or arrived[0].is_meta:
        return None
    factor = _pre(known, arrived[0])
    return None if factor is None else _rounded(factor)


def _rounded(value: float, digits: int = 7) -> float:
    """Float32 noise taken off: 0.0625 rather than 0.06250000186."""
    return float(f"{value:.{digits}g}")
