"""The conversations that ship with Draftsmith: prompts written for it, and SmolLM2-135M-Instruct's recorded greedy answers.

`bundled/README.md` says who made them and how, and gives the command that records the answers again.
"""

from __future__ import annotations

from pathlib import Path

from draftsmith.data.conversations import Conversation, read

FOLDER = Path(__file__).parent / "bundled"


def prompts(split: str) -> list[Conversation]:
    """Conversations without answers; `split` is train or held-out."""
    return read(FOLDER / f"prompts-{split}.jsonl")


def conversations(split: str) -> list[Conversation]:
    """The same with the recorded answers."""
    return read(FOLDER / f"{split}.jsonl.gz")
