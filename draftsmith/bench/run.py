"""`draftsmith bench`: one or two running servers under load, level by level. Whatever was measured before an accident is reported, marked as partial."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.bench.counters import SGLANG, Reading, look
from draftsmith.bench.load import Level, drive, watch_lag
from draftsmith.bench.stream import Answer, Client
from draftsmith.core.log import Advance, progress, warn
from draftsmith.data.chat import AnswerSettings, request
from draftsmith.data.conversations import Conversation
from draftsmith.data.servers import Servers

SPECULATIVE, BASELINE = "speculative", "baseline"
SETTLE_SECONDS, SETTLE_PAUSE = 5.0, 0.25
"""Engines count a moment after they answer: readings are repeated until two are equal."""
PLAIN = {"stream": True, "stream_options": {"include_usage": True}}
RUNNING = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
"""With token counts in every chunk: vLLM and SGLang know it, llama-server ignores it, some others refuse it."""
PER_REQUEST = {SGLANG: {"return_spec_tokens_details": True}}
REFUSED = ("HTTP 400", "HTTP 422")
HINTS = {
    "HTTP 401": "set DRAFTSMITH_API_KEY to the server's key", "HTTP 403": "set DRAFTSMITH_API_KEY to the server's key",
    "HTTP 404": "is this the address of a server that speaks OpenAI's chat protocol, and the model one that it serves?",
    "HTTP 400": "the server does not take this request", "HTTP 422": "the server does not take this request",
    "a stream without token counts": "the server must count tokens in `usage` when asked with stream_options.include_usage",
}  # fmt: skip
"""Errors of the first request that all others would share."""


@dataclass(frozen=True)
class BenchSettings:
    """Where and how to measure. `levels` are run in order, each on the baseline first; `warm_up`: requests to each server that do not count;
    `timeout`: seconds that a server may be silent."""

    url: str
    levels: tuple[Level, ...]
    baseline: str | None = None
    model: str | None = None
    baseline_model: str | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    warm_up: int = 4
    seed: int = 0
    timeout: float = 120.0
    key: str | None = field(default=None, repr=False)

    @property
    def answers(self) -> AnswerSettings:
        """Raises ValueError for values that no server takes."""
        return AnswerSettings(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed, token_ids="off")


def levels(concurrency: Sequence[int] | None, rates: Sequence[float] | None) -> tuple[Level, ...]:
    """Levels in the order given, concurrency first; one request at a time when nothing is given. Raises ValueError."""
    chosen = list(concurrency or ([] if rates else [1]))
    return tuple(dict.fromkeys([*(Level(concurrency=n) for n in chosen), *(Level(rate=r) for r in rates or ())]))


@dataclass
class Side:
    """One server."""

    name: str
    client: Client
    model: str
    engine: str | None = None
    version: str | None = None
    extras: Mapping[str, Any] = field(default_factory=lambda: RUNNING)

    def body(self, prompt: Conversation, settings: AnswerSettings) -> dict[str, Any]:
        """A request."""
        return {**request(self.model, prompt, 0, settings), **self.extras, **PER_REQUEST.get(self.engine or "", {})}


@dataclass
class Measured:
    """One server at one level. `answers` grows while it runs."""

    level: Level
    side: str
    planned: int
    answers: list[Answer] = field(default_factory=list)
    before: Reading = field(default_factory=Reading)
    after: Reading = field(default_factory=Reading)
    lags: list[float] = field(default_factory=list)
    """Seconds by which this process was late, sampled all along: part of every latency."""


@dataclass
class Results:
    """All that was measured; `stopped`: why it is not all that was asked for."""

    sides: list[Side] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    stopped: str | None = None


def measure(prompts: Sequence[Conversation], warm_up: Sequence[Conversation], settings: BenchSettings) -> Results:
    """Send every prompt once at every level to every server. A server that dies, or Ctrl-C, ends it early and says so in `stopped`.

    Raises ValueError for a server that cannot be measured (another model, a wrong address, a refused request), ServersGone for one that is not there.
    """
    results = Results()
    requests = len(prompts) * len(settings.levels) * (2 if settings.baseline else 1)
    try:
        with progress("bench", requests, "answers") as advance:
            asyncio.run(_measure(prompts, warm_up, settings, results, advance))
    except KeyboardInterrupt:
        if not results.measured:
            raise
        results.stopped = "stopped by Ctrl-C"
    return results


async def _measure(
    prompts: Sequence[Conversation], warm_up: Sequence[Conversation], settings: BenchSettings, results: Results, advance: Advance
) -> None:  # fmt: skip
    most = max(level.concurrency or len(prompts) for level in settings.levels)
    wanted = [(SPECULATIVE, settings.url, settings.model)]
    if settings.baseline is not None:
        wanted.insert(0, (BASELINE, settings.baseline, settings.baseline_model))
    async with contextlib.AsyncExitStack() as stack:
        for name, url, model in wanted:
            servers = await stack.enter_async_context(Servers([url], model, settings.key, most, 1, settings.timeout, 0.0))
            side = Side(name, Client(servers.http, servers.servers[0].url), servers.model)
            reading = await look(servers.http, side.client.url)
            side.engine, side.version = reading.engine, reading.version
            results.sides.append(side)
            await _warm(side, warm_up, settings)
        for level in settings.levels:
            for side in results.sides:
                await _run_level(level, side, prompts, settings, results, advance)
                if side.client.gone:
                    results.stopped = f"{side.name} server: {side.client.gone}"
                    return


async def _warm(side: Side, prompts: Sequence[Conversation], settings: BenchSettings) -> None:
    """Requests that do not count. The first finds out which body the server takes. Raises ValueError when what fails would fail for all."""
    start = time.perf_counter()
    answers: list[Answer] = []
    for prompt in prompts:
        answer = await side.client.ask(prompt, side.body(prompt, settings.answers), start, 0.0)
        if answer.error in REFUSED and not answers:
            side.extras = PLAIN
            answer = await side.client.ask(prompt, side.body(prompt, settings.answers), start, 0.0)
        answers.append(answer)
        if answer.error in HINTS and len(answers) == 1:
            said = f" ({answer.said})" if answer.said else ""
            raise ValueError(f"{side.client.url}: {answer.error}{said}; {HINTS[answer.error]}")
        if side.client.gone:
            raise ConnectionError(f"{side.client.gone}, while it was warmed up with {len(answers)} requests")
    wrong = [a for a in answers if a.error]
    if wrong:
        warn(f"{side.client.url}: {len(wrong)} of {len(answers)} requests of the warm-up failed: {wrong[0].error} {wrong[0].said}".rstrip())


async def _run_level(
    level: Level, side: Side, prompts: Sequence[Conversation], settings: BenchSettings, results: Results, advance: Advance
) -> None:  # fmt: skip
    measured = Measured(level, side.name, len(prompts), before=await _settled(side))
    results.measured.append(measured)
    failed = 0

    def keep(answer: Answer) -> None:
        nonlocal failed
        measured.answers.append(answer)
        failed += answer.error is not None
        advance(1, f"{side.name}, {level.name}" + (f", {failed} failed" if failed else ""))

    async def ask(prompt: Conversation, start: float, due: float) -> Answer:
        return await side.client.ask(prompt, side.body(prompt, settings.answers), start, due)

    watch = asyncio.create_task(watch_lag(measured.lags))
    try:
        await drive(level, prompts, ask, side.client, settings.seed, keep)
    finally:
        watch.cancel()
    measured.after = Reading() if side.client.gone else await _settled(side)


async def _settled(side: Side) -> Reading:
    reading = await look(side.client.http, side.client.url)
    until = time.perf_counter() + SETTLE_SECONDS
    while reading.engine is not None and time.perf_counter() < until:
        await asyncio.sleep(SETTLE_PAUSE)
        again = await look(side.client.http, side.client.url)
        if again == reading:
            break
        reading = again
    return reading


def split(prompts: Sequence[Conversation], number: int | None, warm_up: int) -> tuple[list[Conversation], list[Conversation]]:
    """`number` prompts at even distances (all when None), each cut behind the last turn that is asked; and those of the warm-up, which are others as long as
    there are any: a server that keeps what it has read would know them.

    Raises ValueError when nothing is asked.
    """
    asked = [cut for prompt in prompts if (cut := up_to_last_answer(prompt)).messages]
    if not asked:
        raise ValueError("nothing to ask: no conversation has a turn of a user")
    count = len(asked) if number is None else min(number, len(asked))
    chosen = [int((i + 0.5) * len(asked) / count) for i in range(count)]
    others = [asked[i] for i in range(len(asked)) if i not in set(chosen)] or [asked[i] for i in reversed(chosen)]
    return [asked[i] for i in chosen], [others[i % len(others)] for i in range(warm_up)]


def up_to_last_answer(prompt: Conversation) -> Conversation:
    """What the last answer of a conversation answers; without any, all of it up to the last turn of a user or a tool."""
    answers = [i for i, m in enumerate(prompt.messages) if m.role == "assistant"]
    asked = [i for i, m in enumerate(prompt.messages) if m.role in ("user", "tool")]
    end = answers[-1] if answers else (asked[-1] + 1 if asked else 0)
    return replace(prompt, messages=prompt.messages[:end])
