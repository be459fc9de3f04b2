"""The families of `templates/`: real chat templates with real tokenizers, cut down."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from draftsmith.data.template import ChatTemplate

FOLDER = Path(__file__).parent / "templates"
FAMILIES = sorted(place.name for place in FOLDER.iterdir() if (place / "tokenizer.json").is_file())


@cache
def family(name: str) -> ChatTemplate:
    """Tokenizer and template of a family, loaded as a target's are."""
    return ChatTemplate.load(str(FOLDER / name))
