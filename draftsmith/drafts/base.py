"""What every draft answers: what it needs captured, how it learns, how it proposes, and how it ships.

A new algorithm is one file with one `Draft` and one `Config`, and one line in `DRAFTS`. `Target` is an argument, never a submodule:
`state_dict()` holds exactly what is trained, and the few constants that go with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

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


@dataclass(frozen=True)
class Layout:
    """How a draft looks in a checkpoint that engines load: our tensor names -> theirs, and the fields of config.json."""

    names: Mapping[str, str]
    config: Mapping[str, Any]


class Draft(nn.Module, ABC):
    """A draft model. Rows, chains and blocks are its own business; tokens, features and proposals are everybody's."""

    architecture: ClassVar[str]
    """Its name in the config.json that engines read."""
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

    @classmethod
    @abstractmethod
    def from_engine(cls, config: Mapping[str, Any]) -> Draft:
        """An empty draft of the sizes in an engine's config.json. Raises ValueError naming a field that is missing."""

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
    def layout(self) -> Layout:
        """How it ships."""

    @abstractmethod
    def plain_state(self) -> dict[str, Tensor]:
        """The tensors of `layout().names`, with training-time constants folded in."""

    @abstractmethod
    def load_plain_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `plain_state`."""


def draw(logits: Float[Tensor, "*n D"], sampling: Sampling) -> tuple[Int[Tensor, "*n"], Float[Tensor, "*n D"] | None]:
    """A token per row, and the distribution that it was drawn from (None when greedy)."""
    if sampling.temperature == 0:
        return logits.argmax(-1), None
    probs = torch.softmax(logits.float() / sampling.temperature, dim=-1)
    return torch.multinomial(probs.flatten(0, -2), 1, generator=sampling.generator).view(probs.shape[:-1]), probs
