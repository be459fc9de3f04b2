"""EAGLE-3 as docs/design/alignment.md states it, one document, chain, step and position at a time: no packing, no cache, no shared code.

Slow on purpose, float64, autograd. Weights are read from a draft by the names of published checkpoints; nothing else of it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.core.types import Features
from draftsmith.drafts.eagle3 import Eagle3
from draftsmith.target.weights import Target


@dataclass(frozen=True)
class Prediction:
    """Step `step` of chain `anchor`: the draft's log-probabilities over its vocabulary, the teacher's, and whether they are compared."""

    anchor: int
    step: int
    log_q: Tensor
    log_p: Tensor
    in_answer: bool
    """Every token from the given one to the predicted one was written by the assistant."""
    teacher_fits: bool
    """The target's most likely token is in the draft vocabulary."""
    drafted: int
    """The draft's most likely token, as a target id."""
    teacher: int
    """The target's most likely token."""
    token: int
    """The token that the text has there."""

    @property
    def supervised(self) -> bool:
        return self.in_answer and self.teacher_fits

    @property
    def kl(self) -> Tensor:
        return sum((a.exp() * (a - b) for a, b in zip(self.log_p, self.log_q, strict=True)), torch.zeros((), dtype=torch.float64))

    @property
    def overlap(self) -> float:
        return sum(min(math.exp(a), math.exp(b)) for a, b in zip(self.log_p.tolist(), self.log_q.tolist(), strict=True))


def own_logits(target: Target, last: Tensor) -> Tensor:
    """The target's logits of one state, id by id: product, bias, scale, cap; an id that it never produces is as good as minus infinity."""
    out = []
    for token, row in enumerate(target.head_VH.double()):
        value = row @ last.double() + (0.0 if target.bias_V is None else target.bias_V[token].double())
        value = value * target.rule.scale
        if target.rule.cap is not None:
            value = target.rule.cap * torch.tanh(value / target.rule.cap)
        out.append(value if token not in target.rule.banned else torch.tensor(-1e300, dtype=torch.float64))
    return torch.stack(out)


class Reference:
    """The weights of a draft and its target, and the rules of alignment.md."""

    def __init__(self, draft: Eagle3, target: Target) -> None:
        self.weights = dict(draft.named_parameters())
        self.scale = draft.feature_scale.double()
        self.ids = [i + int(offset) for i, offset in enumerate(draft.d2t)]
        self.target, self.shape = target, target.shape
        self.normed_residual = draft.config.norm_before_residual

    # ---- parts ----

    def w(self, name: str) -> Tensor:
        return self.weights[name + ".weight"].double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.shape.norm_eps) * self.w(name)

    def turn(self, x: Tensor, position: int) -> Tensor:
        """Rotate one head's vector: place j is paired with place j + d/2, at the angle position / theta ** (2j / d)."""
        half = len(x) // 2
        out = [torch.zeros((), dtype=torch.float64)] * len(x)
        for j in range(half):
            angle = position / self.shape.rope["rope_theta"] ** (2 * j / len(x))
            out[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
            out[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
        return torch.stack(out)

    def fused(self, feature: Tensor) -> Tensor:
        """g^0 of a token: each layer's features divided by its constant, then fc."""
        size = self.shape.hidden_size
        layers = [feature[n * size : (n + 1) * size].double() / scale for n, scale in enumerate(self.scale)]
        return self.w("fc") @ torch.cat(layers)

    def entering(self, token: int, state: Tensor) -> Tensor:
        embedded = self.target.embedding_VH[token].double()
        return torch.cat((self.norm(embedded, "input_layernorm"), self.norm(state, "hidden_norm")))

    def heads(self, name: str, x: Tensor) -> list[Tensor]:
        return list((self.w("self_attn." + name) @ x).split(self.shape.head_dim))

    def key_value(self, x: Tensor, position: int) -> tuple[list[Tensor], list[Tensor]]:
        return [self.turn(k, position) for k in self.heads("k_proj", x)], self.heads("v_proj", x)

    def attend(self, x: Tensor, position: int, seen: Sequence[tuple[list[Tensor], list[Tensor]]]) -> Tensor:
        group = self.shape.heads // self.shape.kv_heads
        parts = []
        for head, query in enumerate(self.turn(q, position) for q in self.heads("q_proj", x)):
            kv = head // group
            weight = torch.softmax(torch.stack([query @ keys[kv] / math.sqrt(self.shape.head_dim) for keys, _ in seen]), dim=0)
            parts.append(sum((a * values[kv] for a, (_, values) in zip(weight, seen, strict=True)), torch.zeros_like(query)))
        return self.w("self_attn.o_proj") @ torch.cat(parts)

    def mlp(self, x: Tensor) -> Tensor:
        gate = self.w("mlp.gate_proj") @ x
        return self.w("mlp.down_proj") @ (gate * torch.sigmoid(gate) * (self.w("mlp.up_proj") @ x))

    # ---- chains ----

    def chain(self, hidden_TF: Tensor, tokens: Sequence[int], anchor: int, own: Sequence[int]) -> list[Tensor]:
        """Logits of every step of the chain at `anchor`, which is fed the tokens `own` (the first is the given one, t_{anchor+1})."""
        seen = [self.key_value(self.entering(tokens[j + 1], self.fused(hidden_TF[j])), j) for j in range(anchor)]
        state = self.fused(hidden_TF[anchor])
        logits = []
        for step, token in enumerate(own):
            x = self.entering(token, state)
            seen.append(self.key_value(x, anchor + step))
            attended = (self.norm(state, "hidden_norm") if self.normed_residual else state) + self.attend(x, anchor + step, seen)
            state = attended + self.mlp(self.norm(attended, "post_attention_layernorm"))
            logits.append(self.w("lm_head") @ self.norm(state, "norm"))
        return logits

    def predictions(self, document: Features, steps: int) -> list[Prediction]:
        """All predictions of a document whose predicted token exists, supervised or not."""
        tokens, mask = document.sample.input_ids.tolist(), document.sample.loss_mask.tolist()
        out = []
        for i in range(len(tokens) - 2):
            count = min(steps, len(tokens) - 2 - i)
            for k, logits in enumerate(self.chain(document.hidden_TF, tokens, i, tokens[i + 1 : i + 1 + count])):
                teacher = own_logits(self.target, document.last_TH[i + 1 + k])
                best = int(teacher.argmax())
                log_q = torch.log_softmax(logits, dim=0)
                log_p = torch.log_softmax(torch.stack([teacher[t] for t in self.ids]), dim=0)
                in_answer = all(mask[i + 1 : i + 3 + k])
                out.append(Prediction(i, k, log_q, log_p, in_answer, best in self.ids, self.ids[int(log_q.argmax())], best, tokens[i + 2 + k]))
        return out

    def loss(self, documents: Sequence[Features], steps: int, step_weight: float) -> tuple[Tensor, float]:
        """Numerator and denominator over documents."""
        num, den = sum((p.sum() * 0 for p in self.weights.values()), torch.zeros((), dtype=torch.float64)), 0.0
        for document in documents:
            for prediction in self.predictions(document, steps):
                if prediction.supervised:
                    num = num + step_weight**prediction.step * prediction.kl
                    den += step_weight**prediction.step
        return num, den

    # ---- drafting ----

    def propose(self, hidden_TF: Tensor, tokens: Sequence[int], given: int, width: int) -> list[int]:
        """Greedy draft after tokens t_0 .. t_i with features, of which the target followed with `given`; from scratch for every token."""
        own = [given]
        for _ in range(width):
            logits = self.chain(hidden_TF, [*tokens, given], len(tokens) - 1, own)
            own.append(self.ids[int(logits[-1].argmax())])
        return own[1:]
