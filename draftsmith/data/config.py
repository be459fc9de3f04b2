"""Settings of the data: which conversations, how they become samples, and what is left out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from draftsmith.core.config import Config, Positive, Rate

ShapeName = Literal["messages", "sharegpt", "prompt", "alpaca", "text", "tokens"]
"""Shapes of rows; `shapes.py` says what each looks like."""
TooLong = Literal["token", "turn", "drop"]
Turns = Literal["all", "last"]
Role = Literal["system", "user", "assistant", "tool"]


class SourceConfig(Config):
    """One place that rows come from."""

    path: str
    """`bundled`, the name of a public set (`draftsmith prepare --presets` lists them), a file (.jsonl, .json, .parquet, .csv, each also .gz but for
    Parquet), or the id of a data set on the Hugging Face hub."""
    weight: Rate = 1.0
    """How much of it. 0.25: a quarter of its conversations, chosen by a hash of their content; 3: all, three times; 2.5: twice, and half of it again."""
    shape: ShapeName | None = None
    """How its rows look; detected for each row when absent."""
    preset: str | None = None
    """Read a local copy of this public set: its converter for the rows of `path`."""
    subset: str | None = None
    """Configuration of a hub data set."""
    split: str | None = None
    """Split of a hub data set; `train` when absent."""


def _sources(value: Any) -> Any:
    """A lone path is a list of one source; so is a path inside a list."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple({"path": v} if isinstance(v, str) else v for v in values)


Sources = Annotated[tuple[SourceConfig, ...], BeforeValidator(_sources), Field(min_length=1)]
"""A path, or a list of paths and of `{path, weight, shape, preset, subset, split}`."""


class DataConfig(Config):
    """Which conversations to learn from, which to hold out, and how they become samples."""

    train: Sources = (SourceConfig(path="bundled"),)
    """Conversations to learn from; `bundled` is the set that ships with Draftsmith."""
    held_out: Sources = (SourceConfig(path="bundled"),)
    """Other conversations for evaluation; `bundled` likewise. Training conversations that ask the same are dropped."""
    held_out_share: Annotated[float, Field(ge=0, lt=1, strict=True)] | None = None
    """Instead of `held_out`: keep this share of `train` for evaluation, chosen by a hash of what is asked, so never the same on both sides."""
    held_out_features: Positive | None = None
    """Capture this many of the held-out conversations, evenly spread, to choose the best checkpoint; all when absent. Decoding uses all."""
    limit: Positive | None = None
    """Capture and train on this many training conversations, evenly spread over the file; all when absent. The draft vocabulary is
    counted on all of them in any case."""
    deduplicate: bool = False
    """Keep the first of conversations that are equal in every message."""
    turns: Turns = "all"
    """Turns to learn from: `all` of the chosen roles, or the `last` one of each conversation."""
    roles: Annotated[tuple[Role, ...], Field(min_length=1)] = ("assistant",)
    """Whose turns are learned from. A draft is asked only while the assistant writes; other roles are more text for it, of the same kind or not."""
    thinking: bool | None = None
    """Sets the template's `enable_thinking`. `false` also removes thinking from answers; absent, the template decides."""
    template: str | None = None
    """Jinja file to render with instead of the target's own chat template."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More variables for the chat template, as a server is given `chat_template_kwargs`."""
    max_length: Positive = 2048
    """Longest sample in tokens."""
    too_long: TooLong = "token"
    """Longer samples are cut at a `token`, cut behind the last whole `turn` of the assistant that fits, or `drop`ped. Cut tokens are counted."""
    min_supervised: Positive = 1
    """Drop samples with fewer tokens of the assistant."""
    max_answer: Positive = 160
    """Longest answer in tokens when the target's own answers are recorded."""
    processes: Positive = 1
    """Processes that render and tokenize. The samples do not depend on it."""
