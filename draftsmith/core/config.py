"""Recipes: one YAML file a run, strict, with dotted overrides and errors that name the line and the nearest known key.

`Config` is the base of every settings class; each stands beside the code that it configures. `load` reads a file, applies
`key.sub=value` overrides and validates; `dump` writes the resolved settings, enough to run again.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

ConfigT = TypeVar("ConfigT", bound="Config")


class Config(BaseModel):
    """Frozen settings that refuse unknown keys; the docstring under a field is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    shorthand: ClassVar[str | None] = None
    """The field that a plain text stands for, where a mapping would say `{field: text}`."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand is not None and isinstance(value, str) else value


def load(kind: type[ConfigT], path: Path | str, overrides: Sequence[str] = ()) -> ConfigT:
    """Read a recipe.

    Raises ValueError for a missing file, bad YAML, an unknown key, a wrong type or a value out of range: the message names file and line
    (or the override), what was given, what is expected, and the closest known key.
    """
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        raise ValueError(f"no recipe at {path}" + (f"; did you mean {path.with_name(near[0])}?" if near else ""))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    return parse(kind, text, overrides, source=str(path))


def parse(kind: type[ConfigT], text: str, overrides: Sequence[str] = (), source: str = "recipe") -> ConfigT:
    """`load` for YAML text; `source` is the name that errors give it."""
    try:
        data = yaml.safe_load(text)
        data = {} if data is None else data
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{source}: expected `key: value` settings at the top level, got {type(data).__name__}")
    given = [_apply(kind, data, override) for override in overrides]
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = [_explain(kind, data, root, given, dict(problem), source) for problem in error.errors()]
        raise ValueError("\n".join(lines)) from None


def dump(config: Config) -> str:
    """The resolved settings as YAML; `parse(type(config), dump(config)) == config`."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _apply(kind: type[BaseModel], data: dict[str, Any], override: str) -> tuple[str, ...]:
    key, sign, value = override.partition("=")
    path = tuple(key.strip().split("."))
    if not sign or not all(path):
        raise ValueError(f"override {override!r}: expected key.sub=value, for example train.learning_rate=5e-4")
    node: Any = data
    models = [kind]
    for part in path[:-1]:
        child = node.setdefault(part, {})
        models = [m for model in models if part in model.model_fields for m in _models(model.model_fields[part].annotation)]
        short = next((m.shorthand for m in models if issubclass(m, Config) and m.shorthand), None)
        if short is not None and isinstance(child, str):
            child = node[part] = {short: child}
        if not isinstance(child, dict):
            raise ValueError(f"override {override!r}: {part} is a single value, it has no keys below it")
        node = child
    try:
        node[path[-1]] = _scalar(value)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r} is not valid YAML: {error}") from error
    return path


def _scalar(value: str) -> Any:
    parsed = yaml.safe_load(value) if value.strip() else value
    if isinstance(parsed, str) and parsed == value.strip():  # YAML 1.1 reads an unquoted 1e-3 as text
        try:
            return float(parsed)
        except ValueError:
            return parsed
    return parsed


def _explain(
    kind: type[BaseModel],
    data: Mapping[str, Any],
    root: yaml.Node | None,
    overrides: Sequence[tuple[str, ...]],
    problem: Mapping[str, Any],
    source: str,
) -> str:
    path = _visible(data, problem["loc"])
    dotted = ".".join(str(part) for part in path) or "(top level)"
    overridden = any(path[: len(given)] == given or given[: len(path)] == path for given in overrides)
    where = "command line" if overridden else f"{source}:{_line(root, path)}"
    if problem["type"] == "extra_forbidden":
        known = sorted(_fields(kind, data, path[:-1]))
        near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(known)}"
        return f"{where}: unknown key {dotted!r}; {hint}"
    if problem["type"] == "missing":
        return f"{where}: {dotted} is required"
    message = str(problem["msg"]).removeprefix("Value error, ")
    given = problem.get("input")
    shown = f" (got {given!r}, a {type(given).__name__})" if not isinstance(given, dict) else ""
    return f"{where}: {dotted}: {message}{shown}"


def _visible(data: Any, loc: Sequence[Any]) -> tuple[Any, ...]:
    """pydantic's location without the tags of unions, which the user never wrote."""
    path: list[Any] = []
    for i, part in enumerate(loc):
        last = i == len(loc) - 1
        if isinstance(data, Mapping) and (part in data or last):
            path.append(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            path.append(part)
            data = data[part]
    return tuple(path)


def _line(node: yaml.Node | None, path: Sequence[Any]) -> int:
    line = node.start_mark.line + 1 if node else 1
    for part in path:
        if isinstance(node, yaml.MappingNode):
            match = [(k, v) for k, v in node.value if k.value == str(part)]
            if not match:
                break
            line, node = match[0][0].start_mark.line + 1, match[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            child: yaml.Node = node.value[part]
            line, node = child.start_mark.line + 1, child
    return line


def _fields(kind: type[BaseModel], data: Any, path: Sequence[Any]) -> set[str]:
    """Names that the settings class at `path` knows."""
    models = [kind]
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
        models = [m for model in models if part in model.model_fields for m in _models(model.model_fields[part].annotation)]
        tag = data.get("kind") if isinstance(data, Mapping) else None
        tagged = [m for m in models if "kind" in m.model_fields and tag in get_args(m.model_fields["kind"].annotation)]
        models = tagged or models
    return {name for model in models for name in model.model_fields}


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [model for part in get_args(annotation) for model in _models(part)]
    return []


Positive = Annotated[int, Field(ge=1, strict=True)]
"""An integer of at least 1."""
Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
"""A number from 0 to 1."""
Size = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
"""A finite number of at least 0."""
Rate = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
"""A finite number above 0."""


def _stages(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        value = [[0.0, value]]
    pairs: list[Any] = list(value) if isinstance(value, list | tuple) else []
    if not pairs or any(not isinstance(s, list | tuple) or len(s) != 2 for s in pairs):
        raise ValueError("expected an integer, or a list of [fraction of training, integer] such as [[0, 1], [0.5, 3]]")
    starts, values = [s[0] for s in pairs], [s[1] for s in pairs]
    if any(isinstance(s, bool) or not isinstance(s, int | float) for s in starts):
        raise ValueError("expected fractions of training as numbers from 0 to below 1")
    if any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in values):
        raise ValueError("expected integers of at least 1")
    if starts[0] != 0 or any(not a < b for a, b in pairwise(starts)) or not starts[-1] < 1:
        raise ValueError("fractions must start at 0, ascend, and stay below 1")
    return tuple((float(s), v) for s, v in pairs)


Schedule = Annotated[tuple[tuple[float, int], ...], BeforeValidator(_stages)]
"""A whole number that changes in steps over training: `3`, or `[[0, 1], [0.25, 2], [0.5, 3]]` (from these fractions on)."""


def at(schedule: Schedule, fraction: float) -> int:
    """Its value when this fraction of training is done."""
    return next(value for start, value in reversed(schedule) if fraction >= start)
