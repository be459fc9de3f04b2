"""Attention of chains against a loop over chains, heads and keys: values, gradients, and how documents are laid out."""

from __future__ import annotations

import pytest
import torch
from attention_loop import one
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.nn import chain_attention as module
from draftsmith.nn.chain_attention import blocks, chain_attention

some = settings(max_examples=40, deadline=None, derandomize=True)
DIM = 4


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


def laid_out(lengths: tuple[int, ...], where: list[tuple[int, int]]) -> list[module.Block]:
    document, place = (torch.tensor(x) for x in zip(*where, strict=True))
    return blocks(lengths, document, place)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Document lengths, and chains at some anchors of some documents; at least one."""
    lengths = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    every = [(g, i) for g, n in enumerate(lengths) for i in range(n)]
    return lengths, sorted(draw(st.sets(st.sampled_from(every), min_size=1)))


@some
@given(scenes(), st.integers(0, 3), st.sampled_from(((1, 1), (4, 1), (4, 2), (3, 3))), st.integers(1, 4), st.integers(0, 10_000))
def test_values_and_gradients_equal_the_loop(scene: tuple, own: int, heads: tuple[int, int], block: int, seed: int) -> None:
    lengths, where = scene
    g = torch.Generator().manual_seed(seed)
    shapes = [(len(where), heads[0], DIM), *[(sum(lengths), heads[1], DIM)] * 2, *[(len(where), own, heads[1], DIM)] * 2]
    tensors = [torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_CHAINS", block)
        got = chain_attention(*tensors, laid_out(lengths, where))
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
    layout = laid_out(lengths, [(1, 0), (1, 2)])
    before = chain_attention(query, key, value, own, own, layout)
    for tensor in (key, value):
        tensor[[0, 1, 2, 6, 7, 8, 9]] += 1e4
    assert torch.equal(chain_attention(query, key, value, own, own, layout), before)
    value[3] += 1
    assert not torch.equal(chain_attention(query, key, value, own, own, layout), before)


def test_gradients_stay_finite_where_a_document_has_fewer_chains_or_none() -> None:
    lengths = (4, 1, 2)
    layout = laid_out(lengths, [(0, 0), (0, 1), (0, 3), (2, 1)])
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=g, requires_grad=True) for shape in ((4, 2, DIM), (7, 1, DIM), (7, 1, DIM), (4, 0, 1, DIM), (4, 0, 1, DIM))]
    grads = torch.autograd.grad(chain_attention(*tensors, layout).square().sum(), tensors[:3])
    assert all(bool(x.isfinite().all()) for x in grads)
    assert bool((grads[1][4] == 0).all())
    assert bool((grads[2][4] == 0).all())


def test_bfloat16_keeps_its_dtype_and_softmaxes_in_float32() -> None:
    g = torch.Generator().manual_seed(1)
    query, own = torch.randn(3, 4, DIM, generator=g).bfloat16(), torch.randn(3, 2, 2, DIM, generator=g).bfloat16()
    key, value = torch.randn(9, 2, DIM, generator=g).bfloat16(), torch.randn(9, 2, DIM, generator=g).bfloat16()
    where = [(0, 3), (1, 0), (1, 4)]
    layout = laid_out((4, 5), where)
    got = chain_attention(query, key, value, own, own, layout)
    want = looped(query.double(), key.double(), value.double(), own.double(), own.double(), (4, 5), where)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=0.03, atol=0.03)


def test_a_long_document_costs_its_short_neighbours_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are computed against scores that are needed: one document of 1,000 tokens between nine of 30, chains everywhere."""
    monkeypatch.setattr(module, "BLOCK_CHAINS", 16)
    lengths = (30,) * 5 + (1000,) + (30,) * 4
    where = [(g, i) for g, n in enumerate(lengths) for i in range(n)]
    computed = sum(block.hidden_GST.numel() for block in laid_out(lengths, where))
    needed = sum(place + 1 for _, place in where)
    assert computed < 1.1 * needed


def test_every_chain_is_in_one_block_and_sees_its_own_tokens() -> None:
    lengths, where = (7, 3, 130), [(0, 2), (0, 5), (1, 2), *((2, i) for i in range(1, 129))]
    starts = (0, 7, 10)
    seen = {}
    for block in laid_out(lengths, where):
        for g, s in block.real_GS.nonzero().tolist():
            visible = block.token_GT[g][~block.hidden_GST[g, s]]
            assert int(block.chain_GS[g, s]) not in seen
            seen[int(block.chain_GS[g, s])] = visible.tolist()
    assert seen == {c: list(range(starts[g], starts[g] + i + 1)) for c, (g, i) in enumerate(where)}
