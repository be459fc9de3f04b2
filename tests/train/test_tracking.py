from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import command_line as cli
import pytest
import torch

from draftsmith.core.types import Ratio
from draftsmith.train.tracking import Tracker, plain


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_goes_to_each_file_that_has_something_to_say(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "run", 0, tensorboard=False)
    tracker.log(1, {"loss": 0.5}, {"seconds": 2.0})
    tracker.log(1, {"loss": 0.75}, {}, kind="held-out")
    assert lines(tmp_path / "run/metrics.jsonl") == [{"step": 1, "kind": "train", "loss": 0.5}, {"step": 1, "kind": "held-out", "loss": 0.75}]
    assert lines(tmp_path / "run/timing.jsonl") == [{"step": 1, "kind": "train", "seconds": 2.0}]
    assert not (tmp_path / "run/tensorboard").exists()


@pytest.mark.parametrize("resumed", [0, 2, 4])
def test_lines_after_the_checkpoint_are_dropped_on_resume(tmp_path: Path, resumed: int) -> None:
    first = Tracker(tmp_path, 0, tensorboard=False)
    for step in range(1, 5):
        first.log(step, {"loss": float(step)}, {"seconds": 1.0})
        first.log(step, {"loss": 10.0 + step}, {}, kind="held-out")
    again = Tracker(tmp_path, resumed, tensorboard=False)
    again.log(resumed + 1, {"loss": -1.0}, {"seconds": 1.0})
    kept = lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["kind"]) for line in kept] == [(s, k) for s in range(1, resumed + 1) for k in ("train", "held-out")] + [(resumed + 1, "train")]
    assert [line["step"] for line in lines(tmp_path / "timing.jsonl")] == list(range(1, resumed + 2))


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_half_a_line_of_a_killed_process_is_dropped(tmp_path: Path, cut: int) -> None:
    tracker = Tracker(tmp_path, 0, tensorboard=False)
    tracker.log(1, {"loss": 1.0}, {"seconds": 1.0})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    tracker.log(2, {"loss": 2.0}, {"seconds": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    Tracker(tmp_path, 2, tensorboard=False)
    assert path.read_bytes() == whole


def test_ratios_become_numbers_and_missing_values_null_not_nan() -> None:
    """NaN is no JSON."""
    metrics = plain({"a": Ratio.of(1.0, 3.0), "b": Ratio(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([4.0, 0.0, 0.0])), "c": Ratio.of(0.0, 0.0)})
    assert metrics == {"a": 0.333333, "b": [0.25, None, None], "c": None}
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics


def scalars(folder: Path) -> Mapping[str, list[tuple[int, float]]]:
    """As TensorBoard itself reads them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        board.Reload()
    return {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_tensorboard_holds_what_the_log_holds(tmp_path: Path, tiny_target: Path, talks: list) -> None:
    """After the process has ended: nothing is lost in a buffer."""
    recipe = cli.write_recipe(tmp_path, tiny_target, talks, "live", steps=6, evaluate_every=3, tensorboard=True)
    code, text = cli.execute(["train", recipe])
    assert code == 0, text
    found, logged = scalars(tmp_path / "run/tensorboard"), lines(tmp_path / "run/metrics.jsonl")
    for kind, key in (("train", "loss"), ("train", "acceptance_length"), ("train", "gradient_norm"), ("held-out", "loss")):
        wanted = [(line["step"], pytest.approx(line[key], rel=1e-5)) for line in logged if line["kind"] == kind]
        assert found[f"{kind}/{key}"] == wanted
    last = logged[-1]["step_accuracy"]
    assert [found[f"held-out/step_accuracy/{i + 1}"][-1][1] for i in range(len(last))] == pytest.approx(last)
    assert len(found["train/tokens_per_second"]) == 6


def test_tensorboard_leaves_out_what_has_no_value(tmp_path: Path) -> None:
    """A step of training-time test that no answer is long enough for."""
    tracker = Tracker(tmp_path, 0, tensorboard=True)
    tracker.log(1, {"loss": 0.5, "step_accuracy": [0.25, None], "overlap": None}, {})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "kind": "train", "loss": 0.5, "step_accuracy": [0.25, None], "overlap": None}]


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"train\.tensorboard.*pip install.*draftsmith\[tensorboard\]"):
        Tracker(tmp_path, 0, tensorboard=True)
    Tracker(tmp_path, 0, tensorboard=False)
