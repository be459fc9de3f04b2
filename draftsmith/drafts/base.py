"""What every draft answers: what it needs captured, how it learns, how it proposes, and how it ships.

A new algorithm is one file with one `Draft` and one `Config`, and one line in `DRAFTS`. `Target` is an argument, never a submodule:
`state_dict()` holds exactly what is trained, and the few constants that go with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from pydantic import model_validator
from torch import Tensor, nn

from draftsmith.core.config import Config, Positive
from draftsmith.core.types import FeatureBatch, FeatureSpec, Progress, Proposal, StepOutput, TargetShape
from draftsmith.target.weights import Target


@dataclass(frozen=True)
class Context:
    """What became known since the last proposal, for B rows of up to R tokens: the target's features of each token, the token that
    follows it, its position, and which places are real (rows differ in how many tokens they accepted)."""

    hidden_BRF: Float[Tensor, "B R F"]
    next_BR: Int[Tensor, "B R"]
    position_BR: Int[Tensor, "B R"]
    valid_BR: Bool[Tensor, "B R"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: greedily at temperature 0."""

    temperature: float = 0.0
    generator: torch.Generator | None = None


GREEDY = Sampling()


class Tree(Config):
    """A tree of drafted tokens, grown anew for every pass as EAGLE-2 does it (Li et al., arXiv 2406.16858, section 4): level by level the `top_k` likeliest
    tokens are followed, each by its `top_k` likeliest ones, and of all of them the `nodes` likeliest are verified. With `top_k` 1 it is a chain."""

    nodes: Positive = 16
    """Drafted tokens that a pass verifies."""
    top_k: Positive = 4
    """Tokens followed on each level, and branches of each."""
    depth: Positive = 5
    """Longest branch."""

    @model_validator(mode="after")
    def _fits(self) -> Tree:
        most = self.top_k + (self.depth - 1) * self.top_k**2
        if not self.depth <= self.nodes <= most:
            raise ValueError(
                f"a tree of depth {self.depth} with top_k {self.top_k} has {most} tokens to choose from; expected nodes from {self.depth} to {most}"
            )
        return self


Width = int | Tree
"""What is drafted for a pass: a chain of so many tokens, or a tree."""


def depth(width: Width) -> int:
    """The most tokens that a pass can accept."""
    return width.depth if isinstance(width, Tree) else width


def drafted(width: Width) -> int:
    """The tokens that a pass verifies besides the given one."""
    return width.nodes if isinstance(width, Tree) else width


@runtime_checkable
class DraftState(Protocol):
    """What a draft remembers of its rows between proposals."""

    def select(self, rows: Tensor) -> None:
        """Keep these rows."""


Form = Literal["engine", "speculators"]
"""Forms of a checkpoint directory: what every engine reads, and the one of the speculators library."""


@dataclass(frozen=True)
class Layout:
    """How a draft looks in a checkpoint directory of one form: our tensor names -> theirs, and the algorithm's own fields of config.json. Sizes, rotary
    positions and dtype, which all drafts have, are the exporter's."""

    names: Mapping[str, str]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Service:
    """What one engine makes of a draft."""

    method: str
    """The engine's name for the algorithm."""
    refused: tuple[str, ...] = ()
    """Why the engine cannot serve it, each with what to change; empty when it can."""
    options: str = ""
    """Further settings that the engine needs to be given with it."""
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys of config.json that it relies on, by the file of the engine's package that reads them."""


class Draft(nn.Module, ABC):
    """A draft model. Rows, chains and blocks are its own business; tokens, features and proposals are everybody's."""

    forms: ClassVar[tuple[Form, ...]]
    """Forms of a checkpoint directory that it can have."""
    config_class: ClassVar[type[Config]]
    """Its settings in a recipe; all have defaults."""
    trees: ClassVar[bool] = False
    """Whether it can draft a `Tree`."""
    layers: tuple[int, ...]
    """Captured decoder blocks."""

    def __init__(self, config: Any, shape: TargetShape) -> None:
        """`config` is of `config_class`. Raises ValueError for settings that the target does not allow."""
        super().__init__()
        self.config, self.shape = config, shape

    @staticmethod
    @abstractmethod
    def recognises(fields: Mapping[str, Any]) -> bool:
        """Whether a published config.json, of any form, is of this algorithm."""

    @classmethod
    @abstractmethod
    def from_engine(cls, fields: Mapping[str, Any], shape: TargetShape, config: Any, layers: tuple[int, ...]) -> Draft:
        """An empty draft as a published config.json describes it: `shape` holds the sizes in it, `layers` the captured blocks, `config` the training settings.
        Raises ValueError naming a variant that is not known."""

    @staticmethod
    @abstractmethod
    def published_layers(fields: Mapping[str, Any], blocks: int) -> tuple[int, ...]:
        """The captured blocks in a published config.json, by our convention; `blocks`: of the target, 0 when not known. Raises ValueError when the
        conventions in it name different ones, or none is there and the default is not known."""

    @staticmethod
    @abstractmethod
    def layer_faults(fields: Mapping[str, Any], known: tuple[int, ...] | None, source: str, blocks: int | None) -> list[str]:
        """What is wrong with the layer ids of an export; `known`: the captured blocks by our convention, as `source` says; `blocks`: of the target."""

    @staticmethod
    @abstractmethod
    def published_name(name: str) -> str:
        """Our name of a tensor in a published checkpoint; the same name when it is not known."""

    @staticmethod
    @abstractmethod
    def engines(config: Any, shape: TargetShape) -> Mapping[str, Service]:
        """What each engine makes of a draft with these settings, by the engine's name."""

    @staticmethod
    @abstractmethod
    def needs(config: Any, shape: TargetShape) -> FeatureSpec:
        """What to capture. Raises ValueError when the target cannot give it."""

    @abstractmethod
    def initialise(self, target: Target, counts_V: Int[Tensor, " V"], batch: FeatureBatch) -> Mapping[str, object]:
        """Set what depends on data before the first step, from answer-token counts and one batch of features; returns facts to print."""

    @abstractmethod
    def forward(self, batch: FeatureBatch, target: Target, progress: Progress) -> StepOutput:
        """Loss and metrics of one micro-batch (in `forward`, so that compile and FSDP hooks fire)."""

    @abstractmethod
    def start(self, rows: int) -> DraftState:
        """The memory of `rows` rows that have seen nothing."""

    @abstractmethod
    def propose(self, context: Context, state: Any, target: Target, width: Width, sampling: Sampling) -> Proposal:
        """Draft `width` for each row and remember the context. A tree is chosen, not drawn, whatever the temperature, and its likeliest tokens come first."""

    @abstractmethod
    def layout(self, form: Form = "engine") -> Layout:
        """How it ships; `form` is one of `forms`."""

    @abstractmethod
    def plain_state(self) -> dict[str, Tensor]:
        """All tensors that may ship, with training-time constants folded in."""

    @abstractmethod
    def load_plain_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `plain_state`."""


def draw(logits: Float[Tensor, "*n D"], sampling: Sampling) -> tuple[Int[Tensor, "*n"], Float[Tensor, "*n D"] | None]:
    """A token per row, and the distribution that it was drawn from (None when greedy)."""
    if sampling.temperature == 0:
        return logits.argmax(-1), None
    probs = torch.softmax(logits.float() / sampling.temperature, dim=-1)
    return torch.multinomial(probs.flatten(0, -2), 1, generator=sampling.generator).view(probs.shape[:-1]), probs
