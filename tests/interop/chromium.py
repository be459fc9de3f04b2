"""Chromium without a window, driven over its DevTools protocol through two pipes: nothing to install but the browser."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = ("--headless", "--no-sandbox", "--no-zygote", "--single-process", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", "--no-first-run")
"""One process: the builds for containers, which lack a sandbox, start no other way."""
SECONDS = 60.0


class Page:
    """One tab. Whatever its scripts print or throw, and whatever it asks the network for, is kept."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._last = write, read, b"", 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Run a command of the protocol and return its result. Raises RuntimeError with the browser's message."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters} | ({"sessionId": self._session} if self._session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
        raise AssertionError

    def _messages(self) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + SECONDS
        while True:
            message, mark, rest = self._buffer.partition(b"\0")
            if mark:
                self._buffer = rest
                event = json.loads(message)
                self._note(event.get("method"), event.get("params"))
                yield event
                continue
            if not select.select([self._read], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not answer within {SECONDS:.0f} s")
            received = os.read(self._read, 1 << 20)
            if not received:
                raise RuntimeError("Chromium ended")
            self._buffer += received

    def _note(self, method: str | None, parameters: Any) -> None:
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening"):
            self.complaints.append(json.dumps(parameters)[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def js(self, expression: str) -> Any:
        """The value of an expression, awaited. Raises RuntimeError when it throws."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:800])
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true. Raises TimeoutError."""
        deadline = time.monotonic() + SECONDS
        while not self.js(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {expression}; the page complains: {self.complaints}")
            time.sleep(0.02)

    def key(self, key: str, code: int) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def hover(self, selector: str) -> None:
        """Move the mouse onto an element."""
        x, y = self.js(f"(r => [r.x + r.width / 2, r.y + r.height / 2])(document.querySelector({json.dumps(selector)}).getClientRects()[0])")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """Save what is visible as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browse(program: str, profile: Path) -> Iterator[Page]:
    """Start Chromium with an empty profile and open a tab; it is ended at the end."""
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    arguments = [program, *FLAGS, f"--user-data-dir={profile}"]
    actions = [
        (os.POSIX_SPAWN_DUP2, to_browser, 3), (os.POSIX_SPAWN_DUP2, from_browser, 4),  # where the browser expects its pipes
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]  # fmt: skip
    process = os.posix_spawn(program, arguments, os.environ, file_actions=actions)
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(write, read)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(write)
        os.close(read)
