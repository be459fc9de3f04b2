"""`draftsmith prepare`: conversations to samples ahead of a run, with everything that was counted, and samples to look at.

What it makes is kept in the cache that `capture` and `train` read, so nothing is made twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import yaml
from pyarrow import parquet

from draftsmith.core.config import Config, load, parse
from draftsmith.core.disk import new_file
from draftsmith.core.log import say
from draftsmith.data import cache, page
from draftsmith.data.cache import ArrowSamples
from draftsmith.data.config import DataConfig
from draftsmith.data.prepare import Figures, open_job
from draftsmith.data.presets import PRESETS
from draftsmith.data.show import report, show
from draftsmith.pipeline import load_template, resolved
from draftsmith.recipe import Recipe
from draftsmith.target.config import TargetConfig

OUTPUTS = (".jsonl", ".parquet")
PAGES = (".html", ".htm")
ROW = pa.schema([("id", pa.string()), ("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))])
TOGETHER = 1_000
"""Samples of one row group of a Parquet file: all of them would not fit into memory."""


class FilesAlone(Config):
    """Settings when files are named instead of a recipe."""

    data: DataConfig


def prepare(
    inputs: Sequence[str],
    target: str | None,
    shown: int = 0,
    strict: bool = False,
    processes: int | None = None,
    out: Path | None = None,
    html: Path | None = None,
    force: bool = False,
) -> dict[str, ArrowSamples]:
    """Prepare what `inputs` name: one recipe, or sources, and overrides. Returns the samples by split.

    Raises ValueError for inputs that cannot be read, an output that exists, and with `strict` for the first bad row.
    """
    _require_free("--out", out, OUTPUTS, force)
    _require_free("--html", html, PAGES, force)
    data, named = _settings(inputs, processes)
    chosen = resolved(named if target is None and named is not None else TargetConfig(where=target or "smollm2"))
    template = load_template(chosen, data)
    found: dict[str, tuple[ArrowSamples, Figures]] = {}
    excluded: frozenset[bytes] = frozenset()
    both = named is not None or data.held_out_share is not None
    for split in ("held-out", "train") if both else ("train",):
        job = open_job(data, template, split, excluded)
        samples, figures = cache.prepare(job, strict, split)
        excluded = samples.asked if split == "held-out" else excluded
        found[split] = samples, figures
        report(split, samples, figures, template)
    training = found["train"][0]
    show(training, template, shown)
    if out is not None:
        _write(training, out)
        say(f"{len(training):,} training samples in {out}")
    if html is not None:
        say(page.write(html, dict(reversed(found.items())), template, f"Samples for {Path(chosen.where).name}"))
    return {split: samples for split, (samples, _) in found.items()}


def list_presets() -> None:
    """The public sets that a name stands for."""
    for name, preset in PRESETS.items():
        subsets = "".join(f", {s}" for s in preset.subsets if s)
        say(f"{name:<28}{preset.hub}{subsets}, {preset.split}; {preset.license}")


def _settings(inputs: Sequence[str], processes: int | None) -> tuple[DataConfig, TargetConfig | None]:
    """The data settings, and the target when a recipe names one."""
    overrides = [i for i in inputs if "=" in i and not Path(i).exists()]
    named = [i for i in inputs if i not in overrides]
    overrides += [f"data.processes={processes}"] if processes is not None else []
    recipes = [i for i in named if i.endswith((".yaml", ".yml"))]
    if not named or (recipes and len(named) > 1):
        raise ValueError(f"expected one recipe (.yaml), or files and data sets, got {', '.join(named) or 'nothing'}")
    if recipes:
        recipe = load(Recipe, recipes[0], overrides)
        return recipe.data, recipe.target
    return parse(FilesAlone, yaml.safe_dump({"data": {"train": named}}), overrides, "command line").data, None


def _require_free(option: str, file: Path | None, endings: Sequence[str], force: bool) -> None:
    if file is None:
        return
    if file.suffix not in endings:
        raise ValueError(f"{option} {file}: expected a name that ends in {' or '.join(endings)}")
    if file.exists() and not force:
        raise ValueError(f"{file} exists; name another file, or add --force to replace it")


def _write(found: ArrowSamples, out: Path) -> None:
    """Token ids and mask of every sample, as `prepare` and other trainers read them."""
    with new_file(out) as file:
        if out.suffix == ".jsonl":
            for s in found:
                row = {"id": s.id, "input_ids": s.input_ids.tolist(), "loss_mask": s.loss_mask.int().tolist()}
                file.write(json.dumps(row).encode() + b"\n")
            return
        with parquet.ParquetWriter(file, ROW) as writer:
            for start in range(0, len(found), TOGETHER):
                samples = found[start : start + TOGETHER]
                columns = [
                    [s.id for s in samples],
                    [s.input_ids.numpy().astype(np.int32) for s in samples],
                    [s.loss_mask.numpy().astype(np.int8) for s in samples],
                ]
                writer.write_table(pa.table(columns, schema=ROW))
