"""The report: its arithmetic by hand, and that it names every prompt whose output is not the target's own."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from draftsmith.core import log
from draftsmith.drafts.base import Tree
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.eval import decode, report
from draftsmith.eval.acceptance import Acceptance
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.decode import Clock, Decoder
from draftsmith.eval.prompts import Prompt, spread
from draftsmith.eval.report import evaluate
from draftsmith.eval.show import markdown, show
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

CONFIG = EvalConfig(width=3, max_new=14, batch=2, timed_prompts=3, timed_tokens=9, rounds=2, examples=2)
TREE = Tree(nodes=9, top_k=3, depth=3)


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


@pytest.mark.usefixtures("ticks")
def test_the_race_measures_every_way_on_the_same_prompts(plain: Decoder, speculative: Decoder, prompts: list[Prompt]) -> None:
    found = evaluate(plain, speculative, prompts, CONFIG.model_copy(update={"tree": TREE}))
    chain = Decoder(speculative.model, speculative.target, (), speculative.draft, found["best_width"])
    tree = Decoder(speculative.model, speculative.target, (), speculative.draft, TREE.model_copy(update={"nodes": found["of_trees"]["recommended"]}))
    seconds, tokens = [], 0
    for decoder in (plain, chain, tree):
        seconds.append(0)
        for prompt in spread(prompts, 3):
            clock = Clock()
            answer = decoder.decode([prompt.token_ids], 9, clock)[0]
            seconds[-1] += 3 * clock.passes + 2 + 1  # readings: of each pass, of the prompt's pass, and the last one of the race
            tokens += len(answer.token_ids)
    assert tokens / 3 == 27
    for clock, own in ((found["wall_clock"], seconds[1]), (found["of_trees"]["wall_clock"], seconds[2])):
        assert (clock["prompts"], clock["tokens"]) == (3, 27)
        assert clock["plain_tokens_per_second"] == round(27 / seconds[0], 2)
        assert clock["tokens_per_second"] == round(27 / own, 2)
        assert clock["speedup"] == round(seconds[0] / own, 4)
    assert found["speedup"] == found["wall_clock"]["speedup"]


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
    assert {"speedup", "acceptance_rule", "wall_clock", "dtype"} <= set(found)
    assert len(found["costs_ms"]["verify"]) == 4
    assert len(found["costs_ms"]["draft"]) == len(found["predicted_speedup"]) == 3
    assert found["predicted_speedup"][found["best_width"] - 1] == max(found["predicted_speedup"])
    assert "of_trees" not in found
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


def test_trees_stand_beside_chains(plain: Decoder, speculative: Decoder, prompts: list[Prompt]) -> None:
    chains, both = (evaluate(plain, speculative, prompts, CONFIG.model_copy(update={"tree": t})) for t in (None, TREE))
    for key in ("acceptance", "by_kind", "answer_tokens", "draft_tokens"):
        assert chains[key] == both[key]
    trees = both["of_trees"]
    alone = [Decoder(speculative.model, speculative.target, (), speculative.draft, TREE).decode([p.token_ids], CONFIG.max_new)[0] for p in prompts]
    assert trees["acceptance"] == Acceptance.of(alone, 3, 9).as_dict()
    assert trees["acceptance"]["drafted"] == 9 * trees["acceptance"]["steps"]
    assert [p["drafted"] for p in trees["curve"]] == [3, 6, 9]
    assert trees["curve"][-1]["acceptance_length"] == trees["acceptance"]["acceptance_length"]
    assert both["greedy_identical"] is True
    assert json.loads(json.dumps(both)) == both


def test_trees_that_cannot_be_are_left_out_with_their_reason(
    plain: Decoder, speculative: Decoder, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Eagle3, "trees", False)
    found = evaluate(plain, speculative, prompts, CONFIG.model_copy(update={"tree": TREE}))
    assert found["no_trees"] == "Eagle3 drafts chains only"
    assert "of_trees" not in found
    assert "no trees here, chains alone: Eagle3 drafts chains only" in " ".join(capsys.readouterr().err.split())
    assert "No trees: Eagle3 drafts chains only." in markdown(found)


def test_sampled_reports_repeat_with_their_seed_and_claim_no_identity(plain: Decoder, speculative: Decoder, prompts: list[Prompt]) -> None:
    config = CONFIG.model_copy(update={"temperature": 1.0, "tree": TREE})
    first, again, other = (evaluate(plain, speculative, prompts, config.model_copy(update={"seed": s})) for s in (1, 1, 2))
    assert first["greedy_identical"] is None
    assert first["differing_prompts"] == []
    assert first["of_chains"]["examples"] == again["of_chains"]["examples"] != other["of_chains"]["examples"]
    assert first["of_trees"]["examples"] == again["of_trees"]["examples"]
    assert first["acceptance_rule"].startswith("sampling: accepted with probability")
    assert first["of_trees"]["acceptance_rule"] == "sampling: equal to the token drawn from the target"


def test_examples_are_the_answers_token_by_token(plain: Decoder, speculative: Decoder, prompts: list[Prompt]) -> None:
    found = evaluate(plain, speculative, prompts, CONFIG.model_copy(update={"tree": TREE, "examples": 5}))
    texts = {p.id: plain.decode([p.token_ids], CONFIG.max_new)[0].token_ids for p in prompts}
    for key in ("of_chains", "of_trees"):
        examples = found[key]["examples"]
        assert sorted(e["id"] for e in examples) == sorted(texts)
        for example in examples:
            told = [*example["first"], *(i for accepted, _, own in example["passes"] for i in (*accepted, *own))]
            assert told == texts[example["id"]]
            assert all(len(own) == 1 for _, _, own in example["passes"][:-1])
            assert all(own[0] not in rejected[:1] for _, rejected, own in example["passes"] if own), "a rejected token that is right"
            if key == "of_chains":
                assert all(len(accepted) + len(rejected) == 3 for accepted, rejected, own in example["passes"] if own)


def test_markdown_keeps_hostile_names_in_their_cells(plain: Decoder, speculative: Decoder, prompts: list[Prompt]) -> None:
    hostile = [Prompt(p.id, "a|b\n<b>", p.token_ids) for p in prompts]
    text = markdown(evaluate(plain, speculative, hostile, CONFIG))
    (row,) = [line for line in text.splitlines() if line.startswith("| a\\|b")]
    assert row.startswith("| a\\|b &lt;b> | 5 | ")
    assert "greedy, float32" in text
