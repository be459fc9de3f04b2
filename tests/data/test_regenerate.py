"""The whole of it against real HTTP servers around the tiny target: what a server answers is what the target answers here, whatever happens on the way."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, Misbehave, Script, completion, target_script
from command_line import command, start

from draftsmith.data import servers as module
from draftsmith.data.chat import AnswerSettings
from draftsmith.data.conversations import Conversation, Message, dumps, read
from draftsmith.data.journal import FAILED, REPORT, UNFINISHED, sibling
from draftsmith.data.regenerate import Service, regenerate
from draftsmith.data.samples import samples_of
from draftsmith.data.servers import ServersGone
from draftsmith.data.template import ChatTemplate
from draftsmith.eval.answers import answer
from draftsmith.eval.decode import Decoder
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

SETTINGS = AnswerSettings(max_tokens=10)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.2)


@pytest.fixture(scope="module")
def decoder(target_model: TargetModel, target: Target, template: ChatTemplate) -> Decoder:
    """With an end token that stops some answers early."""
    plain = Decoder(target_model, target, ())
    first = plain.decode([template.ids([Message("user", "question 3 xxx")], prompt=True)], 10)[0]
    return replace(plain, end_ids=(*template.end_ids, first.token_ids[5]))


@pytest.fixture(scope="module")
def local(talks: list[Conversation], decoder: Decoder, template: ChatTemplate) -> list[Conversation]:
    """The target's answers on this machine."""
    found = answer(talks, decoder, template, SETTINGS.max_tokens, 5, lambda _: None)
    return [c for c in found if isinstance(c, Conversation)]


@pytest.fixture
def script(decoder: Decoder, template: ChatTemplate) -> Script:
    return target_script(decoder, template)


def service(*servers: ChatServer, **changes: Any) -> Service:
    return replace(Service(tuple(s.url for s in servers), concurrency=3, tries=4, timeout=10, patience=2), **changes)


def report(out: Path) -> dict[str, Any]:
    return json.loads(sibling(out, REPORT).read_text())


def test_servers_give_what_the_target_gives_here(
    tmp_path: Path, talks: list[Conversation], local: list[Conversation], script: Script, template: ChatTemplate
) -> None:
    out = tmp_path / "out.jsonl"
    with ChatServer(script) as one, ChatServer(script) as two:
        regenerate(talks, out, service(one, two), SETTINGS, template.text)
        turns = sum(m.role == "assistant" for c in talks for m in c.messages)
        assert len(one.asked) + len(two.asked) == turns
    assert read(out) == local
    found = report(out)
    reasons = [m.finish_reason for c in local for m in c.messages if m.role == "assistant"]
    assert {"stop", "length"} == set(reasons)
    assert found["counts"] == "read 12 = answered 12 + failed 0"
    assert (found["turns"], found["turns_cut_by_length"], found["turns_without_token_ids"]) == (turns, reasons.count("length"), 0)
    assert found["settings"]["model"] == "tiny"


def test_the_order_is_that_of_the_input_whatever_finishes_first(tmp_path: Path, talks: list[Conversation], local: list[Conversation], script: Script) -> None:
    """Random delays and faults on both servers change neither order nor content."""
    chance = random.Random(5)

    def unsteady(number: int, body: dict[str, Any]) -> Misbehave | dict[str, Any]:
        time.sleep(chance.random() * 0.05)
        faults = [Misbehave(500), Misbehave(body="garbage"), Misbehave(drop=True), Misbehave(429, headers={"retry-after": "0"}), completion(finish=None)]
        return chance.choice(faults) if chance.random() < 0.3 else script(number, body)

    out = tmp_path / "out.jsonl"
    with ChatServer(unsteady) as one, ChatServer(unsteady) as two:
        regenerate(talks, out, service(one, two, tries=50, patience=30), SETTINGS)
        assert len(one.asked) + len(two.asked) > 20
    assert read(out) == local
    assert not sibling(out, FAILED).exists()


def test_what_fails_is_counted_with_reasons_and_kept_to_be_asked_again(
    tmp_path: Path, talks: list[Conversation], local: list[Conversation], script: Script
) -> None:
    def picky(number: int, body: dict[str, Any]) -> Misbehave | dict[str, Any]:
        question = body["messages"][0]["content"]
        if question.startswith(("question 4", "question 7")):
            return Misbehave(400, json.dumps({"error": {"message": f"{len(question)} tokens are too many"}}))
        return Misbehave(body="{}") if question.startswith("question 5") else script(number, body)

    out = tmp_path / "out.jsonl"
    asked = [*talks, Conversation("mute", "odd", (Message("system", "quiet"),))]
    with ChatServer(picky) as server:
        regenerate(asked, out, service(server), SETTINGS)
    assert read(out) == [c for i, c in enumerate(local) if i not in (4, 5, 7)]
    counts = report(out)["counts"]
    assert counts.startswith("read 13 = answered 9 + failed 4: ")
    assert "2 with HTTP 400: # tokens are too many (first: talk-4)" in counts
    assert "1 with a reply without `choices` (# tries) (first: talk-5)" in counts
    assert "1 with nothing in it to answer: no turn of a user (first: mute)" in counts
    assert read(sibling(out, FAILED)) == [asked[i] for i in (4, 5, 7, 12)]
    with ChatServer(script) as server:
        regenerate(read(sibling(out, FAILED))[:3], tmp_path / "again.jsonl", service(server), SETTINGS)
    assert read(tmp_path / "again.jsonl") == [local[i] for i in (4, 5, 7)]


def test_tools_reasoning_and_absent_ids_are_kept_and_counted(tmp_path: Path) -> None:
    call = {"id": "s1", "type": "function", "function": {"name": "tides", "arguments": '{"port": "Brest"}'}}
    tools = ({"type": "function", "function": {"name": "tides"}},)
    recorded = Message("assistant", "", tool_calls=({"id": "r1", "function": {"name": "tides", "arguments": {"port": "Brest"}}},))

    def talk(name: str, question: str) -> Conversation:
        return Conversation(name, "k", (Message("user", question), recorded, Message("tool", "at 7", tool_call_id="r1"), Message("user", "thanks")), tools)

    def script(_number: int, body: dict[str, Any]) -> dict[str, Any]:
        assert body["tools"] == list(tools)
        if body["messages"][-1]["content"] == "call":
            return completion(None, "tool_calls", tool_calls=[call])
        return completion("text", ids=None, counted=3, reasoning_content="hm")

    out = tmp_path / "out.jsonl"
    with ChatServer(script) as server:
        regenerate([talk("same", "call"), talk("other", "say")], out, service(server), SETTINGS)
    same, other = read(out)
    assert [m.role for m in same.messages] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert same.messages[1] == Message("assistant", "", tool_calls=(call | {"id": "r1"},), token_ids=(5, 2), finish_reason="tool_calls")
    assert same.messages[3] == Message("assistant", "text", reasoning="hm", finish_reason="stop")
    assert (same.tools, other.tools) == (tools, tools)
    assert len(other.messages) == 2
    found = report(out)
    wanted = {
        "turns": 4, "turns_with_tool_calls": 1, "turns_with_reasoning": 3, "turns_without_token_ids": 3, "token_ids": 2,
        "conversations_stopped_at_another_tool_call": 1, "turns_cut_by_length": 0, "conversations_with_openings_left_out": 0,
    }  # fmt: skip
    assert {k: v for k, v in found.items() if k not in ("counts", "settings")} == wanted


def test_an_answer_cut_within_a_character_still_becomes_a_sample(tmp_path: Path, template: ChatTemplate) -> None:
    """vLLM leaves the bytes of an unfinished character out of the text; the ids have them."""
    ids = template.tokenizer("né", add_special_tokens=False)["input_ids"][:2]
    assert template.text(ids) == "n\ufffd"
    out = tmp_path / "out.jsonl"
    with ChatServer(lambda *_: completion("n", "length", ids=ids)) as server:
        regenerate([Conversation("c", "k", (Message("user", "x"),))], out, service(server), SETTINGS, template.text)
    (sample,) = samples_of(read(out)[0], template)
    assert sample.input_ids[sample.loss_mask].tolist() == ids


def test_when_nothing_works_it_stops_early_and_says_why(tmp_path: Path) -> None:
    asked = [Conversation(f"c{i}", "k", (Message("user", "x"),)) for i in range(100)]
    with ChatServer(lambda *_: Misbehave(400, '{"error": "no tools here"}')) as server:
        with pytest.raises(ValueError, match="the first 20 conversations all failed, the last with: HTTP 400: no tools here"):
            regenerate(asked, tmp_path / "out.jsonl", service(server), SETTINGS)
        assert len(server.asked) < 30
        with pytest.raises(ValueError, match=r"nothing was answered: read 3 = answered 0 \+ failed 3: 3 with HTTP 400: no tools here"):
            regenerate(asked[:3], tmp_path / "few.jsonl", service(server), SETTINGS)
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl.unfinished"]


def test_all_servers_gone_keeps_what_was_answered(tmp_path: Path, talks: list[Conversation], local: list[Conversation], script: Script) -> None:
    def dying(number: int, body: dict[str, Any]) -> Misbehave | dict[str, Any]:
        if number > 6:
            threading.Thread(target=server.close).start()
            return Misbehave(drop=True)
        return script(number, body)

    out = tmp_path / "out.jsonl"
    with ChatServer(dying) as server, pytest.raises(ServersGone, match="no server has worked"):
        regenerate(talks, out, service(server, patience=0.3, concurrency=1), SETTINGS)
    kept = {json.loads(line)["id"] for line in sibling(out, UNFINISHED).read_text().splitlines()[1:]}
    assert len(kept) == 4  # talk-0 and talk-3 have two turns
    with ChatServer(script) as server:
        regenerate(talks, out, service(server), SETTINGS)
        asked = {b["messages"][0]["content"] for b in server.asked}
    assert asked == {c.messages[0].content for c in talks if c.id not in kept}
    assert read(out) == local


# ---- the command ----


@pytest.fixture
def prompts(tmp_path: Path, talks: list[Conversation]) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(dumps(talks))
    return path


@pytest.fixture
def slow(decoder: Decoder, template: ChatTemplate) -> Iterator[ChatServer]:
    with ChatServer(target_script(decoder, template, seconds=0.1)) as server:
        yield server


def test_a_killed_run_goes_on_without_losing_or_repeating(
    tmp_path: Path, prompts: Path, talks: list[Conversation], local: list[Conversation], slow: ChatServer
) -> None:
    """SIGKILL twice; what was finished before is not asked again, and the file is that of an undisturbed run, byte for byte."""
    out, output = tmp_path / "out.jsonl.gz", tmp_path / "output.txt"
    arguments = ["regenerate", prompts, out, "--server", slow.url, "--max-tokens", 10, "--concurrency", 2]
    unfinished, kept = sibling(out, UNFINISHED), 0
    for wanted in (3, 7):
        process = start(arguments)
        while not unfinished.exists() or unfinished.read_bytes().count(b"\n") <= wanted:
            assert process.is_alive()
            time.sleep(0.01)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        rows = unfinished.read_bytes().splitlines(keepends=True)
        assert kept < len(rows) - 1 < len(talks)
        kept = len(rows) - 1
    finished = {json.loads(row)["id"] for row in rows[1:] if row.endswith(b"\n")}
    before = len(slow.asked)
    code, text = command(arguments, output)
    assert code == 0, text
    asked = {b["messages"][0]["content"] for b in slow.asked[before:]}
    assert asked == {c.messages[0].content for c in talks if c.id not in finished}
    assert read(out) == local
    undisturbed = tmp_path / "undisturbed.jsonl.gz"
    assert command([*arguments[:2], undisturbed, *arguments[3:]], output)[0] == 0
    assert out.read_bytes() == undisturbed.read_bytes()
    assert report(out) == report(undisturbed)
    before = len(slow.asked)
    code, text = command(arguments, output)
    assert (code, len(slow.asked)) == (0, before)
    assert "is finished" in text
    assert "error: " in command([*arguments, "--temperature", 1], output)[1]


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, prompts: Path, slow: ChatServer) -> None:
    out, output = tmp_path / "out.jsonl", tmp_path / "output.txt"
    process = start(["regenerate", prompts, out, "--server", slow.url, "--max-tokens", 10, "--concurrency", 2], output=output)
    unfinished = sibling(out, UNFINISHED)
    while not unfinished.exists() or unfinished.read_bytes().count(b"\n") < 3:
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(20)
    assert process.exitcode == 130
    assert "the same command continues" in output.read_text()
    assert "Traceback" not in output.read_text()


def test_rows_of_any_shape_are_asked_and_bad_ones_counted(tmp_path: Path, script: Script) -> None:
    """ShareGPT rows of one id, an Alpaca row, a torn one, one without a user, and text that is rendered already."""
    talk = {"id": "twice", "conversations": [{"from": "human", "value": "question 1"}, {"from": "gpt", "value": "other"}]}
    lines = [talk, talk | {"id": "twice#2"}, talk, {"instruction": "question 2", "output": "other"}, {"messages": [{"role": "system", "content": "s"}]}]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    text = {"text": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"}
    prompts.write_text("".join(json.dumps(line) + "\n" for line in [*lines, text]) + "{torn\n")
    with ChatServer(script) as server:
        code, printed = command(["regenerate", prompts, out, "--server", server.url, "--max-tokens", 4], tmp_path / "output.txt")
    assert code == 0, printed
    assert [(c.id, c.messages[0].content) for c in read(out)] == [
        ("twice", "question 1"), ("twice#2", "question 1"), ("twice#3", "question 1"), ("line-4", "question 2"),
    ]  # fmt: skip
    counts = report(out)["counts"]
    assert counts.startswith("read 7 = answered 4 + failed 3: ")
    for reason in ("1 that are no valid JSON", "1 that are rendered already", "1 with nothing in it to answer"):
        assert reason in counts


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "error: who is to answer? Give --server ADDRESS (once or several times), or --local"),
        (["--local", "--server", "http://h"], "error: who is to answer?"),
        (["--local", "--top-p", "0.5"], "error: --local decodes greedily or at a temperature"),
        (["--local", "--max-tokens", "0"], "error: max_tokens = 0: expected at least 1"),
        (["--server", "h:80"], "error: server 'h:80': expected an address like http://localhost:8000"),
        (["--server", "http://127.0.0.1:9"], "error: no server answers: http://127.0.0.1:9/v1/models: cannot be reached"),
        (["--server", "http://h", "--template-kwargs", "[1]"], "error: --template-kwargs '[1]': expected a JSON object"),
    ],
)
def test_a_wrong_call_is_explained(tmp_path: Path, prompts: Path, arguments: list[str], said: str) -> None:
    code, text = command(["regenerate", prompts, tmp_path / "out.jsonl", *arguments], tmp_path / "output.txt")
    assert (code, "Traceback" in text) == (2, False), text
    assert said in text
