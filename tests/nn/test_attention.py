"""Attention of chains against a loop over chains, heads and keys; the cache of drafting against lists."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.nn.attention import Grid, KeyValues, attend, chain_attention

some = settings(max_examples=40, deadline=None, derandomize=True)
DIM = 4


def one(query_d: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Softmax attention of one head of one query."""
    scores = [(query_d * k).sum() / math.sqrt(len(query_d)) for k in keys]
    top = max(float(s.detach()) for s in scores)
    parts = [(s - top).exp() for s in scores]
    return torch.stack([p / sum(parts) * v for p, v in zip(parts, values, strict=True)]).sum(0)


def looped(query: Tensor, key_N: Tensor, value_N: Tensor, own_key: Tensor, own_value: Tensor, lengths: tuple[int, ...], where: list[tuple[int, int]]) -> Tensor:
    """`where`: (document, anchor) of each chain; keys of the documents lie end to end."""
    group = query.shape[1] // key_N.shape[1]
    out = []
    for c, (document, anchor) in enumerate(where):
        first = sum(lengths[:document])
        for head in range(query.shape[1]):
            kv = head // group
            keys = [key_N[first + j, kv] for j in range(anchor + 1)] + [own_key[c, s, kv] for s in range(own_key.shape[1])]
            values = [value_N[first + j, kv] for j in range(anchor + 1)] + [own_value[c, s, kv] for s in range(own_value.shape[1])]
            out.append(one(query[c, head], keys, values))
    return torch.stack(out).reshape(query.shape)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Document lengths, and chains at some anchors of some documents; at least one."""
    lengths = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    every = [(g, i) for g, n in enumerate(lengths) for i in range(n)]
    return lengths, sorted(draw(st.sets(st.sampled_from(every), min_size=1)))


@some
@given(scenes(), st.integers(0, 3), st.sampled_from(((1, 1), (4, 1), (4, 2), (3, 3))), st.integers(0, 10_000))
def test_values_and_gradients_equal_the_loop(scene: tuple, own: int, heads: tuple[int, int], seed: int) -> None:
    lengths, where = scene
    g = torch.Generator().manual_seed(seed)
    shapes = [(len(where), heads[0], DIM), *[(sum(lengths), heads[1], DIM)] * 2, *[(len(where), own, heads[1], DIM)] * 2]
    tensors = [torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes]
    query, key, value, own_key, own_value = tensors
    grid = Grid.of(lengths, torch.device("cpu")).token_GT
    document, anchor = (torch.tensor(x) for x in zip(*where, strict=True))
    got = chain_attention(query, key[grid], value[grid], own_key, own_value, document, anchor)
    want = looped(*tensors, lengths, where)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    direction = torch.randn(got.shape, generator=g, dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((out * direction).sum(), tensors, allow_unused=True) for out in (got, want)), strict=True):
        torch.testing.assert_close(torch.zeros(()) if a is None else a, torch.zeros_like(a) if b is None else b, rtol=1e-9, atol=1e-12, check_dtype=False)


def test_documents_without_chains_and_places_behind_the_anchor_are_never_seen() -> None:
    """The chains are of document 1 (packed tokens 3 to 7), with anchors at most 2: they see tokens 3 to 5."""
    lengths, g = (3, 5, 2), torch.Generator().manual_seed(0)
    query, own = torch.randn(2, 4, DIM, generator=g), torch.randn(2, 1, 2, DIM, generator=g)
    key, value = torch.randn(10, 2, DIM, generator=g), torch.randn(10, 2, DIM, generator=g)
    grid, document, anchor = Grid.of(lengths, torch.device("cpu")).token_GT, torch.tensor([1, 1]), torch.tensor([0, 2])
    before = chain_attention(query, key[grid], value[grid], own, own, document, anchor)
    for tensor in (key, value):
        tensor[[0, 1, 2, 6, 7, 8, 9]] += 1e4
    assert torch.equal(chain_attention(query, key[grid], value[grid], own, own, document, anchor), before)
    value[3] += 1
    assert not torch.equal(chain_attention(query, key[grid], value[grid], own, own, document, anchor), before)


def test_gradients_stay_finite_where_a_document_has_fewer_chains_or_none() -> None:
    lengths = (4, 1, 2)
    grid, document, anchor = Grid.of(lengths, torch.device("cpu")).token_GT, torch.tensor([0, 0, 0, 2]), torch.tensor([0, 1, 3, 1])
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=g, requires_grad=True) for shape in ((4, 2, DIM), (7, 1, DIM), (7, 1, DIM), (4, 0, 1, DIM), (4, 0, 1, DIM))]
    query, key, value, own_key, own_value = tensors
    out = chain_attention(query, key[grid], value[grid], own_key, own_value, document, anchor)
    grads = torch.autograd.grad(out.square().sum(), (query, key, value))
    assert all(bool(x.isfinite().all()) for x in grads)
    assert bool((grads[1][4] == 0).all())
    assert bool((grads[2][4] == 0).all())


def test_bfloat16_keeps_its_dtype_and_softmaxes_in_float32() -> None:
    g = torch.Generator().manual_seed(1)
    query, own = torch.randn(3, 4, DIM, generator=g).bfloat16(), torch.randn(3, 2, 2, DIM, generator=g).bfloat16()
    key, value = torch.randn(9, 2, DIM, generator=g).bfloat16(), torch.randn(9, 2, DIM, generator=g).bfloat16()
    grid, where = Grid.of((4, 5), torch.device("cpu")).token_GT, [(0, 3), (1, 0), (1, 4)]
    document, anchor = (torch.tensor(x) for x in zip(*where, strict=True))
    got = chain_attention(query, key[grid], value[grid], own, own, document, anchor)
    want = looped(query.double(), key.double(), value.double(), own.double(), own.double(), (4, 5), where)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=0.03, atol=0.03)


def test_grid_lays_documents_out_by_place() -> None:
    token = Grid.of((3, 1, 2), torch.device("cpu")).token_GT
    assert token.tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0]]


@pytest.mark.parametrize(("heads", "kv"), [(2, 2), (4, 2), (3, 1)])
def test_plain_masked_attention_equals_the_loop(heads: int, kv: int) -> None:
    g = torch.Generator().manual_seed(2)
    query = torch.randn(2, 3, heads, DIM, generator=g, dtype=torch.float64)
    key, value = (torch.randn(2, 5, kv, DIM, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(2, 3, 5, generator=g) < 0.6
    mask[..., 1] = True
    got = attend(query, key, value, mask)
    for b in range(2):
        for q in range(3):
            seen = mask[b, q].nonzero()[:, 0].tolist()
            for head in range(heads):
                at = head * kv // heads
                want = one(query[b, q, head], [key[b, t, at] for t in seen], [value[b, t, at] for t in seen])
                torch.testing.assert_close(got[b, q, head], want, rtol=1e-10, atol=1e-12)


# ---- the cache ----

actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=3)),
        st.tuples(st.just("crop"), st.integers(0, 6)),
        st.tuples(st.just("trim"), st.none()),
        st.tuples(st.just("select"), st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)),
    ),
    max_size=10,
)


@some
@given(actions)
def test_cache_equals_lists_of_places_whatever_is_done(steps: list[tuple]) -> None:
    """A place is (key, value, valid); rows are lists of places."""
    rows: list[list[tuple[float, float, bool]]] = [[], [], []]
    cache = KeyValues(torch.empty(3, 0, 1, 1), torch.empty(3, 0, 1, 1), torch.empty(3, 0, dtype=torch.bool))
    serial = 0.0
    for action, given_ in steps:
        if action == "append":
            fresh = [[(serial + 10 * b + q, -serial - 10 * b - q, column[b]) for q, column in enumerate(given_)] for b in range(len(rows))]
            serial += 100
            key, value = (torch.tensor([[[[place[n]]] for place in row] for row in fresh]) for n in (0, 1))
            cache.append(key, value, torch.tensor([[place[2] for place in row] for row in fresh]))
            rows = [old + new for old, new in zip(rows, fresh, strict=True)]
        elif action == "crop":
            cache.crop(given_)
            rows = [row[:given_] for row in rows]
        elif action == "trim":
            cache.trim()
            while rows[0] and not any(row[-1][2] for row in rows):
                rows = [row[:-1] for row in rows]
        else:
            chosen = [r for r in given_ if r < len(rows)] or [0]
            cache.select(torch.tensor(chosen))
            rows = [rows[r] for r in chosen]
        assert len(cache) == len(rows[0])
        assert cache.key_BTkd[..., 0, 0].tolist() == [[p[0] for p in row] for row in rows]
        assert cache.value_BTkd[..., 0, 0].tolist() == [[p[1] for p in row] for row in rows]
        assert cache.valid_BT.tolist() == [[p[2] for p in row] for row in rows]
