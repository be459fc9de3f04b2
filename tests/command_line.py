"""The real command line in processes of its own, and faults planted in them.

A fork server imports Draftsmith once; each command is a fork of it that calls `draftsmith.cli.main`, so that dying a dozen times costs seconds.
`execute` starts a fresh interpreter instead. A fault strikes at a counted file operation, hence at the same place on every machine.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from draftsmith.data.conversations import Conversation, dumps

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["draftsmith.cli", "draftsmith.pipeline", "transformers.models.llama.modeling_llama"])

DRAFT = {"layers": [1, 2, 4], "vocab_size": 48, "steps": [[0, 1], [0.4, 2], [0.7, 3]], "chains": [[0, 6], [0.5, 3]], "intermediate_size": 24}
TRAIN = {
    "steps": 24, "batch_tokens": 150, "accumulate": 2, "optimizer": {"learning_rate": 0.01}, "dtype": "float32", "seed": 3,
    "log_every": 1, "evaluate_every": 8, "checkpoint_every": 3, "keep": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What happens to a process: a signal to itself before the n-th change of a file below `where` (only at paths that hold `name`, only at this audit
    `event`), and before the next `times - 1`; a largest file size (the disk is full, or with `fatal` the process dies while writing); smaller shards."""

    signal: int | None = None
    operation: int = 1
    times: int = 1
    where: str = "/"
    name: str = ""
    event: str = ""
    file_limit: int | None = None
    fatal: bool = False
    shard_tokens: int | None = None

    def plant(self) -> None:
        """In this process, for the rest of its life."""
        if self.shard_tokens is not None:
            from draftsmith.features import files

            files.SHARD_TOKENS = self.shard_tokens
        if self.file_limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if self.fatal else signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_limit, self.file_limit))
        if self.signal is not None:
            sys.addaudithook(self._strike())

    def _strike(self) -> Callable[[str, tuple], None]:
        left, number = self.operation, int(self.signal or 0)

        def hook(event: str, arguments: tuple) -> None:
            nonlocal left
            if _changes(event, arguments) and self.event in ("", event) and self._meant(arguments[0]):
                left -= 1
                if -self.times < left <= 0:
                    os.kill(os.getpid(), number)

        return hook

    def _meant(self, path: object) -> bool:
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        relative = bool(text) and not text.startswith(os.sep) and not self.name  # shutil.rmtree works relative to an open folder
        return relative or (text.startswith(self.where) and self.name in text)


def _changes(event: str, arguments: tuple) -> bool:
    if event == "open":
        return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


def write_recipe(folder: Path, target: Path, talks: Sequence[Conversation], kind: str = "files", **train: object) -> Path:
    """A recipe of a small run in `folder/run`, with its conversations as JSONL: the last four talks held out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text(dumps(talks[:-4]), encoding="utf-8")
    (folder / "held_out.jsonl").write_text(dumps(talks[-4:]), encoding="utf-8")
    recipe = {
        "run": str(folder / "run"), "target": str(target), "draft": DRAFT, "train": TRAIN | train,
        "data": {"train": str(folder / "train.jsonl"), "held_out": str(folder / "held_out.jsonl")},
        "features": {"kind": kind, "dtype": "float32", "compute": "float32"},
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def start(arguments: Sequence[object], fault: Fault | None = None, output: Path | None = None) -> multiprocessing.process.BaseProcess:
    """`draftsmith ARGUMENTS` in a fork."""
    process = _SERVER.Process(target=_main, args=([str(a) for a in arguments], fault or Fault(), str(output or os.devnull)), daemon=True)
    process.start()
    return process


def command(arguments: Sequence[object], output: Path, fault: Fault | None = None) -> tuple[int, str]:
    """Exit code (negative: the signal that ended it) and everything printed."""
    process = start(arguments, fault, output)
    process.join(600)
    assert process.exitcode is not None, "the command hangs"
    return process.exitcode, output.read_text(encoding="utf-8")


def execute(arguments: Sequence[object], fault: Fault | None = None) -> tuple[int, str]:
    """The same in a fresh interpreter."""
    values = {k: int(v) if isinstance(v, signal.Signals) else v for k, v in asdict(fault or Fault()).items()}
    code = f"from command_line import Fault; Fault(**{values!r}).plant(); from draftsmith.cli import main; main()"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600, check=False
    )
    return done.returncode, done.stdout + done.stderr


def _main(arguments: Sequence[str], fault: Fault, output: str) -> None:
    from draftsmith.cli import main

    with Path(output).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["draftsmith", *arguments]
    fault.plant()
    main()


def contents(folder: Path, skip: Sequence[str] = ()) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in skip}


def printed(folder: Path, *arguments: object, code: int) -> str:
    """What the command printed; its exit code is `code` and there is no traceback."""
    output = folder / "output.txt"
    output.unlink(missing_ok=True)
    found, text = command(arguments, output)
    assert found == code, text
    assert "Traceback" not in text, text
    return text
