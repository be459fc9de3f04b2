"""Growing trees against the plain description of EAGLE-2, one token at a time, and what must hold for any logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.nn.tree import Growth

some = settings(max_examples=60, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Node:
    """A token, the tokens before it on its branch, and the log-probability of the branch."""

    branch: tuple[int, ...]
    score: float


def logits_after(branch: tuple[int, ...], vocabulary: int, seed: int, flat: bool) -> Tensor:
    """A model as a table: what follows a branch depends on all of it. Flat ones are full of equal scores."""
    number = hash((seed, *branch)) % (1 << 31)
    logits = 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(number))
    return logits.round() if flat else logits


def by_loop(top_k: int, depth: int, nodes: int, vocabulary: int, seed: int, flat: bool) -> list[Node]:
    """Level by level: `top_k` tokens below each followed one, the best `top_k` of the level are followed; then the best of all, earlier ones first."""
    followed, found = [Node((), 0.0)], []
    for _ in range(depth):
        level = []
        for node in followed:
            log_probs = torch.log_softmax(logits_after(node.branch, vocabulary, seed, flat), 0)
            for token in torch.topk(log_probs, min(top_k, vocabulary)).indices.tolist():
                score = float(log_probs[token] + torch.tensor(node.score)) if node.branch else float(log_probs[token])
                level.append(Node((*node.branch, token), score))
        followed = sorted(level, key=lambda n: -n.score)[:top_k]
        found += level
    return sorted(found, key=lambda n: -n.score)[:nodes]


def grown(rows: list[int], top_k: int, depth: int, nodes: int, vocabulary: int, flat: bool) -> list[list[Node]]:
    """The same by `Growth`, one row for each seed."""
    growth, branches = Growth(top_k), [[()] for _ in rows]
    for _ in range(depth):
        logits = torch.stack([torch.stack([logits_after(b, vocabulary, seed, flat) for b in row]) for seed, row in zip(rows, branches, strict=True)])
        tokens, above = growth.extend(logits)
        branches = [
            [(*row[a], t) for t, a in zip(own, parents, strict=True)]
            for row, own, parents in zip(branches, tokens.tolist(), above.tolist(), strict=True)
        ]  # fmt: skip
    tokens_BW, parents_BW = growth.best(nodes)
    scores = torch.cat(growth.scores, 1).sort(dim=1, descending=True, stable=True).values[:, :nodes]
    found = []
    for own, parents, score in zip(tokens_BW.tolist(), parents_BW.tolist(), scores.tolist(), strict=True):
        nodes_found: list[Node] = []
        for place, (token, parent) in enumerate(zip(own, parents, strict=True)):
            assert parent < place, "parents come first"
            nodes_found.append(Node((*(nodes_found[parent].branch if parent >= 0 else ()), token), score[place]))
        found.append(nodes_found)
    return found


@some
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 30), st.integers(1, 7), st.lists(st.integers(0, 999), min_size=1, max_size=3), st.booleans())
def test_trees_equal_those_grown_one_token_at_a_time(top_k: int, depth: int, nodes: int, vocabulary: int, rows: list[int], flat: bool) -> None:
    for seed, found in zip(rows, grown(rows, top_k, depth, nodes, vocabulary, flat), strict=True):
        expected = by_loop(top_k, depth, nodes, vocabulary, seed, flat)
        torch.testing.assert_close(torch.tensor([n.score for n in found]), torch.tensor([n.score for n in expected]))
        if not flat:
            assert [n.branch for n in found] == [n.branch for n in expected]


@some
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 30), st.integers(1, 7), st.integers(0, 999), st.booleans())
def test_branches_differ_and_every_smaller_tree_comes_first(top_k: int, depth: int, nodes: int, vocabulary: int, seed: int, flat: bool) -> None:
    """Siblings are different tokens, and the best n of a tree are themselves a tree: what a smaller budget would verify."""
    (found,) = grown([seed], top_k, depth, nodes, vocabulary, flat)
    branches = [n.branch for n in found]
    assert len(set(branches)) == len(branches)
    for size in range(1, len(branches) + 1):
        assert all(b[:-1] in {(), *branches[:size]} for b in branches[:size])
    scores = [n.score for n in found]
    assert scores == sorted(scores, reverse=True)


def test_one_branch_is_the_greedy_chain() -> None:
    (found,) = grown([5], top_k=1, depth=4, nodes=4, vocabulary=9, flat=False)
    branch: tuple[int, ...] = ()
    for node in found:
        branch = (*branch, int(logits_after(branch, 9, 5, False).argmax()))
        assert node.branch == branch


def test_a_sure_token_keeps_its_place_before_its_child() -> None:
    """A child of probability 1 has its parent's score; chosen before it, it would hang in the air."""
    growth = Growth(1)
    for _ in range(3):
        growth.extend(torch.tensor([[[100.0, -100.0, -100.0]]]))
    assert growth.scores[2].item() == growth.scores[0].item() == 0
    assert growth.best(2)[1].tolist() == [[-1, 0]]
