"""Which target, and what a user may say about it. Only `where` is ever needed."""

from __future__ import annotations

from typing import ClassVar

from draftsmith.core.config import Config


class TargetConfig(Config):
    """The target model; a plain `target: NAME` stands for `target: {where: NAME}`."""

    shorthand: ClassVar[str | None] = "where"

    where: str
    """A Hugging Face checkpoint directory, a .gguf file, a hub id, or `smollm2`, which the quickstart installs."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    head_from: str | None = None
    """Checkpoint of the same model, unquantized, whose embedding, norm and head are used: for targets that hold them packed."""
    embedding_key: str | None = None
    """Name of the embedding's tensor in the files, if what is found by itself is not right."""
    head_key: str | None = None
    """Name of the head's tensor, likewise."""
    norm_key: str | None = None
    """Name of the final norm's weight, likewise."""
