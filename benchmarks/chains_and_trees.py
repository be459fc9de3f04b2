"""Chains and trees of a trained draft: what passes cost, and what a decode takes, in CPU seconds of one thread, which other work on the machine hardly changes.

    OMP_NUM_THREADS=1 python benchmarks/chains_and_trees.py RECIPE [settings …]

The recipe's run must have a checkpoint. Acceptance comes from `draftsmith eval`; docs/evaluation.md has what was measured.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import torch

from draftsmith.core.config import load
from draftsmith.core.log import table
from draftsmith.drafts.base import Tree, Width, drafted
from draftsmith.eval import decode
from draftsmith.eval.decode import Decoder
from draftsmith.eval.prompts import Prompt, spread
from draftsmith.eval.sweep import measure_costs, widths_of
from draftsmith.pipeline import Run, decoders, evaluation_prompts
from draftsmith.recipe import Recipe

TREE = Tree(nodes=16, top_k=4, depth=5)


def race(plain: Decoder, speculative: Decoder, widths: list[Width], prompts: list[Prompt], tokens: int) -> None:
    """Every way on the same prompts in turn, after one unmeasured answer each."""
    ways = [plain, *(replace(speculative, width=w) for w in widths)]
    seconds = [0.0] * len(ways)
    outputs: list[list[list[int]]] = [[] for _ in ways]
    for way in ways:
        way.decode([prompts[0].token_ids], 4)
    for prompt in prompts:
        for n, way in enumerate(ways):
            began = time.process_time()
            outputs[n].append(way.decode([prompt.token_ids], tokens)[0].token_ids)
            seconds[n] += time.process_time() - began
    count = sum(map(len, outputs[0]))
    rows = [
        [repr(way.width), f"{count / s:.2f}", f"{seconds[0] / s:.2f}", "equal" if texts == outputs[0] else "differs"]
        for way, s, texts in zip(ways, seconds, outputs, strict=True)
    ]
    table(f"{len(prompts)} prompts, {count} tokens", ["drafted", "tokens per CPU second", "speedup", "outputs"], rows)


def main() -> None:
    """Costs, then the race."""
    torch.set_num_threads(1)
    decode.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    run = Run(load(Recipe, sys.argv[1], sys.argv[2:]))
    config = run.recipe.eval
    plain, speculative = decoders(run, run.best_draft()[0])
    prompts = spread(evaluation_prompts(run)[0], config.timed_prompts)
    for width in (config.width, TREE):
        costs = measure_costs(plain, replace(speculative, width=width), [prompts[0].token_ids], widths_of(width), config.rounds)
        rows = [[drafted(c.width), f"{c.draft:.1f}", f"{c.verify:.1f}"] for c in costs.widths]
        table(f"median of {config.rounds}, CPU ms: {width!r}", ["drafted", "draft", "verify"], [["none", "", f"{costs.plain:.1f}"], *rows])
    race(plain, speculative, [1, 2, 3, Tree(nodes=5, top_k=4, depth=5), Tree(nodes=8, top_k=4, depth=2), TREE], prompts, config.timed_tokens)


if __name__ == "__main__":
    main()
