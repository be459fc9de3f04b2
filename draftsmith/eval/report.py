"""The acceptance report: prompts decoded with and without the draft, batched for acceptance, one by one for the clock."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftsmith.core.log import progress, warn
from draftsmith.drafts.base import Sampling, Tree, Width, depth, drafted
from draftsmith.eval.acceptance import Acceptance
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.decode import Decoded, Decoder, Pass
from draftsmith.eval.prompts import Prompt, spread
from draftsmith.eval.sweep import best, curve, measure_costs, places, widths_of

GREEDY_RULE = "greedy: equal to the target's arg-max"
DRAWN_RULE = "sampling: accepted with probability min(1, p/q), replaced from max(p - q, 0)"
CHOSEN_RULE = "sampling: equal to the token drawn from the target"


@dataclass(frozen=True)
class Batched:
    """Answers of one way of decoding in the order of the prompts, and the seconds they took in batches."""

    answers: list[Decoded]
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(len(a.token_ids) for a in self.answers) / self.seconds


def evaluate(plain: Decoder, speculative: Decoder, prompts: Sequence[Prompt], config: EvalConfig) -> dict[str, Any]:
    """Everything of the report that decoding can tell; `speculative` differs from `plain` in its draft alone. Trees that target or draft cannot do are
    left out with a warning and their reason."""
    ways: dict[str, Width] = {"chain": config.width}
    reason = None
    if config.tree is not None:
        passes = max(config.max_new, config.timed_tokens, (config.rounds + 1) * len(widths_of(config.tree)))
        reason = replace(speculative, width=config.tree).no_trees(max(len(p.token_ids) for p in prompts), passes)
        if reason is None:
            ways["tree"] = config.tree
        else:
            warn(f"no trees here, chains alone: {reason}")
    base = _batched("plain", _seeded(plain, config, 0), prompts, config)
    judged = {name: _judge(name, plain, speculative, width, base, prompts, config) for name, width in ways.items()}
    race = _race(plain, speculative, {name: j["recommended"] for name, j in judged.items()}, prompts, config)
    differing = _finish(judged, race)
    chain = judged["chain"]
    return {
        "acceptance_length": chain["acceptance"]["acceptance_length"], "speedup": chain["wall_clock"]["speedup"],
        "greedy_identical": None if config.temperature else not differing, "prompts": len(prompts), "draft_tokens": config.width,
        "temperature": config.temperature, "seed": config.seed, "acceptance_rule": chain["acceptance_rule"], "answer_tokens": chain["answer_tokens"],
        "differing_prompts": differing, "acceptance": chain["acceptance"], "by_kind": chain["by_kind"],
        "best_width": chain["curve"][best(chain["curve"])]["drafted"], "predicted_speedup": [p["speedup"] for p in chain["curve"]],
        "costs_ms": {"verify": [chain["plain_ms"], *(p["verify_ms"] for p in chain["curve"])], "draft": [p["draft_ms"] for p in chain["curve"]]},
        "wall_clock": chain["wall_clock"], "dtype": config.dtype, "threads": torch.get_num_threads(),
        "plain_batched_tokens_per_second": round(base.rate, 2), "no_trees": reason, **{f"of_{name}s": j for name, j in judged.items()},
    }  # fmt: skip


def _judge(name: str, plain: Decoder, speculative: Decoder, width: Width, base: Batched, prompts: Sequence[Prompt], config: EvalConfig) -> dict[str, Any]:
    """Acceptance, batched speed and predicted speedups of chains or trees."""
    decoder = replace(speculative, width=width)
    batched = _batched(name, _seeded(decoder, config, 1), prompts, config)
    widths, answers = widths_of(width), batched.answers
    lengths = spread([p.token_ids for p in prompts], config.timed_prompts)
    one = measure_costs(_seeded(plain, config, 2), _seeded(decoder, config, 3), lengths[:1], widths, config.rounds)
    points = curve(answers, one)
    recommended = widths[best(points)]
    kinds = sorted({p.kind for p in prompts})
    of_kind = {k: [a for p, a in zip(prompts, answers, strict=True) if p.kind == k] for k in kinds}
    shown = spread([(p, a) for k in kinds for p, a in zip(prompts, answers, strict=True) if p.kind == k], config.examples)
    found: dict[str, Any] = {
        "width": width.model_dump() if isinstance(width, Tree) else width, "acceptance_rule": _rule(width, config),
        "answer_tokens": sum(len(a.token_ids) for a in answers), "acceptance": Acceptance.of(answers, depth(width), drafted(width)).as_dict(),
        "by_kind": {k: Acceptance.of(of_kind[k], depth(width), drafted(width)).as_dict() | {"prompts": len(of_kind[k])} for k in kinds},
        "differing": [] if config.temperature else [p.id for p, a, b in zip(prompts, base.answers, answers, strict=True) if a.token_ids != b.token_ids],
        "batch": config.batch, "batched_tokens_per_second": round(batched.rate, 2), "batched_speedup": round(batched.rate / base.rate, 4),
        "plain_ms": one.plain, "curve": points, "recommended": recommended, "batch_curve": None, "examples": [_example(p, a) for p, a in shown],
    }  # fmt: skip
    rows = spread([p.token_ids for p in prompts], config.batch)
    rounds = -(-config.rounds // 2)
    if config.batch_costs and len(rows) > 1 and decoder.together(max(map(len, rows)) + places(widths, rounds)):
        many = measure_costs(_seeded(plain, config, 4), _seeded(decoder, config, 5), rows, widths, rounds)
        found["batch_curve"] = {"rows": many.rows, "plain_ms": many.plain, "points": curve(answers, many)}
    return found


def _rule(width: Width, config: EvalConfig) -> str:
    return GREEDY_RULE if config.temperature == 0 else CHOSEN_RULE if isinstance(width, Tree) else DRAWN_RULE


def _seeded(decoder: Decoder, config: EvalConfig, use: int) -> Decoder:
    """With a generator of its own, so that no figure depends on what was decoded before."""
    if config.temperature == 0:
        return decoder
    generator = torch.Generator(decoder.model.device).manual_seed(1000 * config.seed + use)
    return replace(decoder, sampling=Sampling(config.temperature, generator))


def _batched(title: str, decoder: Decoder, prompts: Sequence[Prompt], config: EvalConfig) -> Batched:
    """All prompts, in batches of similar length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
    answers: dict[int, Decoded] = {}
    began = time.perf_counter()
    with progress(title, len(prompts), "prompts") as advance:
        for start in range(0, len(order), config.batch):
            rows = order[start : start + config.batch]
            decoded = decoder.decode([prompts[i].token_ids for i in rows], config.max_new)
            answers |= dict(zip(rows, decoded, strict=True))
            advance(len(rows))
    return Batched([answers[i] for i in range(len(prompts))], time.perf_counter() - began)


@dataclass
class Lap:
    """One way of decoding in the race."""

    decoder: Decoder
    seconds: float = 0.0
    tokens: int = 0


def _race(plain: Decoder, speculative: Decoder, widths: Mapping[str, Width], prompts: Sequence[Prompt], config: EvalConfig) -> dict[str, Any]:
    """Every way on the same prompts in turn, after one unmeasured answer each: tokens, seconds, and prompts whose text is not that of plain decoding."""
    timed = spread(prompts, config.timed_prompts)
    laps = {"plain": Lap(_seeded(plain, config, 6))}
    laps |= {name: Lap(_seeded(replace(speculative, width=width), config, 7 + n)) for n, (name, width) in enumerate(widths.items())}
    differing: dict[str, list[str]] = {name: [] for name in laps}
    for lap in laps.values():
        lap.decoder.decode([timed[0].token_ids], config.timed_tokens)
    with progress("race", len(timed), "prompts") as advance:
        for prompt in timed:
            outputs: dict[str, list[int]] = {}
            for name, lap in laps.items():
                began = time.perf_counter()
                outputs[name] = lap.decoder.decode([prompt.token_ids], config.timed_tokens)[0].token_ids
                lap.seconds += time.perf_counter() - began
                lap.tokens += len(outputs[name])
                if not config.temperature and outputs[name] != outputs["plain"]:
                    differing[name].append(prompt.id)
            advance(1)
    return {"prompts": len(timed), "laps": laps, "differing": differing}


def _finish(judged: dict[str, dict[str, Any]], race: dict[str, Any]) -> list[str]:
    """Put the race's figures beside the predictions; returns the prompts whose output differs from plain greedy anywhere."""
    plain, everywhere = race["laps"]["plain"], dict[str, None]()
    for name, found in judged.items():
        lap, point = race["laps"][name], found["curve"][best(found["curve"])]
        found["wall_clock"] = {
            "prompts": race["prompts"], "tokens": lap.tokens, "threads": torch.get_num_threads(),
            "plain_tokens_per_second": round(plain.tokens / plain.seconds, 2), "tokens_per_second": round(lap.tokens / lap.seconds, 2),
            "speedup": round((lap.tokens / lap.seconds) / (plain.tokens / plain.seconds), 4), "predicted_speedup": point["speedup"],
        }  # fmt: skip
        found["recommended"] = point["drafted"]
        everywhere |= dict.fromkeys((*found.pop("differing"), *race["differing"][name]))
    return list(everywhere)


def _example(prompt: Prompt, answer: Decoded) -> dict[str, Any]:
    """A prompt and its answer pass by pass: accepted tokens, rejected ones, and the target's own that followed (none where the answer ended before it)."""
    tokens, passes = list(answer.token_ids), []
    at = 1
    for one in answer.passes:
        accepted = [one.tokens[place] for place in one.accepted]
        at += len(accepted)
        own = tokens[at : at + 1]
        at += len(own)
        passes.append([accepted, _rejected(one) if own else [], own])
    return {
        "id": prompt.id,
        "kind": prompt.kind,
        "prompt": list(prompt.token_ids),
        "first": tokens[:1],
        "passes": passes,
        "finish_reason": answer.finish_reason,
    }


def _rejected(one: Pass) -> list[int]:
    """Of a chain what was not accepted; of a tree the tokens that were offered where its accepted branch ended."""
    if not one.parents:
        return list(one.tokens[len(one.accepted) :])
    end = one.accepted[-1] if one.accepted else -1
    return [token for token, parent in zip(one.tokens, one.parents, strict=True) if parent == end]
