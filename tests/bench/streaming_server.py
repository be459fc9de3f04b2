"""A real HTTP server that streams as a speculating engine does and counts exactly what it does: several tokens a chunk, counters as each engine names them.

Its answers are drawn from the prompt, so the same prompt gets the same words with and without speculation. Truths are kept to compare figures with.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Failing:
    """Instead of an answer: a status with a body; `after` chunks, the connection breaks, or the stream ends or holds `line`."""

    status: int = 200
    body: str = ""
    after: int | None = None
    line: bytes | None = None


@dataclass
class Behaviour:
    """How an engine behaves. `accepted`: at each pass, drawn from these; `width` 0: no speculation. `seconds`: of each pass."""

    engine: str = "vllm"
    width: int = 3
    accepted: tuple[int, ...] = (0, 1, 2, 3)
    tokens: int = 12
    seconds: float = 0.0
    running_counts: bool = True
    usage: bool = True
    refuses: tuple[str, ...] = ()
    fail: Callable[[int], Failing | None] = lambda number: None
    models: tuple[str, ...] = ("tiny",)
    models_status: int = 200
    words: Callable[[int], str] = lambda i: f"w{i} "
    """What the i-th token says."""


@dataclass
class Truth:
    """What was served since the start: `requests` hold (prompt, tokens, accepted by pass, arrivals)."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    positions: list[int] = field(default_factory=lambda: [0] * 8)
    generated: int = 0
    running: int = 0
    most: int = 0
    requests: list[tuple[str, int, list[int], int]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)


class Engine:
    """Serves on a free port until `close`."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.how, self.truth, self.lock = behaviour or Behaviour(), Truth(), threading.Lock()
        self.closed = False
        self.http = _Http(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """New connections are refused; running streams break."""
        if not self.closed:
            self.closed = True
            self.http.shutdown()
            self.http.server_close()

    def plan(self, prompt: str, most: int) -> list[int]:
        """Tokens accepted in each pass of an answer; its first token comes from the prompt's pass."""
        draw, passes, left = random.Random(prompt), [], min(self.how.tokens, most) - 1
        while left > 0:
            accepted = min(draw.choice(self.how.accepted), left - 1) if self.how.width else 0
            passes.append(accepted)
            left -= accepted + 1
        return passes

    def count(self, accepted: int, tokens: int) -> None:
        """One verification pass."""
        with self.lock:
            self.truth.generated += tokens
            if self.how.width:
                self.truth.drafts += 1
                self.truth.drafted += self.how.width
                self.truth.accepted += accepted
                for k in range(accepted):
                    self.truth.positions[k] += 1

    def answer(self, body: dict[str, Any]) -> Iterator[bytes]:
        """Events of a stream, one a pass."""
        prompt, options = body["messages"][-1]["content"], body.get("stream_options") or {}
        running = self.how.running_counts and options.get("continuous_usage_stats")
        passes, done, arrivals = self.plan(prompt, body["max_tokens"]), 0, 0
        yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for accepted in [None, *passes]:
            time.sleep(self.how.seconds)
            new = 1 if accepted is None else accepted + 1
            if accepted is None:
                with self.lock:
                    self.truth.generated += 1
            else:
                self.count(accepted, new)
            text = "".join(self.how.words(i) for i in range(done, done + new))
            done, arrivals = done + new, arrivals + 1
            usage = {"usage": {"prompt_tokens": 7, "completion_tokens": done}} if running else {}
            yield _event({"choices": [{"delta": {"content": text}, "finish_reason": None}]} | usage)
        with self.lock:
            self.truth.requests.append((prompt, done, passes, arrivals))
        usage = {"usage": {"prompt_tokens": 7, "completion_tokens": done}} if running else {}
        yield _event({"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]} | usage | self.of_request(body, passes, done))
        if self.how.engine == "sglang" and self.how.width and body.get("return_spec_tokens_details"):
            yield _event({"choices": [], "sglext": {"spec_tokens_details": self.details(passes, done)}})
        if options.get("include_usage") and self.how.usage:
            yield _event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": done}})
        yield b"data: [DONE]\n\n"

    def details(self, passes: list[int], done: int) -> dict[str, Any]:
        """SGLang 0.5.23's `SpecTokensDetails`; its histogram ends at the largest count seen."""
        histogram = [passes.count(n) for n in range(max(passes) + 1)]
        return {
            "spec_verify_ct": len(passes), "spec_num_correct_drafts": sum(passes), "spec_num_proposed_drafts": self.how.width * len(passes),
            "spec_accept_length": done / len(passes), "spec_correct_drafts_histogram": histogram,
        }  # fmt: skip

    def of_request(self, _body: dict[str, Any], passes: list[int], done: int) -> dict[str, Any]:
        """llama-server's timings."""
        if not self.how.engine.startswith("llama"):
            return {}
        drafting = {"draft_n": self.how.width * len(passes), "draft_n_accepted": sum(passes)} if self.how.width else {}
        return {"timings": {"predicted_n": done} | drafting}

    def page(self, path: str) -> tuple[int, str]:
        """What is served besides answers."""
        t, how = self.truth, self.how
        if path == "/v1/models":
            return how.models_status, json.dumps({"data": [{"id": m} for m in how.models]})
        if path == "/metrics" and how.engine in ("vllm", "llama-metrics"):
            return 200, self.metrics()
        if path == "/version" and how.engine == "vllm":
            return 200, json.dumps({"version": "0.0.test"})
        if path in ("/server_info", "/get_server_info") and how.engine in ("sglang", "sglang-old"):
            state = {"avg_spec_accept_length": 1 + t.accepted / t.drafts} if t.drafts else {}
            return 200, json.dumps({"version": "0.0.test", "internal_states": [state]})
        if path == "/props" and how.engine == "llama":
            return 200, json.dumps({"default_generation_settings": {}, "build_info": "b0-test"})
        return 404, json.dumps({"error": {"message": "not found"}})

    def metrics(self) -> str:
        """Prometheus text. vLLM's has labels and two engines behind one address."""
        t, vllm = self.truth, self.how.engine == "vllm"
        prefix, generated = ("vllm:", "vllm:generation_tokens_total") if vllm else ("llamacpp:", "llamacpp:tokens_predicted_total")
        running = "vllm:num_requests_running" if vllm else "llamacpp:requests_processing"
        lines = ["# HELP some text", "# TYPE x counter"]

        def add(name: str, value: int, **labels: object) -> None:
            for engine, share in (("0", value - value // 3), ("1", value // 3)) if vllm else (("", value),):
                named = {"engine": engine, "model_name": 'ti"ny'} | labels if vllm else labels
                written = "{" + ",".join(f'{k}="{v}"' for k, v in named.items()) + "}" if named else ""
                lines.append(f"{name}{written} {float(share)}")

        add(generated, t.generated)
        add(running, t.running)
        if self.how.width:
            for name, value in (("drafts", t.drafts), ("draft_tokens", t.drafted), ("accepted_tokens", t.accepted)):
                add(f"{prefix}spec_decode_num_{name}_total", value)
                add(f"{prefix}spec_decode_num_{name}_created", 1_700_000_000)
            for k in range(self.how.width):
                add(f"{prefix}spec_decode_num_accepted_tokens_per_pos_total", t.positions[k], position=k)
        return "\n".join(lines) + "\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


class _Http(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of this server."""


def _handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._whole(*engine.page(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with engine.lock:
                engine.truth.bodies.append(body)
                engine.truth.running += 1
                engine.truth.most = max(engine.truth.most, engine.truth.running)
                number = len(engine.truth.bodies)
            try:
                self._answer(body, engine.how.fail(number))
            finally:
                with engine.lock:
                    engine.truth.running -= 1

        def _answer(self, body: dict[str, Any], failing: Failing | None) -> None:
            unknown = [key for key in engine.how.refuses if key in body or key in (body.get("stream_options") or {})]
            if unknown:
                self._whole(400, json.dumps({"error": {"message": f"unknown field {unknown[0]}"}}))
            elif self.path != "/v1/chat/completions":
                self._whole(404, json.dumps({"detail": "Not Found"}))
            elif failing is not None and failing.status != 200:
                self._whole(failing.status, failing.body)
            else:
                self._stream(body, failing)

        def _stream(self, body: dict[str, Any], failing: Failing | None) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for number, event in enumerate(engine.answer(body)):
                if engine.closed or (failing is not None and failing.after == number):
                    if failing is not None and failing.line is not None:
                        self._chunk(failing.line)
                        self._chunk(b"")
                    self.close_connection = True
                    return
                self._chunk(event)
            self._chunk(b"")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        def _whole(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("content-type", "application/json" if text.startswith("{") else "text/plain")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    return Handler
