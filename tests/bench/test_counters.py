"""What engines count, as they write it, and what becomes of it."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from streaming_server import Behaviour, Engine

from draftsmith.bench.counters import LLAMA, RULES, SGLANG, VLLM, Reading, Speculation, look, of_metrics, of_reply, parse

VLLM_TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smollm2"} 2.0
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="smollm2"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="smollm2"} 20.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="smollm2"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="smollm2"} 300.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="smollm2"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="smollm2"} 90.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="smollm2"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="1"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="2"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="smollm2",position="0"} 6.0
vllm:generation_tokens_total{engine="0",model_name="smollm2"} 210.0
vllm:generation_tokens_total{engine="1",model_name="smollm2"} 1e+01
vllm:time{le="+Inf"} NaN
"""
"""Lines as vLLM 0.32.0 writes them, of two engines."""
LLAMA_TEXT = """# HELP llamacpp:spec_decode_num_drafts_total Speculative: Total speculative decoding verification steps
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 40
llamacpp:spec_decode_num_draft_tokens_total 120
llamacpp:spec_decode_num_accepted_tokens_total 50
llamacpp:tokens_predicted_total 95
llamacpp:requests_processing 1
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 18
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 30
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 2
"""


def test_vllm_counters_of_all_engines_add_up() -> None:
    found = of_metrics(parse(VLLM_TEXT), VLLM)
    assert found == Speculation(120, 360, 96, (66, 30, 0), None, VLLM)
    assert found.length == pytest.approx(1.8)
    assert found.position_rates == pytest.approx([0.55, 0.25, 0.0])
    assert sum(found.position_rates or ()) + 1 == pytest.approx(found.length)


def test_llama_server_counters() -> None:
    found = of_metrics(parse(LLAMA_TEXT), LLAMA)
    assert found == Speculation(40, 120, 50, (30, 18, 2), None, LLAMA)
    assert found.length == pytest.approx(2.25)


def test_a_server_without_these_counters_has_no_speculation() -> None:
    assert of_metrics(parse("vllm:generation_tokens_total 7.0\n"), VLLM) is None
    assert of_metrics(parse(LLAMA_TEXT), VLLM) is None


def test_the_difference_of_two_readings() -> None:
    before = Speculation(100, 300, 90, (60, 30), None, VLLM)
    after = Speculation(110, 330, 105, (70, 34, 1), None, VLLM)
    assert after.since(before) == Speculation(10, 30, 15, (10, 4, 1), None, VLLM)
    with pytest.raises(ValueError, match="started again"):
        before.since(after)


def test_sglang_replies() -> None:
    """Its histogram counts passes by accepted tokens and may end early; its own length divides completion tokens by passes."""
    details = {
        "spec_verify_ct": 10, "spec_num_correct_drafts": 9, "spec_num_proposed_drafts": 30, "spec_accept_length": 2.0,
        "spec_correct_drafts_histogram": [4, 3, 3],
    }  # fmt: skip
    found = of_reply({"choices": [], "sglext": {"spec_tokens_details": details}})
    assert found == Speculation(10, 30, 9, (6, 3, 0), 2.0, SGLANG)
    assert found.length == pytest.approx(1.9)
    total = found + Speculation(30, 90, 60, (30, 20, 10), 3.0, SGLANG)
    assert total == Speculation(40, 120, 69, (36, 23, 10), 2.75, SGLANG)
    assert of_reply({"sglext": {"spec_tokens_details": {"spec_verify_ct": 0}}}) is None
    assert of_reply({"sglext": {"cached_tokens_details": {}}}) is None


def test_llama_server_timings() -> None:
    """21 tokens: the first from the prompt, 8 accepted, so 12 passes."""
    found = of_reply({"timings": {"predicted_n": 21, "draft_n": 30, "draft_n_accepted": 8}})
    assert found == Speculation(12, 30, 8, None, None, f"{LLAMA} (timings)")
    assert found.length == pytest.approx(1 + 8 / 12)
    assert of_reply({"timings": {"predicted_n": 21}}) is None


def test_every_rule_can_be_told() -> None:
    for rule in RULES:
        assert Speculation(4, 12, 6, (3, 2, 1), None, rule).as_dict()["rule"] == RULES[rule]


def see(engine: Engine) -> Reading:
    async def run() -> Reading:
        async with httpx2.AsyncClient() as http:
            return await look(http, f"{engine.url}/v1")

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "engine", "version"),
    [
        ("vllm", VLLM, "0.0.test"), ("sglang", SGLANG, "0.0.test"), ("sglang-old", SGLANG, "0.0.test"), ("llama-metrics", LLAMA, None),
        ("llama", LLAMA, "b0-test"), ("unknown", None, None),
    ],
)  # fmt: skip
def test_an_engine_is_known_by_what_it_offers(kind: str, engine: str | None, version: str | None) -> None:
    with Engine(Behaviour(engine=kind)) as server:
        for accepted in (2, 0, 3):
            server.count(accepted, accepted + 1)
        found = see(server)
    assert (found.engine, found.version) == (engine, version)
    counted = kind in ("vllm", "llama-metrics")
    assert found.speculation == (Speculation(3, 9, 5, (2, 2, 1), None, engine or "") if counted else None)
    assert found.generated == (8 if counted else None)
    assert found.lifetime_length == (pytest.approx(1 + 5 / 3) if kind.startswith("sglang") else None)


def test_a_server_that_is_not_there_gives_an_empty_reading() -> None:
    server = Engine()
    server.close()
    assert see(server) == Reading()
