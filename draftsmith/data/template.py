"""Rendering with the tokenizer's own chat template: what a server would see, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

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
    def load(where: str) -> ChatTemplate:
        """Load the tokenizer of a target. Raises ValueError without tokenizer or template."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(where)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"cannot load a tokenizer for target {where!r}: {error}") from error
        return ChatTemplate(tokenizer, where)

    def ids(self, messages: Sequence[Message], prompt: bool) -> list[int]:
        """Token ids of the rendered messages; with `prompt`, the header of the coming assistant turn is added.

        Raises TemplateError when the template refuses the messages.
        """
        rows = [{"role": m.role, "content": m.content} for m in messages]
        try:
            rendered: Any = self.tokenizer.apply_chat_template(rows, add_generation_prompt=prompt, return_dict=True)
            return list(rendered["input_ids"])
        except (jinja2.TemplateError, ValueError) as error:
            raise TemplateError(f"the chat template refuses it: {error}") from error

    def text(self, ids: Sequence[int]) -> str:
        """Decoded text without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn: the end-of-sequence token, and the one that the template puts after an answer."""
        ends: list[Any] = [self.tokenizer.eos_token_id]
        mark = "\u241f"
        turn = [Message("user", "a"), Message("assistant", mark)]
        rendered = self.ids(turn, prompt=False)
        special = set(self.tokenizer.all_special_ids)
        after = rendered[len(self.ids(turn[:1], prompt=True)) :]
        ends += [i for i in after if i in special][:1]
        return tuple(dict.fromkeys(i for i in ends if i is not None))
