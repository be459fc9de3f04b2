"""One EAGLE-3 training step (forward, backward, optimizer) against the floor of exact work and against published packages.

    python benchmarks/eagle3_step.py [--shapes A,B,C] [--shares 0.5,0.1] [--dtype float32] [--contenders ours,specforge,speculators] [--json FILE]

Every measurement is a process of its own, in turns, `--rounds` times; the smallest time counts. The allocator is set up alike on all sides. Peak memory
is what the process adds between the built model and the end of its steps. The floor: floating-point operations of exact work
(`step_cases.exact_work`) over the best rate of a matrix product, measured in the same processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step_cases import LAYERS, SHAPES, STEPS, Inputs, Shape, exact_work, inputs, target_tensors
from step_peers import PEER_STEPS

from draftsmith.core.env import dtype_of, keep_freed_memory
from draftsmith.core.types import FeatureBatch, Progress, TargetShape
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.target.families import LogitRule
from draftsmith.target.weights import Target
from draftsmith.train.optim import OptimConfig, apply, build


def ours(shape: Shape, given: Inputs, dtype: torch.dtype) -> tuple[Callable[[], None], Any]:
    """Draftsmith's step as its trainer runs it, with float32 masters and all metrics."""
    head, norm = target_tensors(shape, dtype)
    sizes = TargetShape(
        shape.hidden, shape.vocab, LAYERS, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, 1e-5, 4096,
        {"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    target = Target("random", sizes, head, head, None, norm, LogitRule(), True, None, None, ())  # type: ignore[arg-type]
    torch.manual_seed(0)
    draft = Eagle3(Eagle3Config(layers=tuple(range(LAYERS)), vocab_size=shape.draft_vocab, steps=((0.0, STEPS),)), sizes)
    optimizer = build(draft, OptimConfig())
    n = shape.tokens
    place, document = torch.arange(n), torch.zeros(n, dtype=torch.long)
    batch = FeatureBatch(("one",), (n,), given.ids_N, given.mask_N, place, document, given.hidden_NF, given.last_NH, given.argmax_N)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = draft(batch, target, Progress())
        output.loss.num.backward()
        apply(draft, optimizer, float(output.loss.den), 1e-4, 1.0)

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return step, draft


STEPS_OF = {"ours": ours, **PEER_STEPS}


def measure(contender: str, shape: Shape, share: float, dtype: torch.dtype, seconds: float) -> dict[str, float]:
    """Smallest and middle time of a step, peak memory, and the best matrix rate before and after."""
    keep_freed_memory()
    torch.manual_seed(0)
    given = inputs(shape, share, dtype)
    step, _held = STEPS_OF[contender](shape, given, dtype)
    rates = [matrix_rate(shape, dtype)]
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    loaded = _memory("VmRSS")
    step()
    peak = _memory("VmHWM") - loaded
    step()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < seconds:
        clock = time.perf_counter()
        step()
        times.append(time.perf_counter() - clock)
    peak = max(peak, _memory("VmHWM") - loaded)
    rates.append(matrix_rate(shape, dtype))
    return {"seconds": min(times), "median": sorted(times)[len(times) // 2], "peak_gb": peak / 1e9, "rate": max(rates)}


def matrix_rate(shape: Shape, dtype: torch.dtype) -> float:
    """Operations per second of the best of two large products: a square one, and the head's."""
    best = 0.0
    for m, k, n in ((2048, 2048, 2048), (1024, shape.hidden, shape.draft_vocab)):
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        out = torch.empty(m, n, dtype=dtype)
        for _ in range(6):
            clock = time.perf_counter()
            torch.mm(a, b, out=out)
            best = max(best, 2.0 * m * k * n / (time.perf_counter() - clock))
    return best


def _memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All combinations, contenders in turns."""
    rows = []
    for name in arguments.shapes.split(","):
        for share in map(float, arguments.shares.split(",")):
            found: dict[str, list[dict[str, float]]] = {c: [] for c in arguments.contenders.split(",")}
            for _ in range(arguments.rounds):
                for contender, results in found.items():
                    results.append(_own_process(contender, name, share, arguments))
            rate = max(r["rate"] for results in found.values() for r in results)
            shape = SHAPES[name]
            work = exact_work(shape, inputs(shape, share, torch.float32).mask_N)
            floor = sum(work.values()) / rate
            row: dict[str, Any] = {"shape": name, "share": share, "dtype": arguments.dtype, "floor": floor, "gflops": rate / 1e9, "work": work}
            for contender, results in found.items():
                row[contender] = {"seconds": min(r["seconds"] for r in results), "peak_gb": max(r["peak_gb"] for r in results)}
            rows.append(row)
            print(describe(row), flush=True)
    return rows


def describe(row: dict[str, Any]) -> str:
    """One line."""
    parts = [f"{row['shape']} {row['share']:.0%} {row['dtype']}: floor {row['floor']:.3f} s at {row['gflops']:.0f} GFLOP/s"]
    for contender in STEPS_OF:
        if contender in row:
            own = row[contender]
            parts.append(f"{contender} {own['seconds']:.3f} s ({own['seconds'] / row['floor']:.2f} x floor), {own['peak_gb']:.2f} GB")
    peers = [row[c] for c in PEER_STEPS if c in row]
    if peers and "ours" in row:
        faster, smaller = min(p["seconds"] for p in peers), min(p["peak_gb"] for p in peers)
        parts.append(
            f"{faster / row['ours']['seconds']:.2f} x faster than the faster peer, {row['ours']['peak_gb'] / smaller:.2f} of the smaller peer's memory"
        )
    return "; ".join(parts)


def _own_process(contender: str, name: str, share: float, arguments: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", contender, "--shapes", name, "--shares", str(share), "--dtype", arguments.dtype]
    done = subprocess.run([*command, "--seconds", str(arguments.seconds)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{contender} on {name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="A,B,C")
    parser.add_argument("--shares", default="0.5,0.1")
    parser.add_argument("--dtype", default=str(dtype_of("auto")).removeprefix("torch."), help="default: the faster one of this machine")
    parser.add_argument("--contenders", default=",".join(STEPS_OF))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="time of a measurement, at least three steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=STEPS_OF, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        warnings.simplefilter("ignore")
        shape, share = SHAPES[arguments.shapes], float(arguments.shares)
        print(json.dumps(measure(arguments.one, shape, share, getattr(torch, arguments.dtype), arguments.seconds)))
        return
    rows = compare(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
