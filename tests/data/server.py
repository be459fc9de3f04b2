"""What a server sees and what its model then writes, by the tokenizer's own `apply_chat_template`: a reference that shares no code with the samples."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jinja2
from template_families import family

from draftsmith.data.conversations import Conversation, Message

ENDS = {
    "deepseek_r1": "<｜end▁of▁sentence｜>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "gemma2": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "glm4": "<|user|>",
    "gpt_oss": "<|return|>",
    "granite3": "<|end_of_text|>",
    "llama2": "</s>",
    "llama3_1": "<|eot_id|>",
    "mistral_nemo": "</s>",
    "mistral_v3": "</s>",
    "phi3": "<|end|>",
    "phi4": "<|im_end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_marked": "<|im_end|>",
    "smollm2": "<|im_end|>",
    "smollm3": "<|im_end|>",
    "yi1_5": "<|im_end|>",
    "zephyr": "</s>",
}
"""What a family's model writes last, from its documentation."""
OPENS_NEXT = {"glm4"}
"""Families whose end is the header of the next question, so that it is missing behind the last answer of a rendering."""
COMPOSES = {"glm4", "gpt_oss", "llama3_1", "phi4", "qwen2_5", "qwen3", "qwen3_marked"}
"""Families whose vocabulary is Qwen's, which normalises to NFC."""
EMPTY_THINKING = {"glm4": "\n<think></think>", "qwen3": "<think>\n\n</think>\n\n", "qwen3_marked": "<think>\n\n</think>\n\n"}
"""What a server adds to the prompt when thinking is off; a template that renders it before an answer without thinking means the same."""


class Refused(Exception):
    """The template raised."""


def row(message: Message) -> dict[str, Any]:
    """The object that a client sends."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    return found if message.reasoning is None else found | {"reasoning_content": message.reasoning, "thinking": message.reasoning}


def rendered(name: str, messages: Sequence[Message], prompt: bool) -> str:
    """The template's text. Raises Refused."""
    try:
        return str(family(name).tokenizer.apply_chat_template([row(m) for m in messages], tokenize=False, add_generation_prompt=prompt))
    except jinja2.TemplateError as error:
        raise Refused from error


def header(name: str) -> str:
    """What opens an answer behind a question."""
    return rendered(name, [Message("user", "\u241f")], True).partition("\u241f")[2]


def prompt_ids(name: str, messages: Sequence[Message]) -> list[int]:
    """The ids that a server feeds before its model writes. Raises Refused."""
    rendered(name, messages, True)
    found: Any = family(name).tokenizer.apply_chat_template([row(m) for m in messages], tokenize=True, add_generation_prompt=True)
    return list(found["input_ids"])


class Turn(NamedTuple):
    """One answer: the ids before it, the empty thinking block that a template puts there, and what the model writes."""

    prompt: list[int]
    block: str
    text: str


def turns(name: str, conversation: Conversation) -> list[Turn]:
    """All answers of a conversation, texts as the tokenizer gives them back. Raises Refused."""
    found: list[Turn] = []
    for i, message in enumerate(conversation.messages):
        if message.role == "assistant":
            before, end = conversation.messages[:i], ENDS[name]
            if name == "smollm3" and message.reasoning:  # its model thinks in the content, and the template ignores what is sent apart
                message = replace(message, content=f"<think>\n{message.reasoning}\n</think>\n{message.content}", reasoning=None)
            text = after(name, rendered(name, before, True), rendered(name, [*before, message], False), message)
            block = EMPTY_THINKING[name] if name in EMPTY_THINKING and text.startswith(EMPTY_THINKING[name]) else ""
            text = text[len(block) :] + (end if name in OPENS_NEXT else "")
            found.append(Turn(prompt_ids(name, before), block, given_back(name, text[: text.rindex(end) + len(end)])))
    return found


def after(name: str, prompt: str, whole: str, message: Message) -> str:
    """What comes behind the prompt. Two templates render an answer behind something else than the prompt that asked for it. Raises Refused."""
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    if name == "mistral_nemo":  # the system prompt stands in the last message if that is the user's, so only in a prompt
        return message.content + ENDS[name]
    if name == "deepseek_r1" and message.reasoning:  # the prompt opens the thinking, and what is rendered has none
        return f"{message.reasoning}\n</think>\n\n{message.content}{ENDS[name]}"
    raise Refused


def given_back(name: str, text: str) -> str:
    """What decoding returns: NFC, or, of Phi-3's marks, without the whitespace behind them and with SentencePiece's mark for the start of a text."""
    if name == "phi3":
        text, end = text.removesuffix("<|end|>").lstrip(), "<|end|>"
        return (" " + text if text else "") + end
    return unicodedata.normalize("NFC", text) if name in COMPOSES else text
