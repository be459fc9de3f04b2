"""`draftsmith bench` against real vLLM servers, one that drafts what stood in the prompt (n-grams) and one that does not speculate."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator

import pytest
from engines import Vllm, environment

from draftsmith.bench.counters import VLLM
from draftsmith.bench.load import Level
from draftsmith.bench.report import build
from draftsmith.bench.run import BASELINE, SPECULATIVE, BenchSettings, Results, measure
from draftsmith.data.conversations import Conversation, Message

pytestmark = pytest.mark.interop
WIDTH, TOKENS = 3, 24
NGRAM = {"method": "ngram", "num_speculative_tokens": WIDTH, "prompt_lookup_min": 2, "prompt_lookup_max": 3}
SENTENCES = ("The cat sat on the mat and the dog lay on the rug.", "One two three four five six seven eight nine ten.", "Red, green, blue, red, green, blue.")
PROMPTS = [Conversation(f"p{i}", "all", (Message("user", f"Repeat this three times: {s} {s}"),)) for i, s in enumerate(SENTENCES)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vllm, Vllm]]:
    """With and without speculation."""
    if not any(environment().glob("lib/python*/site-packages/vllm")):
        pytest.skip(f"no vLLM in {environment()}: run `make engines` (about 3.5 GB), or set DRAFTSMITH_ENGINES to such an environment")
    folder = tmp_path_factory.mktemp("vllm")
    speculating, plain = Vllm(folder / "speculating.txt", {"--speculative-config": json.dumps(NGRAM)}), Vllm(folder / "plain.txt")
    try:
        for server in (speculating, plain):
            server.start()
        yield speculating, plain
    finally:
        speculating.kill()
        plain.kill()


def counted(server: Vllm) -> dict[str, float]:
    """The page of counters, read with another pattern than the package's: every series of speculation and the generated tokens."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    wanted = [line.rsplit(" ", 1) for line in lines if line.startswith(("vllm:spec_decode_num", "vllm:generation_tokens_total"))]
    return {re.sub(r'engine="\d+",model_name="smollm2",?', "", series): float(value) for series, value in wanted if "_created" not in series}


def settings(servers: tuple[Vllm, Vllm]) -> BenchSettings:
    return BenchSettings(servers[0].url, (Level(concurrency=1), Level(concurrency=3)), servers[1].url, max_tokens=TOKENS, timeout=600)


@pytest.fixture(scope="module")
def results(servers: tuple[Vllm, Vllm]) -> tuple[Results, dict[str, float]]:
    """Measured without warm-up, so that the counters move for measured requests alone; and by how much they moved."""
    before = counted(servers[0])
    found = measure(PROMPTS, [], settings(servers))
    after = counted(servers[0])
    return found, {series: after[series] - before[series] for series in after}


def test_acceptance_is_how_far_the_counters_moved(servers: tuple[Vllm, Vllm], results: tuple[Results, dict[str, float]]) -> None:
    measured, moved = results
    found = build(measured, settings(servers), PROMPTS, "test", None)
    a = found["acceptance"]
    assert found["servers"][SPECULATIVE]["engine"] == found["servers"][BASELINE]["engine"] == VLLM
    assert found["servers"][SPECULATIVE]["version"]
    assert a["drafts"] == moved["vllm:spec_decode_num_drafts_total{}"] > 0
    assert a["drafted"] == moved["vllm:spec_decode_num_draft_tokens_total{}"]
    assert a["accepted"] == moved["vllm:spec_decode_num_accepted_tokens_total{}"] > 0
    positions = [moved[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}}'] for k in range(WIDTH)]
    assert a["position_rates"] == [round(n / a["drafts"], 4) for n in positions]
    assert a["acceptance_length"] == round(1 + sum(positions) / a["drafts"], 4)
    for level in found["levels"]:
        assert level[BASELINE]["acceptance"] is None
        assert not [r for side in (BASELINE, SPECULATIVE) for r in level[side]["remarks"] if not r.startswith("this machine was busy")]


def test_tokens_are_what_the_server_generated_and_arrivals_are_fewer(results: tuple[Results, dict[str, float]]) -> None:
    measured, moved = results
    ours = {side: [a for m in measured.measured if m.side == side for a in m.answers] for side in (BASELINE, SPECULATIVE)}
    assert all(a.error is None for answers in ours.values() for a in answers)
    assert sum(a.tokens or 0 for a in ours[SPECULATIVE]) == moved["vllm:generation_tokens_total{}"]
    assert sum(len(a.arrivals) for a in ours[SPECULATIVE]) < sum(a.tokens or 0 for a in ours[SPECULATIVE])
    for a in ours[SPECULATIVE]:
        assert a.arrivals[-1].counted == a.tokens
        assert sum(n for _, n in a.token_gaps()) == (a.tokens or 0) - (a.arrivals[0].counted or 0)


def test_outputs_are_those_of_whole_replies_and_equal_without_speculation(servers: tuple[Vllm, Vllm], results: tuple[Results, dict[str, float]]) -> None:
    """In float32; one near tie may fall the other way."""
    plain = {a.prompt: a for a in next(m for m in results[0].measured if m.side == BASELINE).answers}
    for prompt in PROMPTS:
        body = {"model": "smollm2", "messages": [{"role": "user", "content": prompt.messages[0].content}], "max_tokens": TOKENS, "temperature": 0}
        request = urllib.request.Request(f"{servers[1].url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            whole = json.load(reply)
        assert plain[prompt.id].text == whole["choices"][0]["message"]["content"]
        assert plain[prompt.id].tokens == whole["usage"]["completion_tokens"]
    found = build(results[0], settings(servers), PROMPTS, "test", None)
    assert all(level["comparison"]["identical_outputs"] >= len(PROMPTS) - 1 for level in found["levels"])
