"""What a pass costs on this machine, what it would gain, and so how much to draft.

Passes of all widths take turns within one decode, so that a machine that slows down slows all of them; each cost is a median. What a smaller width
accepts is counted from the passes of the largest one: of a chain its first tokens, of a tree its likeliest, which stand first in a proposal. That leaves
out that passes would start elsewhere; the race in the report measures the chosen width itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from draftsmith.drafts.base import Tree, Width, depth, drafted
from draftsmith.eval.decode import Clock, Decoded, Decoder, Rows

_ENDLESS = 1 << 40
"""No answer gets as long: all rows stay until the last pass."""


@dataclass(frozen=True)
class Cost:
    """Milliseconds of drafting this width, and of the pass that verifies it."""

    width: Width
    draft: float
    verify: float


@dataclass(frozen=True)
class Costs:
    """Of `rows` prompts together: a pass of plain decoding in milliseconds, and of each width."""

    rows: int
    plain: float
    widths: tuple[Cost, ...]


def widths_of(width: Width) -> list[Width]:
    """What to compare: chains of 1 to `width` tokens; for a tree the same tree with fewer nodes, in steps of its depth, or a sixth of it if that is more."""
    if isinstance(width, Tree):
        step = max(width.depth, width.nodes // 6)
        budgets = [*range(width.depth, width.nodes, step), width.nodes]
        return [width.model_copy(update={"nodes": n}) for n in budgets]
    return list(range(1, width + 1))


def places(widths: Sequence[Width], rounds: int) -> int:
    """The most tokens that measuring these widths adds to a row."""
    return (rounds + 1) * sum(depth(w) + 1 for w in widths) + max(drafted(w) for w in widths)


@torch.inference_mode()
def measure_costs(plain: Decoder, speculative: Decoder, prompts: Sequence[Sequence[int]], widths: Sequence[Width], rounds: int) -> Costs:
    """Time `rounds` passes of each width behind the ends of these prompts, decoded together, after one round that is not counted."""
    room = max(1, plain.target.shape.max_positions - places(widths, rounds))
    prompts = [p[-room:] for p in prompts]
    clocks = Clock(), Clock()
    without, with_draft = (Rows.start(d, prompts, _ENDLESS, c) for d, c in zip((_endless(plain), _endless(speculative)), clocks, strict=True))
    for _ in range(rounds + 1):
        without.advance()
        for width in widths:
            with_draft.advance(width)
    each = len(widths)

    def milliseconds(seconds: list[float]) -> float:
        return round(1e3 * median(seconds), 3)

    costs = (Cost(w, milliseconds(clocks[1].draft[each + i :: each]), milliseconds(clocks[1].verify[each + i :: each])) for i, w in enumerate(widths))
    return Costs(len(prompts), milliseconds(clocks[0].verify[1:]), tuple(costs))


def _endless(decoder: Decoder) -> Decoder:
    return Decoder(decoder.model, decoder.target, (), decoder.draft, decoder.width, decoder.sampling)


def gained(answers: Sequence[Decoded], width: Width) -> float:
    """Tokens a pass when only the first `drafted(width)` tokens of each proposal are verified: 1 + accepted / passes."""
    passes = [p for a in answers for p in a.passes]
    return 1 + sum(place < drafted(width) for p in passes for place in p.accepted) / max(len(passes), 1)


def curve(answers: Sequence[Decoded], costs: Costs) -> list[dict[str, Any]]:
    """The predicted speedup over plain decoding of each width, from answers that were drafted with the largest one."""
    return [
        {
            "drafted": drafted(c.width), "acceptance_length": round(gained(answers, c.width), 4), "draft_ms": c.draft, "verify_ms": c.verify,
            "speedup": round(gained(answers, c.width) * costs.plain / (c.draft + c.verify), 3),
        }
        for c in costs.widths
    ]  # fmt: skip


def best(points: Sequence[dict[str, Any]]) -> int:
    """Place of the highest predicted speedup; the smallest width among equals."""
    return max(range(len(points)), key=lambda i: (points[i]["speedup"], -i))
