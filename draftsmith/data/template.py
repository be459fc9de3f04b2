"""Rendering with the tokenizer's own chat template: what a server would see, as token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftsmith.core.hub import snapshot
from draftsmith.data.conversations import Message


class TemplateError(ValueError):
    """The template refused a conversation; it is dropped with this reason."""


class ChatTemplate:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"target {name!r} has no chat template, so conversations cannot be rendered as a server would: use the chat (instruct) "
                "version of the target, or put a chat_template.jinja beside its tokenizer"
            )
        self.tokenizer = tokenizer

    @staticmethod
    def load(where: str, revision: str | None = None) -> ChatTemplate:
        """Load the tokenizer of a target: a directory, a GGUF file or a hub id. Raises ValueError without tokenizer or template."""
        path = Path(where).expanduser()
        try:
            if path.suffix.lower() == ".gguf":
                tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
            elif path.exists():
                tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            else:
                found = snapshot(where.rstrip("/"), revision)
                tokenizer = AutoTokenizer.from_pretrained(
                    found.repository, revision=found.commit, local_files_only=bool(found.unreachable), trust_remote_code=False
                )
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"cannot load a tokenizer for target {where!r}: {error}") from error
        return ChatTemplate(tokenizer, where)

    def ids(self, messages: Sequence[Message], prompt: bool) -> list[int]:
        """Token ids of the rendered messages; with `prompt`, the header of the coming assistant turn is added.

        Raises TemplateError when the template refuses the messages.
        """
        return list(self._render(messages, prompt, tokenize=True)["input_ids"])

    def require_rows(self, rows: int, name: str) -> None:
        """Raises ValueError when the tokenizer has ids that the target's head has no row for."""
        highest = max(self.tokenizer.get_vocab().values())
        if highest >= rows:
            token = next(t for t, i in self.tokenizer.get_vocab().items() if i == highest)
            raise ValueError(
                f"the tokenizer of {name} has ids up to {highest:,} ({token!r}), and the target's head has only {rows:,} rows: they are of different "
                "models, or tokens were added without resizing the model; use the tokenizer that belongs to the weights"
            )

    def text(self, ids: Sequence[int]) -> str:
        """Decoded text without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def answer(self, messages: Sequence[Message], prompt: list[int]) -> list[int]:
        """Token ids of the last message as they follow `prompt`, the ids of everything before it with the assistant's header.

        Where tokens of both merge at the seam (an answer that starts with a space after a newline), the answer's text is tokenized by
        itself, as a server produces it. Raises TemplateError when the template rewrites the prompt.
        """
        whole = self.ids(messages, prompt=False)
        if whole[: len(prompt)] == prompt:
            return whole[len(prompt) :]
        before, text = self._render(messages[:-1], True, tokenize=False), self._render(messages, False, tokenize=False)
        if not text.startswith(before):
            raise TemplateError("the rendered answer does not continue its prompt (the template rewrites it)")
        return list(self.tokenizer(text[len(before) :], add_special_tokens=False)["input_ids"])

    def abilities(self) -> dict[str, bool]:
        """What the template does beyond plain turns, seen from what it renders.

        `system` and `tools` reach the prompt; `generation_prompt` opens the assistant's turn; `thinking` can be rendered or switched;
        `generation_marks`: the assistant's text is marked by `{% generation %}` (training frameworks ask for it, Draftsmith does not).
        """
        mark = "\u241f"
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": mark}
        tool = {"type": "function", "function": {"name": mark, "description": mark, "parameters": {"type": "object", "properties": {}}}}
        plain, opened = self._rendered([user]), self._rendered([user], add_generation_prompt=True)
        switched = {self._rendered([user], add_generation_prompt=True, enable_thinking=on) for on in (False, True)}
        return {
            "system": mark in self._rendered([{"role": "system", "content": mark}, user]),
            "tools": mark in self._rendered([user], tools=[tool]),
            "generation_prompt": opened.startswith(plain) and len(opened) > len(plain),
            "thinking": len(switched) > 1 or "<think>" in opened or mark in self._rendered([user, answer]),
            "generation_marks": re.search(r"\{%-?\s*generation\b", str(self.tokenizer.chat_template)) is not None,
        }

    def _rendered(self, rows: list[dict[str, Any]], **options: Any) -> str:
        """Text of the rendered messages; empty when the template refuses them."""
        try:
            return str(self.tokenizer.apply_chat_template(rows, tokenize=False, **options))
        except (jinja2.TemplateError, ValueError, TypeError):
            return ""

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Every id that stands for a mark, not for text."""
        added: Any = self.tokenizer.added_tokens_decoder
        return frozenset(self.tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn: the end-of-sequence token, and the mark that the template puts after an answer."""
        turn = [Message("user", "a"), Message("assistant", "\u241f")]
        after = self.ids(turn, prompt=False)[len(self.ids(turn[:1], prompt=True)) :]
        marks = [i for i in after if i in self.special_ids][:1]
        eos: Any = self.tokenizer.eos_token_id
        return tuple(dict.fromkeys(i for i in [eos, *marks] if i is not None))

    def _render(self, messages: Sequence[Message], prompt: bool, tokenize: bool) -> Any:
        rows = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return self.tokenizer.apply_chat_template(rows, add_generation_prompt=prompt, tokenize=tokenize, return_dict=tokenize)
        except (jinja2.TemplateError, ValueError) as error:
            raise TemplateError(f"the chat template refuses it: {error}") from error
