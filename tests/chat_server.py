"""A real HTTP server that speaks the chat protocol for a target of the tests, and misbehaves by script."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from draftsmith.data.conversations import Message, from_row
from draftsmith.data.template import ChatTemplate
from draftsmith.eval.decode import Decoder


@dataclass(frozen=True)
class Misbehave:
    """Instead of an answer: this status, body and headers; a broken connection (`drop`); or no reply until the server is closed (`hang`)."""

    status: int = 200
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False
    hang: bool = False


Script = Callable[[int, dict[str, Any]], Misbehave | dict[str, Any]]
"""What the n-th request (from 1) is answered with."""


def completion(content: Any = "yes", finish: Any = "stop", ids: Any = (5, 2), counted: int | None = None, **message: Any) -> dict[str, Any]:
    """A reply as vLLM writes it."""
    ids = list(ids) if isinstance(ids, tuple) else ids
    choice = {"index": 0, "message": {"role": "assistant", "content": content} | message, "finish_reason": finish, "token_ids": ids}
    return {"choices": [choice], "usage": {"completion_tokens": len(ids or ()) if counted is None else counted}}


class ChatServer:
    """Serves on a free port until `close`. What it was asked is in `asked`, with the time of each request."""

    def __init__(self, script: Script, models: Sequence[str] = ("tiny",), port: int = 0, models_status: int = 200) -> None:
        self.script, self.models, self.models_status = script, models, models_status
        self.asked: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most = 0
        self.numbers = itertools.count(1)
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.http = _Http(("127.0.0.1", port), _handler(self))
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Die: open connections break, new ones are refused."""
        if not self.closing.is_set():
            self.closing.set()
            self.http.shutdown()
            self.http.server_close()

    def reply(self, body: dict[str, Any]) -> Misbehave | dict[str, Any]:
        with self.lock:
            number = next(self.numbers)
            self.asked.append(body)
            self.times.append(time.monotonic())
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            return self.script(number, body)
        finally:
            with self.lock:
                self.running -= 1


class _Http(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error of this server."""


def _handler(server: ChatServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            listed = {"object": "list", "data": [{"id": m} for m in server.models]}
            self._send(Misbehave(server.models_status, json.dumps(listed)))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.headers.append({k.lower(): v for k, v in self.headers.items()})
            found = server.reply(body)
            self._send(found if isinstance(found, Misbehave) else Misbehave(body=json.dumps(found)))

        def _send(self, what: Misbehave) -> None:
            if what.hang:
                server.closing.wait()
            if what.drop or server.closing.is_set():
                self.close_connection = True
                return
            data = what.body.encode()
            self.send_response(what.status)
            for name, value in (what.headers | {"content-type": "application/json", "content-length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    return Handler


def target_script(decoder: Decoder, template: ChatTemplate, seconds: float = 0.0) -> Script:
    """Greedy answers of a target, as a server gives them."""
    alone = threading.Lock()

    def script(_number: int, body: dict[str, Any]) -> dict[str, Any]:
        time.sleep(seconds)
        messages: Sequence[Message] = from_row(body, "asked").messages
        with alone:
            decoded = decoder.decode([template.ids(messages, prompt=True)], body["max_tokens"])[0]
        return completion(template.text(decoded.token_ids), decoded.finish_reason, decoded.token_ids)

    return script
