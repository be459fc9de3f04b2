"""The slow exact way from a conversation to samples: for each assistant turn, everything before it is rendered and tokenized again, as a server does."""

from __future__ import annotations

from draftsmith.data.conversations import Conversation, Message
from draftsmith.data.template import ChatTemplate


def rows(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} | ({"reasoning_content": m.reasoning} if m.reasoning else {}) for m in messages]


def rendered(template: ChatTemplate, messages: tuple[Message, ...], prompt: bool) -> tuple[str, list[int]]:
    text = template.tokenizer.apply_chat_template(rows(messages), add_generation_prompt=prompt, tokenize=False)
    return str(text), list(template.tokenizer(str(text), add_special_tokens=False)["input_ids"])


def answer_ids(template: ChatTemplate, conversation: Conversation, place: int) -> list[int]:
    """What follows the prompt: recorded, or the difference of two renderings; tokenized by itself where the seam lies within a token."""
    message = conversation.messages[place]
    if message.token_ids is not None:
        return list(message.token_ids)
    before, prompt = rendered(template, conversation.messages[:place], prompt=True)
    text, whole = rendered(template, conversation.messages[: place + 1], prompt=False)
    assert text.startswith(before)
    alone = template.tokenizer(text[len(before) :], add_special_tokens=False)["input_ids"]
    answer = whole[len(prompt) :] if whole[: len(prompt)] == prompt else list(alone)
    ends = [n for n, token in enumerate(answer) if token in template.end_ids]
    return answer[: ends[-1] + 1] if ends else answer


def samples(conversation: Conversation, template: ChatTemplate) -> list[tuple[list[int], list[bool]]]:
    """Ids and masks; a new sample starts where a prompt does not repeat the ids so far."""
    grown: list[tuple[list[int], list[bool]]] = []
    for place, message in enumerate(conversation.messages):
        if message.role != "assistant":
            continue
        _, prompt = rendered(template, conversation.messages[:place], prompt=True)
        answer = answer_ids(template, conversation, place)
        ids, mask = grown[-1] if grown else ([], [])
        if not grown or prompt[: len(ids)] != ids:
            ids, mask = [], []
            grown.append((ids, mask))
        mask += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids += prompt[len(ids) :] + answer
    return grown
