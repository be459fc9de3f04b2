"""A conversation's assistant turns as text: what a server is given before each, and what it then writes.

The prompt of a turn is the rendering of everything before it plus the assistant's header, the answer is what the rendering with the answer adds, up to and
including its end mark. While a prompt repeats the turns so far, they share one text; where the template rewrote history, a new text starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftsmith.data.config import DataConfig
from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.template import EMPTY_THINKING, ChatTemplate, TemplateError


@dataclass(frozen=True)
class Turn:
    """One answer. `whole` starts with `prompt` and ends with the answer's end mark; with `ids`, these tokens follow the prompt, whatever their text.

    `spans`: the characters of `whole` to learn from.
    """

    prompt: str
    whole: str
    spans: tuple[tuple[int, int], ...] = ()
    ids: tuple[int, ...] | None = None


def groups_of(conversation: Conversation, template: ChatTemplate, config: DataConfig) -> list[list[Turn]]:
    """The turns to learn from, those of one text together. Raises TemplateError when the template or the recorded ids do not fit."""
    if config.thinking is False:
        conversation = replace(conversation, messages=tuple(map(_without_thinking, conversation.messages)))
    grown: list[list[Turn]] = []
    for turn in _turns(conversation, template, config):
        before = grown[-1][-1] if grown else None
        if before is not None and turn.prompt.startswith(before.prompt if before.ids is not None else before.whole):
            grown[-1].append(turn)
        else:
            grown.append([turn])
    return grown


def _turns(conversation: Conversation, template: ChatTemplate, config: DataConfig) -> list[Turn]:
    messages, tools = conversation.messages, conversation.tools
    # What stands before the first message of others cannot have been asked for: it is history, never an answer.
    places = [i for i, m in enumerate(messages) if m.role == "assistant" and any(b.role != "assistant" for b in messages[:i])]
    if not places:
        raise TemplateError("with nothing before the answer" if any(m.role == "assistant" for m in messages) else "without an assistant turn")
    if config.turns == "last":
        places = places[-1:]
    rendered = [i for i in places if messages[i].token_ids is None]
    prompts = template.render([messages[:i] for i in places], True, tools)
    wholes, marks = template.render_marked([messages[: i + 1] for i in rendered], tools)
    answers = dict(zip(rendered, zip(wholes, marks or [[] for _ in wholes], strict=True), strict=True))
    return [
        _rendered(messages[i], prompt, *answers[i], template) if i in answers else Turn(prompt, prompt, ids=_recorded(messages[i], template))
        for i, prompt in zip(places, prompts, strict=True)
    ]


def _rendered(message: Message, prompt: str, whole: str, marks: list[tuple[int, int]], template: ChatTemplate) -> Turn:
    if not whole.startswith(prompt):
        whole, marks = _continued(message, prompt, whole, template), []
    if not _thinks(message):
        # An empty thinking block is the template's, not the target's: servers put it into the prompt when thinking is off.
        answer = whole[len(prompt) :]
        block = next((b for b in template.empty_thinking if answer.startswith(b)), None)
        found = None if block is not None else EMPTY_THINKING.match(answer)
        prompt += block if block is not None else found.group() if found else ""
    start = len(prompt)
    end = max((at + len(mark) for mark in template.end_texts if (at := whole.rfind(mark, start)) >= 0), default=len(whole))
    inside = [(max(a, start), min(b, end)) for a, b in marks if a < end and b > start]
    if inside and whole[inside[-1][1] : end].strip() in ("", *template.end_texts):
        inside[-1] = (inside[-1][0], end)
    return Turn(prompt, whole[:end], tuple(inside) or ((start, end),))


def _continued(message: Message, prompt: str, whole: str, template: ChatTemplate) -> str:
    """For templates that ask for thinking in the prompt and then leave it out of what they render: the prompt, and what the target wrote.

    Raises TemplateError when the message does not go on where the prompt ends.
    """
    shared = next((n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
    forced = prompt[shared:].strip()
    written = message.content
    if message.reasoning is not None and "</think>" not in written:
        written = f"<think>\n{message.reasoning.strip()}\n</think>\n\n{written}"
    if not (forced and _thinks(message) and written.lstrip().startswith(forced)):
        raise TemplateError("the rendered answer does not continue its prompt (the template rewrites it)")
    return prompt + written.lstrip()[len(forced) :].lstrip("\n") + template.end_texts[-1]


def _recorded(message: Message, template: ChatTemplate) -> tuple[int, ...]:
    """Recorded ids as they are, if this tokenizer wrote them."""
    ids = message.token_ids or ()
    if ids and not (min(ids) >= 0 and max(ids) < len(template.tokenizer)):
        raise TemplateError("with recorded token ids outside the target's vocabulary")
    text = template.text(ids)
    parts = [message.content.strip(), (message.reasoning or "").strip(), *(str(c.get("function", c)["name"]) for c in message.tool_calls)]
    # A server takes thinking and tool calls out of the text, so only their parts can be found again.
    same = all(part in text for part in parts) if message.reasoning or message.tool_calls else _whole(text) == _whole(message.content)
    if not same:
        raise TemplateError("with recorded token ids that are another text under the target's tokenizer")
    return ids


def _whole(text: str) -> str:
    """An answer cut by length may end within a character, of which servers leave the first bytes out, and decoding writes a replacement mark."""
    return text.rstrip("\ufffd")


def _thinks(message: Message) -> bool:
    return bool(message.reasoning and message.reasoning.strip()) or "</think>" in message.content


def _without_thinking(message: Message) -> Message:
    if message.role != "assistant" or not _thinks(message) or message.token_ids is not None:
        return message
    head, mark, rest = message.content.rpartition("</think>")
    content = rest.lstrip("\n") if mark and head.lstrip().startswith("<think>") else message.content
    return replace(message, content=content, reasoning=None)


def preformatted(text: str, template: ChatTemplate) -> list[tuple[int, int]]:
    """Characters of the answers in a text that is rendered already: from each assistant header through the next end mark."""
    spans: list[tuple[int, int]] = []
    place = 0
    while template.header and (at := text.find(template.header, place)) >= 0:
        start = at + len(template.header)
        ends = [found + len(mark) for mark in template.end_texts if (found := text.find(mark, start)) >= 0]
        place = min(ends, default=len(text))
        spans.append((start, place))
    return spans


def of_text(text: str, spans: Sequence[tuple[int, int]]) -> list[list[Turn]]:
    """One group whose single turn has several spans."""
    return [[Turn("", text, tuple(spans))]]
