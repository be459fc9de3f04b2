"""Draftsmith trains, checks and ships draft models for speculative decoding."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftsmith.drafts import DRAFTS
    from draftsmith.target.weights import Target

__version__ = "0.1.0"
__all__ = ["DRAFTS", "Target", "__version__"]

_HOMES = {"DRAFTS": "draftsmith.drafts", "Target": "draftsmith.target.weights"}


def __getattr__(name: str) -> object:
    """Public names are imported when first asked for: torch and transformers take seconds, and `draftsmith --help` needs neither."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
