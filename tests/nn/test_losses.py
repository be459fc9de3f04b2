"""The fused head loss against plain autograd over whole logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.nn import losses
from draftsmith.nn.losses import HeadLoss, linear_kl

M, H, D, ROWS = 23, 7, 11, 9


def inputs(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, the teacher's logits of each row, which row judges each prediction (rows repeat, unsorted), weights (some 0)."""
    g = torch.Generator().manual_seed(seed)
    hidden, head, logits = (torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in ((M, H), (D, H), (ROWS, D)))
    row = torch.randint(ROWS, (M,), generator=g)
    weight = torch.rand(M, generator=g, dtype=torch.float64)
    weight[::4] = 0
    return hidden.requires_grad_(), head.requires_grad_(), 2 * logits, row, weight.to(dtype)


def plain(hidden: Tensor, head: Tensor, logits: Tensor, row: Tensor, weight: Tensor) -> HeadLoss:
    """One prediction at a time."""
    loss, kl, argmax, overlap = hidden.new_zeros(()), [], [], []
    for m in range(len(hidden)):
        p, q = torch.softmax(logits[row[m]], 0), torch.softmax(head @ hidden[m], 0)
        kl.append((p * (p / q).log()).sum())
        loss = loss + weight[m] * kl[-1]
        argmax.append(int(q.argmax()))
        overlap.append(sum(min(float(a), float(b)) for a, b in zip(p, q.detach(), strict=True)))
    return HeadLoss(loss, torch.stack(kl).detach(), torch.tensor(argmax), torch.tensor(overlap, dtype=hidden.dtype))


def by_rows(logits: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda rows: logits[rows]


@pytest.mark.parametrize("chunk", [1, 2, 5, 22, 23, 24, 512])
def test_values_and_gradients_equal_plain_autograd(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk)
    hidden, head, logits, row, weight = inputs()
    ours, theirs = linear_kl(hidden, head, by_rows(logits), row, weight), plain(hidden, head, logits, row, weight)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.kl_M, theirs.kl_M, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(ours.overlap_M, theirs.overlap_M, rtol=1e-12, atol=0)
    assert torch.equal(ours.argmax_M, theirs.argmax_M)
    for a, b in zip(torch.autograd.grad(3 * ours.loss, (hidden, head)), torch.autograd.grad(3 * theirs.loss, (hidden, head)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
        assert float(a.abs().max()) > 0.01


@pytest.mark.parametrize("chunk", [4, 512])
def test_the_teacher_is_asked_once_per_row_and_chunk(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk)
    hidden, head, logits, row, weight = inputs()
    asked: list[list[int]] = []
    linear_kl(hidden, head, lambda rows: asked.append(rows.tolist()) or logits[rows], row, weight)
    assert all(len(set(rows)) == len(rows) <= chunk for rows in asked)
    assert {r for rows in asked for r in rows} == set(row.tolist())
    assert len(asked) == -(-M // chunk)


def test_a_prediction_of_weight_zero_gets_no_gradient_but_keeps_its_facts() -> None:
    hidden, head, logits, row, weight = inputs()
    result = linear_kl(hidden, head, by_rows(logits), row, weight)
    (grad,) = torch.autograd.grad(result.loss, hidden)
    assert bool((grad[weight == 0] == 0).all())
    assert bool((grad[weight > 0] != 0).any(1).all())
    assert bool((result.kl_M > 0).all())
    assert bool((result.overlap_M > 0).all())


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, head, logits, row, weight = inputs()
    want = torch.autograd.grad(linear_kl(hidden, head, by_rows(logits), row, weight).loss, (hidden, head))
    (alone,) = torch.autograd.grad(linear_kl(hidden, head.detach(), by_rows(logits), row, weight).loss, hidden)
    assert torch.equal(alone, want[0])
    (alone,) = torch.autograd.grad(linear_kl(hidden.detach(), head, by_rows(logits), row, weight).loss, head)
    assert torch.equal(alone, want[1])
    result = linear_kl(hidden, head, by_rows(logits), row, weight)
    assert result.loss.requires_grad
    assert not any(fact.requires_grad for fact in (result.kl_M, result.overlap_M, result.argmax_M))
    with torch.no_grad():
        assert torch.equal(linear_kl(hidden, head, by_rows(logits), row, weight).loss, result.loss)


def test_the_teacher_gets_no_gradient() -> None:
    hidden, head, logits, row, weight = inputs()
    logits.requires_grad_()
    linear_kl(hidden, head, by_rows(logits), row, weight).loss.backward()
    assert logits.grad is None
    assert hidden.grad is not None


def test_a_draft_equal_to_its_teacher_has_no_divergence_and_full_overlap() -> None:
    hidden, head, _, _, weight = inputs()
    same = (hidden @ head.T).detach() + 5.0  # a constant more changes no distribution
    result = linear_kl(hidden, head, by_rows(same), torch.arange(M), weight)
    torch.testing.assert_close(result.kl_M, torch.zeros(M, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(result.overlap_M, torch.ones(M, dtype=torch.float64), rtol=1e-12, atol=0)
    assert torch.equal(result.argmax_M, same.argmax(1))
    assert all(float(g.abs().max()) < 1e-12 for g in torch.autograd.grad(result.loss, (hidden, head)))


def test_opposite_certainties_have_no_overlap_and_stay_finite() -> None:
    hidden = torch.tensor([[80.0]], requires_grad=True)
    head = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    result = linear_kl(hidden, head, lambda rows: torch.tensor([[-80.0, 80.0]])[rows], torch.tensor([0]), torch.ones(1))
    assert float(result.overlap_M) < 1e-6
    assert float(result.kl_M) == pytest.approx(160)
    assert torch.autograd.grad(result.loss, hidden)[0].tolist() == [[2.0]]


def test_no_predictions_give_zero_and_zero_gradients() -> None:
    hidden, head, logits, row, weight = inputs()
    result = linear_kl(hidden[:0], head, by_rows(logits), row[:0], weight[:0])
    assert float(result.loss.detach()) == 0
    assert all(bool((g == 0).all()) for g in torch.autograd.grad(result.loss, (hidden, head)))


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_bfloat16_states_are_judged_in_float32(master: torch.dtype) -> None:
    """Values equal those of the same rounded numbers in float64, but for the rounding of logits; gradients keep their tensor's dtype."""
    hidden, head, logits, row, weight = (x.detach() for x in inputs())
    low, rounded = hidden.bfloat16().requires_grad_(), head.bfloat16().to(master).requires_grad_()
    result = linear_kl(low, rounded, by_rows(logits.bfloat16()), row, weight.float())
    exact = [low.detach().double().requires_grad_(), rounded.detach().double().requires_grad_()]
    want = plain(exact[0], exact[1], logits.bfloat16().double(), row, weight)
    assert result.loss.dtype == result.kl_M.dtype == result.overlap_M.dtype == torch.float32
    assert float(result.loss.detach()) == pytest.approx(float(want.loss.detach()), rel=0.01)
    torch.testing.assert_close(result.kl_M.double(), want.kl_M, rtol=0.05, atol=0.02)
    grads = torch.autograd.grad(result.loss, (low, rounded))
    assert [g.dtype for g in grads] == [torch.bfloat16, master]
    for got, expected in zip(grads, torch.autograd.grad(want.loss, exact), strict=True):
        assert float((got.double() - expected).norm() / expected.norm()) < 0.02


def test_only_the_logits_themselves_are_rounded_to_bfloat16() -> None:
    """From the rounded logits on, everything is float32: no bfloat16 softmax."""
    hidden, head, logits, row, weight = (x.detach() for x in inputs())
    hidden, head, row = hidden.bfloat16(), head.bfloat16(), row.sort().values
    result = linear_kl(hidden, head, by_rows(logits.bfloat16()), row, weight.float())
    log_q, log_p = (torch.log_softmax(x.double(), dim=1) for x in (hidden @ head.T, logits.bfloat16()[row]))
    torch.testing.assert_close(result.kl_M.double(), (log_p.exp() * (log_p - log_q)).sum(1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(result.overlap_M.double(), torch.minimum(log_p.exp(), log_q.exp()).sum(1), rtol=1e-5, atol=0)
