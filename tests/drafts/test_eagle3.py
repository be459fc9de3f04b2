"""The packed, vectorised EAGLE-3 against the slow reference of reference.py, which follows docs/design/alignment.md position by position."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import EXACT, SHAPE, added, close, exact_frequencies, gradients, random_document, random_documents, random_draft, random_target, run, spans
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Prediction, Reference

from draftsmith.core.types import Features, FeatureSpec, Progress, Sample
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.features.pack import pack
from draftsmith.target.capture import Capture
from draftsmith.target.families import LogitRule

some = settings(max_examples=30, deadline=None, derandomize=True)
T, F = True, False
MASKS = [[F, F, T, T, T, T, T, T], [F, T], [F, T, T, F, F, T, T, T, T, T, F, T], [T, T, T, T], [F, F, F], [F, T, T, T, T, T, T, T, T, T]]
RULES = (LogitRule(), LogitRule(0.25), LogitRule(4.0), LogitRule(1.0, 2.0), LogitRule(0.5, 1.5, (0, 7, 18)))
worlds = st.tuples(st.lists(spans(), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, SHAPE.vocab_size), st.integers(0, 10_000))


def slow_metrics(reference: Reference, documents: list[Features], steps: int) -> dict[str, tuple[object, object]]:
    """Walk each text as decoding would: draft at a given token, accept while the draft's choice is the target's, go on behind the bonus token."""
    started, accepted, right, asked = 0, [0] * steps, [0] * steps, [0] * steps
    for document in documents:
        at = {(p.anchor, p.step): p for p in reference.predictions(document, steps) if p.in_answer}
        for (_, k), p in at.items():
            asked[k] += 1
            right[k] += p.drafted == p.teacher
        i = 0
        while i < len(document):
            if (i, 0) not in at:
                i += 1
                continue
            started, length = started + 1, 0
            while (i, length) in at and at[i, length].drafted == at[i, length].teacher:
                length += 1
            for k in range(length):
                accepted[k] += 1
            i += length + 1
    return {
        "acceptance_length": (started + sum(accepted), started),
        "position_rates": (accepted, [started] * steps),
        "step_accuracy": (right, asked),
    }


def overlap(predictions: list[Prediction], step_weight: float) -> tuple[float, float]:
    known = [p for p in predictions if p.in_answer]
    return sum(step_weight**p.step * p.overlap for p in known if p.teacher_fits), sum(step_weight**p.step for p in known)


# ---- loss, gradients, metrics ----


@settings(some, max_examples=60)
@given(worlds, st.sampled_from((1.0, 0.75, 0.5)), st.sampled_from(RULES), st.booleans(), st.booleans())
def test_packed_loss_gradients_and_metrics_equal_the_reference(world: tuple, step_weight: float, rule: LogitRule, bias: bool, normed: bool) -> None:
    """Under every logit rule, a head with and without a bias, and both kinds of residual."""
    masks, steps, vocabulary, seed = world
    target = random_target(seed, rule=rule, bias=bias)
    draft = random_draft(seed, vocab_size=vocabulary, steps=steps, step_weight=step_weight, norm_before_residual=normed)
    documents = random_documents(masks, target, seed)
    output = run(draft, documents, target)
    reference = Reference(draft, target)
    num, den = reference.loss(documents, steps, step_weight)
    assert float(output.loss.den) == pytest.approx(den, rel=1e-12)
    torch.testing.assert_close(output.loss.num, num, rtol=1e-9, atol=1e-12)
    close(gradients(draft, output.loss.num), gradients(draft, num))

    predictions = [p for document in documents for p in reference.predictions(document, steps)]
    if not any(p.in_answer for p in predictions):
        assert not output.metrics
        return
    for name, (above, below) in (slow_metrics(reference, documents, steps) | {"overlap": overlap(predictions, step_weight)}).items():
        ratio = output.metrics[name]
        torch.testing.assert_close(ratio.num, torch.tensor(above, dtype=torch.float64), rtol=1e-6, atol=1e-9, msg=f"{name}: {ratio.num} not {above}")
        torch.testing.assert_close(ratio.den, torch.tensor(below, dtype=torch.float64), rtol=1e-6, atol=1e-9, msg=f"{name}: {ratio.den} not {below}")


@pytest.mark.parametrize("vocab_size", [40, 259])
def test_captured_features_of_a_target_give_the_loss_of_the_reference(target, target_model, template, talks, vocab_size: int) -> None:
    from draftsmith.data.samples import prepare

    samples = [Sample(s.id, s.input_ids[-14:], s.loss_mask[-14:]) for s in prepare(talks[:2], template, 200).samples]
    draft = random_draft(3, shape=target.shape, vocab_size=vocab_size, steps=3, layers=(0, 3, 5), step_weight=0.5)
    capture = Capture(target_model, target, FeatureSpec(draft.layers, "float32"))
    documents = [capture(s) for s in samples]
    double = copy.copy(target)
    double.embedding_VH, double.head_VH, double.norm_H = target.embedding_VH.double(), target.head_VH.double(), target.norm_H.double()
    documents = [Features(d.sample, d.hidden_TF.double(), d.last_TH.double(), d.argmax_T) for d in documents]
    output = run(draft, documents, double)
    num, den = Reference(draft, double).loss(documents, 3, 0.5)
    assert float(output.loss.den) == pytest.approx(den)
    assert den > 0
    torch.testing.assert_close(output.loss.num, num, rtol=1e-9, atol=0)
    close(gradients(draft, output.loss.num), gradients(draft, num))


@some
@given(worlds)
def test_packed_documents_equal_separate_ones_summed(world: tuple) -> None:
    masks, steps, vocabulary, seed = world
    target, draft = random_target(seed), random_draft(seed, vocab_size=vocabulary, steps=steps)
    documents = random_documents(masks, target, seed)
    together, alone = run(draft, documents, target), [run(draft, [d], target) for d in documents]
    assert float(together.loss.den) == sum(float(o.loss.den) for o in alone)
    torch.testing.assert_close(together.loss.num, sum(o.loss.num for o in alone), rtol=1e-9, atol=1e-12)
    close(gradients(draft, together.loss.num), gradients(draft, sum(o.loss.num for o in alone)))
    separate = added(alone)
    close({k: r.num for k, r in together.metrics.items()}, {k: r.num for k, r in separate.items()})
    close({k: r.den for k, r in together.metrics.items()}, {k: r.den for k, r in separate.items()})


def test_what_lies_outside_a_document_or_behind_its_answer_changes_no_loss() -> None:
    """Features of the last two tokens and the teacher where nothing is supervised may be anything; so may the neighbour's tokens."""
    target, draft = random_target(0), random_draft(0, vocab_size=SHAPE.vocab_size, steps=4)
    documents = random_documents([[F, F, T, T, T, F, F], [F, T, T, T]], target, 0)
    before = run(draft, documents, target).loss.num
    first = documents[0]
    hidden, last = first.hidden_TF.clone(), first.last_TH.clone()
    hidden[3:] = 1e3  # the last chain has its anchor at 2 and predicts token 4
    last[[0, 1, 4, 5, 6]] = -1e3  # teachers are at 2 and 3
    tokens = first.sample.input_ids.clone()
    tokens[[0, 4, 5, 6]] = 7  # token 4 is only predicted, and token 0 never embedded
    changed = Features(Sample("changed", tokens, first.sample.loss_mask), hidden, last, first.argmax_T)
    torch.testing.assert_close(run(draft, [changed, documents[1]], target).loss.num, before, rtol=1e-12, atol=0)
    hidden[2] = hidden[1]
    touched = run(draft, [Features(changed.sample, hidden, last, first.argmax_T), documents[1]], target).loss.num
    assert float((touched - before).detach().abs()) > 0.1


# ---- chain sampling ----


@pytest.mark.parametrize("count", [1, 3])
def test_chain_sampling_is_unbiased_in_loss_denominator_and_gradient(count: int) -> None:
    target = random_target(5)
    documents = random_documents(MASKS, target, 5)
    full, sampled = (random_draft(5, vocab_size=13, steps=3, step_weight=0.5, chains=chains) for chains in (None, count))
    g = torch.Generator().manual_seed(1)
    direction = {name: torch.randn(p.shape, generator=g, dtype=p.dtype) for name, p in full.named_parameters()}

    def figures(draft: Eagle3, progress: Progress) -> list[float]:
        output = run(draft, documents, target, progress)
        along = sum(float((v * direction[k]).sum()) for k, v in gradients(draft, output.loss.num).items())
        return [float(output.loss.num.detach()), float(output.loss.den), along, float(output.metrics["step_accuracy"].den[1])]

    exact = torch.tensor(figures(full, Progress()))
    draws = torch.tensor([figures(sampled, Progress(seed=s)) for s in range(120)])
    error = draws.std(0) / len(draws) ** 0.5
    assert (error > 0).all()
    assert (error[[0, 1, 3]] < 0.1 * exact[[0, 1, 3]]).all()
    assert ((draws.mean(0) - exact).abs() < 4.5 * error).all()


def test_chains_above_all_and_exact_evaluation_equal_no_sampling() -> None:
    target = random_target(6)
    documents = random_documents(MASKS, target, 6)
    full, many, one = (random_draft(6, steps=3, chains=chains) for chains in (None, 50, 1))
    want = run(full, documents, target, Progress(seed=3))
    got = run(many, documents, target, Progress(seed=3))
    assert torch.equal(got.loss.num, want.loss.num)
    assert torch.equal(got.loss.den, want.loss.den)
    assert torch.equal(run(one, documents, target, EXACT).loss.num, run(full, documents, target, EXACT).loss.num)


def test_the_draw_of_chains_follows_from_the_seed_alone() -> None:
    target, draft = random_target(7), random_draft(7, steps=2, chains=1)
    documents = random_documents(MASKS, target, 7)
    first = [float(run(draft, documents, target, Progress(seed=s)).loss.num.detach()) for s in range(8)]
    torch.manual_seed(99)
    assert [float(run(draft, documents, target, Progress(seed=s)).loss.num.detach()) for s in range(8)] == first
    assert len(set(first)) > 4


def test_steps_grow_with_progress_and_evaluation_takes_the_last() -> None:
    target = random_target(8)
    documents = random_documents(MASKS, target, 8)
    growing = random_draft(8, steps=[[0, 1], [0.5, 3]])
    for progress, steps in ((Progress(0.0), 1), (Progress(0.49), 1), (Progress(0.5), 3), (Progress(0.0, exact=True), 3)):
        fixed = random_draft(8, steps=steps)
        assert torch.equal(run(growing, documents, target, progress).loss.num, run(fixed, documents, target, progress).loss.num)


# ---- precision and degenerate batches ----


def test_float32_loss_with_bfloat16_features_is_that_of_the_rounded_features() -> None:
    target = random_target(9, torch.float32)
    g = torch.Generator().manual_seed(9)
    documents = [random_document(mask, target, 2, g, torch.bfloat16) for mask in MASKS]
    documents[0].hidden_TF[0] *= 1000  # an attention sink
    draft = random_draft(9, torch.float32, steps=4)
    output = run(draft, documents, target)
    assert output.loss.num.dtype == torch.float32
    assert all(g.isfinite().all() for g in gradients(draft, output.loss.num).values())
    num, den = Reference(draft, target).loss(documents, 4, 1.0)
    assert float(output.loss.den) == den
    assert float(output.loss.num.detach()) == pytest.approx(float(num.detach()), rel=1e-4)


def test_bfloat16_autocast_stays_close_to_float32_in_loss_and_direction() -> None:
    target = random_target(10, torch.float32)
    draft = random_draft(10, torch.float32, steps=3)
    documents = random_documents(MASKS, target, 10)
    plain = run(draft, documents, target)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = run(draft, documents, target)
    assert float(mixed.loss.num.detach()) == pytest.approx(float(plain.loss.num.detach()), rel=0.03)
    a, b = (torch.cat([g.flatten() for g in gradients(draft, o.loss.num).values()]) for o in (plain, mixed))
    assert float(torch.cosine_similarity(a, b, dim=0)) > 0.99


def no_teacher_fits(target, draft: Eagle3) -> list[Features]:
    """A supervised document whose teacher always wants a token outside the draft vocabulary."""
    (document,) = random_documents([[F, T, T, T, T, T]], target, 1)
    outside = int((~draft.t2d).nonzero()[0])
    return [Features(document.sample, document.hidden_TF, (50 * target.head_VH[outside]).expand(6, -1).clone(), torch.full((6,), outside).int())]


@pytest.mark.parametrize("masks", [[[F, F, F]], [[F]], [[F, T]], [[T]], [[F, T, F, T], [T, F]], None])
def test_nothing_supervised_gives_zero_and_a_backward_pass_without_nan(masks: list[list[bool]] | None) -> None:
    target, draft = random_target(1), random_draft(1, steps=3)
    documents = no_teacher_fits(target, draft) if masks is None else random_documents(masks, target, 1)
    output = run(draft, documents, target, Progress())
    assert float(output.loss.den) == 0
    assert float(output.loss.num.detach()) == 0
    output.loss.num.backward()
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in draft.parameters())
    assert any(p.grad is not None for p in draft.parameters())
    if masks is None:
        assert float(output.metrics["acceptance_length"].value) == 1.0


# ---- drafting: see test_eagle3_drafting.py ----


def test_training_on_repetitive_documents_raises_acceptance(target, target_model) -> None:
    """The target's own greedy text, so that arg-max and text agree."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 259, (4, 5), generator=g)
    for _ in range(40):
        ids = torch.cat((ids, target.logits(target_model.run(ids).last_BQH[:, -1]).argmax(-1)[:, None]), dim=1)
    samples = [Sample(f"own-{n}", row, torch.arange(45) >= 5) for n, row in enumerate(ids)]
    torch.manual_seed(0)
    draft = Eagle3(Eagle3Config(layers=(1, 3, 4), vocab_size=64, steps=3, chains=12), target.shape)
    capture = Capture(target_model, target, draft.needs(draft.config, target.shape))
    batch = pack([capture(s) for s in samples])
    counts = torch.bincount(ids[:, 5:].flatten(), minlength=259)
    draft.initialise(target, counts, batch)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    before = draft(batch, target, EXACT)
    for seed in range(120):
        loss = draft(batch, target, Progress(seed=seed)).loss
        optimizer.zero_grad()
        (loss.num / loss.den).backward()
        optimizer.step()
    after = draft(batch, target, EXACT)
    assert float(after.metrics["acceptance_length"].value) > max(2.2, float(before.metrics["acceptance_length"].value) + 0.4)
    assert float(after.loss.value.detach()) < 0.3 * float(before.loss.value.detach())


# ---- settings ----


@pytest.mark.parametrize("layers", [(3, 1), (1, 1), (0, 5), (-1, 2)])
def test_layers_that_are_unsorted_repeated_or_absent_are_refused_by_name(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"draft\.layers .*ascending, different ids from 0 to 4 \(the target has 5 blocks\)"):
        Eagle3(Eagle3Config(layers=layers, vocab_size=5), SHAPE)


def test_default_layers_are_the_ones_that_every_engine_assumes() -> None:
    from dataclasses import replace

    assert Eagle3.needs(Eagle3Config(), replace(SHAPE, layers=30)).layers == (1, 14, 26)


def test_a_draft_vocabulary_larger_than_the_targets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"draft\.vocab_size 20 is larger than .* 19"):
        Eagle3(Eagle3Config(layers=(1,), vocab_size=20), SHAPE)


@pytest.mark.parametrize("setting", [{"steps": 0}, {"steps": [[0, 1], [0.5, 0]]}, {"chains": 0}, {"vocab_size": 0}, {"step_weight": 0.0}, {"step_weight": 1.5}])
def test_numbers_out_of_range_are_refused_with_the_key_and_the_bound(setting: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"(?s){next(iter(setting))}.*(at least 1|greater than or equal to 1|greater than 0|less than or equal to 1)"):
        Eagle3Config(**setting)


def test_the_rotary_frequencies_are_the_targets() -> None:
    draft = Eagle3(Eagle3Config(layers=(1,), vocab_size=5), SHAPE)
    torch.testing.assert_close(draft.rope.inverse.double(), exact_frequencies(draft), rtol=1e-6, atol=0)
