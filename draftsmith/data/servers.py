"""One or several servers of the same target, of which any may be slow, wrong or dead at any time.

A request goes to the least busy server. What fails there is asked again, elsewhere if possible, with growing pauses. A server that fails repeatedly rests;
before it gets work again it must list the model. Only when no server has worked for `patience` seconds is the run given up.
"""

from __future__ import annotations

import asyncio
import difflib
import email.utils
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from draftsmith.core.log import warn

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before something is tried again: doubled each time, up to the longest."""
FAULTS_BEFORE_REST = 3
CHECK_SECONDS = 10.0
LATER = {401, 403, 404, 405, 408, 409, 425, 500, 502, 504}
"""HTTP statuses after which the same request may succeed, here later or elsewhere now: the fault is the server's."""
BUSY = {429, 503}
"""The server asks for a pause, of all requests: no fault of this one."""

Found = TypeVar("Found")


class ServersGone(ConnectionError):
    """No server has worked for some time. What was answered is kept."""


class Refused(ValueError):
    """A request that is not worth asking again; the message is the reason."""


class Fault(Exception):
    """A request that failed, perhaps not for good. `blamed`: it counts as a try of the request; `pause`: seconds that the server asked to wait."""

    def __init__(self, message: str, blamed: bool = True, pause: float | None = None, dead: bool = False) -> None:
        super().__init__(message)
        self.blamed, self.pause, self.dead = blamed, pause, dead


@dataclass
class Server:
    """One server: requests running on it, faults since its last success, and until when it rests."""

    url: str
    running: int = 0
    faults: int = 0
    rests_until: float = 0.0
    down_since: float | None = None
    suspect: bool = False
    last_fault: str = ""

    def may_take(self, now: float, most: int) -> bool:
        """A suspect is tried with a single request."""
        return now >= self.rests_until and self.running < (1 if self.suspect else most)

    def worked(self) -> None:
        """A request succeeded."""
        self.faults, self.down_since, self.suspect = 0, None, False

    def failed(self, fault: Fault, now: float) -> None:
        """A request failed: rest if the server asked for it, is not there, or fails repeatedly."""
        self.last_fault = str(fault)
        if now >= self.rests_until:  # many requests fail at once when a server dies: one fault
            self.faults += 1
        self.down_since = now if self.down_since is None else self.down_since
        if fault.pause is not None:
            self.rests_until = max(self.rests_until, now + fault.pause)
        elif fault.dead or not fault.blamed or self.faults >= FAULTS_BEFORE_REST:
            self.suspect = self.suspect or fault.dead or self.faults >= FAULTS_BEFORE_REST
            self.rests_until = max(self.rests_until, now + pause(self.faults))


class Servers:
    """An asynchronous context manager; `post` may be awaited by many tasks at once."""

    def __init__(self, urls: Sequence[str], model: str | None, key: str | None, each: int, tries: int, timeout: float, patience: float) -> None:
        """`each`: requests running on one server. `timeout`, `patience`: seconds. Raises ValueError for an address that is none."""
        self.servers = [Server(address(url)) for url in dict.fromkeys(urls)]
        if not self.servers:
            raise ValueError("no server: give at least one address, for example --server http://localhost:8000")
        self.model, self.each, self.tries, self.patience = model or "", each, tries, patience
        self.http = _client(key, timeout, each * len(self.servers))
        self.changed = asyncio.Event()

    async def __aenter__(self) -> Servers:
        await self.http.__aenter__()
        try:
            await self._meet()
        except BaseException:
            await self.http.aclose()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.http.__aexit__(kind, error, trace)

    @property
    def working(self) -> int:
        """Servers that are not known to be down."""
        return sum(s.down_since is None for s in self.servers)

    async def post(self, body: dict[str, Any], read: Callable[[Any], Found]) -> Found:
        """What `read` makes of the reply of any server; `read` raises ValueError for a bad one.

        Raises Refused when the request was refused for good or tried too often, and ServersGone.
        """
        tried, avoid = 0, None
        while True:
            server = await self._take(avoid)
            try:
                if server.suspect and (wrong := self._wrong(server, await self._models(server))):
                    raise Fault(wrong, blamed=False, dead=True)
                found = await self._ask(server, body, read)
                server.worked()
                return found
            except Refused:
                server.worked()
                raise
            except Fault as fault:
                server.failed(fault, time.monotonic())
                tried += fault.blamed
                if tried >= self.tries:
                    raise Refused(f"{fault} ({tried} tries)") from fault
                avoid, wait = server, pause(tried) if fault.blamed else 0.0
            finally:
                server.running -= 1
                self._tell()
            await asyncio.sleep(wait)

    async def _take(self, avoid: Server | None) -> Server:
        while True:
            now = time.monotonic()
            free = [s for s in self.servers if s.may_take(now, self.each)]
            if free:
                server = min(free, key=lambda s: (s is avoid, s.suspect, s.running))
                server.running += 1
                return server
            downs = [s.down_since for s in self.servers if s.down_since is not None]
            idle = not any(s.running for s in self.servers)
            if idle and len(downs) == len(self.servers) and now - max(downs) > self.patience:
                raise ServersGone(f"no server has worked for {self.patience:.0f} s: " + "; ".join(f"{s.url}: {s.last_fault}" for s in self.servers))
            soonest = min((s.rests_until - now for s in self.servers if s.rests_until > now), default=1.0)
            try:
                await asyncio.wait_for(self.changed.wait(), min(soonest + 0.01, 1.0))
            except TimeoutError:
                continue

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _ask(self, server: Server, body: dict[str, Any], read: Callable[[Any], Found]) -> Found:
        response = await self._send("POST", f"{server.url}/chat/completions", body)
        status = response.status_code
        if status in BUSY:
            raise Fault(f"HTTP {status}: {_said(response)}", blamed=False, pause=_retry_after(response.headers.get("retry-after")))
        if status in LATER:
            raise Fault(f"HTTP {status}: {_said(response)}", pause=_retry_after(response.headers.get("retry-after")))
        if status != 200:
            raise Refused(f"HTTP {status}: {_said(response)}")
        try:
            parsed = response.json()
        except ValueError:
            raise Fault("a reply that is no JSON") from None
        try:
            return read(parsed)
        except ValueError as error:
            raise Fault(str(error)) from error

    async def _send(self, method: str, url: str, body: dict[str, Any] | None = None, seconds: float | None = None) -> Any:
        import httpx2

        limit = {} if seconds is None else {"timeout": seconds}
        try:
            return await self.http.request(method, url, json=body, **limit)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Fault(f"cannot be reached ({_name(error)})", blamed=False, dead=True) from error
        except httpx2.TimeoutException as error:
            raise Fault(f"no reply in time ({_name(error)})") from error
        except httpx2.RequestError as error:
            raise Fault(f"the connection broke ({_name(error)})") from error

    async def _meet(self) -> None:
        """Ask all servers what they serve; find out the model if it was not given. Raises ValueError, ServersGone."""
        found = await asyncio.gather(*(self._models(s) for s in self.servers), return_exceptions=True)
        for server, models in zip(self.servers, found, strict=True):
            if isinstance(models, Fault):
                server.failed(Fault(str(models), dead=True), time.monotonic())
            elif isinstance(models, BaseException):
                raise models
            elif models is not None:
                self.model = self.model or _only(server, models)
                if wrong := self._wrong(server, models):
                    raise ValueError(wrong)
        down = [s for s in self.servers if s.down_since is not None]
        if len(down) == len(self.servers):
            raise ServersGone("no server answers: " + "; ".join(f"{s.url}/models: {s.last_fault}" for s in down))
        for server in down:
            warn(f"{server.url}: {server.last_fault}; going on with the others, and trying it again later")
        if not self.model:
            raise ValueError(f"{self.servers[0].url}/models lists nothing: name the model with --model")

    async def _models(self, server: Server) -> list[str] | None:
        """Names of the models that a server serves; None where it does not say. Raises Fault, ValueError (a wrong key)."""
        response = await self._send("GET", f"{server.url}/models", seconds=CHECK_SECONDS)
        if response.status_code in (401, 403):
            raise ValueError(f"{server.url}: HTTP {response.status_code}: {_said(response)}; set DRAFTSMITH_API_KEY to the server's key")
        if response.status_code in (404, 405, 501):
            return None
        if response.status_code != 200:
            raise Fault(f"HTTP {response.status_code}: {_said(response)}", blamed=False)
        try:
            return [str(row["id"]) for row in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise Fault("a list of models that cannot be read", blamed=False) from None

    def _wrong(self, server: Server, models: list[str] | None) -> str | None:
        if models is None or self.model in models:
            return None
        near = difflib.get_close_matches(self.model, models, n=1)
        return f"{server.url} serves {', '.join(models) or 'nothing'}, not {self.model}" + (f"; did you mean {near[0]}?" if near else "")


def address(url: str) -> str:
    """With `/v1`, without a slash at the end. Raises ValueError."""
    if not re.match(r"https?://[^/\s]+", url):
        raise ValueError(f"server {url!r}: expected an address like http://localhost:8000")
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def pause(times: int) -> float:
    """Seconds before the next try: doubled each time, with some chance so that many do not come back at once."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** max(0, times - 1)) * random.uniform(0.75, 1.25)


def _only(server: Server, models: list[str]) -> str:
    if len(models) != 1:
        raise ValueError(f"{server.url} serves {', '.join(models) or 'nothing'}: name one with --model")
    return models[0]


def _client(key: str | None, timeout: float, connections: int) -> Any:
    try:
        import httpx2
    except ImportError as error:
        raise ValueError("asking servers needs httpx2: pip install 'draftsmith[server]'") from error
    return httpx2.AsyncClient(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx2.Timeout(timeout, connect=min(timeout, CHECK_SECONDS)),
        limits=httpx2.Limits(max_connections=connections + 8, max_keepalive_connections=connections),
    )


def _retry_after(value: str | None) -> float | None:
    """Seconds; the header holds them or a date."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _said(response: Any) -> str:
    """The server's own words, in one line."""
    try:
        body = response.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        text = response.text
    return " ".join(str(text).split())[:200] or "no message"


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
