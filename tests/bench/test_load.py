"""When requests are sent: never more than allowed at a time, and at the drawn times whatever the server does."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import httpx2
import pytest
from streaming_server import Behaviour, Engine

from draftsmith.bench.load import Level, arrival_times, drive, watch_lag
from draftsmith.bench.run import RUNNING, levels
from draftsmith.bench.stream import Answer, Client
from draftsmith.data.conversations import Conversation, Message


def prompts(count: int) -> list[Conversation]:
    return [Conversation(f"p{i}", "all", (Message("user", f"question {i}"),)) for i in range(count)]


def load(engine: Engine, level: Level, asked: Sequence[Conversation], gone_after: int | None = None) -> list[Answer]:
    kept: list[Answer] = []

    async def run() -> None:
        async with httpx2.AsyncClient(limits=httpx2.Limits(max_connections=200)) as http:
            client = Client(http, f"{engine.url}/v1")

            async def ask(prompt: Conversation, start: float, due: float) -> Answer:
                body = {"model": "tiny", "messages": [{"role": "user", "content": prompt.messages[0].content}], "max_tokens": 5} | RUNNING
                return await client.ask(prompt, body, start, due)

            def keep(answer: Answer) -> None:
                kept.append(answer)
                if len(kept) == gone_after:
                    client.gone = "dead"

            await drive(level, asked, ask, client, 3, keep)

    asyncio.run(run())
    return kept


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_a_closed_loop_keeps_so_many_running(concurrency: int) -> None:
    with Engine(Behaviour(seconds=0.02)) as engine:
        kept = load(engine, Level(concurrency=concurrency), prompts(12))
    assert sorted(a.prompt for a in kept) == sorted(p.id for p in prompts(12))
    assert all(a.error is None and a.due <= a.sent for a in kept)
    running = [sum(other.sent <= a.sent < other.ended for other in kept) for a in kept]
    assert max(running) == min(concurrency, 12)


def test_an_open_loop_does_not_wait_for_a_slow_server() -> None:
    """Requests are sent at the drawn times although each takes far longer than the time between two; latency counts from when they were due."""
    with Engine(Behaviour(seconds=0.2)) as engine:
        kept = load(engine, Level(rate=40.0), prompts(12))
        assert engine.truth.most > 4
    assert sorted(a.due for a in kept) == arrival_times(40.0, 12, 3)
    assert all(a.sent >= a.due and a.first_token >= 0.2 for a in kept)


def test_nothing_more_is_sent_to_a_server_that_is_gone() -> None:
    with Engine(Behaviour(seconds=0.01)) as engine:
        assert len(load(engine, Level(concurrency=1), prompts(12), gone_after=4)) == 4
        assert 4 <= len(load(engine, Level(rate=20.0), prompts(40), gone_after=4)) < 40


def test_arrival_times_are_a_poisson_process() -> None:
    """Gaps of an exponential distribution have the standard deviation of their mean, and a share of 1 - 1/e below it."""
    times = arrival_times(5.0, 20_001, 1)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.2, rel=0.03)
    assert sum(g < 0.2 for g in gaps) / len(gaps) == pytest.approx(0.632, abs=0.01)
    assert times == arrival_times(5.0, 20_001, 1) != arrival_times(5.0, 20_001, 2)
    assert arrival_times(5.0, 3, 1) == times[:3]


def test_levels_and_their_names() -> None:
    assert [level.name for level in levels(None, None)] == ["1 at a time"]
    assert [level.name for level in levels([1, 8, 1], [0.5])] == ["1 at a time", "8 at a time", "0.5 a second"]
    assert [level.name for level in levels(None, [2.0])] == ["2 a second"]
    with pytest.raises(ValueError, match="0 a second: expected more than 0"):
        levels(None, [0.0])
    with pytest.raises(ValueError, match="has one of both"):
        Level(2, 2.0)


def test_lag_is_what_a_blocked_process_adds() -> None:
    lags: list[float] = []

    async def run() -> None:
        task = asyncio.create_task(watch_lag(lags))
        await asyncio.sleep(0.1)
        time.sleep(0.3)
        await asyncio.sleep(0.1)
        task.cancel()

    asyncio.run(run())
    assert max(lags) >= 0.25
    assert len(lags) >= 3
