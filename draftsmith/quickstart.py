"""`draftsmith quickstart`: everything once, for a real target, within a time budget.

How many conversations and how many steps fit the budget is derived here from speeds measured on this machine, printed, and kept in `run.yaml`; from then
on the run is reproducible, and the same command continues a stopped one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.core.config import dump, load, parse
from draftsmith.core.env import cache_dir, dtype_of
from draftsmith.core.log import say, stage
from draftsmith.core.types import FeatureBatch, Progress
from draftsmith.data import bundled
from draftsmith.data.chat import AnswerSettings
from draftsmith.eval.answers import record
from draftsmith.eval.report import spread
from draftsmith.features.pack import pack
from draftsmith.pipeline import Run, capture, evaluate_run, export_run, plain_decoder, target_directory, train, write_report
from draftsmith.recipe import Recipe
from draftsmith.train.optim import apply, build

RECIPE = Path(__file__).parent / "data" / "bundled" / "quickstart.yaml"
CAPTURE_SHARE = 0.5
"""Share of the budget of capture and training that goes to capture. A guess: docs/experiments/quickstart.md says what is known."""


def quickstart(target: str, minutes: float, run: str) -> dict[str, Any]:
    """Run all stages; leaves run.yaml, features, checkpoints, export and report.json in the run's folder."""
    began = time.perf_counter()
    seconds: dict[str, float] = {}
    with stage("target", seconds):
        target_directory(target)
    recipe = Path(run) / "run.yaml"
    if recipe.exists():
        say(f"continuing {recipe}")
        planned = Run(load(Recipe, recipe))
    else:
        with stage("answers", seconds):
            planned = Run(_with_data(target, run))
        planned = _plan(planned, 60 * minutes - (time.perf_counter() - began))
    with stage("capture", seconds):
        capture(planned)
    with stage("train", seconds):
        train(planned)
    with stage("evaluate", seconds):
        report = evaluate_run(planned)
    with stage("export", seconds):
        export_run(planned)
    seconds["total"] = round(time.perf_counter() - began, 2)
    report["seconds"] = seconds
    write_report(planned, report)
    say(f"done in {seconds['total']:.0f} s; everything is in {run}: report.json, export/ (serve this), run.yaml (run it again)")
    return report


def _with_data(target: str, run: str) -> Recipe:
    """The bundled recipe for this target. Another target than SmolLM2 first gives its own answers to the bundled prompts."""
    overrides = [f"run={run}", f"target={target}"]
    if target != "smollm2":
        where = target_directory(target)
        own = Run(parse(Recipe, RECIPE.read_text(), overrides, str(RECIPE)))
        decoder = plain_decoder(where, own.device, torch.float32, own.template)
        folder = cache_dir() / "answers" / own.target.fingerprint
        for split, count in (("train", OTHER_TARGET_PROMPTS), ("held-out", None)):
            asked = spread(bundled.prompts(split), count)
            record(asked, decoder, own.template, folder / f"{split}.jsonl", AnswerSettings(own.recipe.data.max_answer), batch=32)
        overrides += [f"data.train={folder / 'train.jsonl'}", f"data.held_out={folder / 'held-out.jsonl'}"]
    return parse(Recipe, RECIPE.read_text(), overrides, str(RECIPE))


@dataclass(frozen=True)
class Speeds:
    """What was measured on this machine: captured tokens per second, seconds per training step, tokens per second of exact evaluation on
    held-out features, and seconds to judge one held-out prompt by decoding."""

    capture_tokens: float
    step: float
    validated_tokens: float
    prompt: float


def fit(speeds: Speeds, budget: float, tokens: int, samples: int, held_out_tokens: int, prompts: int) -> dict[str, int]:
    """Conversations, steps and held-out prompts that fit `budget` seconds.

    Evaluation gets what all prompts need, at most `EVALUATE_SHARE`; held-out features come next; the rest is split between capture and training.
    """
    judged = max(1, min(prompts, int(EVALUATE_SHARE * budget / speeds.prompt)))
    held_out = held_out_tokens / speeds.capture_tokens + VALIDATIONS * held_out_tokens / speeds.validated_tokens
    left = budget - judged * speeds.prompt - held_out - FIXED_SECONDS
    if left <= 0:
        raise ValueError(f"{budget:.0f} s are too few on this machine: evaluation and held-out features alone take longer; give more --minutes")
    wanted = CAPTURE_SHARE * left * speeds.capture_tokens
    limit = max(8, min(samples, int(samples * wanted / tokens)))
    training = left - limit / samples * tokens / speeds.capture_tokens
    steps = max(20, int(training / speeds.step))
    return {"data.limit": limit, "train.steps": steps, "train.evaluate_every": -(-steps // VALIDATIONS), "eval.prompts": judged}


def _plan(run: Run, budget: float) -> Run:
    """Fit the recipe to the budget from measured speeds, and print the arithmetic."""
    began = time.perf_counter()
    say(f"measuring this machine: {torch.get_num_threads()} threads, training in {dtype_of(run.recipe.train.dtype, run.device)}")
    found, held_out = run.samples("train"), run.samples("held-out")
    maker = run.capture()
    maker(found[0])
    clock = time.perf_counter()
    trial = [maker(s) for s in spread(found, TRIAL_SAMPLES)]
    rate = sum(map(len, trial)) / (time.perf_counter() - clock)
    speeds = Speeds(rate, *_training_speeds(run, pack(trial)), _prompt_seconds(run))
    budget -= time.perf_counter() - began
    tokens, held_out_tokens = (sum(map(len, samples)) for samples in (found, held_out))
    chosen = fit(speeds, budget, tokens, len(found), held_out_tokens, len(run.conversations("held-out")))
    say(
        f"{speeds.capture_tokens:,.0f} captured tokens/s, {speeds.step:.2f} s a training step, {speeds.prompt:.2f} s to judge a prompt; "
        f"in {budget:.0f} s: " + ", ".join(f"{key} = {value:,}" for key, value in chosen.items())
    )
    return Run(parse(Recipe, dump(run.recipe), [f"{key}={value}" for key, value in chosen.items()]))


def _training_speeds(run: Run, batch: FeatureBatch) -> tuple[float, float]:
    """On a draft that is thrown away: seconds of an update, the mean over the schedules, scaled to full batches; and tokens per second of an exact
    evaluation."""
    recipe = run.recipe
    draft = run.new_draft()
    draft.initialise(run.target, torch.bincount(batch.input_ids_N, minlength=run.target.shape.vocab_size), batch)
    optimizer = build(draft, recipe.train.optimizer)
    dtype = dtype_of(recipe.train.dtype, run.device)
    fractions = [(i + 0.5) / STEP_TRIALS for i in range(STEP_TRIALS)]
    seconds = 0.0
    for i, fraction in enumerate([fractions[-1], *fractions]):
        clock = time.perf_counter()
        with torch.autocast(run.device, dtype=dtype, enabled=dtype != torch.float32):
            output = draft(batch.to(run.device), run.target, Progress(fraction, i))
        output.loss.num.backward()
        computed = time.perf_counter()
        apply(draft, optimizer, float(output.loss.den), 0.0, 1.0)
        if i:  # the first one warms up
            scale = recipe.train.batch_tokens / len(batch.input_ids_N)
            seconds += (computed - clock) * scale * recipe.train.accumulate + time.perf_counter() - computed
    clock = time.perf_counter()
    with torch.no_grad():
        draft(batch, run.target, Progress(1.0, exact=True))
    return seconds / STEP_TRIALS, len(batch.input_ids_N) / (time.perf_counter() - clock)


def _prompt_seconds(run: Run) -> float:
    """Time to judge one held-out prompt: decoded in a batch, plainly and with drafts of which about one in `width` is accepted, and its share of the race."""
    settings = run.recipe.eval
    plain = plain_decoder(run.where, run.device, dtype_of(settings.dtype, run.device), run.template)

    def seconds(rows: int, query: int) -> float:
        cache = plain.model.new_cache()
        ids = torch.ones(rows, 100, dtype=torch.long, device=run.device)
        plain.model.run(ids, cache=cache)
        clock = time.perf_counter()
        for _ in range(3):
            plain.target.logits(plain.model.run(ids[:, :query], cache=cache).last_BQH)
        return (time.perf_counter() - clock) / 3

    one, batch, wide = seconds(1, 1), seconds(settings.batch, 1), seconds(settings.batch, settings.width + 1)
    batched = settings.max_new * (batch + 0.55 * wide) / settings.batch
    race = 1.8 * settings.timed_tokens * one * settings.timed_prompts / 100
    return batched + race


EVALUATE_SHARE = 0.4
"""Largest share of the budget that evaluation may take; fewer held-out prompts are judged when all would take longer."""
VALIDATIONS = 2
"""Evaluations on held-out features during training; the better checkpoint is judged."""
FIXED_SECONDS = 25.0
"""Loading models, checksums, checkpoints and the export."""
OTHER_TARGET_PROMPTS = 600
"""Training prompts that a target without recorded answers is asked."""
TRIAL_SAMPLES = 12
STEP_TRIALS = 8
