"""Trees: verification against plain loops, decoding with drafts that follow a script, and sampling against the target's exact distribution."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Rows, Scripted
from torch import Tensor
from transformers.cache_utils import Cache

from draftsmith.core.types import Proposal
from draftsmith.drafts.base import Context, Sampling, Tree
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.eval import decode
from draftsmith.eval.decode import Clock, Decoder
from draftsmith.eval.verify import verify_choice
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

MAX_NEW = 17
LENGTHS = (1, 2, 7, 23)
VOCABULARY = 5

parents = st.lists(st.integers(0, 30), min_size=1, max_size=9).map(lambda raw: [n % (i + 1) - 1 for i, n in enumerate(raw)])
"""Any tree: each token hangs below the given one (-1) or below an earlier one."""


def siblings_differ(tree: Sequence[int], raw: Sequence[int]) -> list[int]:
    """Tokens near `raw`, no two of one parent the same."""
    used: dict[int, set[int]] = {}
    tokens = []
    for parent, token in zip(tree, raw, strict=True):
        taken = used.setdefault(parent, set())
        token = next(t for t in itertools.count(token) if t not in taken)
        taken.add(token)
        tokens.append(token)
    return tokens


# ---- verification ----


@settings(deadline=None)
@given(parents)
def test_lineage_holds_a_token_and_all_before_it(tree: list[int]) -> None:
    lineage = Proposal(torch.zeros(1, len(tree), dtype=torch.long), None, torch.tensor([tree])).lineage[0]
    for q in range(len(tree) + 1):
        expected, at = {0}, q
        while at:
            expected.add(at)
            at = tree[at - 1] + 1
        assert set(lineage[q].nonzero()[:, 0].tolist()) == expected


def walk(choice: Sequence[int], tokens: Sequence[int], tree: Sequence[int]) -> tuple[list[int], int]:
    """From the given token on, go to the child that is the target's choice as long as there is one: places (0 is the given one), and the choice at the end."""
    path = [0]
    while True:
        below = [w + 1 for w, (token, parent) in enumerate(zip(tokens, tree, strict=True)) if parent + 1 == path[-1] and token == choice[path[-1]]]
        if not below:
            return path, choice[path[-1]]
        path += below


@settings(deadline=None)
@given(parents, st.data())
def test_the_branch_of_the_targets_choices_is_kept(tree: list[int], data: st.DataObject) -> None:
    token, width = st.integers(0, 2), len(tree)
    tokens = siblings_differ(tree, data.draw(st.lists(token, min_size=width, max_size=width)))
    choice = data.draw(st.lists(token, min_size=width + 1, max_size=width + 1))
    proposal = Proposal(torch.tensor([tokens]), None, torch.tensor([tree]))
    kept_BQ, next_B = verify_choice(torch.tensor([choice]), proposal.tokens_BW, proposal.parent_BW, proposal.lineage)
    assert (kept_BQ[0].nonzero()[:, 0].tolist(), int(next_B)) == walk(choice, tokens, tree)


def recursive(probs: Sequence[Sequence[float]], tokens: Sequence[int], tree: Sequence[int]) -> dict[tuple[int, ...], float]:
    """Probability of every output of a pass by the recursive rejection of SpecInfer and EAGLE-2: try the children in order, x with chance p(x); each that is
    rejected is removed from p, which is renormalised; when none is left the token comes from what remains of p."""
    outputs: defaultdict[tuple[int, ...], float] = defaultdict(float)

    def descend(place: int, so_far: tuple[int, ...], chance: float) -> None:
        p = list(probs[place])
        for w, (token, parent) in enumerate(zip(tokens, tree, strict=True)):
            if parent + 1 != place:
                continue
            descend(w + 1, (*so_far, token), chance * p[token])
            chance *= 1 - p[token]
            total = sum(p) - p[token]
            p = [0.0 if t == token or not total else x / total for t, x in enumerate(p)]
        for token, x in enumerate(p):
            outputs[(*so_far, token)] += chance * x

    descend(0, (), 1.0)
    return {k: v for k, v in outputs.items() if v > 0}


@settings(deadline=None, max_examples=25, derandomize=True)
@given(parents, st.integers(0, 999))
def test_drawing_the_targets_own_token_is_the_recursive_rejection_of_chosen_candidates(tree: list[int], seed: int) -> None:
    """The enumerated distribution of outputs, theirs and ours: that of the walk over all choices of the places that it visits."""
    g = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(len(tree) + 1, VOCABULARY, generator=g, dtype=torch.float64), -1).tolist()
    raw = torch.randint(VOCABULARY, (len(tree),), generator=g).tolist()
    tokens = siblings_differ(tree, raw)
    if max(tokens) >= VOCABULARY:
        tokens = siblings_differ(tree, [0] * len(tree))
    if max(tokens) >= VOCABULARY:
        return
    ours: defaultdict[tuple[int, ...], float] = defaultdict(float)

    def descend(place: int, so_far: tuple[int, ...], chance: float) -> None:
        for token, x in enumerate(probs[place]):
            below = [w + 1 for w in range(len(tree)) if tree[w] + 1 == place and tokens[w] == token]
            if below:
                descend(below[0], (*so_far, token), chance * x)
            else:
                ours[(*so_far, token)] += chance * x

    descend(0, (), 1.0)
    theirs = recursive(probs, tokens, tree)
    assert set(ours) == set(theirs)
    assert all(abs(ours[k] - theirs[k]) < 1e-12 for k in ours)


# ---- decoding ----


@dataclass
class Branching(Scripted):
    """Drafts a tree of any form in which the target's own text goes on below a branch of the scripted length; all other tokens are wrong.

    `forms(row, proposal)`: the parents, and how many tokens are right. Which branch holds the right ones is the first long enough, else the longest.
    """

    trees: bool = True
    forms: Callable[[int, int], tuple[list[int], int]] = lambda _row, _n: ([-1], 0)
    taken: list[list[int]] = field(default_factory=list)

    def propose(self, context: Context, state: Rows, target: Target, width: object, sampling: Sampling) -> Proposal:
        rows = []
        for b, row in enumerate(state.rows):
            tree, right = self.forms(row.number, row.proposals)
            ahead = self._tokens(row, context, b, len(tree), 1 << 30)
            rows.append(self._placed(tree, right, [*ahead], target.shape.vocab_size))
        width = max(len(tokens) for tokens, _ in rows)
        assert all(len(tokens) == width for tokens, _ in rows)
        return Proposal(torch.tensor([t for t, _ in rows]), None, torch.tensor([p for _, p in rows]))

    def _placed(self, tree: list[int], right: int, ahead: list[int], vocabulary: int) -> tuple[list[int], list[int]]:
        depth = [0] * len(tree)
        for w, parent in enumerate(tree):
            depth[w] = 1 + (depth[parent] if parent >= 0 else 0)
        end = next((w for w in range(len(tree)) if depth[w] == right), max(range(len(tree)), key=depth.__getitem__)) if right else -1
        branch = []
        while end >= 0:
            branch.append(end)
            end = tree[end]
        branch.reverse()
        self.taken.append(branch)
        text = ahead
        wrong = [(text[depth[w] - 1] + 1 + w) % vocabulary for w in range(len(tree))]  # different among siblings, and never right on the branch
        tokens = [text[depth[w] - 1] if w in branch else wrong[w] for w in range(len(tree))]
        return tokens, tree


class World:
    """The target and its own greedy answers, by transformers."""

    def __init__(self, model: TargetModel, target: Target) -> None:
        self.model, self.target = model, target
        self.greedy = cache(self._greedy)

    def _greedy(self, prompt: tuple[int, ...]) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": MAX_NEW + 14, "eos_token_id": None, "pad_token_id": 0}
        return self.model.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()

    def branching(self, prompts: Sequence[Sequence[int]], forms: Callable[[int, int], tuple[list[int], int]]) -> Branching:
        whole = [[*p, *self.greedy(tuple(p))] for p in prompts]
        return Branching(self.model, whole, lambda *_: 1 << 20, forms=forms)

    def decoder(self, draft: object, end_ids: tuple[int, ...] = (), tree: Tree | None = None) -> Decoder:
        return Decoder(self.model, self.target, end_ids, draft, tree or Tree(nodes=9, top_k=3, depth=9))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def world(target_model: TargetModel, target: Target) -> World:
    return World(target_model, target)


def prompt_of(length: int) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, MAX_NEW), st.data())
def test_any_tree_limit_and_end_gives_the_targets_own_text(world: World, lengths: list[int], width: int, max_new: int, data: st.DataObject) -> None:
    """Trees of any form, another for each row and pass; accepted counts as scripted, features those of one pass over the text."""
    raw = data.draw(st.lists(st.integers(0, 30), min_size=width, max_size=width))
    prompts = [prompt_of(n) for n in lengths]
    end = world.greedy(tuple(prompts[0]))[data.draw(st.integers(0, MAX_NEW + 3))]

    def forms(row: int, proposal: int) -> tuple[list[int], int]:
        turned = [(n + 7 * row + 3 * proposal) % (i + 1) - 1 for i, n in enumerate(raw)]
        return turned, (raw[0] + row + proposal) % (width + 1)

    draft = world.branching(prompts, forms)
    answers = world.decoder(draft, (end,)).decode(prompts, max_new)
    for prompt, answer in zip(prompts, answers, strict=True):
        text = world.greedy(tuple(prompt))[:max_new]
        expected = text[: text.index(end) + 1] if end in text else text
        assert answer.token_ids == expected
        assert sum(answer.accepted) + len(answer.accepted) + 1 - len(expected) in (0, 1), "only a last bonus token may be missing"
        for one, count in zip(answer.passes, answer.accepted, strict=True):
            assert len(one.accepted) == count
            at = -1
            for place in one.accepted:
                assert one.parents[place] == at
                at = place
    draft.check_features()


def test_the_right_branch_is_found_wherever_it_stands_and_whole(world: World) -> None:
    """The last of three branches is right: 4 of 9 tokens a pass, in one row and in a batch; the accepted places are noted."""
    form = [-1, -1, -1, 0, 2, 4, 1, 3, 5]
    prompts = [prompt_of(n) for n in LENGTHS]
    for rows in (prompts, prompts[:1]):
        draft, clock = world.branching(rows, lambda *_: (form, 4)), Clock()
        answers = world.decoder(draft).decode(rows, 1 + 3 * 5, clock)
        assert [a.accepted for a in answers] == [[4, 4, 4]] * len(rows)
        assert {p.accepted for a in answers for p in a.passes} == {(2, 4, 5, 8)}
        assert clock.passes == 3
        assert draft.check_features() == sum(map(len, rows)) + 2 * 5 * len(rows)


def random_eagle3(target: Target, layers: tuple[int, ...], vocabulary: int, seed: int = 5) -> Eagle3:
    torch.manual_seed(seed)
    draft = Eagle3(Eagle3Config(vocab_size=vocabulary, layers=layers), target.shape).eval()
    draft.lm_head.weight.data *= 3
    return draft


@pytest.mark.parametrize("tree", [Tree(nodes=5, top_k=2, depth=3), Tree(nodes=40, top_k=6, depth=3), Tree(nodes=80, top_k=80, depth=1)])
def test_eagle3_trees_are_lossless_and_batches_change_nothing(world: World, tree: Tree) -> None:
    draft = random_eagle3(world.target, (1, 2, 4), 259)
    prompts = [prompt_of(n) for n in LENGTHS]
    decoder = world.decoder(draft, tree=tree)
    together = decoder.decode(prompts, MAX_NEW)
    assert [a.token_ids for a in together] == [world.greedy(tuple(p))[:MAX_NEW] for p in prompts]
    assert together == [decoder.decode([p], MAX_NEW)[0] for p in prompts]


def test_a_broad_tree_accepts_more_than_the_chain(world: World) -> None:
    draft, prompts = random_eagle3(world.target, (1, 2, 4), 259), [prompt_of(n) for n in LENGTHS]
    chain = Decoder(world.model, world.target, (), draft, 2).decode(prompts, MAX_NEW)
    tree = world.decoder(draft, tree=Tree(nodes=120, top_k=60, depth=2)).decode(prompts, MAX_NEW)
    assert sum(n for a in tree for n in a.accepted) > sum(n for a in chain for n in a.accepted) + 2


def keep_the_first_places(cache: Cache, first: int, place_BK: Tensor) -> None:
    decode_keep(cache, first, torch.arange(place_BK.shape[1]).expand_as(place_BK))


decode_keep = decode.keep_places


def test_a_cache_that_is_not_put_in_order_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the places of the first tokens are kept instead of those of the accepted branch."""
    prompts = [prompt_of(n) for n in LENGTHS]
    monkeypatch.setattr(decode, "keep_places", keep_the_first_places)
    with pytest.raises(AssertionError, match="not those of the text"):
        world.decoder(world.branching(prompts, lambda *_: ([-1, -1, -1, 2], 2))).decode(prompts, MAX_NEW)


def test_trees_are_refused_with_the_reason(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = random_eagle3(world.target, (1, 2, 4), 50)
    decoder = world.decoder(draft, tree=Tree())
    monkeypatch.setattr(Eagle3, "trees", False)
    with pytest.raises(ValueError, match="Eagle3 drafts chains only"):
        decoder.decode([[5, 6]], 4)
    monkeypatch.setattr(Eagle3, "trees", True)
    monkeypatch.setitem(vars(world.model), "takes_masks", False)
    with pytest.raises(ValueError, match="LlamaForCausalLM counts positions by places"):
        decoder.decode([[5, 6]], 4)
    monkeypatch.setitem(vars(world.model), "takes_masks", True)
    monkeypatch.setattr(TargetModel, "window", 20)
    with pytest.raises(ValueError, match="more than the window of 20 tokens"):
        decoder.decode([[5, 6]], 4)
