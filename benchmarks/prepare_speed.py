"""How many conversations a second become supervised tokens, against a plain loop over `apply_chat_template` and SpecForge's preprocessing?

    .venv-specforge/bin/python benchmarks/prepare_speed.py --tokenizer ~/.cache/draftsmith/smollm2-135m-instruct --json speed.json

Every side starts at the same JSONL file and ends with token ids and mask of every conversation; imports and loading the tokenizer are not counted.
All run in turn in one process with one thread for everything (`--core` also pins it); the best CPU time and the best wall time of several repetitions
count. CPU time includes children.

ours        `draftsmith.data.cache.prepare`: read, detect, convert, hash, render, mask, tokenize, write Arrow and map it. Cold (nothing cached), and
            warm (everything cached).
naive       for each assistant turn, ids of the prompt and ids with the answer from `apply_chat_template`; the answer is what the second has more.
specforge   `prepare_prompt_tasks` of the published package as its trainer calls it (JSON to Arrow, render, tokenize, mask by tokenizing prefixes,
            filter), without the pool that `num_proc=1` would start, its template `qwen`, whose marks are those of every ChatML tokenizer.

The conversations (ShareGPT's shape) are made of the bundled ones' text, token ids left out. `chat`: 1 to 6 exchanges, answers of 1 to 3 bundled
answers, which is about as long as UltraChat's; `short`: one exchange. One word in 50 is replaced by an invented one that stands nowhere else, so
no message occurs twice and the number of different words grows as in real text. All have the same system prompt: SpecForge's `qwen` adds it otherwise.

SpecForge wants an environment of its own, from one that has Draftsmith:
python -m venv --system-site-packages .venv-specforge && .venv-specforge/bin/pip install --no-deps specforge datasets
Where it cannot be imported, the other sides are measured alone.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SYSTEM = "You are a helpful assistant."
MAX_LENGTH = 2048
FRESH = 50
"""One word in so many is new."""
CONSONANTS, VOWELS = "bcdfghklmnprstvwz", ("a", "e", "i", "o", "u", "ai", "ea", "ou", "er", "on")
SYLLABLES = [c + v for c in CONSONANTS for v in VOWELS]
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}
ROLES = {name: role for role, name in NAMES.items()}
ONE_CORE = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

# ---- the conversations ----


def write_conversations(file: Path, count: int, kind: str) -> None:
    """The same conversations for the same arguments."""
    with gzip.open(ROOT / "draftsmith/data/bundled/train.jsonl.gz", "rt", encoding="utf-8") as lines:
        talks = [json.loads(line)["messages"] for line in lines]
    exchanges = [(a["content"], b["content"]) for talk in talks for a, b in pairwise(talk) if (a["role"], b["role"]) == ("user", "assistant")]
    draw, numbers = random.Random(0), iter(range(10**9))
    with file.open("w", encoding="utf-8") as out:
        for n in range(count):
            turns = [{"from": "system", "value": SYSTEM}]
            for _ in range(draw.randint(1, 6) if kind == "chat" else 1):
                question, answer = draw.choice(exchanges)
                more = [draw.choice(exchanges)[1] for _ in range(draw.randint(0, 2))] if kind == "chat" else []
                turns.append({"from": "human", "value": varied(question, draw, numbers)})
                turns.append({"from": "gpt", "value": varied("\n\n".join([answer, *more]), draw, numbers)})
            out.write(json.dumps({"id": f"talk-{n}", "conversations": turns}, ensure_ascii=False) + "\n")


def varied(text: str, draw: random.Random, numbers: Iterator[int]) -> str:
    """With one word in `FRESH`, at least one, replaced by a new one."""
    words = text.split(" ")
    for place in range(draw.randrange(min(FRESH, len(words))), len(words), FRESH):
        words[place] = invented(next(numbers))
    return " ".join(words)


def invented(number: int) -> str:
    """A word for each number, no two equal; neighbours do not look alike."""
    number, word = (number * 7_368_787) % len(SYLLABLES) ** 4, ""
    for _ in range(4):
        number, place = divmod(number, len(SYLLABLES))
        word += SYLLABLES[place]
    return word


# ---- the sides: what is timed, and how ids and mask of each conversation are read from what it returns ----

Found = Iterator[tuple[list[int], list[int]]]


def ours(file: Path, tokenizer: str, processes: int) -> tuple[Callable[[], Any], Callable[[Any], Found]]:
    from draftsmith.data import cache
    from draftsmith.data.config import DataConfig, SourceConfig
    from draftsmith.data.prepare import open_job
    from draftsmith.data.template import ChatTemplate

    config = DataConfig(train=(SourceConfig(path=str(file)),), max_length=MAX_LENGTH, processes=processes)
    template = ChatTemplate.load(tokenizer)

    def work() -> Any:
        samples, figures = cache.prepare(open_job(config, template, "train"))
        assert figures.counts.read == figures.counts.kept, figures.counts.describe()
        return samples

    return work, lambda samples: ((s.input_ids.tolist(), s.loss_mask.int().tolist()) for s in samples)


def naive(file: Path, where: str, processes: int) -> tuple[Callable[[], Any], Callable[[Any], Found]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(where)
    end: Any = tokenizer.eos_token_id

    def work() -> Any:
        found = []
        for line in file.open(encoding="utf-8"):
            messages = [{"role": ROLES[m["from"]], "content": m["value"]} for m in json.loads(line)["conversations"]]
            whole, mask = [], []
            for n, message in enumerate(messages):
                if message["role"] != "assistant":
                    continue
                prompt = tokenizer.apply_chat_template(messages[:n], add_generation_prompt=True, return_dict=False)
                whole = tokenizer.apply_chat_template(messages[: n + 1], return_dict=False)
                whole = whole[: len(whole) - whole[::-1].index(end)]  # ChatML has a line break after the end mark, which nobody writes
                assert whole[: len(prompt)] == prompt
                mask += [0] * (len(prompt) - len(mask)) + [1] * (len(whole) - len(prompt))
            found.append((whole[:MAX_LENGTH], mask[:MAX_LENGTH]))
        return found

    return work, iter


def specforge(file: Path, where: str, processes: int) -> tuple[Callable[[], Any], Callable[[Any], Found]]:
    import datasets
    from specforge.data.prompt_builder import prepare_prompt_tasks  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(where)

    def work() -> Any:
        return prepare_prompt_tasks(
            str(file), tokenizer, chat_template="qwen", max_length=MAX_LENGTH, is_preformatted=False, train_only_last_turn=False,
            cache_dir=os.environ["DRAFTSMITH_CACHE"], cache_key="speed", num_proc=None,
        )  # fmt: skip

    def read(found: Any) -> Found:
        newline, end = tokenizer.encode("\n", add_special_tokens=False), tokenizer.eos_token_id
        for task in found:
            ids, mask = list(task["payload"]["input_ids"]), list(task["payload"]["loss_mask"])
            for n in range(1, len(ids)):  # it also learns the line break behind the end mark
                if ids[n] == newline[0] and ids[n - 1] == end:
                    mask[n] = 0
            length = len(ids) - ids[::-1].index(end) if ids[-2:] == [end, *newline] else len(ids)
            yield ids[:length], mask[:length]

    return work, read


SIDES = {"ours": ours, "naive": naive, "specforge": specforge}


# ---- measuring ----


def timed(side: str, file: Path, tokenizer: str, folder: Path, processes: int = 1, check: bool = False) -> dict[str, Any]:
    """One run with empty caches, ours once more with full ones; with `check`, also a hash of each conversation's ids and mask."""
    own = Path(tempfile.mkdtemp(dir=folder))
    os.environ["DRAFTSMITH_CACHE"] = str(own)
    copy = Path(shutil.copy(file, own))  # `datasets` remembers files by their names
    work, read = SIDES[side](copy, tokenizer, processes)
    row: dict[str, Any] = {"side": side}
    found: Any = None
    for name in ("cold", "warm") if side == "ours" else ("cold",):
        before, start = cpu(), time.perf_counter()
        found = work()
        row[name] = {"wall": time.perf_counter() - start, "cpu": cpu() - before}
    if check:
        pairs = [(list(map(int, ids)), list(map(int, mask))) for ids, mask in read(found)]
        row["hashes"] = {hashlib.sha256(json.dumps(pair).encode()).hexdigest() for pair in pairs}
        row["tokens"], row["supervised"] = sum(len(ids) for ids, _ in pairs), sum(sum(mask) for _, mask in pairs)
    shutil.rmtree(own)
    print(
        f"  {file.stem}, {Path(tokenizer).name}: {side} " + ", ".join(f"{k} {row[k]['cpu']:.2f} s CPU" for k in ("cold", "warm") if k in row),
        file=sys.stderr,
        flush=True,
    )
    return row


def alone(file: Path, tokenizer: str, processes: int) -> dict[str, Any]:
    """Ours in a process of its own: its figures, and the most memory that its processes held together, in MiB."""
    command = [sys.executable, __file__, "--tokenizer", tokenizer, "--alone", str(file), "--processes", str(processes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak = {"anonymous": 0.0, "all": 0.0}
        watcher = threading.Thread(target=watch, args=(process.pid, peak), daemon=True)
        watcher.start()
        out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"ours ended with {process.returncode}")
    return json.loads(out.strip().splitlines()[-1]) | {"MiB": peak["all"], "anonymous MiB": peak["anonymous"]}


def watch(pid: int, peak: dict[str, float]) -> None:
    """The most memory that a process and its descendants held together. Pages of mapped files are the kernel's to drop; `anonymous` leaves them out."""
    while Path(f"/proc/{pid}").exists():
        found = [memory(p) for p in family(pid)]
        peak["all"] = max(peak["all"], sum(a for a, _ in found))
        peak["anonymous"] = max(peak["anonymous"], sum(b for _, b in found))
        time.sleep(0.1)


def cpu() -> float:
    """Seconds, user and system, of this process, its descendants, and those of them that have ended."""
    stats = [Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split() for p in family(os.getpid())]
    return sum(int(n) for stat in stats for n in stat[11:15]) / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        try:
            found += [int(child) for task in Path(f"/proc/{parent}/task").iterdir() for child in (task / "children").read_text().split()]
        except OSError:  # it has just ended
            continue
    return found


def memory(pid: int) -> tuple[float, float]:
    """Resident MiB, and those of them that belong to no file."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    except OSError:
        return 0.0, 0.0
    return tuple(int(lines.get(name, "0 kB").split()[0]) / 1024 for name in ("VmRSS", "RssAnon"))  # type: ignore[return-value]


def compare(kind: str, tokenizer: str, sides: list[str], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All sides in turn on the same conversations: the best of several, and how many conversations have the same ids and mask as ours."""
    file = folder / f"{kind}.jsonl"
    write_conversations(file, options.count, kind)
    runs = [timed(side, file, tokenizer, folder, check=not n) for n in range(options.repetitions) for side in sides]
    best = {side: rates(options.count, [r["cold"] for r in runs if r["side"] == side]) for side in sides}
    best["ours, warm"] = rates(options.count, [r["warm"] for r in runs if r["side"] == "ours"])
    hashes = {r["side"]: r.pop("hashes") for r in runs if "hashes" in r}
    ratio = {k: best["ours"][k] / max(best[side][k] for side in sides if side != "ours") for k in ("cpu", "wall")}
    return {
        "kind": kind, "tokenizer": tokenizer, "conversations": options.count, "tokens": runs[0]["tokens"], "supervised": runs[0]["supervised"],
        "best": best, "same as ours": {side: len(found & hashes["ours"]) for side, found in hashes.items()}, "ratio": ratio, "runs": runs,
    }  # fmt: skip


def rates(count: int, runs: list[dict[str, float]]) -> dict[str, float]:
    """Conversations per second, the best of several runs; the clock of CPU time ticks every 10 ms."""
    return {k: count / max(min(run[k] for run in runs), 0.01) for k in ("cpu", "wall")}


def grow(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Ours with more rows and more processes: time and memory."""
    found = []
    for rows in options.rows:
        file = folder / f"{rows}.jsonl"
        write_conversations(file, rows, options.grow)
        size = file.stat().st_size / 2**20
        found += [{"rows": rows, "file MiB": size, "processes": n, **alone(file, options.tokenizer[0], n)} for n in options.processes]
        file.unlink()
    return found


def show(report: dict[str, Any]) -> None:
    """Plain tables."""
    for part in report["speed"]:
        count, tokens = part["conversations"], part["tokens"]
        print(f"\n{part['kind']}, {Path(part['tokenizer']).name}: {count:,} conversations of {tokens / count:,.0f} tokens, ", end="")
        print(f"{part['supervised'] / tokens:.0%} supervised; one process\n{'':14}{'per CPU second':>16}{'per second':>12}   same as ours")
        for side, best in part["best"].items():
            print(f"{side:<14}{best['cpu']:>16,.0f}{best['wall']:>12,.0f}   {part['same as ours'].get(side, '')}")
        print(f"ours, cold, against the faster of the others: {part['ratio']['cpu']:.1f} times (CPU), {part['ratio']['wall']:.1f} times (wall)")
    if report["growth"]:
        print(f"\n{'rows':>8}{'file MiB':>10}{'processes':>11}{'per CPU second':>16}{'per second':>12}{'peak MiB':>10}{'anonymous':>11}")
    for row in report["growth"]:
        cpu, wall = (row["rows"] / row["cold"][k] for k in ("cpu", "wall"))
        print(f"{row['rows']:>8,}{row['file MiB']:>10.0f}{row['processes']:>11}{cpu:>16,.0f}{wall:>12,.0f}{row['MiB']:>10,.0f}{row['anonymous MiB']:>11,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", action="append", required=True, help="folder with tokenizer.json and a ChatML template; repeat for several")
    parser.add_argument("--kinds", nargs="*", default=["chat", "short"], choices=["chat", "short"])
    parser.add_argument("--count", type=int, default=2000, help="conversations that the sides are compared on")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="*", default=[2000, 8000, 32000], help="sizes at which ours alone is measured")
    parser.add_argument("--grow", default="chat", choices=["chat", "short"], help="what these rows are")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--core", type=int, help="stay on this core while the sides are compared")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= ONE_CORE  # before any library is loaded
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = folder
        if options.alone:
            print("\n" + json.dumps(timed("ours", options.alone, options.tokenizer[0], Path(folder), options.processes[0])))
            return
        sides = [side for side in SIDES if side != "specforge" or importlib.util.find_spec("specforge")]
        if "specforge" not in sides:
            print("SpecForge is not installed here, so it is left out; --help says how to install it", file=sys.stderr)
        growth = grow(options, Path(folder))
        if options.core is not None:
            os.sched_setaffinity(0, {options.core})
        speed = [compare(kind, tokenizer, sides, options, Path(folder)) for tokenizer in options.tokenizer for kind in options.kinds]
    report = {"speed": speed, "growth": growth}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    show(report)


if __name__ == "__main__":
    main()
