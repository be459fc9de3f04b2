"""The training loop: any draft, any source.

Reproducible by construction: the order of data is a function of (seed, micro-batches consumed), random choices of a step derive from (seed, step), and
a checkpoint holds weights, moments and counts. So a run killed at any moment continues to the same bits on a CPU.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import StrictInt

from draftsmith.core.config import Config, Positive
from draftsmith.core.env import dtype_of
from draftsmith.core.log import Interrupted, progress, say
from draftsmith.core.types import Progress, Ratio, StepOutput
from draftsmith.drafts.base import Draft
from draftsmith.features.source import Source
from draftsmith.target.weights import Target
from draftsmith.train import checkpoint
from draftsmith.train.optim import OptimConfig, apply, build, rate
from draftsmith.train.tracking import Tracker, plain


class TrainConfig(Config):
    """How long, how fast and how carefully to train."""

    steps: Positive = 1000
    """Optimizer updates."""
    batch_tokens: Positive = 2048
    """Tokens of one packed micro-batch."""
    accumulate: Positive = 1
    """Micro-batches per update; equals one large batch."""
    optimizer: OptimConfig = OptimConfig()
    """Optimizer settings."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute dtype: auto, bfloat16 or float32. Weights and moments are float32 in any case."""
    seed: StrictInt = 0
    """Seed of initial weights, order of data and chains."""
    log_every: Positive = 10
    """Updates between log lines."""
    evaluate_every: Positive = 500
    """Updates between evaluations on held-out features; each is followed by a checkpoint, and the last update by both."""
    checkpoint_every: Positive = 250
    """Updates between checkpoints."""
    keep: Positive = 2
    """Checkpoints to keep besides the best."""
    tensorboard: bool = False
    """Also write TensorBoard files (needs the extra `tensorboard`)."""


@dataclass
class Trainer:
    """One training run: what is trained, on what, and where it is kept."""

    run: Path
    draft: Draft
    target: Target
    train: Source
    held_out: Source
    config: TrainConfig
    facts: Mapping[str, Any]
    drafted: int | None = None
    """Tokens a step in evaluations: as many as the draft will be judged by in decoding; as many as in training when None."""

    def fit(self) -> checkpoint.TrainState:
        """Train to the end, from the last checkpoint if there is one.

        Raises Interrupted on Ctrl-C, DiskError when a checkpoint does not fit, ValueError when a checkpoint is of other settings.
        """
        config = self.config
        self.device = next(self.draft.parameters()).device
        self.dtype = dtype_of(config.dtype, self.device.type)
        self.optimizer = build(self.draft, config.optimizer)
        checkpoint.clear_leftovers(self.run)
        state = self._resume()
        tracker = Tracker(self.run, state.step, config.tensorboard)
        stream = self.train.stream(config.batch_tokens, config.seed, state.micro)
        tokens = 0
        with closing(stream), _deterministic(self.device), _deferred_signals() as stop, progress("train", config.steps, "steps") as advance:
            advance(state.step)
            began = time.perf_counter()
            first = state.step
            while state.step < config.steps:
                learned, norm, seen = self._update(stream, state)
                tokens += seen
                state.step += 1
                last = state.step == config.steps
                advance(1, _note(learned))
                if state.step % config.log_every == 0 or last:
                    tracker.log(state.step, self._line(learned, norm, state), _timing(began, tokens, state.step - first, config.steps - state.step))
                evaluated = state.step % config.evaluate_every == 0 or last
                if evaluated:
                    self._select(state, tracker)
                if evaluated or state.step % config.checkpoint_every == 0 or stop:
                    checkpoint.save_checkpoint(self.run, self.draft, self.optimizer, state, self.facts, config.keep)
                if stop and not last:
                    raise Interrupted(f"stopped at step {state.step:,} of {config.steps:,}; the checkpoint is saved, and the same command continues from it")
        return state

    def trial(self, fractions: Sequence[float]) -> tuple[float, float]:
        """Mean seconds of an update at these fractions of training, and tokens per second of exact evaluation, under the conditions of `fit`: the
        same stream with its thread, the same determinism. It changes the draft: throw it away.
        """
        config = self.config
        self.device = next(self.draft.parameters()).device
        self.dtype = dtype_of(config.dtype, self.device.type)
        self.optimizer = build(self.draft, config.optimizer)
        stream = self.train.stream(config.batch_tokens, config.seed, 0)
        with closing(stream), _deterministic(self.device):
            self._update(stream, checkpoint.TrainState(step=int(fractions[-1] * config.steps)))  # warms up
            began = time.perf_counter()
            for fraction in fractions:
                self._update(stream, checkpoint.TrainState(step=int(fraction * config.steps)))
            updated = time.perf_counter()
            batch = next(stream).to(self.device)
            asked = time.perf_counter()
            with torch.no_grad(), self._autocast():
                self.draft(batch, self.target, self._exact)
            return (updated - began) / len(fractions), len(batch.input_ids_N) / (time.perf_counter() - asked)

    def evaluate(self) -> dict[str, Ratio]:
        """Exact metrics on held-out features: every chain, all steps, acceptance as decoding would meet it."""
        self.draft.eval()
        total: dict[str, Ratio] = {}
        with torch.no_grad(), self._autocast(), closing(self.held_out.in_order(self.config.batch_tokens)) as batches:
            for batch in batches:
                _add(total, self.draft(batch.to(self.device), self.target, self._exact))
        self.draft.train()
        return total

    def _update(self, stream: Iterator[Any], state: checkpoint.TrainState) -> tuple[dict[str, Ratio], float, int]:
        total: dict[str, Ratio] = {}
        tokens = 0
        for _ in range(self.config.accumulate):
            batch = next(stream).to(self.device)
            with self._autocast():
                output = self.draft(batch, self.target, Progress(state.step / self.config.steps, self.config.seed * 1_000_003 + state.micro))
            output.loss.num.backward()
            _add(total, output)
            state.micro += 1
            tokens += len(batch.input_ids_N)
        learning_rate = rate(self.config.optimizer, state.step, self.config.steps)
        norm = apply(self.draft, self.optimizer, float(total["loss"].den), learning_rate, self.config.optimizer.clip)
        return total, norm, tokens

    def _select(self, state: checkpoint.TrainState, tracker: Tracker) -> None:
        metrics = plain(self.evaluate())
        tracker.log(state.step, metrics, {}, kind="held-out")
        length = metrics.get("acceptance_length") or 0.0
        if length > state.best_acceptance_length:
            state.best_step, state.best_acceptance_length, state.drafted = state.step, length, self.drafted
        say(
            f"step {state.step:,}: simulated acceptance length on held-out features {length:.3f} "
            f"(best {state.best_acceptance_length:.3f} at step {state.best_step:,})"
        )

    @property
    def _exact(self) -> Progress:
        return Progress(1.0, exact=True, drafted=self.drafted)

    def _resume(self) -> checkpoint.TrainState:
        found = checkpoint.steps(self.run)
        if not found:
            return checkpoint.TrainState()
        checkpoint.require_same(self.run, self.facts)
        state, _ = checkpoint.read_state(self.run, found[-1])
        checkpoint.load_draft(self.run, found[-1], self.draft)
        checkpoint.load_optimizer(self.run, found[-1], self.optimizer)
        say(f"resuming {self.run} at step {state.step:,} of {self.config.steps:,}")
        return state

    def _line(self, learned: Mapping[str, Ratio], norm: float, state: checkpoint.TrainState) -> dict[str, Any]:
        learning_rate = rate(self.config.optimizer, state.step - 1, self.config.steps)
        return plain(learned) | {"gradient_norm": round(norm, 6), "learning_rate": learning_rate, "micro_batches": state.micro}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)


def _add(total: dict[str, Ratio], output: StepOutput) -> None:
    for name, ratio in {"loss": output.loss.detach(), **output.metrics}.items():
        total[name] = total[name] + ratio if name in total else ratio


def _note(learned: Mapping[str, Ratio]) -> str:
    length = learned.get("acceptance_length")
    return f"loss {float(learned['loss'].value):.3f}" + (f", acceptance length {float(length.value):.2f}" if length else "")


def _timing(began: float, tokens: int, done: int, left: int) -> dict[str, float]:
    seconds = time.perf_counter() - began
    return {"seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 1), "seconds_left": round(seconds / done * left, 1)}


@contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Let Ctrl-C and SIGTERM finish the step: the list becomes true. A second Ctrl-C stops at once."""
    caught: list[int] = []

    def note(number: int, _frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_memory: Any = torch.utils.deterministic
"""Its one attribute is created by a module class, which type checkers do not see."""


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """On a CPU, scattered additions run in a fixed order; resuming to the same bits needs it."""
    before, filled = torch.are_deterministic_algorithms_enabled(), _memory.fill_uninitialized_memory
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        _memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        _memory.fill_uninitialized_memory = filled
