"""A run that is stopped in any way, at any moment, continues to the bits of one that never was. Everything goes through the command line."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path

import command_line as cli
import pytest
import torch
from command_line import Fault
from safetensors.torch import load_file, save_file

from draftsmith import pipeline
from draftsmith.core.config import load
from draftsmith.pipeline import Run
from draftsmith.recipe import Recipe
from draftsmith.train import checkpoint

STEPS = cli.TRAIN["steps"]


class Whole:
    """The undisturbed run, from a fresh interpreter, and copies of its recipe that share its features."""

    def __init__(self, folder: Path, target: Path, talks: list) -> None:
        self.folder, self.target, self.talks = folder, target, talks
        recipe = cli.write_recipe(folder, target, talks)
        code, text = cli.command(["capture", recipe], folder / "capture.txt")
        assert code == 0, text
        code, text = cli.execute(["train", recipe])
        assert code == 0, text
        self.run = folder / "run"
        self.kept = self.result(self.run)

    @staticmethod
    def result(run: Path) -> dict[str, bytes]:
        """What must not differ: all checkpoints to the last byte, and the log."""
        return cli.contents(run / "checkpoints") | {"metrics.jsonl": (run / "metrics.jsonl").read_bytes()}

    def another(self, folder: Path) -> tuple[list[object], Path]:
        """Arguments of the same training elsewhere, and its run's folder."""
        recipe = cli.write_recipe(folder, self.target, self.talks)
        return ["train", recipe, f"features.path={self.run / 'features'}"], folder / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, talks: list) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"), tiny_target, talks)


def leftovers(run: Path) -> list[str]:
    return sorted(p.name for p in run.rglob("*.partial"))


def finish(whole: Whole, arguments: list[object], run: Path, output: Path) -> str:
    code, text = cli.command(arguments, output)
    assert code == 0, text
    assert whole.result(run) == whole.kept
    assert leftovers(run) == []
    return text


def test_the_undisturbed_run_is_a_fair_measure(whole: Whole) -> None:
    """Every step changes weights, its schedule of steps and its draw of chains matter, and it keeps the best and the last two checkpoints."""
    lines = [json.loads(line) for line in whole.kept["metrics.jsonl"].splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1))
    assert [len(line["position_rates"]) for line in trained] == [1] * 10 + [2] * 7 + [3] * 7
    assert len({line["loss"] for line in trained}) == STEPS
    assert whole.kept["step-000021/draft.safetensors"] != whole.kept["step-000024/draft.safetensors"]
    assert trained[-1]["micro_batches"] == 2 * STEPS
    state, _ = checkpoint.read_state(whole.run, STEPS)
    assert checkpoint.steps(whole.run) == sorted({state.best_step, 21, 24})


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_file_operations(whole: Whole, tmp_path: Path, seed: int) -> None:
    """SIGKILL before the n-th change of a file, n at random, again and again until a run gets through."""
    draw = random.Random(seed)
    arguments, run = whole.another(tmp_path)
    ends = []
    while not ends or ends[-1] != 0:
        assert len(ends) < 60, "no progress"
        code, text = cli.command(arguments, tmp_path / f"{len(ends)}.txt", Fault(signal.SIGKILL, draw.randint(1, 80), where=str(run)))
        assert code in (0, -signal.SIGKILL), text
        ends.append(code)
    assert len(ends) > 3
    finish(whole, arguments, run, tmp_path / "again.txt")


def test_killed_at_random_times(whole: Whole, tmp_path: Path) -> None:
    draw = random.Random(4)
    arguments, run = whole.another(tmp_path)
    for n in range(4):
        process = cli.start(arguments, output=tmp_path / f"{n}.txt")
        process.join(draw.uniform(0.1, 0.9))
        process.kill()
        process.join()
    finish(whole, arguments, run, tmp_path / "last.txt")


def test_killed_in_the_middle_of_a_write(whole: Whole, tmp_path: Path) -> None:
    """The kernel ends the process inside write(2), with half of optimizer.pt on disk."""
    arguments, run = whole.another(tmp_path)
    limit = len(whole.kept[f"step-{STEPS:06d}/optimizer.pt"]) // 2
    code, _ = cli.command(arguments, tmp_path / "1.txt", Fault(file_limit=limit, fatal=True))
    assert code == -signal.SIGXFSZ
    assert (run / "checkpoints/step-000003.partial/optimizer.pt.partial").stat().st_size == limit
    assert checkpoint.steps(run) == []
    finish(whole, arguments, run, tmp_path / "2.txt")


@pytest.mark.parametrize("removed", [1, 2])
def test_a_checkpoint_killed_while_it_is_dropped_does_not_count_as_whole(whole: Whole, tmp_path: Path, removed: int) -> None:
    """SIGKILL after `removed` of the files of an old checkpoint are gone."""
    arguments, run = whole.another(tmp_path)
    code, _ = cli.command(arguments, tmp_path / "1.txt", Fault(signal.SIGKILL, removed + 1, where=str(run), event="os.remove"))
    assert code == -signal.SIGKILL
    for step in checkpoint.steps(run):
        files = {p.name for p in checkpoint.folder(run, step).iterdir()}
        assert files == {"draft.safetensors", "optimizer.pt", "state.json"}, f"step {step} counts as whole"
    finish(whole, arguments, run, tmp_path / "2.txt")


def test_half_written_checkpoints_are_never_picked_up(whole: Whole, tmp_path: Path) -> None:
    arguments, run = whole.another(tmp_path)
    code, _ = cli.command(arguments, tmp_path / "1.txt", Fault(signal.SIGKILL, 1, where=str(run), name="step-000009"))
    assert code == -signal.SIGKILL
    assert checkpoint.steps(run) == [3, 6, 8] or checkpoint.steps(run) == [6, 8]
    good = checkpoint.folder(run, 8)
    for name, dropped in (("step-000012.partial", ""), ("step-000015", "state.json")):
        shutil.copytree(good, run / "checkpoints" / name)
        if dropped:
            (run / "checkpoints" / name / dropped).unlink()
    assert checkpoint.steps(run)[-1] == 8
    text = finish(whole, arguments, run, tmp_path / "2.txt")
    assert f"at step 8 of {STEPS}" in text


def test_the_next_run_removes_what_a_killed_one_left(whole: Whole, tmp_path: Path) -> None:
    """Also where it will not save at that step itself: a checkpoint of Ctrl-C, killed while it was written."""
    arguments, run = whole.another(tmp_path)
    (run / "checkpoints/step-000007.partial").mkdir(parents=True)
    (run / "checkpoints/step-000007.partial/draft.safetensors").write_bytes(b"half")
    finish(whole, arguments, run, tmp_path / "1.txt")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_by_signal_saves_and_says_how_to_continue(whole: Whole, tmp_path: Path, number: signal.Signals) -> None:
    arguments, run = whole.another(tmp_path)
    fault = Fault(number, 11, where=str(run), name="metrics.jsonl")  # ten train lines and one held-out line: step 10
    code, text = cli.execute(arguments, fault) if number == signal.SIGINT else cli.command(arguments, tmp_path / "1.txt", fault)
    assert code == 130, text
    assert f"stopped at step 10 of {STEPS}" in text
    assert "the same command continues" in text
    assert "Traceback" not in text
    assert checkpoint.steps(run)[-1] == 10
    assert leftovers(run) == []
    assert f"at step 10 of {STEPS}" in finish(whole, arguments, run, tmp_path / "2.txt")


def test_a_signal_during_the_last_step_finishes(whole: Whole, tmp_path: Path) -> None:
    arguments, run = whole.another(tmp_path)
    lines = whole.kept["metrics.jsonl"].count(b"\n")
    code, text = cli.command(arguments, tmp_path / "1.txt", Fault(signal.SIGINT, lines, where=str(run), name="metrics.jsonl"))
    assert code == 0, text
    assert whole.result(run) == whole.kept


def test_a_second_signal_stops_at_once_and_leaves_nothing_half_written(whole: Whole, tmp_path: Path) -> None:
    """Both while the checkpoint of step 6 is written."""
    arguments, run = whole.another(tmp_path)
    code, text = cli.command(arguments, tmp_path / "1.txt", Fault(signal.SIGINT, 2, times=2, where=str(run), name="step-000006"))
    assert code == 130, text
    assert "Traceback" not in text
    assert "continues" in text
    assert checkpoint.steps(run) == [3]
    assert leftovers(run) == []
    finish(whole, arguments, run, tmp_path / "2.txt")


def test_a_full_disk_at_the_first_checkpoint(whole: Whole, tmp_path: Path) -> None:
    """draft.safetensors fits, optimizer.pt does not."""
    arguments, run = whole.another(tmp_path)
    limit = len(whole.kept[f"step-{STEPS:06d}/draft.safetensors"]) + 1000
    code, text = cli.command(arguments, tmp_path / "1.txt", Fault(file_limit=limit))
    assert code == 2, text
    assert "Traceback" not in text
    assert "could not write" in text
    assert "optimizer.pt" in text
    assert "run the same command again" in text
    assert list((run / "checkpoints").iterdir()) == []
    finish(whole, arguments, run, tmp_path / "2.txt")


def test_a_full_disk_at_a_later_checkpoint_spares_the_earlier_one(whole: Whole, tmp_path: Path) -> None:
    arguments, run = whole.another(tmp_path)
    code, _ = cli.command(arguments, tmp_path / "1.txt", Fault(signal.SIGTERM, 4, where=str(run), name="metrics.jsonl"))
    assert code == 130
    before = cli.contents(run / "checkpoints")
    code, text = cli.command(arguments, tmp_path / "2.txt", Fault(file_limit=20_000))
    assert code == 2, text
    assert "draft.safetensors" in text
    assert cli.contents(run / "checkpoints") == before
    assert f"at step 4 of {STEPS}" in finish(whole, arguments, run, tmp_path / "3.txt")


def test_a_full_disk_while_logging_names_the_file(whole: Whole, tmp_path: Path) -> None:
    arguments, run = whole.another(tmp_path)
    late = ["train.checkpoint_every=1000", "train.evaluate_every=1000"]
    prepared = [f"data.{name}={whole.folder / name}.jsonl" for name in ("train", "held_out")]  # samples are made and kept already: no file before the log's
    code, text = cli.command([*arguments, *late, *prepared], tmp_path / "1.txt", Fault(file_limit=2500))
    assert code == 2, text
    assert "Traceback" not in text
    finish(whole, arguments, run, tmp_path / "2.txt")
    assert "metrics.jsonl" in text
    assert "make room" in text


CHANGES = [
    ("draft.step_weight=0.5", "draft.step_weight"),
    ("draft.chains=2", "draft.chains"),
    ("draft.vocab_size=40", "draft.vocab_size"),
    ("train.seed=4", "train.seed"),
    ("train.steps=30", "train.steps"),
    ("train.batch_tokens=140", "train.batch_tokens"),
    ("train.accumulate=1", "train.accumulate"),
    ("train.optimizer.learning_rate=0.02", "train.optimizer.learning_rate"),
    ("train.optimizer.clip=0.5", "train.optimizer.clip"),
    ("features.kind=live", None),
    ("train.log_every=2", None),
    ("train.keep=5", None),
]


@pytest.mark.parametrize(("override", "setting"), CHANGES, ids=[c[0] for c in CHANGES])
def test_resuming_under_another_recipe_is_refused_and_the_setting_named(whole: Whole, tmp_path: Path, override: str, setting: str | None) -> None:
    """What does not touch the bits may change."""
    (_, recipe, features), run = whole.another(tmp_path)
    shutil.copytree(whole.run, run, ignore=shutil.ignore_patterns("features"))
    changed = Run(load(Recipe, recipe, [features, override]))
    if setting is None:
        pipeline.train(changed)
    else:
        with pytest.raises(ValueError, match=setting.replace(".", r"\.")):
            pipeline.train(changed)
    assert cli.contents(run / "checkpoints") == cli.contents(whole.run / "checkpoints")


@pytest.mark.parametrize("override", ["data.limit=5", "data.max_length=40"])
def test_resuming_live_on_other_data_is_refused(whole: Whole, tmp_path: Path, override: str) -> None:
    """The count of consumed micro-batches means nothing in another order."""
    (_, recipe, _), run = whole.another(tmp_path)
    shutil.copytree(whole.run, run, ignore=shutil.ignore_patterns("features"))
    with pytest.raises(ValueError, match=r"data|samples"):
        pipeline.train(Run(load(Recipe, recipe, ["features.kind=live", override])))


def test_a_refused_resume_leaves_the_saved_recipe_as_it_was(whole: Whole, tmp_path: Path) -> None:
    """run.yaml is enough to run it again, so it must stay that of the checkpoints."""
    (_, recipe, features), run = whole.another(tmp_path)
    shutil.copytree(whole.run, run, ignore=shutil.ignore_patterns("features"))
    pipeline.train(Run(load(Recipe, recipe, [features])))
    before = (run / "run.yaml").read_bytes()
    with pytest.raises(ValueError, match="seed"):
        pipeline.train(Run(load(Recipe, recipe, [features, "train.seed=4"])))
    assert (run / "run.yaml").read_bytes() == before


def test_another_target_is_refused(whole: Whole, tmp_path: Path, tiny_target: Path) -> None:
    """The same architecture with other weights: by the features, and live by the checkpoint."""
    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    weights = load_file(other / "model.safetensors")
    weights["model.embed_tokens.weight"] += 0.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    (_, recipe, features), run = whole.another(tmp_path)
    shutil.copytree(whole.run, run, ignore=shutil.ignore_patterns("features"))
    for where in (features, "features.kind=live"):
        with pytest.raises(ValueError, match="target"):
            pipeline.train(Run(load(Recipe, recipe, [where, f"target={other}"])))


def test_a_checkpoint_of_another_shape_does_not_load(whole: Whole, tmp_path: Path) -> None:
    """Should its facts agree all the same: ValueError naming the file, not half a load."""
    (_, recipe, features), run = whole.another(tmp_path)
    draft = Run(load(Recipe, recipe, [features, "draft.vocab_size=40"])).new_draft()
    before = {k: v.clone() for k, v in draft.state_dict().items()}
    shutil.copytree(whole.run, run, ignore=shutil.ignore_patterns("features"))
    with pytest.raises(ValueError, match=r"step-000024/draft\.safetensors"):
        checkpoint.load_draft(run, STEPS, draft)
    assert before["d2t"].shape == draft.state_dict()["d2t"].shape
    assert torch.equal(before["lm_head.weight"], draft.state_dict()["lm_head.weight"])


def test_the_saved_recipe_continues_the_run(whole: Whole, tmp_path: Path) -> None:
    """run.yaml in place of the recipe: the same training, to the same bits."""
    arguments, run = whole.another(tmp_path)
    code, _ = cli.command(arguments, tmp_path / "1.txt", Fault(signal.SIGKILL, 40, where=str(run)))
    assert code == -signal.SIGKILL
    finish(whole, ["train", run / "run.yaml"], run, tmp_path / "2.txt")
