"""SGLang's own draft class, out of its released wheel, reads an export: no tensor is ignored, no parameter is left over, and it drafts what we draft.

`make engines` unpacks the wheel; DRAFTSMITH_SGLANG names another place.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import environment
from safetensors.torch import load_file, save_file
from serving import drive, missing, require

from draftsmith.core.disk import write_text
from draftsmith.core.types import Features, FeatureSpec, Sample
from draftsmith.data.vocab import count
from draftsmith.drafts.base import Context, Sampling
from draftsmith.drafts.eagle3 import Eagle3, Eagle3Config
from draftsmith.export.write import ExportConfig, export
from draftsmith.features.pack import pack
from draftsmith.target.capture import Capture
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

pytestmark = [pytest.mark.interop, pytest.mark.sglang]

LAYERS, WIDTH = (1, 2, 4), 5
FAULTS = {"tensor": {"read", "unset", "proposals"}, "map": {"proposals"}, "layers": {"captured"}}
"""Planted faults, and what of the answer they change."""


@dataclass(frozen=True)
class Exported:
    """A directory, what SGLang is asked about it, and what the draft itself proposes."""

    folder: Path
    asked: dict[str, Any]
    proposals: list[list[int]]


def wheel() -> Path:
    require("vllm")  # whose environment has what SGLang imports
    place = Path(os.environ.get("DRAFTSMITH_SGLANG") or environment() / "sglang")
    if not (place / "sglang").is_dir():
        missing(f"the unpacked wheel of SGLang ({place})")
    return place


@pytest.fixture(scope="module")
def exported(target_model: TargetModel, target: Target, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Random weights, so that no part of the block is idle."""
    torch.manual_seed(5)
    capture = Capture(target_model, target, FeatureSpec(LAYERS, "float32"))
    rows = [torch.randint(3, 259, (n,)) for n in (9, 17, 30)]
    found = [capture(Sample(f"s{i}", ids, torch.ones(len(ids), dtype=torch.bool))) for i, ids in enumerate(rows)]
    draft = Eagle3(Eagle3Config(vocab_size=70, layers=LAYERS), target.shape)
    draft.initialise(target, count([f.sample for f in found], 259), pack(found))
    for parameter in draft.parameters():
        parameter.data = torch.rand(len(parameter)) + 0.5 if parameter.ndim == 1 else torch.randn(parameter.shape) / parameter.shape[1] ** 0.5
    place = tmp_path_factory.mktemp("sglang")
    export(draft.eval(), target, place / "draft", ExportConfig(), found, WIDTH)
    cases = {f"next.{i}": f.sample.input_ids[1:].clone() for i, f in enumerate(found)} | {f"hidden.{i}": f.hidden_TF[:-1].clone() for i, f in enumerate(found)}
    save_file(cases, place / "cases.safetensors")
    asked = {"target": str(tiny_target), "width": WIDTH, "cases": str(place / "cases.safetensors")}
    return Exported(place / "draft", asked, [proposal(draft, target, f) for f in found])


def proposal(draft: Eagle3, target: Target, features: Features) -> list[int]:
    place = torch.arange(len(features) - 1)[None]
    context = Context(features.hidden_TF[None, :-1], features.sample.input_ids[None, 1:], place, torch.ones_like(place, dtype=torch.bool))
    return draft.propose(context, draft.start(1), target, WIDTH, Sampling()).tokens_BW[0].tolist()


def fault(good: Path, name: str, folder: Path) -> str:
    """A copy with a tensor under a name that SGLang skips without a word, with ids where offsets belong, or with layer ids that mean inputs."""
    faulty = folder / name
    shutil.copytree(good, faulty)
    tensors = load_file(faulty / "model.safetensors")
    fields = json.loads((faulty / "config.json").read_text())
    if name == "tensor":
        tensors["midlayer.hidden.weight"] = tensors.pop("midlayer.hidden_norm.weight")
    if name == "map":
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    if name == "layers":
        fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in LAYERS]
    save_file(tensors, faulty / "model.safetensors")
    write_text(faulty / "config.json", json.dumps(fields))
    return str(faulty)


@pytest.fixture(scope="module")
def answers(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the export, and of copies with one fault each; one process, since importing SGLang is most of the time."""
    place = tmp_path_factory.mktemp("answers")
    drafts = {"good": str(exported.folder)} | {name: fault(exported.folder, name, place) for name in FAULTS}
    return drive("sglang_driver", exported.asked | {"wheel": str(wheel()), "drafts": drafts}, place, {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def answer(answers: dict[str, Any]) -> dict[str, Any]:
    return answers["good"]


def test_every_tensor_is_consumed(exported: Exported, answer: dict[str, Any]) -> None:
    assert set(answer["read"]) == set(load_file(exported.folder / "model.safetensors"))
    assert [name for name, went in answer["read"].items() if not went] == ["t2d"], "SGLang reads d2t alone; t2d stays for further training"
    assert answer["unset"] == []


def test_it_drafts_what_the_draft_itself_drafts(exported: Exported, answer: dict[str, Any]) -> None:
    assert answer["proposals"] == exported.proposals
    assert len({token for chain in exported.proposals for token in chain}) > 3


def test_it_captures_the_blocks_that_were_captured_in_training(answer: dict[str, Any]) -> None:
    """SGLang counts inputs of blocks here: the input of block i + 1 is the output of block i."""
    assert answer["captured"] == [i + 1 for i in LAYERS]


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(answers: dict[str, Any], name: str) -> None:
    found, good = answers[name], answers["good"]
    assert {key for key in good if found[key] != good[key]} == FAULTS[name]
