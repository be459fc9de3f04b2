"""The acceptance that training simulates on captured features equals the acceptance of decoding, pass for pass, on the target's own greedy text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith.core.types import FeatureBatch, FeatureSpec, Progress, Sample
from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.samples import prepare
from draftsmith.data.template import ChatTemplate
from draftsmith.data.vocab import count
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.eval.acceptance import Acceptance
from draftsmith.eval.answers import answer
from draftsmith.eval.decode import Decoded, Decoder
from draftsmith.features.live import LiveSource
from draftsmith.target.capture import Capture
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target
from draftsmith.train.loop import TrainConfig, Trainer
from draftsmith.train.optim import OptimConfig

LAYERS, MAX_NEW, STEPS = (1, 2, 4), 24, 80
QUIET = {"log_every": 1000, "evaluate_every": 1000, "checkpoint_every": 1000}


@dataclass(frozen=True)
class Turn:
    """One answer within a sample: what the target was given, and what it wrote."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Written:
    """A sample and the answers in it."""

    sample: Sample
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class World:
    """The target's own greedy text, with the tokens that end it."""

    model: TargetModel
    target: Target
    end_ids: tuple[int, ...]
    written: tuple[Written, ...]
    capture: Capture

    def batch(self, rows: Sequence[Written]) -> FeatureBatch:
        return LiveSource(self.capture, [w.sample for w in rows]).batch(range(len(rows)))

    def decode(self, rows: Sequence[Written], draft: Eagle3, width: int, batch: int) -> list[Decoded]:
        """Answers of all turns, after checking that they are the recorded ones."""
        decoder = Decoder(self.model, self.target, self.end_ids, draft, width)
        turns = [t for w in rows for t in w.turns]
        answers = [a for i in range(0, len(turns), batch) for a in decoder.decode([t.prompt for t in turns[i : i + batch]], MAX_NEW)]
        assert [tuple(a.token_ids) for a in answers] == [t.answer for t in turns]
        return answers


def recorded(talks: list[Conversation], model: TargetModel, target: Target, template: ChatTemplate, end_ids: tuple[int, ...]) -> list[Written]:
    """Recorded through the chat template, as `draftsmith` does it."""
    asked = [t.users_only() for t in talks]
    answered = answer(asked, Decoder(model, target, end_ids), template, MAX_NEW, 8, lambda _: None)
    found = []
    for conversation in answered:
        single = Conversation(conversation.id, conversation.kind, conversation.messages[:2])
        sample = prepare([single], template, 999).samples[0]
        message = single.messages[1]
        assert message.token_ids is not None
        found.append(Written(sample, (Turn(tuple(template.ids(single.messages[:1], prompt=True)), message.token_ids),)))
    return found


def several_turns(number: int, model: TargetModel, target: Target, end_ids: tuple[int, ...]) -> Written:
    """Three turns in one sample, each prompt being all that came before and a few more tokens."""
    decoder = Decoder(model, target, end_ids)
    ids: list[int] = []
    mask: list[bool] = []
    turns = []
    for turn in range(3):
        fresh = torch.randint(3, 259, (4 + turn,), generator=torch.Generator().manual_seed(10 * number + turn)).tolist()
        ids, mask = [*ids, *fresh], [*mask, *[False] * len(fresh)]
        wrote = decoder.decode([ids], MAX_NEW)[0].token_ids
        turns.append(Turn(tuple(ids), tuple(wrote)))
        ids, mask = [*ids, *wrote], [*mask, *[True] * len(wrote)]
    return Written(Sample(f"turns-{number}", torch.tensor(ids), torch.tensor(mask)), tuple(turns))


@pytest.fixture(scope="module")
def world(talks: list[Conversation], target_model: TargetModel, target: Target, template: ChatTemplate) -> World:
    plain = Decoder(target_model, target, ()).decode([template.ids(t.messages[:1], prompt=True) for t in talks], MAX_NEW)
    end_ids = (*template.end_ids, plain[3].token_ids[7], plain[8].token_ids[12])
    written = recorded(talks, target_model, target, template, end_ids) + [several_turns(n, target_model, target, end_ids) for n in range(4)]
    return World(target_model, target, end_ids, tuple(written), Capture(target_model, target, FeatureSpec(LAYERS, "float32")))


@pytest.fixture(scope="module")
def weights(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """A draft trained by the real loop until it is often right on this text, with a vocabulary that lacks some of its tokens."""
    source = LiveSource(world.capture, [w.sample for w in world.written])
    torch.manual_seed(3)
    draft = Eagle3(Eagle3Config(layers=LAYERS, vocab_size=100, steps=3), world.target.shape)
    draft.initialise(world.target, count((w.sample for w in world.written), 259), world.batch(world.written))
    config = TrainConfig(steps=STEPS, batch_tokens=500, dtype="float32", optimizer=OptimConfig(learning_rate=6e-3), **QUIET)
    Trainer(tmp_path_factory.mktemp("run"), draft, world.target, source, source, config, {}).fit()
    return draft.state_dict()


def draft_of(world: World, weights: dict[str, Tensor], steps: int) -> Eagle3:
    """The trained draft, judged over this many steps."""
    draft = Eagle3(Eagle3Config(layers=LAYERS, vocab_size=100, steps=steps), world.target.shape)
    draft.load_state_dict(weights)
    return draft.eval()


@torch.no_grad()
def simulated(draft: Eagle3, batch: FeatureBatch, target: Target) -> tuple[float, list[float]]:
    """Passes, and how many of them accepted each position."""
    metrics = draft(batch, target, Progress(1.0, exact=True)).metrics
    length, rates = metrics["acceptance_length"], metrics["position_rates"]
    assert float(length.num - length.den) == float(rates.num.sum()), "accepted tokens, counted twice"
    assert set(rates.den.tolist()) == {float(length.den)}
    return float(length.den), rates.num.tolist()


def counted(answers: Sequence[Decoded], width: int) -> tuple[float, list[float]]:
    """The same of decoded answers."""
    passes = [n for a in answers for n in a.accepted]
    return len(passes), [sum(n >= k for n in passes) for k in range(1, width + 1)]


def test_the_text_tries_every_kind_of_end(world: World) -> None:
    """Answers that an end token stopped and that the limit stopped, tokens outside the draft vocabulary, several turns in a sample."""
    answers = [t.answer for w in world.written for t in w.turns]
    stopped = [a for a in answers if a[-1] in world.end_ids]
    assert 3 <= len(stopped) < len(answers)
    assert len({len(a) for a in stopped}) > 1
    assert max(len(w.turns) for w in world.written) == 3
    for w in world.written:
        assert w.sample.input_ids[w.sample.loss_mask].tolist() == [i for t in w.turns for i in t.answer]


def test_the_draft_is_right_often_and_not_always(world: World, weights: dict[str, Tensor]) -> None:
    answers = world.decode(world.written, draft_of(world, weights, 4), 4, 99)
    figures = Acceptance.of(answers, 4)
    assert 1.3 < figures.length < 4
    assert min(figures.histogram) > 0, "every count from 0 to the width occurs"
    outside = ~weights["t2d"][torch.tensor([i for w in world.written for t in w.turns for i in t.answer])]
    assert int(outside.sum()) > 5


@pytest.mark.parametrize("width", [4])
def test_every_sample_alone_has_the_same_passes_and_accepted_counts(world: World, weights: dict[str, Tensor], width: int) -> None:
    draft = draft_of(world, weights, width)
    for row in world.written:
        assert simulated(draft, world.batch([row]), world.target) == counted(world.decode([row], draft, width, 1), width), row.sample.id


@pytest.mark.parametrize(("width", "batch"), [(1, 7), (3, 5), (5, 99)])
def test_packed_samples_and_batched_prompts_have_the_same_figures(world: World, weights: dict[str, Tensor], width: int, batch: int) -> None:
    draft = draft_of(world, weights, width)
    answers = world.decode(world.written, draft, width, batch)
    passes, accepted = simulated(draft, world.batch(world.written), world.target)
    assert (passes, accepted) == counted(answers, width)
    figures = Acceptance.of(answers, width)
    assert figures.steps == passes
    assert figures.position_rates == [n / passes for n in accepted]
    assert figures.length == 1 + sum(accepted) / passes


@pytest.mark.parametrize(("steps", "width"), [(4, 4), (7, 4), (2, 4)])
def test_the_trainers_evaluation_is_the_decoded_acceptance_length(world: World, weights: dict[str, Tensor], tmp_path: Path, steps: int, width: int) -> None:
    """Simulated with as many drafted tokens as decoding has, whatever training unrolls."""
    draft = draft_of(world, weights, steps)
    source = LiveSource(world.capture, [w.sample for w in world.written])
    trainer = Trainer(tmp_path, draft, world.target, source, source, TrainConfig(dtype="float32", batch_tokens=150), {}, width)
    trainer.device, trainer.dtype = torch.device("cpu"), torch.float32
    figures = Acceptance.of(world.decode(world.written, draft.eval(), width, 6), width)
    metrics = trainer.evaluate()
    length, rates = metrics["acceptance_length"], metrics["position_rates"]
    assert (float(length.num), float(length.den)) == (figures.steps + figures.accepted, figures.steps)
    assert float(length.value) == pytest.approx(figures.length, rel=1e-12)
    assert rates.value.tolist() == figures.position_rates


def test_an_untrained_draft_agrees_too(world: World) -> None:
    torch.manual_seed(8)
    draft = Eagle3(Eagle3Config(layers=LAYERS, vocab_size=100, steps=3), world.target.shape).eval()
    draft.initialise(world.target, count((w.sample for w in world.written), 259), world.batch(world.written))
    for parameter in draft.parameters():  # an initialised draft may start without attention
        parameter.data += 0.1 * torch.randn(parameter.shape)
    assert simulated(draft, world.batch(world.written), world.target) == counted(world.decode(world.written, draft, 3, 4), 3)


@pytest.mark.parametrize("fault", ["features", "positions", "chains"])
def test_a_misalignment_breaks_the_equality(world: World, weights: dict[str, Tensor], fault: str) -> None:
    """Planted faults: features of the token before, positions off by two, and the mean over all chains instead of those that decoding starts."""
    draft, batch = draft_of(world, weights, 3), world.batch(world.written)
    right = counted(world.decode(world.written, draft, 3, 99), 3)
    assert simulated(draft, batch, world.target) == right
    if fault == "features":
        batch = replace(batch, hidden_NF=batch.hidden_NF.roll(1, dims=0))
    if fault == "positions":  # rotary positions are relative: only the chains' own are moved
        original = draft.rope.forward
        draft.rope.forward = lambda x, position: original(x, position if len(x) == len(batch.input_ids_N) else position + 2)  # type: ignore[method-assign]
    if fault == "chains":
        with torch.no_grad():
            ratio = draft(batch, world.target, Progress()).metrics["acceptance_length"]
        assert float(ratio.den) != right[0]
    else:
        assert simulated(draft, batch, world.target) != right


def test_recorded_talks_of_several_turns_agree_through_the_chat_template(
    world: World, weights: dict[str, Tensor], talks: list[Conversation], template: ChatTemplate
) -> None:
    """All turns of a conversation: what `answer` recorded, `prepare` made of it, and decoding of the same prompts."""
    asked = [replace(t, messages=(*t.users_only().messages[:1], Message("user", "and then?"))) for t in talks[:4]]
    answered = answer(asked, Decoder(world.model, world.target, world.end_ids), template, MAX_NEW, 3, lambda _: None)
    samples = prepare(answered, template, 999).samples
    draft = draft_of(world, weights, 3)
    batch = LiveSource(world.capture, samples).batch(range(len(samples)))
    prompts = [template.ids(c.messages[:i], prompt=True) for c in answered for i, m in enumerate(c.messages) if m.role == "assistant"]
    answers = Decoder(world.model, world.target, world.end_ids, draft, 3).decode(prompts, MAX_NEW)
    assert simulated(draft, batch, world.target) == counted(answers, 3)
