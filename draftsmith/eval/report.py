"""The acceptance report: held-out prompts decoded with and without the draft, batched for acceptance, one by one for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from draftsmith.core.config import Config, Positive
from draftsmith.core.log import progress, table
from draftsmith.eval.acceptance import Acceptance
from draftsmith.eval.decode import Clock, Decoded, Decoder

_REPEATS = 8
"""Passes timed for each width when costs are measured."""


class EvalConfig(Config):
    """How drafts are judged."""

    width: Positive = 5
    """Drafted tokens per step for the acceptance figures."""
    max_new: Positive = 160
    """Longest answer in tokens."""
    batch: Positive = 64
    """Prompts decoded together for the acceptance figures: below about 50 rows a CPU multiplies at a fraction of its rate."""
    timed_prompts: Positive = 10
    """Prompts decoded alone, plain and speculative in turn, for the wall-clock figures."""
    timed_tokens: Positive = 80
    """Longest answer of those."""
    dtype: Literal["auto", "bfloat16", "float32"] = "float32"
    """Decoding dtype. In float32 speculative output equals plain output token for token."""
    prompts: Positive | None = None
    """Use this many held-out prompts, evenly spread; all when absent."""


@dataclass(frozen=True)
class Prompt:
    """Token ids up to where the target answers; `kind` groups figures."""

    id: str
    kind: str
    token_ids: tuple[int, ...]


def evaluate(plain: Decoder, speculative: Decoder, prompts: Sequence[Prompt], config: EvalConfig) -> dict[str, Any]:
    """Everything of the report that decoding can tell; `speculative` differs from `plain` in its draft alone."""
    plain_answers = _batched("plain", plain, prompts, config)
    answers = _batched("draft", speculative, prompts, config)
    differing = [p.id for p, a, b in zip(prompts, plain_answers, answers, strict=True) if a.token_ids != b.token_ids]
    overall = Acceptance.of(answers, config.width)
    kinds = sorted({p.kind for p in prompts})
    by_kind = {k: Acceptance.of((a for p, a in zip(prompts, answers, strict=True) if p.kind == k), config.width) for k in kinds}
    timed = spread(prompts, config.timed_prompts)
    costs = measure_costs(speculative, timed[0], config.width)
    width, predicted = best_width(overall, costs)
    clock = _race(plain, _with_width(speculative, width), timed, config.timed_tokens)
    differing += [i for i in clock.pop("differing") if i not in differing]
    return {
        "acceptance_length": round(overall.length, 4), "speedup": clock["speedup"], "greedy_identical": not differing, "prompts": len(prompts),
        "draft_tokens": config.width, "temperature": 0.0, "acceptance_rule": "greedy: equal to the target's arg-max",
        "answer_tokens": sum(len(a.token_ids) for a in answers), "differing_prompts": differing,
        "acceptance": overall.as_dict(), "by_kind": {k: a.as_dict() | {"prompts": sum(p.kind == k for p in prompts)} for k, a in by_kind.items()},
        "best_width": width, "predicted_speedup": predicted, "costs_ms": costs, "wall_clock": clock, "dtype": config.dtype,
    }  # fmt: skip


def spread(items: Sequence[Any], count: int | None) -> list[Any]:
    """`count` items at even distances; all when None."""
    if count is None or count >= len(items):
        return list(items)
    return [items[int((i + 0.5) * len(items) / count)] for i in range(count)]


def measure_costs(decoder: Decoder, prompt: Prompt, width: int) -> dict[str, list[float]]:
    """Milliseconds of a verification pass over 1 … width + 1 tokens, and of drafting 1 … width tokens, after this prompt."""
    verify, draft = [], []
    for w in range(width + 1):
        timed = Decoder(decoder.model, decoder.target, (), decoder.draft if w else None, w)
        clock = Clock()
        timed.decode([prompt.token_ids], _REPEATS * (w + 1), clock)
        verify.append(round(1e3 * sum(clock.verify) / clock.passes, 2))
        if w:
            draft.append(round(1e3 * sum(clock.draft) / clock.passes, 2))
    return {"verify": verify, "draft": draft}


def best_width(acceptance: Acceptance, costs: dict[str, list[float]]) -> tuple[int, list[float]]:
    """The width with the highest predicted speedup, and the prediction for each width from 1 on."""
    rates = acceptance.position_rates
    plain = costs["verify"][0]
    predicted = [round((1 + sum(rates[:w])) * plain / (costs["verify"][w] + costs["draft"][w - 1]), 3) for w in range(1, acceptance.width + 1)]
    return 1 + max(range(len(predicted)), key=predicted.__getitem__), predicted


def show(report: dict[str, Any]) -> None:
    """Print the report as one table."""
    width = report["draft_tokens"]
    header = ["prompts", "number", "acceptance length", *(f"@{k}" for k in range(1, width + 1))]
    rows = [[kind, a["prompts"], *_cells(a)] for kind, a in report["by_kind"].items()]
    rows.append(["all", report["prompts"], *_cells(report["acceptance"])])
    table(f"Held-out prompts, {width} drafted tokens, greedy, {report['dtype']}; @k: accepted at position k / passes", header, rows)
    clock = report["wall_clock"]
    same = "all" if report["greedy_identical"] else f"all but {len(report['differing_prompts'])}"
    rows = [
        ["plain", f"{clock['plain_tokens_per_second']:.1f}", "1.00", ""],
        [f"speculative, {report['best_width']} drafted", f"{clock['tokens_per_second']:.1f}", f"{report['speedup']:.2f}", f"{same} equal to plain greedy"],
    ]
    table(f"One prompt at a time ({clock['prompts']} prompts)", ["decoding", "tokens/s", "speedup", "outputs"], rows)


def _cells(acceptance: dict[str, Any]) -> list[str]:
    return [f"{acceptance['acceptance_length']:.2f}", *(f"{r:.0%}" for r in acceptance["position_rates"])]


def _batched(title: str, decoder: Decoder, prompts: Sequence[Prompt], config: EvalConfig) -> list[Decoded]:
    """All prompts, in batches of similar length; answers in the order of the prompts."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
    answers: dict[int, Decoded] = {}
    with progress(title, len(prompts), "prompts") as advance:
        for start in range(0, len(order), config.batch):
            rows = order[start : start + config.batch]
            decoded = decoder.decode([prompts[i].token_ids for i in rows], config.max_new)
            answers |= dict(zip(rows, decoded, strict=True))
            advance(len(rows))
    return [answers[i] for i in range(len(prompts))]


def _race(plain: Decoder, speculative: Decoder, prompts: Sequence[Prompt], max_new: int) -> dict[str, Any]:
    """Both on the same prompts in turn, after one unmeasured answer each."""
    seconds = {"plain": 0.0, "speculative": 0.0}
    tokens, differing = 0, []
    runs: dict[str, Callable[[Prompt], list[int]]] = {
        "plain": lambda p: plain.decode([p.token_ids], max_new)[0].token_ids,
        "speculative": lambda p: speculative.decode([p.token_ids], max_new)[0].token_ids,
    }
    for run in runs.values():
        run(prompts[0])
    with progress("race", len(prompts), "prompts") as advance:
        for prompt in prompts:
            outputs = []
            for name, run in runs.items():
                began = time.perf_counter()
                outputs.append(run(prompt))
                seconds[name] += time.perf_counter() - began
            tokens += len(outputs[0])
            if outputs[0] != outputs[1]:
                differing.append(prompt.id)
            advance(1)
    return {
        "prompts": len(prompts), "tokens": tokens, "differing": differing, "threads": torch.get_num_threads(),
        "plain_tokens_per_second": round(tokens / seconds["plain"], 2), "tokens_per_second": round(tokens / seconds["speculative"], 2),
        "speedup": round(seconds["plain"] / seconds["speculative"], 4),
    }  # fmt: skip


def _with_width(decoder: Decoder, width: int) -> Decoder:
    return Decoder(decoder.model, decoder.target, decoder.end_ids, decoder.draft, width, decoder.sampling)
