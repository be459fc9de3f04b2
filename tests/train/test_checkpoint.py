from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from draftsmith.train import checkpoint
from draftsmith.train.checkpoint import TrainState
from draftsmith.train.optim import OptimConfig, apply, build


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    made.register_buffer("constant", torch.tensor([1, 2, 3]))
    return made


def stepped(made: nn.Module, optimizer: torch.optim.AdamW, seed: int) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    made(x).square().sum().backward()
    apply(made, optimizer, 5.0, 0.1, 1.0)


def save(run: Path, step: int, best: int = -1, keep: int = 2) -> None:
    made = model()
    checkpoint.save_checkpoint(run, made, build(made, OptimConfig()), TrainState(step, 2 * step, best, 1.5), {"seed": 1}, keep)


def test_weights_moments_state_and_facts_come_back_and_training_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    made = model()
    optimizer = build(made, OptimConfig(weight_decay=0.1))
    for seed in range(3):
        stepped(made, optimizer, seed)
    state = TrainState(3, 6, 2, 1.25)
    checkpoint.save_checkpoint(tmp_path, made, optimizer, state, {"seed": 7, "draft": {"steps": [[0, 1]]}}, 2)
    other = model(seed=9)
    moments = build(other, OptimConfig(weight_decay=0.1))
    checkpoint.load_draft(tmp_path, 3, other)
    checkpoint.load_optimizer(tmp_path, 3, moments)
    assert checkpoint.read_state(tmp_path, 3) == (state, {"seed": 7, "draft": {"steps": [[0, 1]]}})
    for seed in range(3, 6):
        stepped(made, optimizer, seed)
        stepped(other, moments, seed)
    assert all(torch.equal(a, b) for a, b in zip(made.state_dict().values(), other.state_dict().values(), strict=True))


def test_loading_weights_alone_is_not_enough_to_go_on(tmp_path: Path) -> None:
    """The test above can fail: without the moments the bits differ."""
    made = model()
    optimizer = build(made, OptimConfig())
    stepped(made, optimizer, 0)
    checkpoint.save_checkpoint(tmp_path, made, optimizer, TrainState(1), {}, 2)
    other = model(seed=9)
    checkpoint.load_draft(tmp_path, 1, other)
    stepped(made, optimizer, 1)
    stepped(other, build(other, OptimConfig()), 1)
    assert not torch.equal(made[0].weight, other[0].weight)


def test_the_file_holds_float32_weights_under_their_own_names(tmp_path: Path) -> None:
    save(tmp_path, 1)
    stored, made = load_file(checkpoint.folder(tmp_path, 1) / "draft.safetensors"), model()
    assert {k: (v.dtype, v.shape) for k, v in stored.items()} == {k: (v.dtype, v.shape) for k, v in made.state_dict().items()}


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [(1, -1, [5]), (2, -1, [4, 5]), (2, 1, [1, 4, 5]), (2, 4, [4, 5]), (1, 3, [3, 5]), (3, 2, [2, 3, 4, 5]), (9, 1, [1, 2, 3, 4, 5])],
)
def test_the_last_few_and_the_best_are_kept(tmp_path: Path, keep: int, best: int, left: list[int]) -> None:
    for step in range(1, 6):
        save(tmp_path, step, best if step >= best else -1, keep)
    assert checkpoint.steps(tmp_path) == left
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [f"step-{s:06d}" for s in left]


def test_an_overtaken_best_is_dropped(tmp_path: Path) -> None:
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 4), (5, 4), (6, 4)):
        save(tmp_path, step, best, keep=1)
    assert checkpoint.steps(tmp_path) == [4, 6]


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    """Beyond a million steps the names are longer."""
    for step in (999_999, 1_000_000, 5):
        save(tmp_path, step, keep=9)
    assert checkpoint.steps(tmp_path) == [5, 999_999, 1_000_000]


@pytest.mark.parametrize("damage", ["partial", "no state", "no weights", "no optimizer", "not a number"])
def test_what_is_not_whole_does_not_count(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = checkpoint.folder(tmp_path, 2)
    if damage == "partial":
        path.rename(path.with_name(path.name + ".partial"))
    elif damage == "not a number":
        path.rename(path.with_name("step-best"))
    else:
        (path / {"no state": "state.json", "no weights": "draft.safetensors", "no optimizer": "optimizer.pt"}[damage]).unlink()
    assert checkpoint.steps(tmp_path) == [1]


def test_the_best_is_the_one_that_the_last_state_names(tmp_path: Path) -> None:
    save(tmp_path, 1, best=1)
    save(tmp_path, 2, best=1)
    save(tmp_path, 3, best=1)
    assert checkpoint.best_step(tmp_path) == 1
    shutil.rmtree(checkpoint.folder(tmp_path, 1))
    assert checkpoint.best_step(tmp_path) == 3


def test_a_run_without_checkpoints_says_what_to_do(tmp_path: Path) -> None:
    assert checkpoint.steps(tmp_path / "nowhere") == []
    with pytest.raises(ValueError, match=r"no checkpoint.*draftsmith train"):
        checkpoint.best_step(tmp_path / "nowhere")


def test_weights_of_another_shape_are_refused_with_the_file(tmp_path: Path) -> None:
    save(tmp_path, 1)
    other = nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))
    with pytest.raises(ValueError, match=r"step-000001/draft\.safetensors does not fit"):
        checkpoint.load_draft(tmp_path, 1, other)


@pytest.mark.parametrize("name", ["draft.safetensors", "optimizer.pt", "state.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    """Bit rot, or a copy that broke off: a message, not a traceback from inside a library."""
    save(tmp_path, 1)
    path = checkpoint.folder(tmp_path, 1) / name
    path.write_bytes(path.read_bytes()[:-20])
    made = model()
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        checkpoint.read_state(tmp_path, 1), checkpoint.load_draft(tmp_path, 1, made), checkpoint.load_optimizer(tmp_path, 1, build(made, OptimConfig()))
