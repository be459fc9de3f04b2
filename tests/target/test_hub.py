"""Targets on a hub: only what is needed is downloaded, once; without network the cache serves, or the error says what it lacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import transformers.utils.hub
from checkpoints import saved
from families import PLAIN, SIZES
from hub_server import Hub, running
from huggingface_hub import close_session, constants
from transformers import LlamaConfig

from draftsmith.core import hub as hub_module
from draftsmith.data.conversations import Message
from draftsmith.data.template import ChatTemplate
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

ID = "draftsmith-tests/tiny-model"
PARTS = ("embedding_VH", "head_VH", "norm_H")
LLAMA, QWEN = "llama", "qwen2-tied"


def point_at(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """What HF_ENDPOINT and HF_HOME do at import."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    close_session()


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, Callable[[], None]]]:
    """A running hub with an empty cache, and how to pull its plug."""
    hub = Hub()
    with ExitStack() as stack:
        stack.enter_context(running(hub))
        point_at(monkeypatch, hub.url, tmp_path / "cache")
        yield hub, stack.close
    close_session()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """Four or more shards, of which three hold embedding, norm and head; with a tokenizer, and a `.bin` copy that nobody should touch."""
    folder = saved(LlamaConfig(**(SIZES | {"vocab_size": 259})), tmp_path_factory.mktemp("hub") / "sharded", max_shard_size="40KB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_target / name, folder)
    (folder / "pytorch_model.bin").write_bytes(b"a second copy")
    (folder / "README.md").write_text("a model")
    return folder


def needed(folder: Path) -> set[str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {index[k] for k in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    assert 1 <= len(shards) < len(set(index.values()))
    return shards


def same(ours: Target, folder: Path) -> bool:
    theirs = Target.load(str(folder))
    return all(torch.equal(getattr(ours, part), getattr(theirs, part)) for part in PARTS)


def refused(where: str = ID, revision: str | None = None) -> str:
    start = time.monotonic()
    with pytest.raises(ValueError, match=r".") as raised:
        Target.load(where, revision=revision)
    assert time.monotonic() - start < 10
    return str(raised.value)


def test_only_the_shards_that_hold_its_tensors_are_downloaded_and_only_once(online: tuple[Hub, Callable[[], None]], sharded: Path) -> None:
    hub, _ = online
    commit = hub.publish(ID, sharded)
    assert same(Target.load(ID), sharded)
    assert set(hub.downloaded()) == {"config.json", "model.safetensors.index.json"} | needed(sharded)
    assert len(hub.downloaded()) == len(set(hub.downloaded()))
    hub.requests.clear()
    again = Target.load(ID)
    assert same(again, sharded)
    assert hub.downloaded() == []
    assert not any("/resolve/" in r for r in hub.requests)
    assert len(hub.requests) <= 2
    hub.requests.clear()
    assert same(Target.load(ID, revision=commit), sharded)
    assert hub.downloaded() == []


def test_a_tied_checkpoint_looks_nowhere_else_for_a_head(online: tuple[Hub, Callable[[], None]], tmp_path: Path) -> None:
    hub, _ = online
    folder = saved(PLAIN[QWEN](), tmp_path / "tied", max_shard_size="10KB")
    shutil.copy(next(folder.glob("model-*.safetensors")), folder / "consolidated.safetensors")
    hub.publish(ID, folder)
    assert same(Target.load(ID), folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {index["model.embed_tokens.weight"], index["model.norm.weight"]}
    assert set(hub.downloaded()) == {"config.json", "model.safetensors.index.json"} | shards


def test_a_second_copy_as_bin_is_not_downloaded_to_look_for_a_head(online: tuple[Hub, Callable[[], None]], tmp_path: Path) -> None:
    hub, _ = online
    folder = saved(PLAIN[QWEN](), tmp_path / "flag-off")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    (folder / "pytorch_model.bin").write_bytes(b"a second copy")
    hub.publish(ID, folder)
    with pytest.warns(UserWarning, match=r"no head and the tie flag is off"):
        assert Target.load(ID).tied
    assert hub.downloaded() == ["config.json", "model.safetensors"]


def test_a_revision_reaches_weights_model_and_tokenizer(online: tuple[Hub, Callable[[], None]], sharded: Path, tmp_path: Path) -> None:
    hub, _ = online
    other = Path(shutil.copytree(sharded, tmp_path / "other"))
    (other / "chat_template.jinja").write_text("{% for m in messages %}OTHER{{ m['content'] }}{% endfor %}")
    model = TargetModel.load(str(sharded), torch.float32).model
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    model.save_pretrained(other, max_shard_size="40KB")
    main, branch = hub.publish(ID, sharded), hub.publish(ID, other, "branch")
    assert main != branch
    assert same(Target.load(ID), sharded)
    assert same(Target.load(ID, revision="branch"), other)
    assert not same(Target.load(ID, revision="branch"), sharded)
    prints = {Target.load(ID, revision=r).fingerprint for r in (None, "main", main)}
    assert len(prints) == 1
    assert Target.load(ID, revision=branch).fingerprint not in prints
    ids = torch.tensor([[5, 9, 17]])
    for revision, folder in ((None, sharded), ("branch", other)):
        theirs = TargetModel.load(str(folder), torch.float32).own_logits(ids)
        assert torch.equal(TargetModel.load(ID, torch.float32, revision=revision).own_logits(ids), theirs)
    rendered = [t.tokenizer.decode(t.ids([Message("user", "hi")], prompt=False)) for t in (ChatTemplate.load(ID), ChatTemplate.load(ID, "branch"))]
    assert rendered[0] == "<|im_start|>user\nhi<|im_end|>\n"
    assert rendered[1] == "OTHERhi"


def test_without_network_the_cache_serves(online: tuple[Hub, Callable[[], None]], sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, pull_the_plug = online
    hub.publish(ID, sharded)
    ids = torch.tensor([[5, 9, 17]])
    print_, logits, ends = Target.load(ID).fingerprint, TargetModel.load(ID, torch.float32).own_logits(ids), ChatTemplate.load(ID).end_ids
    pull_the_plug()
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert same(Target.load(ID), sharded)
        assert Target.load(ID).fingerprint == print_
        assert torch.equal(TargetModel.load(ID, torch.float32).own_logits(ids), logits)
        assert ChatTemplate.load(ID).end_ids == ends
    assert len(hub.downloaded()) == len(set(hub.downloaded()))


@pytest.mark.parametrize("offline", [False, True])
def test_nothing_cached_and_no_network_is_told_at_once(online: tuple[Hub, Callable[[], None]], monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    _, pull_the_plug = online
    pull_the_plug()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    found = refused()
    assert f"no such target: {ID!r} is not a directory" in found
    assert "the hub cannot be reached (" in found
    assert ("HF_HUB_OFFLINE" if offline else "ConnectError") in found
    assert "nothing of it is cached" in found
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"cannot load a tokenizer for target .* nothing of it is cached"):
        ChatTemplate.load(ID)
    with pytest.raises(ValueError, match="nothing of it is cached"):
        TargetModel.load(ID, torch.float32)
    assert time.monotonic() - start < 10


def test_a_part_cached_and_no_network_names_what_is_there_and_what_is_not(online: tuple[Hub, Callable[[], None]], sharded: Path) -> None:
    hub, pull_the_plug = online
    hub.publish(ID, sharded)
    hub.publish(ID, sharded, "tag")
    hub_module.snapshot(ID).path("config.json")
    hub_module.snapshot(ID).path("model.safetensors.index.json")
    pull_the_plug()
    found = refused()
    shard = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]["model.embed_tokens.weight"]
    assert f"{shard} is not cached and cannot be downloaded" in found
    assert "Cached of it: config.json, model.safetensors.index.json" in found
    assert "of it only main is cached, not tag" in refused(revision="tag")


def test_only_the_configuration_cached_and_no_network(online: tuple[Hub, Callable[[], None]], sharded: Path) -> None:
    hub, pull_the_plug = online
    hub.publish(ID, sharded)
    hub_module.snapshot(ID).path("config.json")
    pull_the_plug()
    assert "none of its weights is cached, and the hub cannot be reached" in refused()
    start = time.monotonic()
    with pytest.raises(ValueError, match="cannot load a tokenizer for target"):
        ChatTemplate.load(ID)
    assert time.monotonic() - start < 10


def test_a_hub_that_does_not_answer_is_given_up_soon(online: tuple[Hub, Callable[[], None]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import socket

    monkeypatch.setattr(hub_module, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        point_at(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path / "cache")
        assert "ReadTimeout" in refused()


def test_a_page_that_is_no_hub_is_told(online: tuple[Hub, Callable[[], None]]) -> None:
    hub, _ = online
    hub.html = True
    assert "the hub cannot be reached (JSONDecodeError" in refused()


def test_no_such_repository_revision_or_right(online: tuple[Hub, Callable[[], None]], sharded: Path) -> None:
    hub, _ = online
    assert f"the hub has no repository {ID!r} (a private one needs a login" in refused()
    hub.publish(ID, sharded)
    assert f"{ID} has no revision 'no-such-branch' on the hub" in refused(revision="no-such-branch")
    hub.publish("draftsmith-tests/gated", sharded, gated=True)
    assert "draftsmith-tests/gated is gated: accept its terms on the hub, then log in" in refused("draftsmith-tests/gated")
    with pytest.raises(ValueError, match="gated"):
        ChatTemplate.load("draftsmith-tests/gated")
    assert "is no hub id" in refused("draftsmith-tests/two--dashes")


@pytest.mark.parametrize("leftover", ["unreachable", "fetched"])
def test_a_single_file_repository(online: tuple[Hub, Callable[[], None]], tmp_path: Path, leftover: str) -> None:
    hub, pull_the_plug = online
    folder = saved(PLAIN[LLAMA](), tmp_path / "single")
    hub.publish(ID, folder)
    assert same(Target.load(ID), folder)
    assert hub.downloaded() == ["config.json", "model.safetensors"]
    if leftover == "unreachable":
        pull_the_plug()
    assert same(Target.load(ID), folder)


def test_pickled_weights_alone_are_used(online: tuple[Hub, Callable[[], None]], tmp_path: Path) -> None:
    hub, _ = online
    folder = saved(PLAIN[LLAMA](), tmp_path / "single")
    state = TargetModel.load(str(folder), torch.float32).model.state_dict()
    torch.save(state, folder / "pytorch_model.bin")
    expected = Target.load(str(folder))
    (folder / "model.safetensors").unlink()
    hub.publish(ID, folder)
    found = Target.load(ID)
    assert all(torch.equal(getattr(found, part), getattr(expected, part)) for part in PARTS)
    assert hub.downloaded() == ["config.json", "pytorch_model.bin"]


def test_inspect_takes_a_hub_id_in_an_environment_of_its_own(sharded: Path, tmp_path: Path) -> None:
    """HF_ENDPOINT and HF_HOME as people set them, read at import."""
    hub = Hub()
    with running(hub):
        hub.publish(ID, sharded, "v1")
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
        command = [sys.executable, "-c", "from draftsmith.cli import main; main()", "inspect", ID, "--revision", "v1", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["revision"] == "v1"
    assert found["tokenizer"]["chat_template"]
    assert set(found["files_read"]) == needed(sharded)
    assert (tmp_path / "home" / "hub").is_dir()
