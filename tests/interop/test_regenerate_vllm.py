"""`draftsmith regenerate` against a real vLLM server: the answers, and what is left when the client, the server or its neighbour fails."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_server import ChatServer, Misbehave
from command_line import command, start
from engines import Vllm, environment

from draftsmith.data import bundled
from draftsmith.data.conversations import Conversation, Message, dumps, read
from draftsmith.data.journal import FAILED, REPORT, UNFINISHED, sibling
from draftsmith.data.template import ChatTemplate
from draftsmith.target import smollm2

pytestmark = pytest.mark.interop
TOOLS = ({"type": "function", "function": {"name": "get_tides", "description": "Tides of a port.", "parameters": {"type": "object", "properties": {}}}},)


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """One server for all tests."""
    if not any(environment().glob("lib/python*/site-packages/vllm")):
        pytest.skip(f"no vLLM in {environment()}: run `make engines` (about 3.5 GB), or set DRAFTSMITH_ENGINES to such an environment")
    server = Vllm(tmp_path_factory.mktemp("vllm") / "log.txt")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def asked() -> list[Conversation]:
    """28 held-out prompts: several of two or three turns, tools in system messages, two with tools of their own."""
    held_out = bundled.prompts("held-out")
    several = [c for c in held_out if len(c.messages) > 2][:10]
    tools = [c for c in held_out if c.kind == "tools" and c not in several][:6]
    others = [c for c in held_out if c not in several and c not in tools][:10]
    own = [Conversation(f"own-{i}", "tools", (Message("user", f"When is high water in port {i}?"),), TOOLS) for i in range(2)]
    return [*others, *several, *tools, *own]


@pytest.fixture
def prompts(tmp_path: Path, asked: list[Conversation]) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(dumps(asked))
    return path


def run(tmp_path: Path, prompts: Path, out: Path, *more: object, code: int = 0) -> str:
    """The command's output."""
    found, text = command(["regenerate", prompts, out, "--max-tokens", 32, *more], tmp_path / f"{out.stem}.txt")
    assert found == code, text
    return text


def rows(out: Path) -> dict[str, str]:
    """Finished conversations of a run that was stopped, as they were written."""
    lines = sibling(out, UNFINISHED).read_text().split("\n")[1:-1]
    return {json.loads(line)["id"]: line for line in lines}


def wait_for(out: Path, count: int) -> None:
    until = time.monotonic() + 240
    while not sibling(out, UNFINISHED).exists() or sibling(out, UNFINISHED).read_bytes().count(b"\n") <= count:
        assert time.monotonic() < until
        time.sleep(0.05)


def complete(out: Path, asked: list[Conversation], kept: dict[str, str]) -> None:
    """Every row once, in order, and those that were finished before the accident unchanged."""
    lines = out.read_text().split("\n")[:-1]
    assert [json.loads(line)["id"] for line in lines] == [c.id for c in asked]
    assert [c.users_only() for c in read(out)] == asked
    assert kept == {i: line for line in lines if (i := json.loads(line)["id"]) in kept}
    assert not sibling(out, UNFINISHED).exists()
    assert json.loads(sibling(out, REPORT).read_text())["counts"] == f"read {len(asked)} = answered {len(asked)} + failed 0"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, asked: list[Conversation]) -> list[Conversation]:
    """Answers decoded on this machine to the first 20 prompts."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "prompts.jsonl").write_text(dumps(asked[:20]))
    run(folder, folder / "prompts.jsonl", folder / "here.jsonl", "--local")
    return read(folder / "here.jsonl")


@pytest.mark.parametrize("ids", ["field", "logprobs"])
def test_token_ids_are_those_of_greedy_decoding_here(vllm: Vllm, tmp_path: Path, here: list[Conversation], ids: str) -> None:
    """vLLM's kernels add in another order, so a near tie may fall the other way: one conversation in ten may differ."""
    prompts, served = tmp_path / "prompts.jsonl", tmp_path / "served.jsonl"
    prompts.write_text(dumps(here))
    run(tmp_path, prompts, served, "--server", vllm.url, "--target", "smollm2", "--token-ids", ids)
    assert sum(a == b for a, b in zip(read(served), here, strict=True)) >= 18
    assert json.loads(sibling(served, REPORT).read_text())["turns_without_token_ids"] == 0


def test_the_server_renders_what_the_template_renders(vllm: Vllm, asked: list[Conversation]) -> None:
    template = ChatTemplate.load(str(smollm2.directory()))
    for c in [c for c in asked if not c.tools][:16]:
        body = {"model": "smollm2", "messages": [{"role": m.role, "content": m.content} for m in c.messages], "max_tokens": 1, "return_token_ids": True}
        request = urllib.request.Request(f"{vllm.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)["prompt_token_ids"] == template.ids(c.messages, prompt=True), c.id


def test_a_killed_client_goes_on(vllm: Vllm, tmp_path: Path, prompts: Path, asked: list[Conversation]) -> None:
    out = tmp_path / "out.jsonl"
    process = start(["regenerate", prompts, out, "--server", vllm.url, "--max-tokens", 32, "--concurrency", 4])
    wait_for(out, 6)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    kept = rows(out)
    assert 6 <= len(kept) < len(asked)
    run(tmp_path, prompts, out, "--server", vllm.url, "--concurrency", 4)
    complete(out, asked, kept)


def test_a_neighbour_that_answers_garbage_does_no_harm(vllm: Vllm, tmp_path: Path, prompts: Path, asked: list[Conversation]) -> None:
    out = tmp_path / "out.jsonl"
    with ChatServer(lambda *_: Misbehave(body='{"choices": [{}]}'), models=["smollm2"]) as garbage:
        run(tmp_path, prompts, out, "--server", garbage.url, "--server", vllm.url)
        assert len(garbage.asked) >= 3
    complete(out, asked, {})


def test_a_server_that_dies_and_comes_back(vllm: Vllm, tmp_path: Path, prompts: Path, asked: list[Conversation]) -> None:
    """Alone and killed: a clear error. Started again: the rest is answered."""
    out, output = tmp_path / "out.jsonl", tmp_path / "dying.txt"
    arguments = ["regenerate", prompts, out, "--server", vllm.url, "--max-tokens", 32, "--concurrency", 4, "--patience", 3]
    process = start(arguments, output=output)
    wait_for(out, 6)
    vllm.kill()
    process.join(120)
    text = output.read_text()
    assert process.exitcode == 2, text
    assert "error: no server has worked for 3 s" in text
    assert f"{vllm.url}/v1: cannot be reached" in text
    kept = rows(out)
    assert not sibling(out, FAILED).exists()
    vllm.start()
    run(tmp_path, prompts, out, "--server", vllm.url, "--concurrency", 4)
    complete(out, asked, kept)
