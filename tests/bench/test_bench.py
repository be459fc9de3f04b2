"""`draftsmith bench` against servers that count exactly: every figure that can be exact is, and every accident leaves what was measured."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import command, start
from streaming_server import Behaviour, Engine, Failing

from draftsmith.bench import report
from draftsmith.bench.command import Outputs, bench
from draftsmith.bench.counters import LLAMA, RULES, SGLANG, VLLM
from draftsmith.bench.load import Level
from draftsmith.bench.run import BenchSettings, split, up_to_last_answer
from draftsmith.data import bundled
from draftsmith.data.conversations import Conversation, Message, dumps

ONE = (Level(concurrency=1),)


@pytest.fixture(autouse=True)
def a_client_in_no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run on busy machines, and ask what else is said."""
    monkeypatch.setattr(report, "LAG_MS", float("inf"))


def talks(count: int) -> list[Conversation]:
    return [Conversation(f"t{i}", "even" if i % 2 == 0 else "odd", (Message("user", f"question {i}"),)) for i in range(count)]


def measure(engine: Engine, count: int = 8, number: int | None = None, outputs: Outputs | None = None, **settings: Any) -> dict[str, Any]:
    chosen = {"levels": ONE, "warm_up": 2} | settings
    return bench(talks(count), "talks", number, BenchSettings(engine.url, **chosen), outputs or Outputs())


def truth_of(engine: Engine, name: str) -> tuple[int, int, int, list[int]]:
    """Drafts, drafted, accepted and accepted by position for the prompts t0 … that were measured once, by counting single passes."""
    passes = [n for prompt, _, passes, _ in engine.truth.requests if prompt.startswith(name) for n in passes]
    width = engine.how.width
    return len(passes), width * len(passes), sum(passes), [sum(n >= k for n in passes) for k in range(1, width + 1)]


@pytest.mark.parametrize(
    ("kind", "engine", "rule"),
    [
        ("vllm", VLLM, RULES[VLLM]), ("llama-metrics", LLAMA, RULES[LLAMA]), ("sglang", SGLANG, RULES[SGLANG]),
        ("llama", LLAMA, RULES["llama-server (timings)"]),
    ],
)  # fmt: skip
def test_acceptance_is_what_the_engine_did_for_us(kind: str, engine: str, rule: str) -> None:
    """Counted before us: not ours. Warm-up: not ours. All others: to the last token."""
    with Engine(Behaviour(engine=kind)) as server:
        for accepted in (3, 3, 0):
            server.count(accepted, accepted + 1)
        found = measure(server, count=12, number=10)
        measured = server.truth.requests[2:]
        server.truth.requests = measured
        drafts, drafted, accepted, positions = truth_of(server, "question")
    assert len(measured) == 10
    a = found["acceptance"]
    assert found["servers"]["speculative"]["engine"] == engine
    assert (a["drafts"], a["drafted"], a["accepted"], a["rule"]) == (drafts, drafted, accepted, rule)
    assert a["acceptance_length"] == round(1 + accepted / drafts, 4)
    assert a["acceptance_rate"] == round(accepted / drafted, 4)
    assert a["position_rates"] == (None if kind == "llama" else [round(n / drafts, 4) for n in positions])
    assert a["draft_tokens"] == (None if kind == "llama" else 3)
    if kind == "sglang":
        assert a["engine_length"] == pytest.approx(sum(tokens for _, tokens, _, _ in measured) / drafts, abs=1e-3)
        assert all(body["return_spec_tokens_details"] for body in server.truth.bodies)
    level = found["levels"][0]["speculative"]
    assert level["remarks"] == []
    assert level["completion_tokens"] == sum(tokens for _, tokens, _, _ in measured)
    assert all(1 <= r["arrivals"] <= n for r, (_, _, _, n) in zip(found["requests"], measured, strict=True))
    assert [r["tokens"] for r in found["requests"]] == [12] * 10


def test_levels_add_up_and_each_prompt_is_sent_once_at_each() -> None:
    with Engine() as server:
        found = measure(server, levels=(Level(concurrency=1), Level(concurrency=4), Level(rate=200.0)))
        sent = Counter(body["messages"][-1]["content"] for body in server.truth.bodies[2:])
        drafts = truth_of(server, "question")[0] - sum(len(passes) for _, _, passes, _ in server.truth.requests[:2])
    assert sent == {f"question {i}": 3 for i in range(8)}
    assert [level["level"] for level in found["levels"]] == ["1 at a time", "4 at a time", "200 a second"]
    assert found["acceptance"]["drafts"] == sum(level["speculative"]["acceptance"]["drafts"] for level in found["levels"]) == drafts
    assert (found["complete"], found["prompts"]["by_kind"]) == (True, {"even": 4, "odd": 4})


def test_what_is_sent() -> None:
    with Engine() as server:
        measure(server, count=2, max_tokens=5, temperature=0.5)
        body = server.truth.bodies[-1]
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("tiny", 5, 0.5, True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "return_token_ids" not in body
    assert "return_spec_tokens_details" not in body


def test_a_server_that_refuses_running_counts_is_asked_without() -> None:
    with Engine(Behaviour(refuses=("continuous_usage_stats",))) as server:
        found = measure(server)
        assert "continuous_usage_stats" in server.truth.bodies[0]["stream_options"]
        assert all("continuous_usage_stats" not in body["stream_options"] for body in server.truth.bodies[1:])
    assert found["levels"][0]["speculative"]["answered"] == 8
    assert found["levels"][0]["speculative"]["errors"] == {}


def test_two_servers_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same words with and without speculation: outputs equal, a speedup within its interval, and a report that disagrees is found."""
    with Engine() as fast, Engine(Behaviour(width=0)) as plain:
        run = {
            "acceptance_length": 3.4, "simulated_acceptance_length": 3.5, "draft_tokens": 3, "prompts": 8, "temperature": 0.0,
            "acceptance": {"position_rates": [0.9, 0.8, 0.7]}, "by_kind": {"even": {"prompts": 4}, "odd": {"prompts": 4}},
        }  # fmt: skip
        (tmp_path / "report.json").write_text(json.dumps(run))
        outputs = Outputs(tmp_path / "report.json", tmp_path / "out.json", tmp_path / "out.html")
        found = measure(fast, baseline=plain.url, outputs=outputs)
    comparison = found["levels"][0]["comparison"]
    assert (comparison["identical_outputs"], comparison["differing"], comparison["same_tokens"]) == (8, [], 8)
    assert comparison["interval"][0] <= comparison["speedup"] <= comparison["interval"][1]
    assert found["levels"][0]["baseline"]["acceptance"] is None
    assert json.loads((tmp_path / "out.json").read_text()) == found
    assert "<svg" in (tmp_path / "out.html").read_text()
    (finding,) = found["agreement"]["findings"]
    assert finding.startswith("measured in the engine")
    printed = capsys.readouterr()
    assert "Check first, in this order:" in printed.out
    assert "1. layer ids" in printed.out
    assert finding in printed.err


def test_outputs_that_differ_are_counted_and_kept() -> None:
    with Engine() as ours, Engine(Behaviour(width=0, words=lambda i: f"w{i} " if i < 9 else "x ")) as plain:
        found = measure(ours, baseline=plain.url)
    comparison = found["levels"][0]["comparison"]
    assert comparison["identical_outputs"] == 0
    assert {d["from_character"] for d in comparison["differing"]} == {len("".join(f"w{i} " for i in range(9)))}


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (Behaviour(width=0), "no speculation: the server has no counters of it (start it with --speculative-config)"),
        (Behaviour(engine="unknown"), "no speculation: the server has no counters of it (known are the counters of vLLM, SGLang, llama-server)"),
        (Behaviour(engine="sglang", width=0), "no speculation: the server has no counters of it (start it with --speculative-algorithm)"),
        (Behaviour(tokens=1), "the server counts speculation, but drafted nothing"),
        (Behaviour(engine="sglang-old"), "on average since it was started, all traffic included; not of this run alone"),
    ],
)
def test_a_server_without_speculation_is_measured_and_told(behaviour: Behaviour, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(behaviour) as server:
        found = measure(server)
    level = found["levels"][0]["speculative"]
    assert level["answered"] == 8
    assert level["acceptance"] is None
    assert found["acceptance"] is None
    assert said in level["remarks"][0]
    assert said in capsys.readouterr().err


def test_traffic_of_others_is_noticed() -> None:
    with Engine() as server:
        original = server.how.fail

        def busy(number: int) -> Failing | None:
            server.count(2, 5) if number == 6 else None
            return original(number)

        server.how.fail = busy
        (remark,) = measure(server)["levels"][0]["speculative"]["remarks"]
    assert remark.startswith("other traffic: the server generated 5 tokens more than our 96;")


def test_a_busy_client_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LAG_MS", 0.0)
    with Engine(Behaviour(seconds=0.01)) as server:
        level = measure(server)["levels"][0]["speculative"]
    assert level["client_lag_ms"]["p90"] > 0
    assert level["remarks"][0].startswith("this machine was busy: one in ten events was handled")


def test_a_baseline_that_speculates_is_told() -> None:
    with Engine() as ours, Engine() as other:
        found = measure(ours, baseline=other.url)
    assert found["levels"][0]["baseline"]["remarks"] == ["the baseline speculates too: are both addresses right?"]


@pytest.mark.parametrize(("code", "said"), [(429, "slow down"), (500, "boom")])
def test_some_errors_are_counted_by_kind(code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(Behaviour(fail=lambda n: Failing(code, said) if n % 3 == 0 else None)) as server:
        found = measure(server)
        answered = [tokens for _, tokens, _, _ in server.truth.requests[2:]]
    level = found["levels"][0]["speculative"]
    assert (level["answered"], level["errors"], level["not_sent"]) == (5, {f"HTTP {code}": 3}, 0)
    assert level["completion_tokens"] == sum(answered)
    assert f"3 requests failed: HTTP {code} {said}" in capsys.readouterr().err


def test_only_errors_end_in_an_error_with_everything_written(tmp_path: Path) -> None:
    with (
        Engine(Behaviour(fail=lambda n: Failing(500, "boom"))) as server,
        pytest.raises(ValueError, match="1 at a time: no request was answered; 8 x HTTP 500 boom"),
    ):
        measure(server, outputs=Outputs(out=tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text())["levels"][0]["speculative"]["errors"] == {"HTTP 500": 8}


def test_a_server_that_dies_leaves_what_was_measured(tmp_path: Path) -> None:
    server = Engine()

    def die(number: int) -> Failing | None:
        if number == 7:
            server.close()
            return Failing(after=2)
        return None

    server.how.fail = die
    out = tmp_path / "out.json"
    with pytest.raises(ValueError, match=r"no longer answers .*what was measured is in .*out.json, marked as partial"):
        measure(server, outputs=Outputs(out=out))
    found = json.loads(out.read_text())
    level = found["levels"][0]["speculative"]
    assert (found["complete"], level["answered"], level["errors"], level["not_sent"]) == (False, 4, {"the connection broke": 1}, 3)
    assert server.url in found["stopped"]
    assert [r["tokens"] for r in found["requests"] if r["error"] is None] == [12] * 4


def test_a_server_that_was_never_there() -> None:
    server = Engine()
    server.close()
    with pytest.raises(ConnectionError, match=f"no server answers: {server.url}/v1/models: cannot be reached"):
        measure(server)


@pytest.mark.parametrize(
    ("behaviour", "settings", "said"),
    [
        (Behaviour(), {"model": "tinny"}, "serves tiny, not tinny; did you mean tiny"),
        (Behaviour(models=("a", "b")), {}, "serves a, b: name one with --model"),
        (Behaviour(fail=lambda n: Failing(404, '{"detail": "Not Found"}')), {}, r"HTTP 404 \(.*Not Found.*\); is this the address"),
        (Behaviour(fail=lambda n: Failing(401, "who are you")), {}, r"HTTP 401 \(who are you\); set DRAFTSMITH_API_KEY"),
        (Behaviour(usage=False, running_counts=False), {}, "a stream without token counts; the server must count tokens"),
        (Behaviour(refuses=("stream",)), {}, r"HTTP 400 \(unknown field stream\)"),
    ],
)
def test_what_would_fail_for_every_request_is_refused_at_once(behaviour: Behaviour, settings: dict[str, Any], said: str) -> None:
    with Engine(behaviour) as server:
        with pytest.raises(ValueError, match=said):
            measure(server, **settings)
        assert len(server.truth.bodies) <= 2


def test_prompts_are_cut_behind_the_last_question() -> None:
    user, answer, system = Message("user", "q"), Message("assistant", "a"), Message("system", "s")
    assert up_to_last_answer(Conversation("x", "all", (system, user, answer, user, answer))).messages == (system, user, answer, user)
    assert up_to_last_answer(Conversation("x", "all", (user, answer, user))).messages == (user,)
    assert up_to_last_answer(Conversation("x", "all", (system, user, user))).messages == (system, user, user)
    with pytest.raises(ValueError, match="nothing to ask"):
        split([Conversation("x", "all", (system,))], None, 2)


def test_warm_up_takes_other_prompts_while_there_are_any() -> None:
    chosen, warm = split(talks(10), 5, 3)
    assert [c.id for c in chosen] == ["t1", "t3", "t5", "t7", "t9"]
    assert [c.id for c in warm] == ["t0", "t2", "t4"]
    assert [c.id for c in split(talks(2), None, 3)[1]] == ["t1", "t0", "t1"]
    held_out, _ = split(bundled.conversations("held-out"), None, 1)
    assert len(held_out) == 100


def test_the_command(tmp_path: Path) -> None:
    """Exit codes, and Ctrl-C in the middle."""
    out = tmp_path / "out.json"
    with Engine() as server:
        code, text = command(["bench", "--url", server.url, "--number", 6, "--max-tokens", 8, "--concurrency", 2, "--out", out], tmp_path / "a.txt")
        assert code == 0, text
        assert "6 prompts of the bundled held-out set, at most 8 tokens" in text
        assert json.loads(out.read_text())["levels"][0]["speculative"]["completion_tokens"] == 48
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(dumps(talks(3)) + '{"messages": 7}\n')
        code, text = command(["bench", "--url", server.url, "--prompts", prompts, "--out", out], tmp_path / "p.txt")
        assert (code, "prompts.jsonl: read 4" in text) == (0, True), text
        assert json.loads(out.read_text())["prompts"]["by_kind"] == {"even": 2, "odd": 1}
        bad = [
            (["--report", tmp_path / "no.json"], "no such file"),
            (["--report", out], "no report of `draftsmith eval`"),
            (["--rate", 0], "0 a second: expected more than 0"),
            (["--prompts", tmp_path / "nothing.jsonl"], "nothing.jsonl"),
            (["--max-tokens", 0], "max_tokens = 0: expected at least 1"),
        ]
        for more, said in bad:
            code, text = command(["bench", "--url", server.url, *more], tmp_path / "b.txt")
            assert (code, said in text) == (2, True), text
            (tmp_path / "b.txt").unlink()
    with Engine(Behaviour(seconds=0.05)) as slow:
        process = start(["bench", "--url", slow.url, "--warm-up", 1, "--out", out], output=tmp_path / "c.txt")
        until = time.monotonic() + 60
        while len(slow.truth.requests) < 4 and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(process.pid or 0, signal.SIGINT)
        process.join(30)
    assert process.exitcode == 130, (tmp_path / "c.txt").read_text()
    found = json.loads(out.read_text())
    assert (found["complete"], found["stopped"]) == (False, "stopped by Ctrl-C")
    assert 2 <= found["levels"][0]["speculative"]["answered"] < 100
