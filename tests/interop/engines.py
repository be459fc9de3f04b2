"""Real serving engines, as processes that tests may kill, in the virtual environment that `make engines` builds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from draftsmith.core.env import engines_dir
from draftsmith.target import smollm2

ROOT = Path(__file__).parents[2]
START_SECONDS = 300


def environment() -> Path:
    """The engines' virtual environment, relative to the repository."""
    return ROOT / engines_dir()


class Vllm:
    """A vLLM server of SmolLM2 in float32 on a CPU, which can be killed and started again on its port."""

    def __init__(self, log: Path, more: Mapping[str, object] | None = None) -> None:
        """`more`: further arguments of its command line, with their values."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.log, self.more = f"http://127.0.0.1:{self.port}", log, dict(more or {})
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        arguments = {
            "--model": smollm2.directory(), "--served-model-name": "smollm2", "--dtype": "float32", "--max-model-len": 2048, "--host": "127.0.0.1",
            "--port": self.port, "--tool-call-parser": "hermes",
            **self.more,
        }  # fmt: skip
        command = [environment() / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--enable-auto-tool-choice"]
        command += [part for pair in arguments.items() for part in pair]
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([str(part) for part in command], env=clean | settings, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + START_SECONDS
        while not self._healthy():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def kill(self) -> None:
        """SIGKILL, with its engine's process."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False
