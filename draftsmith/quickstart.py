"""`draftsmith quickstart`: everything once, for a real target, within a time budget.

What fits the budget is derived here from speeds measured on this machine, printed, and kept in `run.yaml`: how many conversations before capture, how many
steps after it, when the time left is known. From then on the run is reproducible, and the same command continues a stopped one.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from draftsmith.core.config import dump, load, parse
from draftsmith.core.env import cache_dir, dtype_of
from draftsmith.core.log import say, stage
from draftsmith.data import bundled
from draftsmith.data.chat import AnswerSettings
from draftsmith.eval.answers import answer, record
from draftsmith.eval.prompts import spread
from draftsmith.pipeline import Run, capture, evaluate_run, plain_decoder, resolved, source, train, write_report
from draftsmith.recipe import Recipe
from draftsmith.shipping import export_run
from draftsmith.target.config import TargetConfig
from draftsmith.train import checkpoint
from draftsmith.train.loop import Trainer

RECIPE = Path(__file__).parent / "data" / "bundled" / "quickstart.yaml"
CAPTURE_SHARE = 0.5
"""Share of the budget of capture and training that goes to capture. A guess: docs/experiments/quickstart.md says what is known."""


def quickstart(target: str, minutes: float, run: str) -> dict[str, Any]:
    """Run all stages; leaves run.yaml, features, checkpoints, export and report.json in the run's folder."""
    began = time.perf_counter()
    seconds: dict[str, float] = {}

    def left() -> float:
        return 60 * minutes - (time.perf_counter() - began)

    with stage("target", seconds):
        resolved(TargetConfig(where=target))
    recipe = Path(run) / "run.yaml"
    if recipe.exists():
        say(f"continuing {recipe}")
        planned, evaluation = Run(load(Recipe, recipe)), None
    else:
        with stage("answers", seconds):
            planned = Run(_with_data(target, run, left()))
        planned, evaluation = _plan_capture(planned, left())
    with stage("capture", seconds):
        capture(planned)
    if not checkpoint.steps(planned.folder):  # also of a run that was stopped before its first checkpoint: its steps were not fitted yet, or to less time
        evaluation = _prompt_seconds(planned) * (planned.recipe.eval.prompts or 0) if evaluation is None else evaluation
        planned = _plan_steps(planned, left() - evaluation)
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


def _with_data(target: str, run: str, budget: float) -> Recipe:
    """The bundled recipe for this target; another than SmolLM2 first gives its own answers to bundled prompts, as many as fit its share of `budget`."""
    overrides = [f"run={run}", f"target={target}"]
    if target != "smollm2":
        folder = _own_answers(Run(parse(Recipe, RECIPE.read_text(), overrides, str(RECIPE))), ANSWER_SHARE * budget)
        overrides += [f"data.train={folder / 'train.jsonl'}", f"data.held_out={folder / 'held-out.jsonl'}"]
    return parse(Recipe, RECIPE.read_text(), overrides, str(RECIPE))


def _own_answers(run: Run, budget: float) -> Path:
    """Folder of the target's recorded answers; what an earlier call recorded is kept."""
    folder = cache_dir() / "answers" / run.target.fingerprint
    paths = {split: folder / f"{split}.jsonl" for split in ("train", "held-out")}
    if not all(path.exists() for path in paths.values()):
        decoder, longest = plain_decoder(run.chosen, run.device, torch.float32, run.template), run.recipe.data.max_answer
        clock = time.perf_counter()
        answer(spread(bundled.prompts("train"), ANSWER_BATCH), decoder, run.template, longest, ANSWER_BATCH, lambda _tokens: None)
        counts = answerable(budget, (time.perf_counter() - clock) / ANSWER_BATCH)
        for split, path in paths.items():
            record(spread(bundled.prompts(split), counts[split]), decoder, run.template, path, AnswerSettings(longest), ANSWER_BATCH)
    return folder


def answerable(budget: float, each: float) -> dict[str, int]:
    """Training and held-out prompts whose answers fit `budget` seconds, at `each` a prompt: six to one, and never fewer than training can use."""
    prompts = int(budget / each)
    return {"train": max(4 * ANSWER_BATCH, min(OTHER_TARGET_PROMPTS, prompts * 6 // 7)), "held-out": max(16, min(OTHER_TARGET_HELD_OUT, prompts // 7))}


def fit_capture(rate: float, prompt: float, budget: float, tokens: int, samples: int, held_out_tokens: int, prompts: int) -> tuple[dict[str, int], float]:
    """Training conversations to capture and held-out prompts to judge within `budget` seconds, and the seconds that judging will take.

    `rate`: captured tokens per second; `prompt`: seconds to judge one. Evaluation gets what all prompts need, at most `EVALUATE_SHARE`; held-out features
    come next; of the rest capture gets `CAPTURE_SHARE`. Raises ValueError when nothing is left.
    """
    judged = max(1, min(prompts, int(EVALUATE_SHARE * budget / prompt)))
    rest = budget - judged * prompt - held_out_tokens / rate - FIXED_SECONDS
    if rest <= 0:
        raise ValueError(
            f"{max(budget, 0):.0f} s are left of the budget, too few on this machine: evaluation and held-out features alone take {budget - rest:.0f} s. "
            "Give more --minutes; recorded answers are kept, so a second call has that time too"
        )
    limit = max(8, min(samples, int(samples * CAPTURE_SHARE * rest * rate / tokens)))
    return {"data.limit": limit, "eval.prompts": judged}, judged * prompt


def fit_steps(update: float, validated: float, budget: float, held_out_tokens: int) -> dict[str, int]:
    """Training steps within `budget` seconds. `update`: seconds of one; `validated`: tokens per second of exact evaluation on held-out features."""
    steps = max(20, int((budget - FIXED_SECONDS - VALIDATIONS * held_out_tokens / validated) / update))
    return {"train.steps": steps, "train.evaluate_every": -(-steps // VALIDATIONS)}


def _plan_capture(run: Run, budget: float) -> tuple[Run, float]:
    """Fit conversations and prompts to the budget; also the seconds that evaluation will take."""
    began = time.perf_counter()
    say(f"measuring this machine: {torch.get_num_threads()} threads, training in {dtype_of(run.recipe.train.dtype, run.device)}")
    found, held_out = run.samples("train"), run.samples("held-out")
    maker = run.capture()
    maker(found[0])
    clock = time.perf_counter()
    trial = [maker(s) for s in spread(found, TRIAL_SAMPLES)]
    rate = sum(map(len, trial)) / (time.perf_counter() - clock)
    prompt = _prompt_seconds(run)
    budget -= time.perf_counter() - began
    tokens, held_out_tokens = (sum(map(len, samples)) for samples in (found, held_out))
    chosen, evaluation = fit_capture(rate, prompt, budget, tokens, len(found), held_out_tokens, len(run.conversations("held-out")))
    return _with(run, chosen, f"{rate:,.0f} captured tokens/s, {prompt:.2f} s to judge a prompt; {budget:.0f} s left"), evaluation


def _plan_steps(run: Run, budget: float) -> Run:
    """Fit the steps to what is left, from updates of a draft that is thrown away."""
    began = time.perf_counter()
    learning, held_out = source(run, "train", None), source(run, "held-out", None)
    draft = run.new_draft()
    some = learning.batch(spread(range(len(learning)), TRIAL_SAMPLES)).to(run.device)
    draft.initialise(run.target, torch.bincount(some.input_ids_N, minlength=run.target.shape.vocab_size), some)
    trainer = Trainer(run.folder, draft, run.target, learning, held_out, run.recipe.train, {}, run.recipe.eval.width)
    update, validated = trainer.trial([(i + 0.5) / TRIAL_UPDATES for i in range(TRIAL_UPDATES)])
    budget -= time.perf_counter() - began
    chosen = fit_steps(update, validated, budget, sum(held_out.lengths))
    return _with(run, chosen, f"{update:.2f} s an update; {budget:.0f} s left for training")


def _with(run: Run, chosen: dict[str, int], measured: str) -> Run:
    say(f"{measured}: " + ", ".join(f"{key} = {value:,}" for key, value in chosen.items()))
    return Run(parse(Recipe, dump(run.recipe), [f"{key}={value}" for key, value in chosen.items()]))


def _prompt_seconds(run: Run) -> float:
    """Time to judge one held-out prompt: decoded in a batch, plainly and with drafts of which about one in `width` is accepted, and its share of the race."""
    settings = run.recipe.eval
    plain = plain_decoder(run.chosen, run.device, dtype_of(settings.dtype, run.device), run.template)

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
OTHER_TARGET_PROMPTS, OTHER_TARGET_HELD_OUT = 600, 100
"""Prompts that a target without recorded answers is asked at most."""
ANSWER_SHARE = 0.35
"""Share of the budget that recording its answers may take."""
ANSWER_BATCH = 32
TRIAL_SAMPLES = 12
TRIAL_UPDATES = 12
