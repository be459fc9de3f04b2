"""What is asked: prompts of a recipe's held-out conversations, or of any files and public sets, by category; every row is counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.config import DataConfig, SourceConfig
from draftsmith.data.conversations import Conversation, Counts
from draftsmith.data.prepare import Entry, Figures, Job
from draftsmith.data.sources import chunks, open_source
from draftsmith.data.template import ChatTemplate, TemplateError

NOT_CHOSEN = "not chosen (eval.prompts)"


@dataclass(frozen=True)
class Prompt:
    """Token ids up to where the target answers; `kind` groups figures."""

    id: str
    kind: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class PromptSet:
    """Where prompts come from. `name` is the category of all of them; absent, each conversation's own kind is."""

    job: Job
    name: str | None = None


def open_sets(sources: Sequence[SourceConfig], data: DataConfig) -> list[PromptSet]:
    """One set for each source, named after its file or public set. Raises ValueError for a source that is not there."""
    alone = data.model_copy(update={"held_out_share": None})
    names: list[str] = []
    for source in sources:
        name = Path(source.path).name.partition(".")[0] or source.path
        names.append(name if name not in names else f"{name}#{sum(n.partition('#')[0] == name for n in names) + 1}")
    return [PromptSet(Job((open_source(s, "held-out"),), alone, None, "held-out"), n) for s, n in zip(sources, names, strict=True)]


def read_prompts(asked: PromptSet, template: ChatTemplate, limit: int | None, longest: int) -> tuple[list[Prompt], Counts]:
    """Conversations up to their last answer, `limit` of them at even distances, those beyond `longest` tokens left out; and what became of every row."""
    figures = Figures()
    counts = figures.counts
    entries = [entry for chunk in chunks(asked.job.sources) for entry in asked.job.entries(chunk, figures)]
    chosen = spread(entries, limit)
    if len(chosen) < len(entries):
        first = next(e for e, kept in zip(entries, [*chosen, None], strict=False) if e is not kept)
        counts.drop(NOT_CHOSEN, first.where, len(entries) - len(chosen))
    found: list[Prompt] = []
    for entry in chosen:
        ids = _ids(entry, template)
        if not isinstance(ids, str) and len(ids) > longest:
            ids = f"longer than {longest:,} tokens"
        if isinstance(ids, str):
            counts.drop(ids, entry.where)
            continue
        name = entry.name if asked.name is None else f"{asked.name}/{entry.name}"
        found.append(Prompt(name, asked.name or entry.kind, tuple(ids)))
    counts.kept = len(found)
    return found, counts


def _ids(entry: Entry, template: ChatTemplate) -> list[int] | str:
    """The prompt's tokens, or why there are none."""
    item = entry.item
    if not isinstance(item, Conversation):
        return "that are rendered already: where the target answers is not told"
    ends = [i for i, m in enumerate(item.messages) if m.role == "assistant"]
    before = item.messages[: ends[-1]] if ends else item.messages
    if not before:
        return "that ask nothing"
    try:
        return template.ids(before, True, item.tools)
    except TemplateError as error:
        return error.reason


def read_all(sets: Sequence[PromptSet], template: ChatTemplate, limit: int | None, longest: int) -> tuple[list[Prompt], Mapping[str, Any]]:
    """Prompts of all sets, `limit` of each, and the counts of each set for the report. Raises ValueError when nothing is left to ask."""
    prompts: list[Prompt] = []
    told: dict[str, Any] = {}
    for asked in sets:
        found, counts = read_prompts(asked, template, limit, longest)
        prompts += found
        told[asked.name or "held-out"] = {"read": counts.read, "kept": counts.kept, "dropped": counts.dropped, "reasons": counts.reasons}
        if not found:
            raise ValueError(f"{asked.name or 'the held-out set'} has nothing to ask: {counts.describe()}")
    return prompts, told


def spread(items: Sequence[Any], count: int | None) -> list[Any]:
    """`count` items at even distances; all when None."""
    if count is None or count >= len(items):
        return list(items)
    return [items[int((i + 0.5) * len(items) / count)] for i in range(count)]
