"""The environment is read in one place, and dtypes are named there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import draftsmith
from draftsmith.core.env import best_device, cache_dir, chromium, dtype_of, fast_dtype

PACKAGE = Path(draftsmith.__file__).parent


def test_the_cache_is_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "c"))
    assert cache_dir() == tmp_path / "c"


@pytest.mark.parametrize("empty", [True, False])
def test_the_cache_is_in_the_home_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: bool) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if empty:
        monkeypatch.setenv("DRAFTSMITH_CACHE", "")
    else:
        monkeypatch.delenv("DRAFTSMITH_CACHE", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "draftsmith"


def test_dtypes_by_name() -> None:
    assert [dtype_of(n) for n in ("float64", "float32", "bfloat16")] == [torch.float64, torch.float32, torch.bfloat16]
    assert dtype_of("auto", "cpu") == getattr(torch, fast_dtype("cpu"))


@pytest.mark.parametrize("name", ["float16", "fp32", "torch.float32", "", "Tensor"])
def test_an_unknown_dtype_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=f"dtype {name!r}: expected auto, float64, float32, bfloat16"):
        dtype_of(name)


def test_bfloat16_is_the_fast_dtype_exactly_with_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for tiles, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda tiles=tiles: tiles)
        assert fast_dtype("cpu") == expected


def test_the_best_device_is_one_that_computes() -> None:
    assert float(torch.ones(2, device=best_device()).sum()) == 2


def environment_reads(tree: ast.AST) -> list[int]:
    """Lines that read the environment, however it was imported."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    reads = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in names]
    return reads + [n.lineno for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "os" and names & {a.name for a in n.names}]


def test_no_other_file_reads_the_environment() -> None:
    found = {p.relative_to(PACKAGE).as_posix(): environment_reads(ast.parse(p.read_text())) for p in PACKAGE.rglob("*.py")}
    assert [name for name, lines in found.items() if lines] == ["core/env.py"]


@pytest.mark.parametrize("planted", ["import os\nx = os.environ['A']", "import os as o\nx = o.getenv('A')", "from os import environ as e\nx = e['A']"])
def test_a_planted_read_is_found(planted: str) -> None:
    assert environment_reads(ast.parse(planted))


def test_chromium_is_the_named_one_or_the_first_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DRAFTSMITH_CHROMIUM", raising=False)
    assert chromium() is None
    for name in ("google-chrome", "chromium"):
        (tmp_path / name).touch(mode=0o755)
    assert chromium() == str(tmp_path / "chromium")
    monkeypatch.setenv("DRAFTSMITH_CHROMIUM", "/opt/chromium/start")
    assert chromium() == "/opt/chromium/start"
