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
from torch import Tensor, nn

from draftsmith.core.config import Config
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
    def propose(self, context: Context, state: Any, target: Target, width: int, sampling: Sampling) -> Proposal:
        """Draft `width` tokens for each row and remember the context."""

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
