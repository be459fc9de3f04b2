"""One streamed request: what came, when, and how many tokens the server says it was.

Token counts are the server's (`usage`), never the number of chunks: a speculative server sends several tokens in one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from draftsmith.bench.counters import Speculation, of_reply
from draftsmith.data.conversations import REASONING, Conversation

PROBE_SECONDS = 5.0


@dataclass(frozen=True)
class Arrival:
    """What one read from the network brought: seconds after the start of the level, and tokens counted so far (None where the server does not say)."""

    at: float
    counted: int | None


@dataclass(frozen=True)
class Answer:
    """One request. `due`: when it was to be sent, `sent` and `ended`: when it was, in seconds after the start of its level. `error`: its kind, for counting;
    what had arrived before is kept."""

    prompt: str
    kind: str
    due: float
    sent: float
    ended: float
    arrivals: tuple[Arrival, ...] = ()
    text: str = ""
    tokens: int | None = None
    prompt_tokens: int | None = None
    finish: str | None = None
    speculation: Speculation | None = None
    error: str | None = None
    said: str = ""

    @property
    def first_token(self) -> float:
        """Seconds from when it was due to the first arrival."""
        return self.arrivals[0].at - self.due

    @property
    def seconds(self) -> float:
        """Seconds from when it was due to the last arrival."""
        return self.arrivals[-1].at - self.due

    def token_gaps(self) -> list[tuple[float, int]]:
        """(seconds, tokens): the latency of each token behind the first arrival, and how many tokens had it.

        An arrival of n tokens after a gap of g seconds counts as n tokens of g / n. Where the server does not count as it goes, all tokens but the first
        have the request's mean. Either way they add up to the time from the first arrival to the last.
        """
        assert self.tokens is not None
        counts = [a.counted for a in self.arrivals]
        if None not in counts and counts[-1] == self.tokens:
            return [((b.at - a.at) / n, n) for a, b in pairwise(self.arrivals) if (n := (b.counted or 0) - (a.counted or 0)) > 0]
        behind = self.tokens - 1
        return [((self.arrivals[-1].at - self.arrivals[0].at) / behind, behind)] if behind > 0 else []

    def pauses(self) -> list[float]:
        """Seconds between arrivals: what a reader sees."""
        return [b.at - a.at for a, b in pairwise(self.arrivals)]


class _Reading:
    """The state of a stream while it is read."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.text: list[str] = []
        self.usage: Mapping[str, Any] = {}
        self.finish: str | None = None
        self.speculation: Speculation | None = None
        self.done = False
        self.rest = b""

    def take(self, block: bytes, at: float) -> None:
        """One read from the network. Raises ValueError for what is no stream of chat chunks."""
        # Lines end with \n alone: text may hold U+2028 and other characters that libraries split at.
        *lines, self.rest = (self.rest + block).split(b"\n")
        texts, counted = "", None
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.done = True
                continue
            try:
                text, count = self._chunk(data)
            except (AttributeError, IndexError, KeyError, TypeError) as error:  # JSON of another shape
                raise ValueError(f"a stream that cannot be read: {error!r}") from error
            texts += text
            counted = count if count is not None else counted
        before = self.arrivals[-1].counted if self.arrivals else 0
        if texts or (counted is not None and counted > (before or 0)):
            self.text.append(texts)
            self.arrivals.append(Arrival(at, counted))

    def _chunk(self, data: bytes) -> tuple[str, int | None]:
        try:
            chunk = json.loads(data)
        except ValueError:
            raise ValueError("a stream that cannot be read") from None
        if not isinstance(chunk, Mapping) or "error" in chunk:
            raise ValueError(f"an error in the stream: {_said(chunk)}")
        usage = chunk.get("usage")
        if isinstance(usage, Mapping):
            self.usage = usage
        self.speculation = of_reply(chunk) or self.speculation
        choices = chunk.get("choices")
        if not choices:
            return "", None
        self.finish = choices[0].get("finish_reason") or self.finish
        counted = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
        return _text(choices[0].get("delta") or {}), counted if isinstance(counted, int) else None


class Client:
    """Asks one server. `gone` is set when it no longer answers at all."""

    def __init__(self, http: Any, url: str) -> None:
        """`http`: an asynchronous HTTP client; `url`: with /v1."""
        self.http, self.url = http, url
        self.gone: str | None = None
        self.probing = asyncio.Lock()

    async def ask(self, prompt: Conversation, body: Mapping[str, Any], start: float, due: float) -> Answer:
        """One answer, streamed. `start`: of the level, by `time.perf_counter`; `due`: seconds after it."""
        import httpx2

        found, sent, error, said = _Reading(), time.perf_counter() - start, None, ""
        try:
            async with self.http.stream("POST", f"{self.url}/chat/completions", json=dict(body)) as response:
                if response.status_code != 200:
                    said = _said_in((await response.aread()).decode("utf-8", "replace"))
                    error = f"HTTP {response.status_code}"
                else:
                    async for block in response.aiter_bytes():
                        found.take(block, time.perf_counter() - start)
        except httpx2.TimeoutException as fault:
            error, said = "no reply in time", repr(fault)
        except httpx2.RequestError as fault:
            connected = not isinstance(fault, httpx2.ConnectError)
            error, said = "the connection broke" if connected else "cannot be reached", repr(fault)
            await self._probe()
        except ValueError as fault:
            error, _, said = str(fault).partition(": ")
        counted = found.usage.get("completion_tokens")
        tokens = counted if isinstance(counted, int) else None
        error = error or _wrong(found, tokens)
        return Answer(
            prompt.id, prompt.kind, due, sent, time.perf_counter() - start, tuple(found.arrivals), "".join(found.text), tokens,
            found.usage.get("prompt_tokens"), found.finish, found.speculation, error, said,
        )  # fmt: skip

    async def _probe(self) -> None:
        """Whether the server is there at all: one request that broke does not end a run."""
        import httpx2

        async with self.probing:
            if self.gone is None:
                try:
                    await self.http.get(f"{self.url}/models", timeout=PROBE_SECONDS)
                except httpx2.TimeoutException:
                    return  # busy, not gone
                except httpx2.RequestError as fault:
                    self.gone = f"{self.url} no longer answers ({type(fault).__name__})"


def _wrong(found: _Reading, tokens: int | None) -> str | None:
    if not found.done and found.finish is None:
        return "the stream ended early"
    if tokens is None:
        return "a stream without token counts"
    if not found.arrivals:
        return "an empty answer"
    return None


def _text(delta: Mapping[str, Any]) -> str:
    """All that a model wrote in a chunk, thinking and tool calls included."""
    calls = [c.get("function") or {} for c in delta.get("tool_calls") or ()]
    parts = [*(delta.get(key) for key in REASONING), delta.get("content"), *(v for c in calls for v in (c.get("name"), c.get("arguments")))]
    return "".join(p for p in parts if isinstance(p, str))


def _said_in(text: str) -> str:
    try:
        return _said(json.loads(text))
    except ValueError:
        return " ".join(text.split())[:200] or "no message"


def _said(body: Any) -> str:
    """The server's own words, in one line."""
    error = body.get("error", body) if isinstance(body, Mapping) else body
    text = error.get("message", error) if isinstance(error, Mapping) else error
    return " ".join(str(text).split())[:200] or "no message"
