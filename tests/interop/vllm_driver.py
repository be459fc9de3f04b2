"""Runs under the engines' Python, without Draftsmith: `python vllm_driver.py ASKED.json ANSWERED.json` lets vLLM answer prompts, and writes what it counted.

ASKED: {"target", "draft" or null, "width", "max_new", "end_ids", "prompts"}; ANSWERED: {"version", "layers", "answers", "counters"}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import vllm
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """All prompts at once, greedily, in float32."""
    speculation = {"method": "eagle3", "model": asked["draft"], "num_speculative_tokens": asked["width"]} if asked["draft"] else None
    llm = LLM(
        model=asked["target"],
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        enable_prefix_caching=False,  # a prompt that starts like another one is run whole: its features come from one pass, as ours do
        disable_log_stats=False,
        speculative_config=speculation,
        per_request_spec_decode_metrics="detailed" if asked["draft"] else "none",
    )
    sampling = SamplingParams(temperature=0, max_tokens=asked["max_new"], stop_token_ids=asked["end_ids"], detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], sampling)
    return {
        "version": vllm.__version__,
        "layers": _layers(llm) if asked["draft"] else {},
        "answers": [_answer(output.outputs[0]) for output in outputs],
        "counters": {m.name: getattr(m, "values", getattr(m, "value", None)) for m in llm.get_metrics() if "spec_decode" in m.name},
    }


def _layers(llm: LLM) -> dict[str, list[int]]:
    """Captured layers of the target, as each of the two model runners reads them; which of them is running depends on vLLM."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert isinstance(runner, GPUModelRunner), f"{type(runner).__name__} is no V1 runner: tests/interop counts its passes as V1 does"
    return {"V1": list(runner._get_eagle3_aux_layers_from_config()), "V2": list(get_eagle3_aux_layers_from_config(runner.speculative_config))}


def _answer(output: Any) -> dict[str, Any]:
    counted = output.spec_decode_metrics
    return {
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "accepted": counted.per_step_accepted if counted else [],
        "drafted": counted.per_step_drafted if counted else [],
    }


if __name__ == "__main__":
    source, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(main(json.loads(source.read_text()))))
