"""Features against `output_hidden_states`, arg-max only where it is a teacher, and the check of the logit rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from draftsmith.core.types import IGNORED, FeatureSpec, Sample
from draftsmith.data.conversations import Conversation
from draftsmith.data.samples import prepare
from draftsmith.data.template import ChatTemplate
from draftsmith.target import capture as module
from draftsmith.target.capture import Capture
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target


@pytest.fixture(scope="module")
def samples(template: ChatTemplate, talks: list[Conversation]) -> list[Sample]:
    return prepare(talks, template, 512).samples


@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 2, 4), (1, 5)])
def test_features_are_the_libraries_hidden_states_one_further(
    target_model: TargetModel, target: Target, samples: list[Sample], layers: tuple[int, ...]
) -> None:
    """transformers counts the embedding as 0, so block i is hidden_states[i + 1]; its last entry is after the final norm."""
    make = Capture(target_model, target, FeatureSpec(layers, "float32"))
    for sample in samples[:4]:
        features = make(sample)
        with torch.no_grad():
            own = target_model.model(input_ids=sample.input_ids[None], output_hidden_states=True)
        assert len(own.hidden_states) == 7
        assert torch.equal(features.last_TH, own.hidden_states[-1][0])
        for n, i in enumerate(layers):
            block = features.hidden_TF[:, 32 * n : 32 * (n + 1)]
            if i < 5:
                assert torch.equal(block, own.hidden_states[i + 1][0])
            else:
                torch.testing.assert_close(target_model.model.model.norm(block), own.hidden_states[-1][0])
                assert not torch.allclose(block, own.hidden_states[-1][0])
        assert features.hidden_TF.shape == (len(sample), 32 * len(layers))
        assert features.sample is sample


@pytest.mark.parametrize("rows", [1, 3, 512])
def test_argmax_is_the_targets_where_the_next_token_is_supervised_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, target_model: TargetModel, target: Target, samples: list[Sample], rows: int
) -> None:
    monkeypatch.setattr(module, "_ROWS", rows)
    make = Capture(target_model, target, FeatureSpec((1,), "float32"))
    for sample in samples[:4]:
        with torch.no_grad():
            logits = target_model.model(input_ids=sample.input_ids[None]).logits[0]
        found = make(sample).argmax_T
        for t in range(len(sample)):
            supervised = t + 1 < len(sample) and bool(sample.loss_mask[t + 1])
            assert int(found[t]) == (int(logits[t].argmax()) if supervised else IGNORED), t


@pytest.mark.parametrize("mask", [[False] * 5, [True] * 5, [False, True, False, True, True]])
def test_argmax_of_any_mask(target_model: TargetModel, target: Target, mask: list[bool]) -> None:
    sample = Sample("m", torch.tensor([5, 9, 40, 77, 2]), torch.tensor(mask))
    found = Capture(target_model, target, FeatureSpec((1,), "float32"))(sample).argmax_T
    assert (found != IGNORED).tolist() == [*mask[1:], False]


def test_the_argmax_does_not_lose_to_rounding_of_what_is_stored(target_model: TargetModel, target: Target, samples: list[Sample]) -> None:
    exact, stored = (Capture(target_model, target, FeatureSpec((1, 2), d))(samples[0]) for d in ("float32", "bfloat16"))
    assert stored.hidden_TF.dtype == stored.last_TH.dtype == torch.bfloat16
    assert torch.equal(stored.hidden_TF, exact.hidden_TF.bfloat16())
    assert torch.equal(stored.last_TH, exact.last_TH.bfloat16())
    assert torch.equal(stored.argmax_T, exact.argmax_T)


def test_what_is_captured_does_not_depend_on_what_came_before(target_model: TargetModel, target: Target, samples: list[Sample]) -> None:
    make = Capture(target_model, target, FeatureSpec((0, 4), "float32"))
    first = make(samples[0])
    make(samples[1])
    again = make(samples[0])
    assert torch.equal(first.hidden_TF, again.hidden_TF)
    assert torch.equal(first.last_TH, again.last_TH)


@pytest.mark.parametrize("layers", [(6,), (1, 2, 17)])
def test_a_block_that_does_not_exist_is_refused(target_model: TargetModel, target: Target, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"capture layer {layers[-1]} does not exist: the target has blocks 0 to 5"):
        Capture(target_model, target, FeatureSpec(layers))


class Ruled(nn.Module):
    """A head followed by another logit rule."""

    def __init__(self, head: nn.Module, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.rule = head, rule

    def forward(self, last: Tensor) -> Tensor:
        return self.rule(self.head(last))


RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled up": lambda x: 1.1 * x,
    "scaled down": lambda x: x / 8,
    "soft-capped": lambda x: 3 * torch.tanh(x / 3),
    "biased": lambda x: x + torch.linspace(-1, 1, x.shape[-1]),
    "not a number": lambda x: x * torch.nan,
    "permuted": lambda x: x.roll(1, -1),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_check_refuses_another_logit_rule(tiny_target: Path, target: Target, samples: list[Sample], rule: str) -> None:
    model = TargetModel.load(str(tiny_target), torch.float32)
    model.model.lm_head = Ruled(model.model.lm_head, RULES[rule])
    with pytest.raises(ValueError, match="llama has a logit rule that is not supported yet"):
        Capture(model, target, FeatureSpec((1,))).check(samples[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_passes_the_plain_rule(tiny_target: Path, samples: list[Sample], dtype: torch.dtype) -> None:
    where = str(tiny_target)
    Capture(TargetModel.load(where, dtype), Target.load(where, "cpu", dtype), FeatureSpec((1,))).check(samples[0])


def test_the_check_refuses_the_tensors_of_another_checkpoint(target_model: TargetModel, target: Target, samples: list[Sample]) -> None:
    other = replace(target, head_VH=target.head_VH.flip(0), tied=False)
    with pytest.raises(ValueError, match="differ by"):
        Capture(target_model, other, FeatureSpec((1,))).check(samples[0])
