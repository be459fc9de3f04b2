"""The export, served by a real vLLM in float32: the outputs of plain decoding, and the acceptance that our evaluator measured.

How vLLM 0.32 counts (vllm/v1/core/sched/scheduler.py, update_from_output): a pass of a request counts as one draft when drafted tokens were verified in it, so
the prompt's pass, which gives the first token, does not; accepted are the tokens that it returned less one, before an end token or the token limit cuts
the answer. Only in that last pass do our figures differ; `serving.cut` takes the difference out, and then counts are compared pass by pass.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import MAX_NEW, WIDTH, Served, cut, disagreements, drive, require

from draftsmith.core.disk import write_text
from draftsmith.eval.acceptance import Acceptance
from draftsmith.eval.decode import Decoded
from draftsmith.eval.prompts import Prompt
from draftsmith.pipeline import Run

pytestmark = [pytest.mark.interop, pytest.mark.slow]

Ask = Callable[..., Served]
FAULTY_PROMPTS = 12


@pytest.fixture(scope="module")
def installed() -> None:
    """Asked first: without vLLM nothing is trained."""
    require("vllm")


@pytest.fixture(scope="module")
def ask(installed: None, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Lets vLLM answer. Its V2 runner asks for a Triton with a CPU back end, which no released package has: there only its reading of the layer ids is run."""

    def answers(prompts: list[Prompt], draft: Path | None) -> Served:
        asked = {
            "target": run.chosen.where, "draft": draft and str(draft), "width": WIDTH, "max_new": MAX_NEW,
            "end_ids": list(run.template.end_ids), "prompts": [list(p.token_ids) for p in prompts],
        }  # fmt: skip
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        found = drive("vllm_driver", asked, tmp_path_factory.mktemp("vllm"), settings)
        _require_totals(found)
        rows = (Decoded(a["token_ids"], cut(a["accepted"], len(a["token_ids"])), a["finish_reason"]) for a in found["answers"])
        return Served(tuple(rows), found["counters"], found["layers"])

    return answers


def _require_totals(found: dict[str, Any]) -> None:
    """The server's counters, which users see, are the sums of what it reports for each answer."""
    passes = [n for a in found["answers"] for n in a["accepted"]]
    if not passes:
        assert not any(found["counters"].values())
        return
    assert {n for a in found["answers"] for n in a["drafted"]} == {WIDTH}
    assert found["counters"] == {
        "vllm:spec_decode_num_drafts": len(passes),
        "vllm:spec_decode_num_draft_tokens": WIDTH * len(passes),
        "vllm:spec_decode_num_accepted_tokens": sum(passes),
        "vllm:spec_decode_num_accepted_tokens_per_pos": [sum(n >= k for n in passes) for k in range(1, WIDTH + 1)],
    }


@pytest.fixture(scope="module")
def plain(ask: Ask, prompts: list[Prompt]) -> Served:
    """vLLM without speculation."""
    return ask(prompts, None)


@pytest.fixture(scope="module")
def served(ask: Ask, prompts: list[Prompt], shipped: Path) -> Served:
    return ask(prompts, shipped)


def test_outputs_equal_those_of_vllm_without_speculation(plain: Served, served: Served) -> None:
    assert [a.token_ids for a in served.answers] == [a.token_ids for a in plain.answers]
    assert [a.finish_reason for a in served.answers] == [a.finish_reason for a in plain.answers]


def test_vllm_accepts_what_our_evaluator_accepts(ours: list[Decoded], served: Served) -> None:
    figures = Acceptance.of(ours, WIDTH)
    print(f"here {figures.as_dict()}\nvLLM {Acceptance.of(served.answers, WIDTH).as_dict()}\ncounters {served.counters}")
    assert figures.length > 1.05, "a draft of which nothing is accepted would agree with any other"
    assert disagreements(ours, served.answers) == []


def test_both_runners_capture_the_blocks_that_were_captured_in_training(run: Run, served: Served) -> None:
    """vLLM counts inputs of blocks: the input of block i + 1 is the output of block i."""
    assert served.layers == {"V1": [i + 1 for i in run.spec.layers], "V2": [i + 1 for i in run.spec.layers]}


def test_layer_ids_that_are_off_by_one_are_found(ask: Ask, ours: list[Decoded], plain: Served, prompts: list[Prompt], shipped: Path, tmp_path: Path) -> None:
    """Outputs stay right, which is why nobody notices: only acceptance tells."""
    faulty = tmp_path / "faulty"
    shutil.copytree(shipped, faulty)
    fields = json.loads((faulty / "config.json").read_text())
    fields["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in fields["eagle_aux_hidden_state_layer_ids"]]
    write_text(faulty / "config.json", json.dumps(fields))
    found = ask(prompts[:FAULTY_PROMPTS], faulty)
    assert [a.token_ids for a in found.answers] == [a.token_ids for a in plain.answers[:FAULTY_PROMPTS]]
    assert disagreements(ours[:FAULTY_PROMPTS], found.answers) != []
