"""One streamed request: what arrived, when, and every way in which a stream can be wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streaming_server import Behaviour, Engine, Failing

from draftsmith.bench.run import PLAIN, RUNNING
from draftsmith.bench.stream import Answer, Arrival, Client
from draftsmith.data.conversations import Conversation, Message

ASKED = Conversation("p", "all", (Message("user", "count, please"),))


def ask(engine: Engine, extras: dict[str, Any] = RUNNING, timeout: float = 5.0, path: str = "/v1") -> tuple[Answer, Client]:
    async def run() -> tuple[Answer, Client]:
        async with httpx2.AsyncClient(timeout=timeout) as http:
            client = Client(http, engine.url + path)
            body = {"model": "tiny", "messages": [{"role": "user", "content": "count, please"}], "max_tokens": 40} | extras
            return await client.ask(ASKED, body, time.perf_counter(), 0.0), client

    return asyncio.run(run())


@pytest.mark.parametrize("running", [True, False])
def test_tokens_are_the_servers_count_and_arrivals_the_chunks(running: bool) -> None:
    with Engine(Behaviour(tokens=30, seconds=0.01, running_counts=running)) as engine:
        answer, _ = ask(engine)
        (_, tokens, passes, arrivals) = engine.truth.requests[0]
    assert (answer.error, answer.finish, answer.prompt_tokens) == (None, "stop", 7)
    assert answer.tokens == tokens == 30
    assert answer.text == "".join(f"w{i} " for i in range(30))
    counts = [1, *(1 + sum(passes[:k]) + k for k in range(1, len(passes) + 1))]
    found = [a.counted for a in answer.arrivals]
    assert len(found) <= arrivals < tokens  # a busy client reads two chunks at once
    assert found == ([n for n in counts if n in found] if running else [None] * len(found))
    assert found[-1] == (30 if running else None)
    assert min(answer.pauses()) > 0
    assert answer.seconds >= 0.01 * arrivals
    assert answer.first_token >= 0.01
    assert answer.ended >= answer.arrivals[-1].at


@given(
    st.floats(0.01, 5), st.lists(st.tuples(st.floats(0.001, 2), st.integers(1, 6)), max_size=12), st.booleans(),
)  # fmt: skip
def test_token_latencies_add_up_to_the_time_behind_the_first_arrival(first: float, steps: list[tuple[float, int]], counted: bool) -> None:
    """By brute force: one latency a token, each token of an arrival the same share of its gap."""
    at, tokens, arrivals, wanted = first, 1, [Arrival(first, 1 if counted else None)], []
    for gap, n in steps:
        at, tokens = at + gap, tokens + n
        arrivals.append(Arrival(at, tokens if counted else None))
        wanted += [gap / n] * n
    answer = Answer("p", "all", 0.0, 0.0, at, tuple(arrivals), "x", tokens)
    found = [seconds for seconds, n in answer.token_gaps() for _ in range(n)]
    assert len(found) == tokens - 1
    assert sum(found) == pytest.approx(at - first, abs=1e-9)
    mean = sum(wanted) / len(wanted) if wanted else 0.0
    assert found == pytest.approx(wanted if counted else [mean] * (tokens - 1), abs=1e-9)


def test_tokens_that_are_counted_behind_the_last_text_are_not_lost() -> None:
    """Running counts that do not reach the total (an end token without text) cannot place it: the mean of the request stands."""
    answer = Answer("p", "all", 0.0, 0.0, 3.0, (Arrival(1.0, 1), Arrival(3.0, 4)), "x", 5)
    assert answer.token_gaps() == [(0.5, 4)]


def test_text_may_hold_what_other_libraries_split_lines_at() -> None:
    strange = "a\u2028b\u0085c\x0bd\u2029 é👩‍🚀"
    with Engine(Behaviour(words=lambda i: strange)) as engine:
        answer, _ = ask(engine)
    assert answer.error is None
    assert answer.text == strange * 12


def test_thinking_and_calls_are_text_that_arrives() -> None:
    deltas = ['{"reasoning_content": "hm"}', '{"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}', '{"content": null}', '{"content": "x"}']
    lines = b"".join(f'data: {{"choices": [{{"delta": {d}}}]}}\n\n'.encode() for d in deltas)
    end = b'data: {"choices": [], "usage": {"completion_tokens": 9}}\n\ndata: [DONE]\n\n'
    with Engine(Behaviour(fail=lambda n: Failing(after=0, line=b": a comment\r\n\r\nevent: message\r\n" + lines + end))) as engine:
        answer, _ = ask(engine)
    assert (answer.error, answer.text, answer.tokens) == (None, "hmf{}x", 9)


def status(code: int, body: str) -> Callable[[int], Failing]:
    return lambda number: Failing(code, body)


@pytest.mark.parametrize(
    ("failing", "error", "said"),
    [
        (Failing(429, '{"error": {"message": "slow down"}}'), "HTTP 429", "slow down"),
        (Failing(500, "<html>\n boom</html>"), "HTTP 500", "<html> boom</html>"),
        (Failing(503, ""), "HTTP 503", "no message"),
        (Failing(after=3), "the connection broke", "incomplete chunked read"),
        (Failing(after=3, line=b""), "the stream ended early", ""),
        (Failing(after=3, line=b"data: {torn\n\n"), "a stream that cannot be read", ""),
        (Failing(after=3, line=b'data: {"choices": ["x"]}\n\n'), "a stream that cannot be read", "AttributeError"),
        (Failing(after=3, line=b'data: {"choices": {"x": 1}}\n\n'), "a stream that cannot be read", "KeyError"),
        (Failing(after=3, line=b'data: {"timings": {"draft_n": 4}}\n\n'), "a stream that cannot be read", "KeyError"),
        (Failing(after=3, line=b'data: {"error": {"message": "out of memory"}}\n\n'), "an error in the stream", "out of memory"),
        (Failing(after=3, line=b"data: 7\n\n"), "an error in the stream", "7"),
        (Failing(after=3, line=b"data: [DONE]\n\n"), "a stream without token counts", ""),
        (Failing(after=0, line=b'data: {"choices": [], "usage": {"completion_tokens": 0}}\n\ndata: [DONE]\n\n'), "an empty answer", ""),
    ],
)
def test_what_fails_is_told_apart_and_what_had_arrived_is_kept(failing: Failing, error: str, said: str) -> None:
    with Engine(Behaviour(fail=lambda n: failing)) as engine:
        answer, client = ask(engine, PLAIN)
    assert answer.error == error
    assert said in answer.said
    assert client.gone is None
    assert answer.text.startswith("w0 ") == (failing.after == 3)


def test_a_silent_server() -> None:
    with Engine(Behaviour(seconds=3.0)) as engine:
        answer, client = ask(engine, timeout=0.3)
    assert (answer.error, client.gone) == ("no reply in time", None)


def test_a_server_that_is_not_there_is_gone() -> None:
    engine = Engine()
    engine.close()
    answer, client = ask(engine)
    assert answer.error == "cannot be reached"
    assert client.gone is not None
    assert engine.url in client.gone
