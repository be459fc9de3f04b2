"""Every layout of files gives the saved model's tensors; every damaged one a named error, and nothing is run or held open."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import saved
from families import PLAIN
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BertConfig, T5Config

from draftsmith.target.place import LocalPlace
from draftsmith.target.tensors import Read, groups
from draftsmith.target.weights import Target

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
NATIVE = {EMBEDDING: "tok_embeddings.weight", NORM: "norm.weight", HEAD: "output.weight"}
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(PLAIN["llama"](), tmp_path_factory.mktemp("layouts") / "original")


@pytest.fixture(scope="module")
def tensors(original: Path) -> Tensors:
    return load_file(original / "model.safetensors")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A configuration without weights, to lay out some beside."""
    made = tmp_path / "target"
    made.mkdir()
    shutil.copy(original / "config.json", made)
    return made


def is_the_target(where: Path | str, tensors: Tensors) -> bool:
    found = Target.load(str(where))
    pairs = ((found.embedding_VH, EMBEDDING), (found.norm_H, NORM), (found.head_VH, HEAD))
    return all(torch.equal(ours, tensors[key]) for ours, key in pairs)


def refused(where: Path | str) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        Target.load(str(where))
    return str(raised.value)


def write(tensors: Tensors, path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path, metadata={"format": "pt"})
    else:
        torch.save(tensors, path)


def shards(tensors: Tensors, folder: Path, suffix: str, index: str, count: int = 4, stem: str = "part") -> dict[str, str]:
    """Write shards and their index; returns which file holds what."""
    keys = sorted(tensors)
    file_of = {}
    for i in range(count):
        file = f"{stem}-{i + 1:05d}-of-{count:05d}{suffix}"
        write({k: tensors[k] for k in keys[i::count]}, folder / file)
        file_of |= dict.fromkeys(keys[i::count], file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return file_of


def one_safetensors(t: Tensors, folder: Path) -> None:
    write(t, folder / "model.safetensors")


def safetensors_shards(t: Tensors, folder: Path) -> None:
    shards(t, folder, ".safetensors", "model.safetensors.index.json", stem="model")


def one_bin(t: Tensors, folder: Path) -> None:
    write(t, folder / "pytorch_model.bin")


def bin_shards(t: Tensors, folder: Path) -> None:
    shards(t, folder, ".bin", "pytorch_model.bin.index.json", stem="pytorch_model")


def legacy_bin(t: Tensors, folder: Path) -> None:
    torch.save(t, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def wrapped_bin(t: Tensors, folder: Path) -> None:
    torch.save({"state_dict": t, "epoch": 3}, folder / "pytorch_model.bin")


def oddly_named_index(t: Tensors, folder: Path) -> None:
    shards(t, folder, ".safetensors", "model.fp16.safetensors.index.json")


def two_indices(t: Tensors, folder: Path) -> None:
    """Those that transformers would load win over a copy that is none."""
    shards({k: v + 1 for k, v in t.items()}, folder, ".bin", "pytorch_model.bin.index.json", stem="pytorch_model")
    shards(t, folder, ".safetensors", "model.safetensors.index.json", stem="model")
    shards({k: v + 2 for k, v in t.items()}, folder, ".safetensors", "another.safetensors.index.json", stem="another")


def a_whole_file_beside_an_index(t: Tensors, folder: Path) -> None:
    """transformers loads model.safetensors before it looks for an index."""
    write(t, folder / "model.safetensors")
    shards({k: v + 1 for k, v in t.items()}, folder, ".safetensors", "model.safetensors.index.json", stem="model")


def native_alone(t: Tensors, folder: Path) -> None:
    write({NATIVE.get(k, k.removeprefix("model.")): v for k, v in t.items()}, folder / "consolidated.safetensors")


def native_beside_missing_shards(t: Tensors, folder: Path) -> None:
    file_of = shards(t, folder, ".safetensors", "model.safetensors.index.json", stem="model")
    (folder / file_of[HEAD]).unlink()
    native_alone(t, folder)


def native_beside_shards_without_head(t: Tensors, folder: Path) -> None:
    shards({k: v for k, v in t.items() if k != HEAD}, folder, ".safetensors", "model.safetensors.index.json", stem="model")
    native_alone(t, folder)


def an_odd_file(t: Tensors, folder: Path) -> None:
    write(t, folder / "llama-finetuned.v2.safetensors")


def odd_files(t: Tensors, folder: Path) -> None:
    keys = sorted(t)
    write({k: t[k] for k in keys[::2]}, folder / "first.safetensors")
    write({k: t[k] for k in keys[1::2]}, folder / "second.safetensors")


def shards_without_index(t: Tensors, folder: Path) -> None:
    safetensors_shards(t, folder)
    (folder / "model.safetensors.index.json").unlink()


def leftovers(t: Tensors, folder: Path) -> None:
    """Of training, of conversion and of adapters, under names that weights could have."""
    one_safetensors(t, folder)
    wrong = {k: v + 1 for k, v in t.items()}
    for name in ("optimizer.bin", "training_args.bin", "scheduler.bin", "adapter_model.safetensors", "adapter_model.bin", "pytorch_model.bin"):
        write(wrong, folder / name)
    (folder / "original").mkdir()
    write(wrong, folder / "original" / "consolidated.safetensors")


def links_into_a_cache(t: Tensors, folder: Path) -> None:
    safetensors_shards(t, folder)
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{i:064x}")
        file.symlink_to(Path("..") / "blobs" / f"{i:064x}")


LAYOUTS: list[Callable[[Tensors, Path], None]] = [
    one_safetensors, safetensors_shards, one_bin, bin_shards, legacy_bin, wrapped_bin, oddly_named_index, two_indices, a_whole_file_beside_an_index,
    native_alone, native_beside_missing_shards, native_beside_shards_without_head, an_odd_file, odd_files, shards_without_index, leftovers,
    links_into_a_cache,
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_target(layout: Callable[[Tensors, Path], None], folder: Path, tensors: Tensors) -> None:
    layout(tensors, folder)
    assert is_the_target(folder, tensors)


@pytest.mark.parametrize("name", ["with spaces", "größe-模型", "a'quote", "model.gguf"])
def test_a_directory_may_have_any_name(name: str, folder: Path, tensors: Tensors) -> None:
    one_safetensors(tensors, folder)
    assert is_the_target(folder.rename(folder.with_name(name)), tensors)


def test_home_trailing_slash_and_relative_paths(folder: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    one_safetensors(tensors, folder)
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder.parent)
    for where in ("~/target", f"{folder}/", "target", "./target/"):
        assert is_the_target(where, tensors)


def test_a_directory_that_cannot_be_written_is_only_read(folder: Path, tensors: Tensors) -> None:
    safetensors_shards(tensors, folder)
    before = {p: p.stat().st_mtime_ns for p in [folder, *folder.iterdir()]}
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert is_the_target(folder, tensors)
        assert {p: p.stat().st_mtime_ns for p in [folder, *folder.iterdir()]} == before
    finally:
        folder.chmod(0o755)


def held(folder: Path) -> set[str]:
    """Files of a folder that this process has open or mapped."""
    gc.collect()
    opened = [str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.is_symlink()]
    mapped = [line.split(maxsplit=5)[5].strip() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    return {Path(p.removesuffix(" (deleted)")).name for p in opened + mapped if str(folder) in p}


@pytest.mark.parametrize("layout", [one_safetensors, safetensors_shards, one_bin, bin_shards, legacy_bin])
def test_no_file_is_held_but_by_the_tensors_out_of_it(layout: Callable[[Tensors, Path], None], folder: Path, tensors: Tensors) -> None:
    layout(tensors, folder)
    target = Target.load(str(folder))
    assert len(target.fingerprint) == 16
    assert held(folder) <= set(target.found.read.files)
    shutil.rmtree(folder)
    assert torch.equal(target.head_VH, tensors[HEAD])
    del target
    assert held(folder) == set()


def test_groups_open_nothing_until_they_are_asked(folder: Path, tensors: Tensors) -> None:
    """Leftovers that are no weights at all do not matter while what is needed is found before them."""
    one_safetensors(tensors, folder)
    (folder / "zz-notes.safetensors").write_bytes(b"not weights")
    (folder / "pytorch_model.bin").write_bytes(b"not weights")
    assert is_the_target(folder, tensors)


class Payload:
    """Pickled, it makes a directory when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("how", ["torch", "legacy", "pickle"])
def test_pickled_code_is_refused_and_not_run(how: str, folder: Path, tensors: Tensors) -> None:
    made = folder.parent / "pwned"
    content = tensors | {"payload": Payload(made)}
    path = folder / "pytorch_model.bin"
    if how == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "torch")
    found = refused(folder)
    assert str(path) in found
    assert "holds pickled code, or objects other than tensors, and is not loaded" in found
    assert ("mkdir" in found) == (how != "pickle")
    assert not made.exists()
    torch.load(path, weights_only=False) if how != "pickle" else pickle.loads(path.read_bytes())
    assert made.exists()


@pytest.mark.parametrize("layout", [one_bin, legacy_bin])
@pytest.mark.parametrize("keep", [0, 1, 100, 5000, -100])
def test_a_truncated_bin_is_named(layout: Callable[[Tensors, Path], None], keep: int, folder: Path, tensors: Tensors) -> None:
    layout(tensors, folder)
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:keep])
    found = refused(folder)
    assert f"{path} cannot be read" in found
    assert "truncated" in found


@pytest.mark.parametrize("text", [b"", b"hello", b"<html>not found</html>", b"\x80\x02", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_is_no_weights_is_named(text: bytes, name: str, folder: Path) -> None:
    (folder / name).write_bytes(text)
    found = refused(folder)
    assert f"{folder / name} cannot be read" in found
    assert ("git lfs pull" in found) == text.startswith(b"version")


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_an_index_that_is_wrong_about_a_shard_is_named(suffix: str, folder: Path, tensors: Tensors) -> None:
    standard = "model.safetensors" if suffix == ".safetensors" else "pytorch_model.bin"
    file_of = shards(tensors, folder, suffix, f"{standard}.index.json")
    other = next(f for f in file_of.values() if f != file_of[HEAD])
    (folder / f"{standard}.index.json").write_text(json.dumps({"weight_map": file_of | {HEAD: other}}))
    found = refused(folder)
    assert f"{standard}.index.json says that {other} holds {HEAD!r}, and it does not" in found


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_missing_shard_is_named_with_and_without_an_index(suffix: str, folder: Path, tensors: Tensors) -> None:
    standard = "model.safetensors" if suffix == ".safetensors" else "pytorch_model.bin"
    file_of = shards(tensors, folder, suffix, f"{standard}.index.json", stem="model")
    (folder / file_of[HEAD]).unlink()
    assert f"{standard}.index.json names {file_of[HEAD]}, which is not there (1 missing)" in refused(folder)
    (folder / f"{standard}.index.json").unlink()
    number = int(file_of[HEAD].split("-")[1])
    assert f"has no index and lacks part {number} of model-*-of-00004{suffix} (1 missing)" in refused(folder)


def test_two_files_that_hold_the_same_tensors_are_not_chosen_between(folder: Path, tensors: Tensors) -> None:
    write(tensors, folder / "one.safetensors")
    write({k: v + 1 for k, v in tensors.items()}, folder / "two.safetensors")
    found = refused(folder)
    assert "one.safetensors and two.safetensors both hold" in found
    assert "rename the right one to model.safetensors" in found


def test_a_link_to_nothing_is_a_missing_shard(folder: Path, tensors: Tensors) -> None:
    links_into_a_cache(tensors, folder)
    shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][NORM]
    (folder / shard).resolve().unlink()
    assert f"names {shard}, which is not there" in refused(folder)


def test_places_without_weights_say_what_they_are(folder: Path, tmp_path: Path) -> None:
    assert f"{folder} holds no weights: expected *.safetensors or *.bin files; it has config.json" in refused(folder)
    (folder / "training_args.bin").write_bytes(b"x")
    assert "holds no weights" in refused(folder)
    (tmp_path / "empty").mkdir()
    assert "is an empty directory" in refused(tmp_path / "empty")
    (tmp_path / "empty" / "model-q4.gguf").touch()
    assert f"give the path of one of them, for example {tmp_path / 'empty' / 'model-q4.gguf'}" in refused(tmp_path / "empty")


def test_an_adapter_names_its_base(tmp_path: Path, tensors: Tensors) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base-8b"}))
    write({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    found = refused(tmp_path)
    assert f"{tmp_path} is a LoRA adapter, not a whole model" in found
    assert "Merge it into its base 'org/base-8b' (peft: merge_and_unload" in found
    (tmp_path / "adapter_config.json").write_text("{")
    assert "not named in adapter_config.json" in refused(tmp_path)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (BertConfig(architectures=["BertForMaskedLM"]), "bert is an encoder"),
        (BertConfig(architectures=["BertModel"]), "bert is an encoder"),
        (T5Config(architectures=["T5ForConditionalGeneration"]), "t5 is an encoder-decoder"),
    ],
)
def test_what_is_no_decoder_is_told(config: Any, what: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    write({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert what in refused(tmp_path)


@pytest.mark.parametrize("known", [False, True])
def test_code_inside_a_checkpoint_is_not_run(known: bool, folder: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that transformers knows is loaded by its own code, whatever the checkpoint brings; another one is refused without a question."""
    one_safetensors(tensors, folder)
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "configuration_new.NewConfig", "AutoModelForCausalLM": "modeling_new.NewModel"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": code, "model_type": "llama" if known else "brand_new"}))
    (folder / "configuration_new.py").write_text(f"open({str(folder.parent / 'ran')!r}, 'w')\nclass NewConfig: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    if known:
        assert is_the_target(folder, tensors)
    else:
        found = refused(folder)
        assert "model_type 'brand_new' is not known to the installed transformers" in found
        assert "configuration_new.NewConfig, modeling_new.NewModel" in found
        assert "Update transformers if it knows the family by now" in found
    assert not (folder.parent / "ran").exists()


def test_the_first_group_is_what_transformers_loads(folder: Path, tensors: Tensors) -> None:
    for layout in (one_safetensors, safetensors_shards, one_bin, bin_shards, two_indices, a_whole_file_beside_an_index):
        for file in folder.iterdir():
            if file.name != "config.json":
                file.unlink()
        layout(tensors, folder)
        first = groups(LocalPlace(folder))[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            head = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_output_embeddings().weight
        assert torch.equal(first.read(HEAD, Read()), head), layout.__name__
