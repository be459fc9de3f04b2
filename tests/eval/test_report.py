"""The report: its arithmetic by hand, and that it names every prompt whose output is not the target's own."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.core import log
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.eval import decode, report
from draftsmith.eval.acceptance import Acceptance
from draftsmith.eval.decode import Clock, Decoder
from draftsmith.eval.report import EvalConfig, Prompt, best_width, evaluate, measure_costs, show, spread
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

CONFIG = EvalConfig(width=3, max_new=14, batch=2, timed_prompts=3, timed_tokens=9)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(4)
    lengths = (9, 2, 30, 5, 17)
    return [Prompt(f"p{i}", "ab"[i % 2], tuple(torch.randint(3, 259, (n,), generator=generator).tolist())) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def speculative(target_model: TargetModel, target: Target) -> Decoder:
    torch.manual_seed(5)
    draft = Eagle3(Eagle3Config(vocab_size=60, layers=(1, 2, 4)), target.shape).eval()
    return Decoder(target_model, target, (), draft, CONFIG.width)


@pytest.fixture(scope="module")
def plain(target_model: TargetModel, target: Target) -> Decoder:
    return Decoder(target_model, target, ())


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that moves on by one second whenever it is asked for, so that seconds count readings."""
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(decode, "time", clock)
    monkeypatch.setattr(report, "time", clock)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A console on which no cell is wrapped."""
    monkeypatch.setattr(log.console, "_width", 200)


def acceptance(*histogram: int) -> Acceptance:
    accepted = sum(n * count for n, count in enumerate(histogram))
    return Acceptance(len(histogram) - 1, sum(histogram), accepted, accepted + sum(histogram), histogram)


def test_best_width_by_hand() -> None:
    found = acceptance(2, 2, 2, 4)  # rates 0.8, 0.6, 0.4
    width, predicted = best_width(found, {"verify": [10, 11, 12, 20], "draft": [1, 2, 3]})
    assert predicted == [round(1.8 * 10 / 12, 3), round(2.4 * 10 / 14, 3), round(2.8 * 10 / 23, 3)]
    assert width == 2


def test_best_width_prefers_fewer_tokens_among_equals_and_is_at_least_one() -> None:
    assert best_width(acceptance(1, 0, 0), {"verify": [10, 10, 10], "draft": [1, 1]})[0] == 1


def test_spread_by_hand() -> None:
    assert spread("abcdefghij", 3) == ["b", "f", "i"]
    assert spread("abc", 1) == ["b"]
    assert spread("abc", None) == spread("abc", 3) == spread("abc", 9) == ["a", "b", "c"]


@given(st.integers(1, 60), st.integers(1, 60))
def test_spread_keeps_order_and_distances(size: int, count: int) -> None:
    found = spread(range(size), count)
    assert len(found) == min(size, count)
    gaps = {b - a for a, b in itertools.pairwise(found)}
    assert all(g >= 1 for g in gaps)
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


@pytest.mark.usefixtures("ticks")
def test_costs_are_milliseconds_a_pass(speculative: Decoder, prompts: list[Prompt]) -> None:
    """Each pass reads the clock before drafting, between, and at its end: one second each."""
    assert measure_costs(speculative, prompts[0], 3) == {"verify": [1000.0] * 4, "draft": [1000.0] * 3}


@pytest.mark.usefixtures("ticks")
def test_the_race_measures_both_decoders_on_the_same_prompts(plain: Decoder, speculative: Decoder, prompts: list[Prompt]) -> None:
    found = evaluate(plain, speculative, prompts, CONFIG)
    seconds, tokens = [], 0
    at_best = Decoder(speculative.model, speculative.target, (), speculative.draft, found["best_width"])
    for decoder in (plain, at_best):
        seconds.append(0)
        for prompt in spread(prompts, 3):
            clock = Clock()
            answer = decoder.decode([prompt.token_ids], 9, clock)[0]
            seconds[-1] += 3 * clock.passes + 2 + 1  # readings: of each pass, of the prompt's pass, and the last one of the race
            tokens += len(answer.token_ids)
    clock = found["wall_clock"]
    assert clock["prompts"] == 3
    assert clock["tokens"] == tokens / 2 == 27
    assert clock["plain_tokens_per_second"] == round(27 / seconds[0], 2)
    assert clock["tokens_per_second"] == round(27 / seconds[1], 2)
    assert found["speedup"] == clock["speedup"] == round(seconds[0] / seconds[1], 4)


def test_figures_equal_those_of_prompts_decoded_one_by_one(plain: Decoder, speculative: Decoder, prompts: list[Prompt]) -> None:
    found = evaluate(plain, speculative, prompts, CONFIG)
    alone = [speculative.decode([p.token_ids], CONFIG.max_new)[0] for p in prompts]
    assert found["acceptance"] == Acceptance.of(alone, 3).as_dict()
    assert found["acceptance_length"] == round(Acceptance.of(alone, 3).length, 4)
    assert set(found["by_kind"]) == {"a", "b"}
    for kind, figures in found["by_kind"].items():
        own = [a for a, p in zip(alone, prompts, strict=True) if p.kind == kind]
        assert figures == Acceptance.of(own, 3).as_dict() | {"prompts": len(own)}
    assert found["greedy_identical"] is True
    assert found["differing_prompts"] == []
    assert (found["prompts"], found["draft_tokens"], found["temperature"], found["answer_tokens"]) == (5, 3, 0.0, 5 * 14)
    assert {"speedup", "acceptance_rule", "best_width", "predicted_speedup", "costs_ms", "wall_clock", "dtype"} <= set(found)
    assert 1 <= found["best_width"] <= 3
    assert json.loads(json.dumps(found)) == found, "it is written as JSON"


@pytest.mark.usefixtures("wide")
def test_a_prompt_whose_text_differs_is_named(plain: Decoder, speculative: Decoder, prompts: list[Prompt], capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: one of the two decoders stops at a token that occurs in some answers."""
    texts = [plain.decode([p.token_ids], CONFIG.max_new)[0].token_ids for p in prompts]
    end = texts[3][6]
    wrong = [p.id for p, text in zip(prompts, texts, strict=True) if end in text[:-1]]
    assert 0 < len(wrong) < len(prompts)
    found = evaluate(Decoder(plain.model, plain.target, (end,)), speculative, prompts, CONFIG)
    assert found["greedy_identical"] is False
    assert found["differing_prompts"] == wrong
    capsys.readouterr()
    show(found)
    assert f"all but {len(wrong)} equal to plain greedy" in " ".join(capsys.readouterr().out.split())


def test_a_difference_that_only_the_race_meets_is_named(plain: Decoder, speculative: Decoder, prompts: list[Prompt]) -> None:
    config = CONFIG.model_copy(update={"max_new": 3, "timed_tokens": 14, "timed_prompts": 5})
    texts = [plain.decode([p.token_ids], 14)[0].token_ids for p in prompts]
    end = next(i for i in texts[2][3:-1] if all(i not in text[:3] for text in texts))
    wrong = [p.id for p, text in zip(prompts, texts, strict=True) if end in text[:-1]]
    found = evaluate(Decoder(plain.model, plain.target, (end,)), speculative, prompts, config)
    assert found["greedy_identical"] is False
    assert found["differing_prompts"] == wrong


def test_a_verifier_that_accepts_everything_is_reported(plain: Decoder, speculative: Decoder, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault in verification itself."""
    monkeypatch.setattr(decode, "verify_choice", lambda choice, *_: (torch.ones_like(choice, dtype=torch.bool), choice[:, -1]))
    found = evaluate(plain, speculative, prompts, CONFIG)
    assert found["greedy_identical"] is False
    assert found["differing_prompts"] == [p.id for p in prompts]
    assert found["acceptance_length"] > 3


@pytest.mark.usefixtures("wide")
def test_the_table_shows_kinds_rates_and_identity(plain: Decoder, speculative: Decoder, prompts: list[Prompt], capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(plain, speculative, prompts, CONFIG)
    capsys.readouterr()
    show(found)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for kind, figures in [*found["by_kind"].items(), ("all", found["acceptance"] | {"prompts": 5})]:
        rates = " ".join(f"{r:.0%}" for r in figures["position_rates"])
        assert f"{kind} {figures['prompts']} {figures['acceptance_length']:.2f} {rates}" in shown
    assert "all equal to plain greedy" in shown
    assert f"{found['speedup']:.2f}" in shown
