"""Ratios add before they divide; samples and specifications refuse what cannot be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.types import FeatureBatch, FeatureSpec, Ratio, Sample


def whole(low: int, high: int) -> st.SearchStrategy[float]:
    """Whole numbers as floats: their sums are exact."""
    return st.integers(low, high).map(float)


pairs = st.lists(st.tuples(whole(-(10**6), 10**6), whole(0, 10**6)), min_size=1, max_size=30)


@settings(deadline=None)
@given(pairs)
def test_the_sum_of_parts_is_the_whole(parts: list[tuple[float, float]]) -> None:
    total = Ratio.of(0.0, 0.0)
    for num, den in parts:
        total = total + Ratio.of(num, den)
    num, den = sum(n for n, _ in parts), sum(d for _, d in parts)
    assert (float(total.num), float(total.den)) == (num, den)
    assert float(total.value) == num / den if den else math.isnan(float(total.value))


@settings(deadline=None)
@given(pairs, st.data())
def test_how_parts_are_grouped_does_not_matter(parts: list[tuple[float, float]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(parts)))
    groups = [parts[:cut], parts[cut:]]
    by_group = [Ratio.of(math.fsum(n for n, _ in g), math.fsum(d for _, d in g)) for g in groups]
    merged = by_group[0] + by_group[1]
    one_by_one = sum((Ratio.of(n, d) for n, d in parts), start=Ratio.of(0.0, 0.0))
    assert torch.equal(merged.num, one_by_one.num)
    assert torch.equal(merged.den, one_by_one.den)


def test_a_ratio_of_ratios_is_not_their_mean() -> None:
    assert float((Ratio.of(1.0, 1.0) + Ratio.of(0.0, 9.0)).value) == 0.1


def test_a_vector_has_no_value_exactly_where_nothing_was_counted() -> None:
    ratio = Ratio.of(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([4.0, 0.0, 0.0]))
    assert float(ratio.value[0]) == 0.25
    assert torch.isnan(ratio.value[1:]).all()


def test_a_small_denominator_is_not_rounded_away() -> None:
    assert float(Ratio.of(1e-20, 1e-20).value) == 1.0


def test_detach_cuts_the_graph_and_keeps_the_figures() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    ratio = Ratio(x * 2, torch.tensor(4.0))
    cut = ratio.detach()
    assert not cut.num.requires_grad
    assert ratio.num.requires_grad
    assert cut.num.dtype == cut.den.dtype == torch.float64
    assert float(cut.value) == 1.5


def test_an_undetached_ratio_carries_its_gradient() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    (Ratio(x * 2, torch.tensor(4.0)) + Ratio(x, torch.tensor(2.0))).value.backward()
    assert float(x.grad) == 0.5  # type: ignore[arg-type]


def test_a_sample_needs_one_mask_value_a_token() -> None:
    with pytest.raises(Exception, match=r"."):
        Sample("s", torch.arange(3), torch.ones(2, dtype=torch.bool))
    assert len(Sample("s", torch.arange(3), torch.ones(3, dtype=torch.bool))) == 3


@pytest.mark.parametrize("layers", [(), (2, 1), (1, 1), (-1, 2), (0, 3, 3)])
def test_capture_layers_must_ascend(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending, different"):
        FeatureSpec(layers)


def test_a_batch_moves_every_tensor_and_keeps_the_rest() -> None:
    n = 3
    batch = FeatureBatch(
        ("a", "b"), (1, 2), torch.arange(n), torch.ones(n, dtype=torch.bool), torch.arange(n), torch.zeros(n, dtype=torch.long),
        torch.ones(n, 4), torch.ones(n, 2), torch.arange(n),
    )  # fmt: skip
    moved = batch.to("meta")
    assert (moved.ids, moved.lengths) == (batch.ids, batch.lengths)
    tensors = [v for v in vars(moved).values() if isinstance(v, torch.Tensor)]
    assert len(tensors) == 7
    assert all(t.is_meta for t in tensors)
    assert not batch.input_ids_N.is_meta
