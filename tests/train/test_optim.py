from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from draftsmith.train.optim import OptimConfig, apply, build, rate


class Small(nn.Module):
    """A matrix, a norm's vector, and something frozen."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.matrix = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.vector = nn.Parameter(torch.randn(5, generator=generator))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def gradients(step: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {"matrix": scale * torch.randn(4, 3, generator=generator), "vector": scale * torch.randn(5, generator=generator)}


def give(model: Small, found: dict[str, torch.Tensor]) -> None:
    for name, gradient in found.items():
        getattr(model, name).grad = gradient.clone()


def by_hand(value: float, grads: list[float], rates: list[float], decay: float, betas: tuple[float, float]) -> float:
    """AdamW of one number, from the paper's formula, in Python floats."""
    m = v = 0.0
    for t, (g, lr) in enumerate(zip(grads, rates, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        value -= lr * decay * value
        value -= lr * (m / (1 - betas[0] ** t)) / (math.sqrt(v / (1 - betas[1] ** t)) + 1e-8)
    return value


def test_five_steps_equal_the_formula_with_summed_gradients_divided_clipped_and_a_changing_rate() -> None:
    config = OptimConfig(learning_rate=0.05, weight_decay=0.2, betas=(0.8, 0.9), clip=1.5)
    model = Small()
    begin = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build(model, config)
    rates, used = [0.01, 0.05, 0.04, 0.02, 0.001], []
    for step, lr in enumerate(rates):
        summed, denominator = gradients(step, scale=7.0 if step % 2 else 0.7), 2.0 + step
        give(model, summed)
        norm = apply(model, optimizer, denominator, lr, config.clip)
        mean = {n: [x / denominator for x in g.flatten().tolist()] for n, g in summed.items()}
        expected = math.sqrt(sum(x * x for values in mean.values() for x in values))
        assert norm == pytest.approx(expected, rel=1e-5)
        shrink = min(1.0, config.clip / expected)
        used.append({n: [x * shrink for x in values] for n, values in mean.items()})
        assert model.matrix.grad is None
    assert any(max(abs(x) for x in u["matrix"]) > 0.2 for u in used)
    for name, decay in (("matrix", config.weight_decay), ("vector", 0.0)):
        for i, start in enumerate(begin[name].flatten().tolist()):
            wanted = by_hand(start, [u[name][i] for u in used], rates, decay, config.betas)
            assert getattr(model, name).flatten()[i].item() == pytest.approx(wanted, rel=2e-5, abs=2e-6)
    assert torch.equal(model.frozen, begin["frozen"])


@pytest.mark.parametrize(("scale", "clipped"), [(0.01, False), (50.0, True)])
def test_the_whole_gradient_is_clipped_by_one_norm(scale: float, clipped: bool) -> None:
    """Seen in the first moment, which after one step is the gradient times one minus its factor."""
    model = Small()
    optimizer = build(model, OptimConfig(betas=(0.75, 0.9)))
    found = gradients(0, scale)
    give(model, found)
    norm = apply(model, optimizer, 1.0, 1.0, 0.5)
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in found.values()))
    assert norm == pytest.approx(expected, rel=1e-5)
    assert (expected > 0.5) == clipped
    factor = 0.5 / expected if clipped else 1.0
    for name, gradient in found.items():
        moment = optimizer.state[getattr(model, name)]["exp_avg"]
        torch.testing.assert_close(moment, 0.25 * gradient * factor, rtol=1e-4, atol=1e-6)


def test_weight_decay_reaches_matrices_only() -> None:
    """With gradients of zero nothing else moves a weight."""
    model = Small()
    begin = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build(model, OptimConfig(weight_decay=0.5))
    give(model, {n: torch.zeros_like(g) for n, g in gradients(0).items()})
    apply(model, optimizer, 1.0, 0.1, 1.0)
    torch.testing.assert_close(model.matrix.detach(), begin["matrix"] * (1 - 0.1 * 0.5))
    assert torch.equal(model.vector, begin["vector"])
    assert torch.equal(model.frozen, begin["frozen"])


def test_every_trainable_weight_is_in_exactly_one_group() -> None:
    model = Small()
    held = [id(p) for group in build(model, OptimConfig()).param_groups for p in group["params"]]
    assert sorted(held) == sorted([id(model.matrix), id(model.vector)])


def test_an_update_on_nothing_supervised_changes_nothing_at_first() -> None:
    """The denominator is 0, and so are the gradients: no division by zero."""
    model = Small()
    begin = model.matrix.detach().clone()
    give(model, {n: torch.zeros_like(g) for n, g in gradients(0).items()})
    assert apply(model, build(model, OptimConfig()), 0.0, 0.1, 1.0) == 0.0
    assert torch.equal(model.matrix, begin)


CONFIGS = st.builds(OptimConfig, learning_rate=st.floats(1e-5, 1.0), warmup=st.floats(0, 0.5))


@given(CONFIGS, st.integers(1, 3000))
def test_the_rate_rises_then_falls_and_stays_in_bounds(config: OptimConfig, steps: int) -> None:
    rates = [rate(config, s, steps) for s in range(steps)]
    assert all(0 < r <= config.learning_rate * (1 + 1e-12) for r in rates)
    top = max(range(steps), key=rates.__getitem__)
    assert top <= config.warmup * steps + 1
    assert all(a < b for a, b in pairwise(rates[: top + 1]))
    assert all(a >= b for a, b in pairwise(rates[top:]))


@given(CONFIGS, st.integers(100, 5000))
def test_the_rate_warms_up_linearly_peaks_near_its_setting_and_ends_near_zero(config: OptimConfig, steps: int) -> None:
    rates = [rate(config, s, steps) for s in range(steps)]
    warm = math.ceil(config.warmup * steps)
    for s in range(warm):
        assert rates[s] == pytest.approx(rates[0] * (s + 1), rel=1e-9)
    assert max(rates) > 0.95 * config.learning_rate
    assert rates[-1] < 0.002 * config.learning_rate
    half = round((warm + steps) / 2)
    assert rates[half] == pytest.approx(config.learning_rate / 2, rel=0.1)


@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_no_warm_up_and_only_warm_up(warmup: float) -> None:
    config = OptimConfig(warmup=warmup)
    rates = [rate(config, s, 50) for s in range(50)]
    assert rates == sorted(rates, reverse=warmup == 0)
    assert max(rates) == pytest.approx(config.learning_rate, rel=0.03)


@pytest.mark.parametrize(
    "bad", [{"learning_rate": 0}, {"learning_rate": -1}, {"warmup": 1.5}, {"weight_decay": -0.1}, {"clip": 0}, {"betas": (0.9, 1.0)}, {"beta": 1}]
)
def test_settings_out_of_range_are_refused(bad: dict) -> None:
    """When the recipe is read, not when the optimizer is built."""
    with pytest.raises(ValidationError, match=next(iter(bad))):
        OptimConfig(**bad)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = build(layer, OptimConfig())
    before = layer.weight.detach().clone()
    layer(torch.tensor([[1.0, float("nan"), 0.0]])).sum().backward()
    with pytest.raises(ValueError, match="not finite"):
        apply(layer, optimizer, 1.0, 1e-3, 1.0)
    assert torch.equal(layer.weight, before)
    assert not optimizer.state
