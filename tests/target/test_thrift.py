"""Only the needed tensors are read: exactly counted, and measured as memory and as pages of files that are mostly holes, larger than most machines' memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.target.weights import Target

GIB = 2**30
V, H = 4000, 64
NEEDED = {
    "model.embed_tokens.weight": torch.arange(V * H).remainder(251).view(V, H).bfloat16(),
    "model.norm.weight": torch.full((H,), 1.5, dtype=torch.bfloat16),
    "lm_head.weight": torch.arange(V * H).remainder(257).view(V, H).bfloat16(),
}
ALLOWED = 48 * 2**20
"""Of memory: what Python and transformers take for a skeleton. A hole that was read would take tens of GB."""


def configured(folder: Path, tied: bool = False) -> Path:
    folder.mkdir(parents=True)
    LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied
    ).save_pretrained(folder)
    return folder


def sparse(path: Path, tensors: Mapping[str, Tensor | int]) -> int:
    """A safetensors file by hand, in this order; a number stands for a hole of so many bytes. Returns the size of its header."""
    header, place = {}, 0
    for name, tensor in tensors.items():
        size = tensor if isinstance(tensor, int) else tensor.nbytes
        shape = [size // 2] if isinstance(tensor, int) else list(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + place)
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                file.write(tensor.view(torch.uint8).numpy().tobytes())
    assert path.stat().st_blocks * 512 < 64 * 2**20, "the file system of the tests does not keep holes as holes"
    return 8 + len(text)


def memory(name: str) -> int:
    """`VmRSS`, what this process holds, or `VmHWM`, the most that it held since `forget_peak`."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def resident(folder: Path) -> int:
    """Bytes of files of a folder that are in this process's memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[:1] in "0123456789abcdef" and "-" in line.split()[0]:
            ours = str(folder) in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def read_so_far() -> int:
    """Bytes that this process asked the system to read, cached or not; pages of mapped files not included."""
    return int(Path("/proc/self/io").read_text().split()[1])


def loaded(folder: Path, needed: Mapping[str, Tensor], headers: int) -> Target:
    """Load under measurement: memory, pages and reads may grow by what is needed, and what was counted is exact."""
    size = sum(t.nbytes for t in needed.values())
    held, read = forget_peak(), read_so_far()
    target = Target.load(str(folder))
    assert memory("VmHWM") - held < ALLOWED
    assert read_so_far() - read < ALLOWED
    assert resident(folder) <= size + len(needed) * 2**17, "pages around a tensor may come with it"
    assert (target.found.read.tensors, target.found.read.headers) == (size, headers)
    assert torch.equal(target.embedding_VH, needed["model.embed_tokens.weight"])
    assert torch.equal(target.head_VH, needed.get("lm_head.weight", target.embedding_VH))
    assert torch.equal(target.norm_H, needed["model.norm.weight"])
    assert {target.embedding_VH.dtype, target.head_VH.dtype, target.norm_H.dtype} == {torch.bfloat16}
    return target


@pytest.mark.parametrize("gib", [4, 40])
def test_one_large_file(gib: int, tmp_path: Path) -> None:
    """40 GiB: on many machines more than can be mapped, where the needed tensors are read instead."""
    folder = configured(tmp_path / "one")
    a, b, c = NEEDED.items()
    half = gib * GIB // 2
    header = sparse(folder / "model.safetensors", dict([("model.layers.0.up", half), a, ("model.layers.1.up", half - 64), b, c]))
    target, held = loaded(folder, NEEDED, header), forget_peak()
    assert len(target.fingerprint) == 16
    assert memory("VmHWM") - held < ALLOWED, "the sample that a fingerprint takes of every tensor is small"


def test_a_tied_target_in_shards_opens_only_what_it_needs_and_shares_one_tensor(tmp_path: Path) -> None:
    folder = configured(tmp_path / "shards", tied=True)
    a, b, _ = NEEDED.items()
    shards = {"model-1.safetensors": dict([a, ("model.layers.0.up", 16 * GIB)]), "model-2.safetensors": {"model.layers.1.up": 16 * GIB}}
    shards["model-3.safetensors"] = dict([("model.layers.2.up", 16 * GIB), b])
    sizes = {name: sparse(folder / name, tensors) for name, tensors in shards.items()}
    index = {"weight_map": {k: name for name, tensors in shards.items() for k in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    target = loaded(folder, dict([a, b]), sizes["model-1.safetensors"] + sizes["model-3.safetensors"])
    assert target.found.read.files == ["model-1.safetensors", "model-3.safetensors"]
    assert target.head_VH is target.embedding_VH


def test_a_large_bin_is_mapped(tmp_path: Path) -> None:
    folder = configured(tmp_path / "bin")
    path = folder / "pytorch_model.bin"
    with torch.serialization.skip_data():  # leaves holes for all tensors; no page of the large one is ever touched
        torch.save({"model.layers.0.up": torch.empty(GIB, 2, dtype=torch.bfloat16), **NEEDED}, path)
    reader = torch._C.PyTorchFileReader(str(path))
    with path.open("r+b") as file:
        for i, tensor in enumerate(NEEDED.values()):
            file.seek(reader.get_record_offset(f"data/{i + 1}"))
            file.write(tensor.view(torch.uint8).numpy().tobytes())
    loaded(folder, NEEDED, len(reader.get_record("data.pkl")))


def test_a_tensor_is_read_once_and_in_the_stored_dtype_and_another_dtype_is_a_copy(tmp_path: Path) -> None:
    folder = configured(tmp_path / "small")
    sparse(folder / "model.safetensors", NEEDED)
    target = Target.load(str(folder), "cpu", torch.float32)
    assert target.found.read.tensors == sum(t.nbytes for t in NEEDED.values())
    assert target.head_VH.dtype == torch.float32
    assert torch.equal(target.head_VH, NEEDED["lm_head.weight"].float())


def test_writing_to_a_target_does_not_reach_the_file(tmp_path: Path) -> None:
    folder = configured(tmp_path / "small")
    sparse(folder / "model.safetensors", NEEDED)
    before = np.fromfile(folder / "model.safetensors", np.uint8)
    Target.load(str(folder)).head_VH.zero_()
    assert np.array_equal(np.fromfile(folder / "model.safetensors", np.uint8), before)
