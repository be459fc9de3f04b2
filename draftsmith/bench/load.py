"""When requests are sent: so many at a time (a closed loop), or at random times with a mean rate (an open loop)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.bench.stream import Answer, Client
from draftsmith.data.conversations import Conversation

Ask = Callable[[Conversation, float, float], Coroutine[Any, Any, Answer]]
"""A prompt, the start of the level and the second after it at which the prompt is due, to its answer."""

LAG_PAUSE = 0.02


@dataclass(frozen=True)
class Level:
    """`concurrency` requests at a time, or `rate` requests a second on average. Raises ValueError unless exactly one is given, above 0."""

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError(f"concurrency {self.concurrency}, rate {self.rate}: a level has one of both")
        if (self.concurrency or self.rate or 0) <= 0:
            raise ValueError(f"{self.name}: expected more than 0")

    @property
    def name(self) -> str:
        """As it stands in tables."""
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} a second"


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Seconds after the start: a Poisson process, the first request at 0. The same seed gives the same times."""
    draw = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(rate))
    return times[:count]


async def watch_lag(lags: list[float]) -> None:
    """Append, until cancelled, the seconds by which this process comes late to what it wanted to do: its own share of every latency measured."""
    while True:
        wanted = time.perf_counter() + LAG_PAUSE
        await asyncio.sleep(LAG_PAUSE)
        lags.append(max(0.0, time.perf_counter() - wanted))


async def drive(level: Level, prompts: Sequence[Conversation], ask: Ask, client: Client, seed: int, keep: Callable[[Answer], None]) -> None:
    """Send every prompt once, until `client.gone`; `keep` gets each answer as it is complete. What was not sent is the caller's to count."""
    start = time.perf_counter()
    if level.rate is None:
        left = iter(prompts)

        async def work() -> None:
            for prompt in left:
                if client.gone:
                    return
                keep(await ask(prompt, start, time.perf_counter() - start))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(level.concurrency or 1, len(prompts))):
                group.create_task(work())
        return

    async def one(prompt: Conversation, due: float) -> None:
        keep(await ask(prompt, start, due))

    async with asyncio.TaskGroup() as group:
        for prompt, due in zip(prompts, arrival_times(level.rate, len(prompts), seed), strict=True):
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            if client.gone:
                return
            group.create_task(one(prompt, due))
