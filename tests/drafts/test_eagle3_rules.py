"""EAGLE-3 on real targets whose logits are not `head @ last`: captured, judged and started under the target's own rule."""

from __future__ import annotations

import pytest
import torch
from cases import close, gradients, random_draft, run
from checkpoints import ruled, saved
from reference import Reference, own_logits

from draftsmith.core.types import Features, FeatureSpec, Sample
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.features.pack import pack
from draftsmith.target.capture import Capture
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

FAMILIES = ruled(2.0, vocab_size=61, max_position_embeddings=64, eos_token_id=1)


@pytest.fixture(scope="module", params=FAMILIES)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModel, Target]:
    folder = str(saved(FAMILIES[request.param](), tmp_path_factory.mktemp("rules") / "target"))
    return TargetModel.load(folder, torch.float32), Target.load(folder)


def documents(real: tuple[TargetModel, Target], layers: tuple[int, ...]) -> list[Features]:
    capture = Capture(*real, FeatureSpec(layers, "float32"))
    g = torch.Generator().manual_seed(4)
    return [capture(Sample(str(n), torch.randint(2, 61, (n,), generator=g), torch.arange(n) >= 3)) for n in (9, 12)]


def test_loss_and_gradients_equal_the_reference_under_the_targets_own_rule(real: tuple[TargetModel, Target]) -> None:
    target = real[1]
    draft = random_draft(2, torch.float64, target.shape, vocab_size=40, layers=(0, 2), steps=3)
    found = [Features(d.sample, d.hidden_TF.double(), d.last_TH.double(), d.argmax_T) for d in documents(real, draft.layers)]
    double = target._moved("cpu", torch.float64)
    output = run(draft, found, double)
    num, den = Reference(draft, double).loss(found, 3, 1.0)
    assert float(output.loss.den) == den > 0
    torch.testing.assert_close(output.loss.num, num, rtol=1e-9, atol=1e-12)
    close(gradients(draft, output.loss.num), gradients(draft, num))


def test_the_reference_gives_the_models_own_logits_which_are_not_the_plain_product(real: tuple[TargetModel, Target]) -> None:
    """Else the test above would compare two faults, or nothing."""
    model, target = real
    ids = torch.tensor([[5, 9, 17, 3, 58]])
    last, own = model.run(ids).last_BQH[0], model.own_logits(ids)[0]
    torch.testing.assert_close(torch.stack([own_logits(target, x) for x in last]).float(), own, rtol=1e-4, atol=1e-4)
    plain = last / (target.rule.pre or 1.0) @ target.head_VH.T
    assert (plain - own).abs().max() > 0.1


def test_arg_max_and_chosen_columns_follow_the_rule(real: tuple[TargetModel, Target]) -> None:
    model, target = real
    (document, _) = documents(real, (1,))
    own = model.own_logits(document.sample.input_ids[None])[0]
    wanted = document.sample.loss_mask[1:].nonzero()[:, 0]
    assert torch.equal(document.argmax_T[wanted].long(), own.argmax(-1)[wanted])
    some = torch.tensor([3, 4, 17, 60])
    torch.testing.assert_close(target.logits(document.last_TH, some), own[:, some], rtol=1e-4, atol=1e-4)


def test_the_head_starts_with_the_targets_scale(real: tuple[TargetModel, Target]) -> None:
    """What a draft's own norm leaves has no factor before the head: head @ (last / pre) is the target's logit before its cap and without its bias."""
    model, target = real
    draft = Eagle3(Eagle3Config(layers=(0, 2), vocab_size=61, start="random"), target.shape)
    found = documents(real, draft.layers)
    draft.initialise(target, torch.ones(61, dtype=torch.long), pack(found))
    last = found[0].last_TH
    own = model.own_logits(found[0].sample.input_ids[None])[0]
    if target.rule.cap is not None:
        own = torch.atanh((own / target.rule.cap).clamp(-0.999, 0.999)) * target.rule.cap
    started = draft.lm_head(last / (target.rule.pre or 1.0)) + (0.0 if target.bias_V is None else target.bias_V)
    near = own.abs() < 3
    torch.testing.assert_close(started[near], own[near], rtol=1e-3, atol=1e-3)
