"""Predicted speedups: their arithmetic by hand, what smaller widths would have accepted, and costs read from a clock that ticks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from draftsmith.drafts.base import Tree
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.eval import decode
from draftsmith.eval.acceptance import Acceptance
from draftsmith.eval.decode import Decoded, Decoder, Pass
from draftsmith.eval.sweep import Cost, Costs, best, curve, gained, measure_costs, widths_of
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target


def chain(*accepted: int) -> Decoded:
    """An answer whose passes accepted so many of three drafted tokens."""
    return Decoded([1], list(accepted), "length", [Pass((7, 8, 9), (), tuple(range(n))) for n in accepted])


def test_the_curve_of_chains_by_hand() -> None:
    answers = [chain(0, 3, 3), chain(1, 2, 3, 0, 1, 2, 3)]  # accepted at 1, 2, 3: 8, 6, 4 of 10 passes
    costs = Costs(1, 10.0, (Cost(1, 1.0, 11.0), Cost(2, 2.0, 12.0), Cost(3, 3.0, 20.0)))
    points = curve(answers, costs)
    assert [p["acceptance_length"] for p in points] == [1.8, 2.4, 2.8]
    assert [p["speedup"] for p in points] == [round(18 / 12, 3), round(24 / 14, 3), round(28 / 23, 3)]
    assert best(points) == 1
    assert [gained(answers, w) - 1 for w in (1, 2, 3)] == pytest.approx(list(itertools.accumulate(Acceptance.of(answers, 3).position_rates)))


def test_the_smallest_width_is_best_among_equals() -> None:
    assert best([{"speedup": 0.9}, {"speedup": 1.1}, {"speedup": 1.1}]) == 1


def test_a_smaller_tree_is_the_likeliest_part_of_it() -> None:
    """Passes that accepted the tokens at places 0 and 4, 2, and none: of three nodes the first and the second pass keep one token each."""
    passes = [Pass((1,) * 6, (-1, -1, -1, 1, 0, 4), places) for places in ((0, 4), (2,), ())]
    answers = [Decoded([1], [2, 1, 0], "length", passes)]
    tree = Tree(nodes=6, top_k=3, depth=2)
    assert gained(answers, tree) == 1 + 3 / 3
    assert gained(answers, tree.model_copy(update={"nodes": 3})) == 1 + 2 / 3
    assert gained(answers, tree.model_copy(update={"nodes": 2})) == 1 + 1 / 3


def test_widths_to_compare() -> None:
    assert widths_of(3) == [1, 2, 3]
    assert [w.nodes for w in widths_of(Tree(nodes=40, top_k=4, depth=4)) if isinstance(w, Tree)] == [4, 10, 16, 22, 28, 34, 40]
    assert [w.nodes for w in widths_of(Tree(nodes=5, top_k=4, depth=5)) if isinstance(w, Tree)] == [5]


@pytest.fixture
def speculative(target_model: TargetModel, target: Target) -> Decoder:
    torch.manual_seed(5)
    return Decoder(target_model, target, (), Eagle3(Eagle3Config(vocab_size=60, layers=(1, 2, 4)), target.shape).eval(), 3)


@pytest.mark.parametrize("rows", [1, 3])
def test_costs_are_medians_of_passes_in_milliseconds(speculative: Decoder, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is read before a draft, after it, and after the pass. It ticks by 1, 2, 3 … seconds, and a round that is not counted comes first."""
    ticks = itertools.accumulate(itertools.count(1))
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=ticks.__next__))
    plain = Decoder(speculative.model, speculative.target, ())
    widths = [1, 3, Tree(nodes=5, top_k=2, depth=3)]
    costs = measure_costs(plain, speculative, [[5, 6, 7]] * rows, widths, rounds=3)
    # reading n ends an interval of n seconds; two prompts' passes read twice each, then a plain pass and three drafted ones read three times each, four rounds
    first = [4 + 12 * r for r in range(1, 4)]
    assert costs.rows == rows
    assert costs.plain == 1000 * (first[1] + 3)
    assert [(c.width, c.draft, c.verify) for c in costs.widths] == [
        (w, 1000 * (first[1] + 3 * i + 2), 1000 * (first[1] + 3 * i + 3)) for i, w in enumerate(widths, start=1)
    ]
