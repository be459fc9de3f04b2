"""`draftsmith verify`: every rule that an exported directory must keep, checked in Python alone, one verdict each.

A check is a function that yields what is wrong, or raises `Skip` with the reason why it could not be made. Checks go on behind a failed one, so that all
faults are named at once; one that needs what another found missing is skipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from draftsmith.core.types import Features
from draftsmith.drafts.base import Draft
from draftsmith.export import layouts
from draftsmith.export.engines import sources
from draftsmith.export.layouts import ENGINES, EngineName, rope_of, turned
from draftsmith.export.read import EMBEDDING, Published, assemble, empty, map_faults, missing_map, published
from draftsmith.export.write import compare
from draftsmith.target.weights import Target


class Skip(Exception):
    """A check that could not be made, and why."""


@dataclass(frozen=True)
class Check:
    """One verdict."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    detail: str = ""


@dataclass(frozen=True)
class Subject:
    """A directory, and what it is compared with as far as it is known."""

    found: Published
    target: Target | None = None
    tokenizer: str | None = None
    """Fingerprint of the target's tokenizer."""
    checkpoint: Draft | None = None
    samples: Sequence[Features] = ()
    width: int = 5
    engines: tuple[EngineName, ...] = ()
    """Engines that must be able to serve it."""
    environment: Path | None = None
    """An environment in which engines are installed, to look their rules up."""

    @cached_property
    def recorded(self) -> tuple[int, ...] | None:
        """Captured blocks in draftsmith.json."""
        ids = self.found.facts.get("layers", {}).get("ids")
        return None if ids is None else tuple(ids)

    @cached_property
    def sketch(self) -> Draft:
        """What config.json describes, without weights; the layer ids in it are another check's."""
        try:
            return empty(self.found, layers=self.recorded or (None if self.checkpoint is None else self.checkpoint.layers))
        except ValueError as error:
            raise Skip(f"config.json describes no draft: {error}") from error

    @cached_property
    def draft(self) -> Draft:
        """The draft, read."""
        try:
            return assemble(self.found, None if self.target is None else self.target.shape)
        except ValueError as error:
            raise Skip("the directory cannot be read: see the checks that failed") from error

    @property
    def given(self) -> Target:
        """The target. Raises Skip without one."""
        if self.target is None:
            raise Skip("no target given: --target")
        return self.target


def verify(folder: Path, make: Callable[[Published], Subject]) -> list[Check]:
    """All checks. `make` says what the directory is compared with. Raises ValueError when there is nothing to check: no config.json, or no weights."""
    subject = make(published(folder))
    return [_judge(name, check, subject) for name, check in CHECKS.items()]


def _judge(name: str, check: Callable[[Subject], Iterator[str]], subject: Subject) -> Check:
    try:
        faults = list(check(subject))
    except Skip as reason:
        return Check(name, "skipped", str(reason))
    return Check(name, "failed", "; ".join(faults)) if faults else Check(name, "passed")


# ---- config.json ----


def _algorithm(s: Subject) -> Iterator[str]:
    """Known, and of no variant that computes something else: a normed state, a norm in another place, more blocks."""
    try:
        _ = s.sketch
    except Skip as reason:
        yield str(reason)


def _fields(s: Subject) -> Iterator[str]:
    """Every field that engines read, with the value that follows from the checkpoint, or else from the other fields; flags of variants written."""
    draft = s.sketch if s.checkpoint is None else s.checkpoint
    dtype = str(next((t.dtype for t in s.found.tensors.values() if t.is_floating_point()), torch.float32)).removeprefix("torch.")
    expected = layouts.config_of(draft, s.found.form, dtype, "", s.width)
    expected.pop("speculators_config", None)
    yield from _different(expected, s.found.fields, "")
    if s.found.form == "speculators" and "speculators_config" not in s.found.fields:
        yield "speculators_config is missing: vLLM reads the verifier and the draft length there"


def _different(expected: dict[str, object], given: dict[str, object], prefix: str) -> Iterator[str]:
    for key, value in expected.items():
        if key == "architectures" or key.endswith("layer_ids"):
            continue  # several names are read, and layer ids are a check of their own
        if key not in given and value is not None:
            yield f"{prefix}{key} is missing, expected {value}"
        elif isinstance(value, dict) and isinstance(there := given.get(key), dict) and not key.startswith("rope"):
            yield from _different(value, there, f"{prefix}{key}.")
        elif not key.startswith("rope") and given.get(key) != value:
            yield f"{prefix}{key} is {given.get(key)}, expected {value}"


def _layer_ids(s: Subject) -> Iterator[str]:
    """Both conventions, ascending, blocks that the target has; equal to what the checkpoint or draftsmith.json says."""
    source, known = ("the checkpoint", s.checkpoint.layers) if s.checkpoint is not None else ("draftsmith.json", s.recorded)
    blocks = s.target.shape.layers if s.target is not None else None
    yield from s.found.kind.layer_faults(s.found.fields, known, source, blocks)
    if s.checkpoint is not None and s.recorded not in (None, s.checkpoint.layers):
        yield f"draftsmith.json has outputs of blocks {list(s.recorded or ())}, the checkpoint captures {list(s.checkpoint.layers)}"


def _rope(s: Subject) -> Iterator[str]:
    """The same by both spellings, and as the target's own."""
    body = s.found.fields.get("transformer_layer_config", s.found.fields)
    new, old = rope_of(body), rope_of(body, legacy=True)
    if new != old:
        yield f"rope_parameters {new} and rope_theta, rope_scaling {old} are different rotary positions; engines differ in which they read"
    if s.target is not None and (own := turned(s.target.shape.rope)) != turned(new):
        yield f"rope_parameters {new} differ from the target's {own}: every draft made here has its target's"


# ---- tensors ----


def _names(s: Subject) -> Iterator[str]:
    """None missing, none unknown (engines drop those silently), none twice."""
    kind = s.found.kind
    named: dict[str, list[str]] = {}
    for theirs in s.found.tensors:
        named.setdefault(kind.published_name(theirs), []).append(theirs)
    wanted = set(s.sketch.layout(s.found.form).names)
    for name in sorted(wanted - set(named) - {"d2t", "t2d"}):
        yield f"{name} is missing"
    for name, all_theirs in sorted(named.items()):
        if name not in wanted | {EMBEDDING}:
            extra = " (a draft of the whole vocabulary: vLLM refuses a map in it)" if name in ("d2t", "t2d") else ": SGLang drops it without a word"
            yield f"{all_theirs[0]} is not a tensor of this draft{extra}"
        if len(all_theirs) > 1:
            yield f"{' and '.join(all_theirs)} are the same tensor twice"


def _sizes(s: Subject) -> Iterator[str]:
    """Shapes as config.json says, one floating dtype as config.json says."""
    expected = s.sketch.plain_state()
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in s.found.tensors.values() if t.is_floating_point()})
    for theirs, tensor in s.found.tensors.items():
        name = s.found.kind.published_name(theirs)
        if name in expected and tensor.shape != expected[name].shape:
            yield f"{theirs} is {list(tensor.shape)}, config.json asks for {list(expected[name].shape)}"
    stated = s.found.fields.get("dtype") or s.found.fields.get("torch_dtype") or s.found.fields.get("transformer_layer_config", {}).get("torch_dtype")
    if stated is not None and dtypes != [stated]:
        yield f"tensors are {', '.join(dtypes)}, config.json says {stated}"


def _finite(s: Subject) -> Iterator[str]:
    """No NaN, no infinity, no tensor of zeros alone."""
    for name, tensor in s.found.tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            yield f"{name} holds {int((~tensor.isfinite()).sum()):,} values that are NaN or infinite"
        elif tensor.is_floating_point() and tensor.ndim == 1 and not bool(tensor.any()):
            yield f"{name} is all zeros: a norm's weight that was never loaded"


def _map(s: Subject) -> Iterator[str]:
    """The draft vocabulary: there when pruned, an offset, in range, without duplicates, t2d consistent."""
    expected, vocab_size = s.sketch.plain_state(), s.sketch.shape.vocab_size
    if "d2t" not in expected:
        raise Skip("drafts of this algorithm have the whole vocabulary")
    size = len(expected["d2t"])
    d2t, t2d = s.found.tensors.get("d2t"), s.found.tensors.get("t2d")
    if d2t is None and size < vocab_size:
        yield missing_map(s.found.folder, size, vocab_size)
    elif d2t is not None:
        yield from map_faults(d2t, t2d, size, vocab_size)
        if d2t.dtype != torch.int64:
            yield f"d2t is {d2t.dtype}, expected int64"


# ---- against the target and the run ----


def _same_target(s: Subject) -> Iterator[str]:
    """Of this target: sizes, weights, tokenizer."""
    shape, ours, about = s.given.shape, layouts.shape_of(s.found.fields, 0, "config.json"), s.found.facts.get("target", {})
    for name, theirs, own in (("hidden size", ours.hidden_size, shape.hidden_size), ("vocabulary", ours.vocab_size, shape.vocab_size)):
        if theirs != own:
            yield f"its {name} is {theirs:,}, the target's is {own:,}: a draft of another target"
    if not about:
        raise Skip("no draftsmith.json: only sizes could be compared, and they fit" if ours.hidden_size == shape.hidden_size else "no draftsmith.json")
    if about["fingerprint"] != s.given.fingerprint:
        yield f"made for a target with fingerprint {about['fingerprint']} ({about['name']}), this one has {s.given.fingerprint}"
    if s.tokenizer is not None and about["tokenizer"] is not None and about["tokenizer"] != s.tokenizer:
        yield f"made with another tokenizer ({about['tokenizer']}, this target's is {s.tokenizer}): its draft vocabulary names other tokens"


def _embedding(s: Subject) -> Iterator[str]:
    """Equal to the target's, in the dtype of the file."""
    there = s.found.tensors.get(EMBEDDING)
    rows = s.given.embedding_VH[: s.sketch.shape.vocab_size].cpu()
    if there is None:
        raise Skip("no embedding in it: engines take the target's")
    if there.shape != rows.shape:
        yield f"{EMBEDDING} is {list(there.shape)}, the target's is {list(rows.shape)}"
    elif not torch.equal(there, rows.to(there.dtype)):
        far = int((there != rows.to(there.dtype)).any(1).sum())
        yield f"{EMBEDDING} differs from the target's in {far:,} rows: vLLM drafts from these, SGLang from the target's"


def _unchanged(s: Subject) -> Iterator[str]:
    """Weights and config.json as they were written."""
    sums = s.found.facts.get("sha256")
    if not sums:
        raise Skip("no draftsmith.json with checksums")
    for name, digest in sums.items():
        path = s.found.folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            yield f"{name} was changed since it was exported"


def _reload(s: Subject) -> Iterator[str]:
    """Read into a draft and written out again: the same tensors."""
    try:
        draft = assemble(s.found, None if s.target is None else s.target.shape)
    except ValueError as error:
        yield str(error)
        return
    plain = draft.plain_state()
    for ours, theirs in _stored(s, draft).items():
        if not torch.equal(plain[ours], s.found.tensors[theirs].to(plain[ours].dtype)):
            yield f"{theirs} changes when it is read"


def _stored(s: Subject, draft: Draft) -> dict[str, str]:
    plain = draft.plain_state()
    return {name: theirs for theirs in s.found.tensors if (name := s.found.kind.published_name(theirs)) in plain}


def _proposals(s: Subject) -> Iterator[str]:
    """The same weights and the same drafted tokens as the run's checkpoint."""
    if s.checkpoint is None:
        raise Skip("no run given: --run")
    plain: dict[str, Tensor] = s.checkpoint.plain_state()
    for ours, theirs in _stored(s, s.draft).items():
        tensor = s.found.tensors[theirs]
        if ours in plain and not torch.equal(tensor, plain[ours].cpu().to(tensor.dtype)):
            yield f"{theirs} differs from the checkpoint's"
    if any(t.dtype == torch.bfloat16 for t in s.found.tensors.values()):
        return  # its rounded weights may draft otherwise; they are equal to the checkpoint's, rounded
    try:
        compare(s.draft, s.checkpoint.cpu(), s.given, s.samples, s.width)
    except ValueError as error:
        yield str(error)


# ---- engines ----


def _engines(s: Subject) -> Iterator[str]:
    """The engines that the recipe names can serve it; without any named, at least one can."""
    found = layouts.refusals(type(s.sketch), s.sketch.config, s.sketch.shape, s.found.form)
    for name in s.engines:
        yield from (f"{name}: {reason}" for reason in found[name])
    if not s.engines and all(found.values()):
        yield "no engine can serve it: " + "; ".join(f"{name}: {reasons[0]}" for name, reasons in found.items())


def _sources(s: Subject) -> Iterator[str]:
    """The engines that are installed still read the keys that the directory relies on."""
    if s.environment is None:
        raise Skip("no environment with engines given: --environment")
    looked, faults = sources(s.environment, type(s.sketch).engines(s.sketch.config, s.sketch.shape))
    if not looked:
        raise Skip(f"neither of {', '.join(e.package for e in ENGINES.values() if e.package)} is installed in {s.environment}")
    yield from faults


CHECKS: dict[str, Callable[[Subject], Iterator[str]]] = {
    "algorithm and norm state": _algorithm,
    "config fields": _fields,
    "layer ids": _layer_ids,
    "rotary positions": _rope,
    "tensor names": _names,
    "tensor sizes and dtypes": _sizes,
    "finite values": _finite,
    "draft vocabulary": _map,
    "unchanged since export": _unchanged,
    "reload": _reload,
    "same target": _same_target,
    "embedding": _embedding,
    "proposals of the checkpoint": _proposals,
    "engines": _engines,
    "keys in engine sources": _sources,
}
"""In the order of the table."""
