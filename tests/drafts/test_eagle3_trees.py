"""Trees that EAGLE-3 drafts, against branches that the reference computes one by one, from scratch for every token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from cases import random_documents, random_draft, random_target
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference
from torch import Tensor

from draftsmith.core.types import Features, Proposal
from draftsmith.drafts.base import Context, Sampling, Tree
from draftsmith.drafts.eagle3 import Eagle3
from draftsmith.nn import tree as growing
from draftsmith.target.weights import Target

GREEDY = Sampling()
some = settings(max_examples=12, deadline=None, derandomize=True)


def context(documents: Sequence[Features], start: int, counts: Sequence[int]) -> Context:
    """Tokens of each row from `start` on, right-padded with rubbish."""
    longest, features = max(counts), documents[0].hidden_TF.shape[1]
    hidden = torch.full((len(documents), longest, features), 77.0, dtype=torch.float64)
    following = torch.full((len(documents), longest), 3)
    for b, (document, count) in enumerate(zip(documents, counts, strict=True)):
        hidden[b, :count] = document.hidden_TF[start : start + count]
        following[b, :count] = document.sample.input_ids[start + 1 : start + count + 1]
    position = (start + torch.arange(longest)).expand(len(documents), -1)
    return Context(hidden, following, position, torch.arange(longest) < torch.tensor(counts)[:, None])


def branches(proposal: Proposal, row: int) -> list[tuple[int, ...]]:
    """The tokens from the root to each drafted one."""
    assert proposal.parent_BW is not None
    found: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens_BW[row].tolist(), proposal.parent_BW[row].tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def by_reference(reference: Reference, document: Features, tree: Tree) -> list[tuple[int, ...]]:
    """EAGLE-2's tree behind a document whose last token is the given one."""
    tokens = document.sample.input_ids.tolist()

    def log_probs(branch: tuple[int, ...]) -> Tensor:
        logits = reference.chain(document.hidden_TF, tokens, len(tokens) - 2, [tokens[-1], *branch])[-1]
        return torch.log_softmax(logits.detach(), 0)

    followed: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    found = []
    for _ in range(tree.depth):
        level = []
        for score, branch in followed:
            best = log_probs(branch).topk(min(tree.top_k, len(reference.ids)))
            level += [(score + value, (*branch, reference.ids[i])) for value, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
        followed = sorted(level, key=lambda n: -n[0])[: tree.top_k]
        found += level
    return [branch for _, branch in sorted(found, key=lambda n: -n[0])][: tree.nodes]


@some
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 9), st.lists(st.integers(2, 6), min_size=1, max_size=2), st.integers(0, 99))
def test_trees_equal_the_reference_row_by_row_and_round_by_round(top_k: int, depth: int, more: int, lengths: list[int], seed: int) -> None:
    """Rows together in the first round; each alone in two, of which the first must leave nothing behind that the second sees."""
    tree = Tree(nodes=min(depth + more, top_k + (depth - 1) * top_k**2), top_k=top_k, depth=depth)
    target, draft = random_target(seed), random_draft(seed)
    documents = random_documents([[True] * (n + 3) for n in lengths], target, seed)
    reference = Reference(draft, target)
    proposal = draft.propose(context(documents, 0, lengths), draft.start(len(documents)), target, tree, GREEDY)
    assert proposal.probs_BWV is None
    for b, document in enumerate(documents):
        assert branches(proposal, b) == by_reference(reference, part(document, lengths[b] + 1), tree)
        state = draft.start(1)
        draft.propose(context([document], 0, [lengths[b]]), state, target, tree, GREEDY)
        second = draft.propose(context([document], lengths[b], [2]), state, target, tree, GREEDY)
        assert branches(second, 0) == by_reference(reference, document, tree)


def part(document: Features, length: int) -> Features:
    """Its first tokens."""
    sample = type(document.sample)("part", document.sample.input_ids[:length], document.sample.loss_mask[:length])
    return Features(sample, document.hidden_TF[:length], document.last_TH[:length], document.argmax_T[:length])


def drafted(draft: Eagle3, target: Target, document: Features, width: int | Tree, sampling: Sampling = GREEDY) -> Proposal:
    return draft.propose(context([document], 0, [len(document) - 1]), draft.start(1), target, width, sampling)


def test_a_tree_with_one_branch_is_the_chain() -> None:
    target, draft = random_target(3), random_draft(3)
    (document,) = random_documents([[True] * 7], target, 3)
    chain, tree = (drafted(draft, target, document, w) for w in (4, Tree(nodes=4, top_k=1, depth=4)))
    assert torch.equal(chain.tokens_BW, tree.tokens_BW)
    assert tree.parent_BW is not None
    assert tree.parent_BW.tolist() == [[-1, 0, 1, 2]]
    assert torch.equal(chain.lineage, tree.lineage)


def test_a_temperature_ranks_branches_by_the_probabilities_at_it() -> None:
    """Flat probabilities reward short branches: a hot tree is broader than a cold one, and both are chosen without chance."""
    target, draft = random_target(6), random_draft(6)
    (document,) = random_documents([[True] * 7], target, 6)
    tree = Tree(nodes=8, top_k=3, depth=4)
    hot, cold = (branches(drafted(draft, target, document, tree, Sampling(t)), 0) for t in (30.0, 0.05))
    assert sum(map(len, hot)) < sum(map(len, cold))
    assert hot == branches(drafted(draft, target, document, tree, Sampling(30.0)), 0)


def test_a_branch_that_hangs_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: drafting takes the children of every token for children of the first."""
    target, draft, tree = random_target(8), random_draft(8), Tree(nodes=30, top_k=3, depth=4)
    documents = random_documents([[True] * n for n in (5, 6, 7, 8)], target, 8)
    want = [by_reference(Reference(draft, target), d, tree) for d in documents]
    assert [branches(drafted(draft, target, d, tree), 0) for d in documents] == want
    extend = growing.Growth.extend

    def below_the_first(growth: growing.Growth, logits: Tensor) -> tuple[Tensor, Tensor]:
        token_BM, above_BM = extend(growth, logits)
        return token_BM, torch.zeros_like(above_BM)

    monkeypatch.setattr(growing.Growth, "extend", below_the_first)
    assert any(branches(drafted(draft, target, d, tree), 0) != w for d, w in zip(documents, want, strict=True))


@pytest.mark.parametrize("nodes", [3, 15])
def test_settings_that_no_tree_has_are_refused(nodes: int) -> None:
    assert Tree(nodes=14, top_k=2, depth=4)
    with pytest.raises(ValueError, match="14 tokens to choose from; expected nodes from 4 to 14"):
        Tree(nodes=nodes, top_k=2, depth=4)
