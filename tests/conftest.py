"""Fixtures: a tiny random target with a real tokenizer and chat template, made once a session, and shape checks on public signatures."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")


def _own_cache() -> None:
    """Prepared samples go into a folder of this session; a target that was converted before is seen there too."""
    usual = Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith")
    own = Path(tempfile.mkdtemp(prefix="draftsmith-tests-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    for target in usual.glob("*/config.json"):
        (own / target.parent.name).symlink_to(target.parent)
    os.environ["DRAFTSMITH_CACHE"] = str(own)


_own_cache()

import jaxtyping

# jaxtyping annotations become checks, for the packages whose public functions take tensors.
jaxtyping.install_import_hook(["draftsmith.nn", "draftsmith.drafts", "draftsmith.eval.verify", "draftsmith.core.types"], "beartype.beartype")

import pytest
import torch
from hypothesis import settings
from tiny import tiny_config, tiny_tokenizer
from transformers import LlamaForCausalLM

from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.template import ChatTemplate
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

# A deadline judges the machine: the first example of a run, or one on a busy machine, takes longer than any that is fixed. Benchmarks judge speed.
settings.register_profile("draftsmith", deadline=None)
settings.load_profile("draftsmith")


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option for masks that were checked by eye."""
    parser.addoption("--regenerate-golden", action="store_true", help="write tests/data/golden anew; read the difference before you commit it")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny target: random float32 weights, tied embeddings, one file."""
    folder = tmp_path_factory.mktemp("target") / "tiny"
    torch.manual_seed(7)
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(tiny_target: Path) -> Target:
    """Its embedding, norm and head."""
    return Target.load(str(tiny_target))


@pytest.fixture(scope="session")
def target_model(tiny_target: Path) -> TargetModel:
    """The whole of it, in float32."""
    return TargetModel.load(str(tiny_target), torch.float32)


@pytest.fixture(scope="session")
def template(tiny_target: Path) -> ChatTemplate:
    """Its tokenizer and chat template."""
    return ChatTemplate.load(str(tiny_target))


@pytest.fixture(scope="session")
def talks() -> list[Conversation]:
    """Twelve short conversations of one or two turns, two kinds."""
    return [
        Conversation(
            f"talk-{i}",
            "even" if i % 2 == 0 else "odd",
            (
                Message("user", f"question {i} " + "x" * i),
                Message("assistant", f"answer {i * 7} to that"),
                *((Message("user", "more?"), Message("assistant", f"yes {i}")) if i % 3 == 0 else ()),
            ),
        )
        for i in range(12)
    ]
