"""Attention of drafting against a loop over heads and keys; its cache against lists."""

from __future__ import annotations

import pytest
import torch
from attention_loop import one
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.nn.attention import KeyValues, attend

some = settings(max_examples=40, deadline=None, derandomize=True)
DIM = 4


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
