"""A conversation's turns as text: what a server is given before each assistant turn, and what it then writes; other roles' turns if they are asked for.

The prompt of a turn is the rendering of everything before it plus the assistant's header, the answer is what the rendering with the answer adds, up to and
including its end mark. While a prompt repeats the turns so far, they share one text; where the template rewrote history, a new text starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.data.config import DataConfig
from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.template import EMPTY_THINKING, PROBE, ChatTemplate, TemplateError


@dataclass(frozen=True)
class Turn:
    """One answer. `whole` starts with `prompt` and ends with the answer's end mark; with `ids`, these tokens follow the prompt, whatever their text.

    `spans`: the characters of `whole` to learn from. `given`: no answer but another role's turn, which a server tokenizes together with its header.
    """

    prompt: str
    whole: str
    spans: tuple[tuple[int, int], ...] = ()
    ids: tuple[int, ...] | None = None
    given: bool = False


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
    asked = next((i for i, m in enumerate(messages) if m.role != "assistant"), len(messages))
    places = [i for i, m in enumerate(messages) if m.role in config.roles and (m.role != "assistant" or i > asked)]
    if not places and config.roles != ("assistant",):
        raise TemplateError(f"without a turn of {' or '.join(config.roles)}")
    if not places:
        raise TemplateError("with nothing before the answer" if any(m.role == "assistant" for m in messages) else "without an assistant turn")
    if any(m.role == "tool" for m in messages[: places[-1]]) and not template.writes_results:
        raise TemplateError("with tool results, which the chat template leaves out")
    if config.turns == "last":
        places = places[-1:]
    written = [i for i in places if messages[i].role == "assistant"]
    found = _written(messages, written, template, tools) | _given(messages, [i for i in places if i not in written], template, tools)
    return [found[i] for i in places]


def _written(messages: Sequence[Message], places: Sequence[int], template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> dict[int, Turn]:
    """The assistant turns at these places."""
    if not places:
        return {}
    rendered = [i for i in places if messages[i].token_ids is None]
    prompts = template.render([messages[:i] for i in places], True, tools)
    wholes, marks = template.render_marked([[*messages[:i], _spoken(messages[i], template)] for i in rendered], tools)
    answers = dict(zip(rendered, zip(wholes, marks or [[] for _ in wholes], strict=True), strict=True))
    turns = [
        _rendered(messages[: i + 1], prompt, *answers[i], template, tools) if i in answers else Turn(prompt, prompt, ids=_recorded(messages[i], template))
        for i, prompt in zip(places, prompts, strict=True)
    ]
    if template.end_mark not in template.closing:
        following = [prompt.removeprefix(turn.whole) if prompt.startswith(turn.whole) else "" for turn, prompt in zip(turns, [*prompts[1:], ""], strict=True)]
        turns = [_stopped(turn, messages[i], rest, template) for turn, i, rest in zip(turns, places, following, strict=True)]
    return dict(zip(places, turns, strict=True))


def _given(messages: Sequence[Message], places: Sequence[int], template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> dict[int, Turn]:
    """Other roles' turns: content through end mark, between what the template writes before and behind any content there. Raises TemplateError when
    the template moves, repeats or leaves out the content, so that this cannot be told."""
    texts = template.render([messages[: i + 1] for i in places], False, tools)
    probed = template.render([[*messages[:i], replace(messages[i], content=PROBE)] for i in places], False, tools)
    turns: dict[int, Turn] = {}
    for i, text, probe in zip(places, texts, probed, strict=True):
        before, _, behind = probe.partition(PROBE)
        start, end = len(before), len(text) - len(behind)
        if probe.count(PROBE) != 1 or start > end or not (text.startswith(before) and text.endswith(behind)):
            raise TemplateError(f"with a {messages[i].role} turn that the chat template does not set apart")
        mark = template.first_mark(behind)
        closed = mark and behind.lstrip().startswith(mark)
        end += behind.index(mark) + len(mark) if closed else 0
        # Without a mark, the last characters may share a token with what the template writes behind them.
        turns[i] = Turn(before, text[:end] if closed else text, ((start, end),), given=True)
    return turns


def _stopped(turn: Turn, message: Message, following: str, template: ChatTemplate) -> Turn:
    """The turn of a template without end marks (GLM's): the target stops by writing the mark that opens what follows, a question if nothing does."""
    if turn.ids is not None or (message.tool_calls and not following):
        return turn
    mark = template.first_mark(following) if following else template.end_mark
    start, end = turn.spans[-1]
    if end < len(turn.whole) or not following.startswith(mark if following else ""):
        return turn
    return replace(turn, whole=turn.whole + mark, spans=(*turn.spans[:-1], (start, end + len(mark))))


def _rendered(
    messages: Sequence[Message], prompt: str, whole: str, marks: list[tuple[int, int]], template: ChatTemplate, tools: Sequence[Mapping[str, Any]]
) -> Turn:
    if not whole.startswith(prompt):
        whole, marks = _continued(messages, prompt, whole, template, tools), []
    if not all(str(c.get("function", c).get("name")) in whole[len(prompt) :] for c in messages[-1].tool_calls):
        raise TemplateError("with tool calls, which the chat template leaves out")
    if not _thinks(messages[-1]):
        # An empty thinking block is the template's, not the target's: servers put it into the prompt when thinking is off.
        answer = whole[len(prompt) :]
        block = next((b for b in template.empty_thinking if answer.startswith(b)), None)
        found = None if block is not None else EMPTY_THINKING.match(answer)
        prompt += block if block is not None else found.group() if found else ""
    start = len(prompt)
    end = _end(whole, start, template)
    inside = [(max(a, start), min(b, end)) for a, b in marks if a < end and b > start]
    if inside and whole[inside[-1][1] : end].strip() in ("", *template.end_texts):
        inside[-1] = (inside[-1][0], end)
    return Turn(prompt, whole[:end], tuple(inside) or ((start, end),))


def _end(whole: str, start: int, template: ChatTemplate) -> int:
    """Where the answer that starts there ends: behind the end mark, though a closing of the whole conversation may follow it."""
    closing, mark = template.closing, template.end_mark
    if mark and mark in closing and whole.endswith(closing) and len(whole) - len(closing) >= start:
        return len(whole) - len(closing) + closing.index(mark) + len(mark)
    # Other answers, such as tool calls, may be closed otherwise.
    return max((at + len(mark) for mark in template.end_texts if (at := whole.rfind(mark, start)) >= 0), default=len(whole))


def _continued(messages: Sequence[Message], prompt: str, whole: str, template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> str:
    """The prompt and what the target wrote, for templates that render an answer behind something else than the prompt that asked for it.

    Some write a system prompt, tools or the thinking before a tool call only while no answer follows: then the answer stands behind another history, but behind
    the same header. Others open the thinking in the prompt and leave it out of what they render. Raises TemplateError when it is neither.
    """
    *before, message = messages
    if template.lead is not None and prompt.endswith(template.header):
        probe = template.render([[*before, Message("assistant", PROBE)]], False, tools)[0].rpartition(PROBE)[0]
        history = probe.removesuffix(template.lead)
        if history.endswith(template.header) and whole.startswith(history):
            return prompt + whole[len(history) :]
    if not re.search(r"<think>\s*\Z", prompt):
        raise TemplateError("the rendered answer does not continue its prompt (the template rewrites it)")
    if not _thinks(message):
        raise TemplateError("with an answer without thinking, which the prompt of the template opens")
    written = message.content
    if "</think>" not in written:
        written = f"{(message.reasoning or '').strip()}\n</think>\n\n{written}"
    return prompt + written.lstrip().removeprefix("<think>").lstrip("\n") + template.closing


def _spoken(message: Message, template: ChatTemplate) -> Message:
    """The answer as the target wrote it, where thinking that a client sends apart would be left out of it."""
    if not (message.reasoning and template.thinks_in_content) or "</think>" in message.content:
        return message
    tail = next((block[block.index("</think>") :] for block in template.empty_thinking if "</think>" in block), "</think>\n\n")
    return replace(message, content=f"<think>\n{message.reasoning.strip()}\n{tail}{message.content}", reasoning=None)


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


def preformatted(text: str, template: ChatTemplate, config: DataConfig) -> list[tuple[int, int]]:
    """Characters of the answers in a text that is rendered already: from each assistant header through the next end mark. Raises TemplateError for
    other roles."""
    if config.roles != ("assistant",):
        raise TemplateError("of text that is rendered already, in which only assistant turns can be found")
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
