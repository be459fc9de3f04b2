"""Acceptance figures of decoded answers, exactly as docs/design/alignment.md defines them.

steps = verification passes; acceptance length = 1 + accepted / steps (the bonus token counts); position rates are unconditional (accepted at
position k / steps) or conditional (given that position k - 1 was accepted).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from draftsmith.eval.decode import Decoded


@dataclass(frozen=True)
class Acceptance:
    """Figures over some answers at one draft width: the most tokens that a pass can accept, of `drafted` that it verifies (as many for a chain). `tokens` are
    completion tokens that verification passes produced (the first one of an answer comes from the prompt's pass)."""

    width: int
    steps: int
    accepted: int
    tokens: int
    histogram: tuple[int, ...]
    drafted: int | None = None

    @staticmethod
    def of(answers: Iterable[Decoded], width: int, drafted: int | None = None) -> Acceptance:
        """Count over answers."""
        answers = list(answers)
        lengths = Counter(n for a in answers for n in a.accepted)
        return Acceptance(
            width=width,
            steps=sum(lengths.values()),
            accepted=sum(n * count for n, count in lengths.items()),
            tokens=sum(len(a.token_ids) - 1 for a in answers),
            histogram=tuple(lengths.get(n, 0) for n in range(width + 1)),
            drafted=drafted,
        )

    @property
    def length(self) -> float:
        """Acceptance length, tau."""
        return 1 + self.accepted / max(self.steps, 1)

    @property
    def position_rates(self) -> list[float]:
        """Unconditional rate of each drafted position."""
        return [sum(self.histogram[k:]) / max(self.steps, 1) for k in range(1, self.width + 1)]

    @property
    def conditional_rates(self) -> list[float]:
        """Rate of each position among passes that accepted the one before."""
        reached = [self.steps, *(sum(self.histogram[k:]) for k in range(1, self.width + 1))]
        return [after / before if before else 0.0 for before, after in pairwise(reached)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        drafted = self.steps * (self.width if self.drafted is None else self.drafted)
        return {
            "acceptance_length": round(self.length, 4), "steps": self.steps, "accepted": self.accepted, "drafted": drafted,
            "tokens_per_step": round(self.tokens / max(self.steps, 1), 4),
            "acceptance_rate": round(self.accepted / max(drafted, 1), 4),
            "position_rates": [round(r, 4) for r in self.position_rates],
            "conditional_rates": [round(r, 4) for r in self.conditional_rates], "histogram": list(self.histogram),
        }  # fmt: skip
