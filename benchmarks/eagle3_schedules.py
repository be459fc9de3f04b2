"""Which EAGLE-3 settings reach the longest acceptance length in the same time?

    python benchmarks/eagle3_schedules.py RUN --seconds 80 --seeds 0 1 2 --variants base chains24

RUN is a run whose features are captured (`draftsmith capture`). Every variant trains for the same number of seconds: schedules and
learning rate follow the clock, not a step count. The figure is the simulated acceptance length on held-out features (5 drafted tokens, exact
walk), which equals the decoded one on the target's own greedy text. The machine must do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from draftsmith.core.config import load
from draftsmith.core.env import dtype_of
from draftsmith.core.types import Progress, Ratio
from draftsmith.data import vocab
from draftsmith.eval.prompts import spread
from draftsmith.pipeline import INITIAL_SAMPLES, Run, source
from draftsmith.recipe import Recipe
from draftsmith.train.optim import apply, build, rate
from draftsmith.train.tracking import plain

SHORT = "[[0, 1], [0.4, 2], [0.7, 3]]"
GROW = "[[0, 1], [0.2, 2], [0.45, 3], [0.8, 5]]"
VARIANTS: dict[str, list[str]] = {
    "base": ["draft.steps=5"],
    "chains24": ["draft.steps=5", "draft.chains=24"],
    "steps3": ["draft.steps=3"],
    "both": ["draft.steps=3", "draft.chains=24"],
    "grow": [f"draft.steps={GROW}", "draft.chains=24"],
    "short": [f"draft.steps={SHORT}", "draft.chains=24"],
    "short-random-start": [f"draft.steps={SHORT}", "draft.chains=24", "draft.start=random"],
    "short-frozen-head": [f"draft.steps={SHORT}", "draft.chains=24", "draft.train_head=false"],
    "short-noise": [f"draft.steps={SHORT}", "draft.chains=24", "draft.feature_noise=0.2"],
    "short-2e-3": [f"draft.steps={SHORT}", "draft.chains=24", "train.optimizer.learning_rate=2e-3"],
    "short-512": [f"draft.steps={SHORT}", "draft.chains=24", "train.batch_tokens=512"],
    "short-2048": [f"draft.steps={SHORT}", "draft.chains=24", "train.batch_tokens=2048"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), help="names, or key=value+key=value")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.variants:
        overrides = VARIANTS.get(name) or name.split("+")
        for seed in options.seeds:
            rows.append({"variant": name, "seed": seed, **measure(options.run / "run.yaml", [*overrides, f"train.seed={seed}"], options.seconds)})
            print(json.dumps(rows[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
    for name in options.variants:
        lengths = [r["acceptance_length"] for r in rows if r["variant"] == name]
        spread = statistics.stdev(lengths) if len(lengths) > 1 else 0.0
        print(f"{statistics.mean(lengths):.3f} ± {spread:.3f}  {name}")


def measure(recipe: Path, overrides: list[str], seconds: float) -> dict[str, Any]:
    """Train for `seconds`, then evaluate."""
    run = Run(load(Recipe, recipe, overrides))
    config = run.recipe.train
    learning, held_out = source(run, "train", None), source(run, "held-out", None)
    draft = run.new_draft()
    counts = vocab.count(run.samples("train", everything=True), run.target.shape.vocab_size)
    draft.initialise(run.target, counts, learning.batch(spread(range(len(learning)), INITIAL_SAMPLES)))
    optimizer = build(draft, config.optimizer)
    stream = learning.stream(config.batch_tokens, config.seed)
    dtype = dtype_of(config.dtype, run.device)
    began, steps = time.perf_counter(), 0
    while (fraction := (time.perf_counter() - began) / seconds) < 1:
        with torch.autocast(run.device, dtype=dtype, enabled=dtype != torch.float32):
            output = draft(next(stream).to(run.device), run.target, Progress(fraction, config.seed * 1_000_003 + steps))
        output.loss.num.backward()
        apply(draft, optimizer, float(output.loss.den), rate(config.optimizer, round(fraction * 10_000), 10_000), config.optimizer.clip)
        steps += 1
    stream.close()
    total: dict[str, Ratio] = {}
    draft.eval()
    with torch.no_grad():
        for batch in held_out.in_order(config.batch_tokens):
            for key, ratio in draft(batch, run.target, Progress(1.0, exact=True)).metrics.items():
                ratio = Ratio(ratio.num[..., :5], ratio.den[..., :5]) if ratio.num.ndim else ratio
                total[key] = total[key] + ratio if key in total else ratio
    figures = plain(total)
    return {
        "steps": steps,
        "epochs": round(steps * config.batch_tokens / sum(learning.lengths), 2),
        **{k: figures[k] for k in ("acceptance_length", "position_rates")},
    }


if __name__ == "__main__":
    main()
