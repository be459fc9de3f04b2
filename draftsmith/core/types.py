"""The nouns of Draftsmith as data, and the legend of shape letters that every tensor file uses.

Shape letters (suffixes of names, and names in jaxtyping annotations):

    N  tokens of a packed batch (documents laid end to end, no padding)      T  tokens of one document
    H  hidden size                F  captured features = layers x target hidden size
    V  target vocabulary          D  draft vocabulary
    C  chains                     K  training-time-test steps               W  drafted tokens (width)
    B  rows decoded together      Q  query tokens of one decoding pass

Conventions, fixed once: layer i is the output of decoder block i, counted from 0, without the final norm; `last` is exactly what
the target's LM head multiplies; `loss_mask[t]` says that token t was written by the assistant; positions restart at 0 in
each document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

IGNORED = -1
"""Value of `argmax` where it was not computed (the next token is not supervised)."""


@dataclass(frozen=True)
class Sample:
    """Token ids of one conversation as a server sees them, and which of them the assistant wrote."""

    id: str
    input_ids: Int[Tensor, " T"]
    loss_mask: Bool[Tensor, " T"]

    def __post_init__(self) -> None:
        if self.input_ids.shape != self.loss_mask.shape:
            raise ValueError(f"sample {self.id!r}: {len(self.input_ids)} token ids but {len(self.loss_mask)} mask values")

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class FeatureSpec:
    """What a draft needs captured from the target.

    `layers`: outputs of these decoder blocks (0-based, ascending), concatenated per token. `dtype`: how they are stored.
    `last` and `argmax` (the target's most likely next token over its whole vocabulary) always come with them: they are the teacher.
    """

    layers: tuple[int, ...]
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if list(self.layers) != sorted(set(self.layers)) or not self.layers or self.layers[0] < 0:
            raise ValueError(f"capture layers must be ascending, different and >= 0, got {list(self.layers)}")


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a target that a draft is built from. `rope` is the target's own `rope_parameters`."""

    hidden_size: int
    vocab_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_positions: int
    rope: Mapping[str, Any]
    model_type: str = "llama"
    bos_token_id: int | None = None
    eos_token_id: int | None = None


@dataclass(frozen=True)
class Features:
    """What was captured for one sample; `argmax` is `IGNORED` where the next token is not the assistant's."""

    sample: Sample
    hidden_TF: Float[Tensor, "T F"]
    last_TH: Float[Tensor, "T H"]
    argmax_T: Int[Tensor, " T"]

    def __len__(self) -> int:
        return len(self.sample)


@dataclass(frozen=True)
class FeatureBatch:
    """Packed features: the input of one micro-step. Documents are contiguous; `lengths` sums to N."""

    ids: tuple[str, ...]
    lengths: tuple[int, ...]
    input_ids_N: Int[Tensor, " N"]
    loss_mask_N: Bool[Tensor, " N"]
    position_N: Int[Tensor, " N"]
    document_N: Int[Tensor, " N"]
    hidden_NF: Float[Tensor, "N F"]
    last_NH: Float[Tensor, "N H"]
    argmax_N: Int[Tensor, " N"]

    def to(self, device: torch.device | str) -> FeatureBatch:
        """The same batch on a device."""
        moved = {f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class Ratio:
    """A mean that is not divided yet: sum over micro-batches and ranks first, divide once.

    `num` and `den` have the same shape; entries whose `den` is 0 have no value (`nan`).
    """

    num: Tensor
    den: Tensor

    @staticmethod
    def of(num: float | Tensor, den: float | Tensor) -> Ratio:
        """Build from plain numbers."""
        return Ratio(torch.as_tensor(num, dtype=torch.float64), torch.as_tensor(den, dtype=torch.float64))

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.num + other.num, self.den + other.den)

    def detach(self) -> Ratio:
        """The same figures, cut from the graph, in float64."""
        return Ratio(self.num.detach().double().cpu(), self.den.detach().double().cpu())

    @property
    def value(self) -> Tensor:
        """num / den; `nan` where den is 0."""
        return torch.where(self.den > 0, self.num / self.den.clamp(min=1e-38), torch.full_like(self.num, torch.nan))


@dataclass(frozen=True)
class Progress:
    """Where training stands: schedules read `fraction` in [0, 1); random choices of a step derive from `seed` alone,
    so that a resumed run repeats them without carrying generator states. `exact` switches off sampling (evaluation), with `drafted` tokens a step,
    by default as many as training has."""

    fraction: float = 0.0
    seed: int = 0
    exact: bool = False
    drafted: int | None = None


@dataclass(frozen=True)
class StepOutput:
    """What a draft returns for one micro-batch: the loss (differentiable numerator) and metrics, all as ratios."""

    loss: Ratio
    metrics: Mapping[str, Ratio]


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens of B rows, as target ids, parents before children.

    `probs_BWV`: the distribution that each was drawn from, over the target's vocabulary; absent where tokens were chosen and not drawn. `parent_BW`: the
    place of the drafted token before it on its branch, -1 for the given token; absent for a chain, the tree with one branch. Tokens of one parent differ.
    """

    tokens_BW: Int[Tensor, "B W"]
    probs_BWV: Float[Tensor, "B W V"] | None = None
    parent_BW: Int[Tensor, "B W"] | None = None

    @property
    def lineage(self) -> Bool[Tensor, "B Q Q"]:
        """Q = W + 1 with the given token first; True where a column's token is the row's own or one before it on its branch: what it may attend to."""
        rows, width = self.tokens_BW.shape
        eye_QQ = torch.eye(width + 1, device=self.tokens_BW.device)
        if self.parent_BW is None:
            return torch.ones_like(eye_QQ, dtype=torch.bool).tril().expand(rows, -1, -1)
        above_BWQ = torch.nn.functional.one_hot(self.parent_BW + 1, width + 1).float()
        known_BQQ = eye_QQ + torch.nn.functional.pad(above_BWQ, (0, 0, 1, 0))
        for _ in range(width.bit_length()):  # each product doubles the generations that are known
            known_BQQ = (known_BQQ @ known_BQQ).clamp(max=1)
        return known_BQQ > 0
