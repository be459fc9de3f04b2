"""Drafts that know the answers: they follow a script of how many tokens of each proposal are right, and check what decoding tells them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.core.types import Proposal
from draftsmith.drafts.base import Context, Sampling
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

LAYERS = (0, 3)


@dataclass
class Row:
    """What one prompt's draft was told, from the first token on."""

    number: int
    hidden: list[Tensor] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    proposals: int = 0


@dataclass
class Rows:
    """The draft's memory of the rows still decoded."""

    rows: list[Row]

    def select(self, rows: Tensor) -> None:
        self.rows = [self.rows[i] for i in rows.tolist()]


@dataclass
class Scripted:
    """`right(row, proposal)` tells how many leading tokens of a proposal equal the target's own; the one after them is wrong.

    `whole`: prompt and the target's own answer, per row, longer than what will be decoded by `width`.
    """

    model: TargetModel
    whole: Sequence[Sequence[int]]
    right: Callable[[int, int], int]
    layers: tuple[int, ...] = LAYERS
    rows: list[Row] = field(default_factory=list)
    one_hot: bool = False

    def start(self, rows: int) -> Rows:
        assert rows == len(self.whole)
        self.rows = [Row(i) for i in range(rows)]
        return Rows(list(self.rows))

    def propose(self, context: Context, state: Rows, target: Target, width: int, sampling: Sampling) -> Proposal:
        assert context.hidden_BRF.shape[:2] == context.next_BR.shape == context.position_BR.shape == context.valid_BR.shape
        assert len(state.rows) == len(context.next_BR)
        tokens = [self._tokens(row, context, b, width, target.shape.vocab_size) for b, row in enumerate(state.rows)]
        tokens_BW = torch.tensor(tokens)
        probs = torch.nn.functional.one_hot(tokens_BW, target.shape.vocab_size).float() if self.one_hot else None
        return Proposal(tokens_BW, probs)

    def _tokens(self, row: Row, context: Context, b: int, width: int, vocabulary: int) -> list[int]:
        """Check that real places continue where the last proposal ended, then follow the script."""
        valid_R = context.valid_BR[b]
        positions, following = context.position_BR[b][valid_R].tolist(), context.next_BR[b][valid_R].tolist()
        assert positions == list(range(len(row.known), len(row.known) + len(positions)))
        row.known += following
        row.hidden.append(context.hidden_BRF[b][valid_R])
        whole = self.whole[row.number]
        assert row.known == list(whole[1 : len(row.known) + 1]), "the tokens told to the draft are not those of the text"
        ahead = list(whole[len(row.known) + 1 : len(row.known) + 1 + width])
        assert len(ahead) == width, "the script is too short"
        count = self.right(row.number, row.proposals)
        row.proposals += 1
        return [token if n < count else (token + 1 + n) % vocabulary for n, token in enumerate(ahead)]

    def check_features(self) -> int:
        """Require that the features told are those of one pass over each text alone; returns how many tokens were compared."""
        total = 0
        for row in self.rows:
            if not row.hidden:
                continue
            told = torch.cat(row.hidden)
            alone = self.model.run(torch.tensor([self.whole[row.number][: len(told)]]), self.layers).hidden_BQF
            assert alone is not None
            torch.testing.assert_close(told, alone[0], rtol=1e-4, atol=1e-4)
            total += len(told)
        return total
