"""Runs under the engines' Python, without Draftsmith: `python llamacpp_driver.py ASKED.json ANSWERED.json` lets llama.cpp's server answer prompts, one by one.

ASKED: {"target", "draft" or null (GGUF files), "width", "max_new", "prompts"}; ANSWERED: {"version", "answers"}.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp
from xllamacpp import CommonParams, Server, common_speculative_type


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Greedy answers, and how many tokens were drafted and accepted for each."""
    params = CommonParams()
    params.model.path = asked["target"]
    params.n_ctx, params.n_parallel, params.port, params.warmup = 2048, 1, 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    if asked["draft"]:
        params.speculative.types = [common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
        params.speculative.draft.mparams.path = asked["draft"]
        params.speculative.draft.n_max, params.speculative.draft.n_min, params.speculative.draft.p_min = asked["width"], 0, 0.0
    server = Server(params)
    answers = [_answer(server.listening_address, ids, asked["max_new"]) for ids in asked["prompts"]]
    return {"version": xllamacpp.__version__, "answers": answers}


def _answer(url: str, ids: list[int], max_new: int) -> dict[str, Any]:
    body = {"prompt": ids, "n_predict": max_new, "temperature": 0, "top_k": 1, "return_tokens": True, "cache_prompt": False}
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        found = json.load(reply)
    timings = found["timings"]
    return {
        "token_ids": found["tokens"],
        "stop": found["stop_type"],
        "drafted": timings.get("draft_n", 0),
        "accepted": timings.get("draft_n_accepted", 0),
        "timings": timings,
    }


if __name__ == "__main__":
    source, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(main(json.loads(source.read_text()))))
