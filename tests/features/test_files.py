from __future__ import annotations

import json
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path

import command_line as cli
import pytest
import torch
from command_line import Fault

from draftsmith import pipeline
from draftsmith.core.config import load
from draftsmith.core.types import Features, FeatureSpec, Sample
from draftsmith.data import samples as rendering
from draftsmith.features import files
from draftsmith.features.files import FileSource, Identity
from draftsmith.pipeline import Run
from draftsmith.recipe import Recipe
from draftsmith.target.capture import Capture

SPEC = FeatureSpec((1, 2), "float32")
SHARD = 150
"""Tokens of a shard here: 12 short talks make five."""


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SHARD_TOKENS", SHARD)


@pytest.fixture(scope="module")
def found(template, talks) -> list[Sample]:
    return rendering.prepare(talks, template, 200).samples


@pytest.fixture(scope="module")
def identity(found: list[Sample]) -> Identity:
    return Identity.of("target-1", SPEC, "float32", "template-1", found)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, found: list[Sample], identity: Identity, target, target_model) -> Path:
    """A whole set of several shards."""
    folder = tmp_path_factory.mktemp("stored") / "set"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "SHARD_TOKENS", SHARD)
        files.write(folder, identity, found, Capture(target_model, target, SPEC), lambda _n: None)
    assert len(list(folder.glob("shard-*"))) >= 4
    return folder


@pytest.fixture
def copy(tmp_path: Path, stored: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "set"))


def test_what_is_read_is_what_was_captured(stored: Path, found: list[Sample], identity: Identity, target, target_model) -> None:
    source, capture = FileSource(stored, identity), Capture(target_model, target, SPEC)
    assert list(source.lengths) == [len(s) for s in found]
    for i, sample in enumerate(found):
        got, wanted = source.features(i), capture(sample)
        assert got.sample.id == sample.id == source.sample(i).id
        for a, b in ((got.sample.input_ids, sample.input_ids), (got.sample.loss_mask, sample.loss_mask), (source.sample(i).input_ids, sample.input_ids)):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        assert got.hidden_TF.dtype == torch.float32
        assert torch.equal(got.hidden_TF, wanted.hidden_TF)
        assert torch.equal(got.last_TH, wanted.last_TH)
        assert torch.equal(got.argmax_T, wanted.argmax_T)


def test_the_size_is_told_beforehand(stored: Path, found: list[Sample]) -> None:
    """Of the tensors alone: each shard's header takes a few hundred bytes more."""
    tokens = sum(map(len, found))
    shards = [p.stat().st_size for p in stored.glob("shard-*")]
    assert 0 <= sum(shards) - files.bytes_needed(SPEC, 32, tokens) < 600 * len(shards)
    assert files.bytes_needed(FeatureSpec((1, 2)), 32, tokens) == tokens * (3 * 32 * 2 + 9)


def changed(identity: Identity, found: list[Sample], field: str) -> Identity:
    sample = found[0]
    flipped = Sample(sample.id, sample.input_ids, ~sample.loss_mask)
    return {
        "target": replace(identity, target="target-2"),
        "layers": Identity.of("target-1", FeatureSpec((1, 3), "float32"), "float32", "template-1", found),
        "dtype": Identity.of("target-1", FeatureSpec((1, 2), "bfloat16"), "float32", "template-1", found),
        "compute": Identity.of("target-1", SPEC, "bfloat16", "template-1", found),
        "template": Identity.of("target-1", SPEC, "float32", "template-2", found),
        "samples (fewer)": Identity.of("target-1", SPEC, "float32", "template-1", found[:-1]),
        "samples (order)": Identity.of("target-1", SPEC, "float32", "template-1", found[::-1]),
        "samples (mask)": Identity.of("target-1", SPEC, "float32", "template-1", [flipped, *found[1:]]),
    }[field]


FIELDS = ["target", "layers", "dtype", "compute", "template", "samples (fewer)", "samples (order)", "samples (mask)"]


@pytest.mark.parametrize("field", FIELDS)
def test_another_specification_is_refused_and_the_field_named(copy: Path, found: list[Sample], identity: Identity, field: str) -> None:
    """On opening, and on capturing into the folder, which stays as it is."""
    other, before = changed(identity, found, field), cli.contents(copy)
    message = rf"{copy}.*another specification: {field.split()[0]} is .*needs"
    with pytest.raises(ValueError, match=message):
        FileSource(copy, other)
    with pytest.raises(ValueError, match=message):
        files.write(copy, other, found, _never, lambda _n: None)
    assert cli.contents(copy) == before


def _never(_sample: Sample) -> Features:
    raise AssertionError("nothing is left to capture")


def test_every_field_of_the_identity_is_covered_above(identity: Identity) -> None:
    assert set(asdict(identity)) == {field.split()[0] for field in FIELDS}


@pytest.mark.parametrize("field", ["layers", "last"])
def test_other_conventions_are_refused_and_named(copy: Path, identity: Identity, field: str) -> None:
    """A set made by a tool that numbers layers otherwise, or stores the state before the norm."""
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["conventions"][field] = "otherwise"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=rf"{field}.*otherwise"):
        FileSource(copy, identity)


@pytest.mark.parametrize("place", [0, 9, 200, -40_000, -1])
def test_a_flipped_bit_is_found_on_opening_and_the_shard_named(copy: Path, identity: Identity, place: int) -> None:
    path = copy / "shard-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard-00002\.safetensors is corrupt"):
        FileSource(copy, identity)


@pytest.mark.parametrize("size", [None, 0, 100, -1, +1])
def test_a_truncated_or_missing_shard_is_named(copy: Path, identity: Identity, size: int | None) -> None:
    path = copy / "shard-00001.safetensors"
    data = path.read_bytes()
    path.unlink()
    if size is not None:
        path.write_bytes(data + b"x" if size == 1 else data[:size])
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is (truncated|missing|corrupt)"):
        FileSource(copy, identity)


def test_swapped_shards_are_found(copy: Path, identity: Identity) -> None:
    one, two = copy / "shard-00000.safetensors", copy / "shard-00001.safetensors"
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors"):
        FileSource(copy, identity)


def test_a_missing_manifest_says_how_to_make_one(tmp_path: Path, copy: Path, identity: Identity) -> None:
    with pytest.raises(ValueError, match=r"nowhere.*draftsmith capture"):
        FileSource(tmp_path / "nowhere", identity)
    (copy / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no manifest\.json.*draftsmith capture"):
        FileSource(copy, identity)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', "\x00\x00"])
def test_a_damaged_manifest_is_named(copy: Path, identity: Identity, text: str) -> None:
    (copy / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        FileSource(copy, identity)


@pytest.mark.parametrize("version", [0, 2, None])
def test_another_format_is_refused(copy: Path, identity: Identity, version: int | None) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"format": version}))
    with pytest.raises(ValueError, match=rf"manifest\.json.*format {version}.*reads 1"):
        FileSource(copy, identity)


class Stopped(Exception): ...


@pytest.mark.parametrize("after", [0, 1, 4, 7, 11])
def test_a_stopped_capture_is_unfinished_and_continues_to_the_same_bytes(
    tmp_path: Path, stored: Path, found: list[Sample], identity: Identity, target, target_model, after: int
) -> None:
    capture, folder, asked = Capture(target_model, target, SPEC), tmp_path / "set", []

    def stopping(sample: Sample) -> Features:
        if len(asked) == after:
            raise Stopped
        asked.append(sample.id)
        return capture(sample)

    with pytest.raises(Stopped):
        files.write(folder, identity, found, stopping, lambda _n: None)
    with pytest.raises(ValueError, match=r"unfinished|no manifest"):
        FileSource(folder, identity)
    kept = sum(len(s["lengths"]) for s in json.loads((folder / "manifest.json").read_text())["shards"]) if folder.exists() else 0
    again, told = [], []

    def counting(sample: Sample) -> Features:
        again.append(sample.id)
        return capture(sample)

    files.write(folder, identity, found, counting, told.append)
    assert again == [s.id for s in found[kept:]]
    assert sum(told) == sum(map(len, found))
    assert cli.contents(folder) == cli.contents(stored)
    files.write(folder, identity, found, _never, lambda _n: None)
    assert cli.contents(folder) == cli.contents(stored)


def test_require_space_refuses_before_the_work(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    files.require_space(tmp_path / "not" / "there" / "yet", free // 2)
    with pytest.raises(ValueError, match=r"not/there.*need \d.* GB.*are free.*features\.kind=live"):
        files.require_space(tmp_path / "not" / "there", 2 * free + 10**9)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("done", [False, True])
def test_a_capture_needs_room_only_for_what_is_missing(tmp_path: Path, tiny_target: Path, talks: list, monkeypatch: pytest.MonkeyPatch, done: bool) -> None:
    """After a full disk one makes room for the rest: the shards that are there must not be asked for again."""
    run = Run(load(Recipe, cli.write_recipe(tmp_path, tiny_target, talks)))
    usage = shutil.disk_usage(tmp_path)
    if done:
        pipeline.capture(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=10_000))
    if done:
        pipeline.capture(run)
    else:
        with pytest.raises(ValueError, match="are free"):
            pipeline.capture(run)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, talks: list) -> Path:
    """The folder of an undisturbed capture through the command line."""
    folder = tmp_path_factory.mktemp("captured")
    code, text = cli.command(["capture", cli.write_recipe(folder, tiny_target, talks)], folder / "out.txt", Fault(shard_tokens=SHARD))
    assert code == 0, text
    return folder / "run" / "features"


def continues(tmp_path: Path, recipe: Path, captured: Path) -> None:
    code, text = cli.command(["capture", recipe], tmp_path / "again.txt", Fault(shard_tokens=SHARD))
    assert code == 0, text
    assert cli.contents(tmp_path / "run" / "features") == cli.contents(captured)


@pytest.mark.parametrize("operation", [1, 2, 4, 7, 8, 11, 15])
def test_a_capture_killed_at_any_file_operation_continues_to_the_same_bytes(
    tmp_path: Path, tiny_target: Path, talks: list, captured: Path, operation: int
) -> None:
    recipe, folder = cli.write_recipe(tmp_path, tiny_target, talks), tmp_path / "run" / "features"
    fault = Fault(signal.SIGKILL, operation, where=str(folder), name="features", shard_tokens=SHARD)
    code, text = cli.command(["capture", recipe], tmp_path / "1.txt", fault)
    assert code == -signal.SIGKILL, text
    continues(tmp_path, recipe, captured)


def test_ctrl_c_during_a_capture_says_how_to_continue(tmp_path: Path, tiny_target: Path, talks: list, captured: Path) -> None:
    recipe, folder = cli.write_recipe(tmp_path, tiny_target, talks), tmp_path / "run" / "features"
    fault = Fault(signal.SIGINT, 1, where=str(folder), name="shard-00001", shard_tokens=SHARD)
    code, text = cli.command(["capture", recipe], tmp_path / "1.txt", fault)
    assert code == 130, text
    assert not list(folder.rglob("*.partial"))
    assert "Traceback" not in text
    continues(tmp_path, recipe, captured)
    assert "the same command continues" in text


@pytest.mark.parametrize("first", [0, 1])
def test_a_full_disk_while_capturing(tmp_path: Path, tiny_target: Path, talks: list, captured: Path, first: int) -> None:
    """At the first shard, and at the second, after the first was written on a better day."""
    recipe, folder = cli.write_recipe(tmp_path, tiny_target, talks), tmp_path / "run" / "features"
    if first:
        fault = Fault(signal.SIGKILL, 1, where=str(folder), name="shard-00001", shard_tokens=SHARD)
        assert cli.command(["capture", recipe], tmp_path / "1.txt", fault)[0] == -signal.SIGKILL
    code, text = cli.command(["capture", recipe], tmp_path / "2.txt", Fault(file_limit=20_000, shard_tokens=SHARD))
    assert code == 2, text
    assert "Traceback" not in text
    assert f"shard-{first:05d}.safetensors" in text
    assert "run the same command again" in text
    present = {p.name for p in folder.rglob("*") if p.is_file()}
    assert present == ({"manifest.json", "shard-00000.safetensors"} if first else set())
    code, text = cli.command(["train", recipe], tmp_path / "3.txt")
    assert code == 2
    assert "draftsmith capture" in text or "unfinished" in text
    continues(tmp_path, recipe, captured)
