"""EAGLE-3 as an engine runs it: from config.json and the tensors alone, one row, one position at a time. Shares no code with the package."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """One head's vector, halves paired."""
    half = len(x) // 2
    turned = x.clone()
    for i in range(half):
        angle = position / theta ** (2 * i / len(x))
        a, b = x[i], x[i + half]
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned


class MiniEagle3:
    """`legacy`: read rope_theta at the top level instead of rope_parameters."""

    def __init__(self, folder: Path, legacy: bool = False) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors = {name: t.double() if t.is_floating_point() else t for name, t in load_file(folder / "model.safetensors").items()}
        self.theta = float(self.config["rope_theta"] if legacy else self.config["rope_parameters"]["rope_theta"])
        self.eps = self.config["rms_norm_eps"]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def weight(self, name: str) -> Tensor:
        return self.tensors[name + ".weight"]

    def step(self, token: int, hidden: Tensor, position: int) -> Tensor:
        """Feed one token with a recurrent state; returns the state before the final norm."""
        c = self.config
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        embedded = norm(self.weight("embed_tokens")[token], self.weight("midlayer.input_layernorm"), self.eps)
        mixed = torch.cat((embedded, norm(hidden, self.weight("midlayer.hidden_norm"), self.eps)))
        query, key, value = (self.weight(f"midlayer.self_attn.{n}_proj") @ mixed for n in "qkv")
        self.keys.append(torch.stack([rotate(key[i * dim : (i + 1) * dim], position, self.theta) for i in range(kv)]))
        self.values.append(value.reshape(kv, dim))
        seen = []
        for h in range(heads):
            turned = rotate(query[h * dim : (h + 1) * dim], position, self.theta)
            group = h // (heads // kv)
            scores = torch.stack([turned @ k[group] / math.sqrt(dim) for k in self.keys])
            share = torch.softmax(scores, 0)
            seen.append(sum((s * v[group] for s, v in zip(share, self.values, strict=True)), torch.zeros(dim).double()))
        if c.get("norm_before_residual"):
            hidden = norm(hidden, self.weight("midlayer.hidden_norm"), self.eps)
        hidden = hidden + self.weight("midlayer.self_attn.o_proj") @ torch.cat(seen)
        x = norm(hidden, self.weight("midlayer.post_attention_layernorm"), self.eps)
        gate, up = self.weight("midlayer.mlp.gate_proj") @ x, self.weight("midlayer.mlp.up_proj") @ x
        return hidden + self.weight("midlayer.mlp.down_proj") @ (gate / (1 + torch.exp(-gate)) * up)

    def propose(self, features: Tensor, following: list[int], width: int) -> list[int]:
        """Captured features of tokens 0 … n-1 and the tokens that follow each; drafts `width` tokens after the last of them."""
        self.keys, self.values = [], []
        for i, token in enumerate(following):
            state = self.step(token, self.weight("fc") @ features[i].double(), i)
        tokens: list[int] = []
        for k in range(width):
            if k:
                state = self.step(tokens[-1], state, len(following) - 1 + k)
            draft_id = int((self.weight("lm_head") @ norm(state, self.weight("norm"), self.eps)).argmax())
            tokens.append(draft_id + int(self.tensors["d2t"][draft_id]))
        return tokens
