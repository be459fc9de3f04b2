"""Who imports whom, and how large files and functions are: docs/design/house.md as a check of the tree."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

import draftsmith

ROOT = Path(draftsmith.__file__).parent
NAME = "draftsmith"
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "target": {"core"},
    "data": {"core"},
    "nn": {"core"},
    "drafts": {"nn", "core", "target.weights"},
    "features": {"target", "data", "core"},
    "train": {"drafts", "features", "target", "core"},
    "eval": {"drafts", "target", "data", "core"},
    "export": {"drafts", "target", "core"},
    "bench": {"data", "core"},
}
"""What each package may import besides itself. Top-level modules glue, and may import everything; nobody may import them."""
ALGORITHM_NEUTRAL = {"__init__", "base", "published"}
"""Modules of `drafts` that are no algorithm."""
FILE_LINES, FUNCTION_LINES = 400, 60


def module_of(path: Path, root: Path) -> tuple[str, ...]:
    """("drafts", "eagle3") for drafts/eagle3.py; a package is ("drafts", "__init__")."""
    return path.relative_to(root).with_suffix("").parts


def imports(tree: ast.AST, module: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
    """Every import of ours, wherever it stands, as parts below the package with the line; `from package import name` counts as package.name."""
    found: list[tuple[int, tuple[str, ...]]] = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([NAME, *module[: len(module) - node.level], *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and isinstance(node.args[0], ast.Constant):
            names = [str(node.args[0].value)]
        found += [(node.lineno, tuple(name.split(".")[1:])) for name in names if name.split(".")[0] == NAME]  # type: ignore[attr-defined]
    return found


def forbidden(root: Path) -> list[str]:
    """Imports against the allowed directions, as `file:line imports module`."""
    wrong: list[str] = []
    for path in sorted(root.rglob("*.py")):
        module = module_of(path, root)
        if len(module) == 1:
            continue
        for line, parts in imports(ast.parse(path.read_text()), module):
            place = f"{path.relative_to(root)}:{line} imports {'.'.join((NAME, *parts))}"
            package, imported = module[0], parts[0] if parts else ""
            own = imported == package
            permitted = own or imported in ALLOWED.get(package, set()) or ".".join(parts[:2]) in ALLOWED.get(package, set())
            algorithm = own and package == "drafts" and module[-1] != "__init__" and len(parts) > 1 and parts[1] not in ALGORITHM_NEUTRAL
            if not permitted or algorithm or package not in ALLOWED:
                wrong.append(place)
    return wrong


def oversized(root: Path) -> list[str]:
    """Files and functions that are too long."""
    wrong: list[str] = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        if len(text.splitlines()) > FILE_LINES:
            wrong.append(f"{path.relative_to(root)} has {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    wrong.append(f"{path.relative_to(root)}:{node.lineno} {node.name} has {length} lines")
    return wrong


def algorithms_named_elsewhere(root: Path) -> list[str]:
    """Files outside an algorithm's own that name it, other than the DRAFTS dict."""
    names = {p.stem for p in (root / "drafts").glob("*.py")} - ALGORITHM_NEUTRAL
    wrong: list[str] = []
    for path in sorted(root.rglob("*.py")):
        if path.parent.name == "drafts" and path.stem in {*names, "__init__"}:
            continue
        tree = ast.parse(path.read_text())
        words = {n.id.lower() for n in ast.walk(tree) if isinstance(n, ast.Name)} | {n.attr.lower() for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        words |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        words |= {alias.name.lower() for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) for alias in n.names}
        wrong += [f"{path.relative_to(root)} names {name}" for name in sorted(names & words)]
    return wrong


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package, to plant faults in."""
    return Path(shutil.copytree(ROOT, tmp_path / NAME, ignore=shutil.ignore_patterns("__pycache__", "bundled")))


def plant(root: Path, file: str, line: str) -> None:
    path = root / file
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")


def test_imports_go_in_the_allowed_directions() -> None:
    assert forbidden(ROOT) == []


def test_the_walk_sees_the_imports_of_the_tree() -> None:
    seen = {(module_of(p, ROOT)[0], i[0]) for p in ROOT.rglob("*.py") for _, i in imports(ast.parse(p.read_text()), module_of(p, ROOT)) if i}
    assert {("drafts", "nn"), ("drafts", "target"), ("features", "target"), ("train", "features"), ("eval", "drafts"), ("cli", "pipeline")} <= seen
    assert {p.name for p in ROOT.iterdir() if p.is_dir() and any(p.glob("*.py"))} <= set(ALLOWED)


@pytest.mark.parametrize(
    ("file", "line", "imported"),
    [
        ("core/types.py", "import draftsmith.data.vocab", "draftsmith.data.vocab"),
        ("core/types.py", "from draftsmith import __version__", "draftsmith.__version__"),
        ("core/env.py", "from draftsmith.cli import app", "draftsmith.cli.app"),
        ("core/env.py", "from ..data import vocab", "draftsmith.data.vocab"),
        ("data/vocab.py", "from draftsmith.target.weights import Target", "draftsmith.target.weights.Target"),
        ("target/cache.py", "def f():\n    from draftsmith.features import files", "draftsmith.features.files"),
        ("nn/rope.py", "from draftsmith.drafts.base import Draft", "draftsmith.drafts.base.Draft"),
        ("drafts/base.py", "from draftsmith.target.model import TargetModel", "draftsmith.target.model.TargetModel"),
        ("drafts/base.py", "from draftsmith.drafts.eagle3 import Eagle3", "draftsmith.drafts.eagle3.Eagle3"),
        ("drafts/other.py", "from draftsmith.drafts.eagle3 import Eagle3", "draftsmith.drafts.eagle3.Eagle3"),
        ("drafts/other.py", "from .eagle3 import Eagle3", "draftsmith.drafts.eagle3.Eagle3"),
        ("drafts/eagle3.py", "import importlib\nx = importlib.import_module('draftsmith.train.loop')", "draftsmith.train.loop"),
        ("features/pack.py", "from draftsmith.drafts import DRAFTS", "draftsmith.drafts.DRAFTS"),
        ("train/loop.py", "from draftsmith.eval import report", "draftsmith.eval.report"),
        ("train/loop.py", "from draftsmith.data.vocab import count", "draftsmith.data.vocab.count"),
        ("eval/decode.py", "import draftsmith.features.files", "draftsmith.features.files"),
        ("export/write.py", "from draftsmith.train import checkpoint", "draftsmith.train.checkpoint"),
        ("export/write.py", "from draftsmith.data.template import ChatTemplate", "draftsmith.data.template.ChatTemplate"),
        ("bench/run.py", "from draftsmith.eval.report import evaluate", "draftsmith.eval.report.evaluate"),
        ("newcomer/thing.py", "from draftsmith.core.types import Sample", "draftsmith.core.types.Sample"),
    ],
)
def test_a_planted_import_is_found(copy: Path, file: str, line: str, imported: str) -> None:
    before = forbidden(copy)
    plant(copy, file, line)
    fresh = [w for w in forbidden(copy) if w not in before]
    assert len(fresh) == 1
    assert fresh[0].startswith(f"{file}:")
    assert fresh[0].endswith(f" imports {imported}")


@pytest.mark.parametrize("line", ["from draftsmith.target.weights import Target", "from draftsmith.drafts.base import Draft", "from .base import Draft"])
def test_a_permitted_import_is_not_reported(copy: Path, line: str) -> None:
    before = forbidden(copy)
    plant(copy, "drafts/other.py", line)
    assert forbidden(copy) == before


def test_files_and_functions_are_of_a_readable_size() -> None:
    assert oversized(ROOT) == []


def test_a_planted_long_function_is_found(copy: Path) -> None:
    before = oversized(copy)
    plant(copy, "core/env.py", "def long():\n" + "    x = 1\n" * FUNCTION_LINES)
    plant(copy, "core/log.py", "x = 1\n" * FILE_LINES)
    fresh = [w for w in oversized(copy) if w not in before]
    assert len(fresh) == 2
    assert f"long has {FUNCTION_LINES + 1} lines" in fresh[0]
    assert fresh[1].startswith("core/log.py has ")


def test_no_file_is_a_drawer() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [str(p) for p in ROOT.rglob("*") if p.stem in drawers] == []


def test_no_algorithm_is_named_outside_its_file() -> None:
    assert algorithms_named_elsewhere(ROOT) == []


@pytest.mark.parametrize("line", ["x = 'eagle3'", "from draftsmith.drafts import Eagle3", "if kind == 'eagle3':\n    pass"])
def test_a_planted_algorithm_name_is_found(copy: Path, line: str) -> None:
    before = algorithms_named_elsewhere(copy)
    plant(copy, "train/optim.py", line)
    assert [w for w in algorithms_named_elsewhere(copy) if w not in before] == ["train/optim.py names eagle3"]
