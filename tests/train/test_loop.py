from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import command_line as cli
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from draftsmith import pipeline
from draftsmith.core.config import load
from draftsmith.core.types import FeatureBatch, Progress, Ratio, StepOutput
from draftsmith.drafts.base import Draft
from draftsmith.features.source import Source
from draftsmith.pipeline import Run
from draftsmith.recipe import Recipe
from draftsmith.train import checkpoint
from draftsmith.train.loop import TrainConfig, Trainer


def lines(run: Path, name: str = "metrics", kind: str = "train") -> list[dict[str, Any]]:
    return [line for text in (run / f"{name}.jsonl").read_text().splitlines() if (line := json.loads(text))["kind"] == kind]


def prepared(folder: Path, target: Path, talks: Sequence, overrides: Sequence[str] = (), kind: str = "live") -> Run:
    return Run(load(Recipe, cli.write_recipe(folder, target, talks, kind), overrides))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, talks: list) -> Path:
    """A short ordinary run."""
    folder = tmp_path_factory.mktemp("ran")
    pipeline.train(prepared(folder, tiny_target, talks, ["train.log_every=3", "train.steps=20"]))
    return folder / "run"


def test_lines_have_their_names_and_are_written_when_due(ran: Path) -> None:
    measured = {"loss", "acceptance_length", "position_rates", "step_accuracy", "overlap"}
    assert [line["step"] for line in lines(ran)] == [3, 6, 9, 12, 15, 18, 20]
    assert all(set(line) == measured | {"step", "kind", "gradient_norm", "learning_rate", "micro_batches"} for line in lines(ran))
    assert [line["micro_batches"] for line in lines(ran)] == [2 * s for s in (3, 6, 9, 12, 15, 18, 20)]
    assert [line["step"] for line in lines(ran, kind="held-out")] == [8, 16, 20]
    assert all(set(line) == measured | {"step", "kind"} for line in lines(ran, kind="held-out"))
    assert all(len(line["position_rates"]) <= 3 for line in lines(ran)), "as many as training unrolls"
    assert all(len(line["position_rates"]) == 5 for line in lines(ran, kind="held-out")), "as many as decoding will be judged by"


def test_timing_tells_speed_and_time_left(ran: Path) -> None:
    timing = lines(ran, "timing")
    assert [line["step"] for line in timing] == [3, 6, 9, 12, 15, 18, 20]
    assert all({"seconds", "tokens_per_second", "seconds_left"} <= set(line) for line in timing)
    assert all(line["tokens_per_second"] > 0 for line in timing)
    assert timing[-1]["seconds_left"] == 0
    for line in timing:
        assert line["seconds_left"] == pytest.approx(line["seconds"] / line["step"] * (20 - line["step"]), abs=0.1)


def test_the_logged_rate_follows_the_schedule(ran: Path) -> None:
    rates = [line["learning_rate"] for line in lines(ran)]
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.02 * rates[0]


class Gradients:
    """The gradients of every update, as the optimizer gets them."""

    def __init__(self) -> None:
        self.steps: list[list[torch.Tensor]] = []

    def __enter__(self) -> list[list[torch.Tensor]]:
        def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self.steps.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"] if p.grad is not None])

        self.handle = register_optimizer_step_pre_hook(keep)
        return self.steps

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


def first_update(run: Run, start: Mapping[str, torch.Tensor], tokens: int, accumulate: int, folder: Path) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Gradients and log line of one update from given weights."""
    source, draft = pipeline.source(run, "train", run.capture()), run.new_draft()
    draft.load_state_dict(start)
    settings = {"steps": 1, "batch_tokens": tokens, "accumulate": accumulate, "optimizer": {"clip": 1e9}, "dtype": "float32"}
    with Gradients() as steps:
        Trainer(folder, draft, run.target, source, source, TrainConfig.model_validate(settings), {}).fit()
    assert len(steps) == 1
    return steps[0], lines(folder)[0]


def test_accumulating_two_micro_batches_equals_the_batch_that_holds_both(tmp_path: Path, tiny_target: Path, talks: list) -> None:
    """Two documents with answers of different length, so that a mean of two means would be another number."""
    long, short, rest = talks[6], talks[2], talks[-4:]
    whole = ["draft.chains=null", "draft.steps=3"]
    both = prepared(tmp_path / "both", tiny_target, [long, short, *rest], whole)
    draft, first = both.new_draft(), pipeline.source(both, "train", both.capture()).batch([0, 1])
    counts = torch.bincount(first.input_ids_N[first.loss_mask_N], minlength=both.target.shape.vocab_size)
    draft.initialise(both.target, counts, first)
    with torch.no_grad():
        for p in draft.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    start = {k: v.clone() for k, v in draft.state_dict().items()}
    apart, log_apart = first_update(both, start, 1, 2, tmp_path / "apart")
    together, log_together = first_update(both, start, 1000, 1, tmp_path / "together")
    singles = [
        first_update(prepared(tmp_path / name, tiny_target, [talk, *rest], whole), start, 1000, 1, tmp_path / f"run-{name}")
        for name, talk in (("long", long), ("short", short))
    ]
    assert (log_apart["micro_batches"], log_together["micro_batches"]) == (2, 1)
    off = 0.0
    for a, b, one, other in zip(apart, together, singles[0][0], singles[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
        off = max(off, float(((one + other) / 2 - b).abs().max() / b.abs().max()))
    assert off > 0.02, "a mean of means must not pass"
    for name in ("loss", "acceptance_length", "overlap", "gradient_norm"):
        assert log_apart[name] == pytest.approx(log_together[name], rel=1e-4)
    assert log_apart["step_accuracy"] == pytest.approx(log_together["step_accuracy"], rel=1e-6)


def test_evaluation_changes_neither_weights_nor_training_nor_the_random_stream(tmp_path: Path, tiny_target: Path, talks: list) -> None:
    """Evaluating after every update gives the training of evaluating once."""
    for name, every in (("often", 1), ("once", 1000)):
        pipeline.train(prepared(tmp_path / name, tiny_target, talks, [f"train.evaluate_every={every}", "train.steps=12"]))
    often, once = tmp_path / "often/run", tmp_path / "once/run"
    assert lines(often) == lines(once)
    assert len(lines(often, kind="held-out")) == 12
    last = "checkpoints/step-000012/"
    for name in ("draft.safetensors", "optimizer.pt"):
        assert (often / last / name).read_bytes() == (once / last / name).read_bytes()


def test_evaluation_by_itself_leaves_everything_as_it_was(tmp_path: Path, ran: Path, tiny_target: Path, talks: list) -> None:
    run = prepared(tmp_path, tiny_target, talks)
    draft = run.new_draft().train()
    trainer = Trainer(
        tmp_path / "run", draft, run.target, pipeline.source(run, "train", run.capture()), pipeline.source(run, "held-out", run.capture()),
        run.recipe.train, {}, run.recipe.eval.width,
    )  # fmt: skip
    trainer.device, trainer.dtype = torch.device("cpu"), torch.float32
    checkpoint.load_draft(ran, checkpoint.steps(ran)[-1], draft)
    before, stream = {k: v.clone() for k, v in draft.state_dict().items()}, torch.get_rng_state()
    first, second = trainer.evaluate(), trainer.evaluate()
    assert {k: v.value.tolist() for k, v in first.items()} == {k: v.value.tolist() for k, v in second.items()}
    assert round(float(first["loss"].value), 6) == lines(ran, kind="held-out")[-1]["loss"]
    assert all(torch.equal(v, before[k]) for k, v in draft.state_dict().items())
    assert all(p.grad is None for p in draft.parameters())
    assert all(module.training for module in draft.modules())
    assert torch.equal(torch.get_rng_state(), stream)


def test_bfloat16_compute_trains_with_float32_masters_and_moments(tmp_path: Path, tiny_target: Path, talks: list) -> None:
    overrides = ["train.dtype=bfloat16", "features.dtype=bfloat16", "train.steps=60", "draft.chains=null", "draft.steps=3"]
    pipeline.train(prepared(tmp_path, tiny_target, talks, overrides))
    run = tmp_path / "run"
    losses = [line["loss"] for line in lines(run)]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    folder = checkpoint.folder(run, 60)
    weights = load_file(folder / "draft.safetensors")
    assert {v.dtype for v in weights.values() if v.is_floating_point()} == {torch.float32}
    assert any(not torch.equal(v, v.bfloat16().float()) for v in weights.values() if v.is_floating_point())
    moments = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    assert {m.dtype for entry in moments.values() for m in entry.values()} == {torch.float32}
    reference = prepared(tmp_path / "float32", tiny_target, talks, [*overrides, "train.dtype=float32", "train.steps=60"])
    pipeline.train(reference)
    assert lines(tmp_path / "float32/run")[0]["loss"] == pytest.approx(losses[0], rel=0.03)
    assert lines(tmp_path / "float32/run")[0]["loss"] != losses[0]


class Scripted(Draft):
    """One weight; its held-out figures are read from a script by the number of evaluations so far."""

    def __init__(self, lengths: Sequence[float | None], losses: Sequence[float]) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.ones(1))
        self.script = list(zip(lengths, losses, strict=True))
        self.evaluations = 0

    def forward(self, batch: FeatureBatch, target: Any, progress: Progress) -> StepOutput:
        loss = Ratio(self.weight.square().sum(), torch.ones(()))
        if not progress.exact:
            return StepOutput(loss, {"acceptance_length": Ratio.of(9.0, 1.0)})
        length, loss_now = self.script[self.evaluations]
        self.evaluations += 1
        return StepOutput(Ratio.of(loss_now, 1.0), {"acceptance_length": Ratio.of(length or 0.0, float(length is not None))})

    def _unused(self, *_: Any) -> Any:
        raise AssertionError("training does not ask this")

    needs = initialise = start = propose = layout = plain_state = load_plain_state = engines = _unused  # type: ignore[assignment]
    from_engine = recognises = published_layers = published_name = layer_faults = _unused  # type: ignore[assignment]


class OneBatch(Source):
    """Holds one tiny sample."""

    lengths = (4,)

    def sample(self, index: int) -> Any:
        raise AssertionError("training does not ask this")

    def features(self, index: int) -> Any:
        from draftsmith.core.types import Features, Sample

        sample = Sample("one", torch.arange(4), torch.ones(4, dtype=torch.bool))
        return Features(sample, torch.zeros(4, 2), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int32))


def scripted(
    run: Path, lengths: Sequence[float | None], losses: Sequence[float], facts: Mapping[str, Any] | None = None, **config: Any
) -> checkpoint.TrainState:
    settings = TrainConfig(**({"steps": len(lengths), "evaluate_every": 1, "checkpoint_every": 1000, "dtype": "float32", "keep": 1} | config))
    return Trainer(run, Scripted(lengths, losses), None, OneBatch(), OneBatch(), settings, facts or {}).fit()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "losses", "best", "left"),
    [
        ([1.2, 1.9, 1.5, 1.4], [4.0, 3.0, 2.0, 1.0], 2, [2, 4]),
        ([1.9, 1.2, 1.5, 1.4], [4.0, 3.0, 2.0, 1.0], 1, [1, 4]),
        ([1.2, 1.3, 1.5, 1.9], [1.0, 2.0, 3.0, 4.0], 4, [4]),
        ([1.2, 1.9, 1.9, 1.4], [4.0, 3.0, 2.0, 1.0], 2, [2, 4]),
        ([None, None, 1.0, None], [4.0, 3.0, 2.0, 1.0], 3, [3, 4]),
    ],
    ids=["longest wins over least loss", "first", "last", "a tie keeps the earlier", "no value is no best"],
)
def test_the_best_checkpoint_is_that_of_the_longest_simulated_acceptance(
    tmp_path: Path, lengths: list[float | None], losses: list[float], best: int, left: list[int]
) -> None:
    state = scripted(tmp_path, lengths, losses)
    assert state.best_step == best
    assert state.best_acceptance_length == max(x for x in lengths if x is not None)
    assert checkpoint.steps(tmp_path) == left
    assert checkpoint.best_step(tmp_path) == best


def test_checkpoints_come_when_due_and_after_every_evaluation(tmp_path: Path) -> None:
    scripted(tmp_path, [1.0] * 10, [1.0] * 10, evaluate_every=4, checkpoint_every=3, keep=99)
    assert checkpoint.steps(tmp_path) == [3, 4, 6, 8, 9, 10]


def test_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    scripted(tmp_path, [1.0, 2.0], [1.0, 1.0], {"seed": 1})
    before = cli.contents(tmp_path)
    assert scripted(tmp_path, [1.0, 2.0], [1.0, 1.0], {"seed": 1}).step == 2
    assert cli.contents(tmp_path) == before


@pytest.mark.parametrize(("before", "now", "named"), [({"a": 1}, {"a": 2}, "a = 1.*now says 2"), ({"a": 1}, {"a": 1, "b": 3}, "b")])
def test_facts_that_differ_or_were_not_known_are_refused(tmp_path: Path, before: dict, now: dict, named: str) -> None:
    scripted(tmp_path, [1.0], [1.0], before)
    with pytest.raises(ValueError, match=named):
        scripted(tmp_path, [1.0], [1.0], now)


def test_training_restores_what_it_switches_on(tmp_path: Path) -> None:
    """Deterministic algorithms, their filling of memory, and the signal handlers."""
    import signal

    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    modes = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    scripted(tmp_path, [1.0], [1.0])
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory) == modes
    assert not [t for t in threading.enumerate() if t.name == "draftsmith-source"]
