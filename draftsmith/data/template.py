"""Rendering with the tokenizer's own chat template, and token ids of the text as a server computes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from draftsmith.core.hub import snapshot
from draftsmith.data.conversations import Message, RowError, arguments
from draftsmith.data.words import Words

RENDERING = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What a template raises when it meets something that it was not written for."""
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
EMPTY_THINKING = re.compile(r"\s*(?:<(?:seed:)?think(?:ing)?>)?\s*</(?:seed:)?think(?:ing)?>\s*")
CACHED_PIECES, CACHED_LENGTH = 20_000, 1_000
PROBE = "\u241f"
CALL: Mapping[str, Any] = {"id": "call00000", "type": "function", "function": {"name": "probe_name", "arguments": {}}}
"""A tool call to look for in a rendering; some templates ask for ids of nine letters or digits."""


class TemplateError(RowError):
    """The template or the tokenizer refused a conversation; it is dropped with this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, reason)


class ChatTemplate:
    """A tokenizer with its chat template.

    `source`: another template instead of the tokenizer's own. `variables`: what a server would be given as `chat_template_kwargs`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str, source: str | None = None, variables: Mapping[str, Any] | None = None) -> None:
        if not (source or tokenizer.chat_template):
            raise ValueError(
                f"target {name!r} has no chat template, so conversations cannot be rendered as a server would: use the chat (instruct) "
                "version of the target, put a chat_template.jinja beside its tokenizer, or set data.template to a Jinja file"
            )
        self.tokenizer = tokenizer
        self.source = source
        self.variables = dict(variables or {})
        self._ids: dict[str, np.ndarray] = {}

    @staticmethod
    def load(where: str, revision: str | None = None, file: str | None = None, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
        """Load the tokenizer of a target: a directory, a GGUF file or a hub id; `file`: a Jinja template of your own.

        Raises ValueError without tokenizer or template.
        """
        from transformers import AutoTokenizer  # imports torch, which the processes that tokenize do without

        path, source = Path(where).expanduser(), None
        if file is not None:
            if not Path(file).is_file():
                raise ValueError(f"no chat template at {file}; data.template must be a Jinja file")
            source = Path(file).read_text(encoding="utf-8")
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
        return ChatTemplate(tokenizer, where, source, variables)

    def jinja(self, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The template's text; a tokenizer may have one of its own for conversations with tools."""
        if tools:
            return self.source or str(self.tokenizer.get_chat_template(None, [dict(tool) for tool in tools]))
        return self._plain_jinja

    @cached_property
    def _plain_jinja(self) -> str:
        return self.source or str(self.tokenizer.get_chat_template(None, None))

    # ---- text ----

    def render(self, prefixes: Sequence[Sequence[Message]], prompt: bool, tools: Sequence[Mapping[str, Any]] = ()) -> list[str]:
        """The text of each list of messages; with `prompt`, the header of the coming assistant turn is added.

        Raises TemplateError when the template refuses one of them.
        """
        return self._render(prefixes, prompt, tools, marks=False)[0]

    def render_marked(self, prefixes: Sequence[Sequence[Message]], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[list[str], list[list[tuple[int, int]]]]:
        """Texts, and the characters that the template's `{% generation %}` marks enclose; no spans without such marks."""
        return self._render(prefixes, False, tools, marks=MARKS.search(self.jinja(tools)) is not None)

    def _render(
        self, prefixes: Sequence[Sequence[Message]], prompt: bool, tools: Sequence[Mapping[str, Any]], marks: bool
    ) -> tuple[list[str], list[list[tuple[int, int]]]]:
        jinja = self.jinja(tools)
        offered: list[Any] | None = [dict(tool) for tool in tools] or None
        if not prefixes:
            return [], []
        if not all(prefixes):
            raise TemplateError("with nothing before an answer")

        def attempt(text_arguments: bool) -> Any:
            null = self._null_content if any(m.tool_calls for m in max(prefixes, key=len)) else False
            rows = {id(m): _row(m, text_arguments, null) for m in max(prefixes, key=len)}  # the others repeat these messages
            chats = [[rows.get(id(m)) or _row(m, text_arguments, null) for m in messages] for messages in prefixes]
            variables = self._special_tokens | self.variables
            return render_jinja_template(chats, offered, chat_template=jinja, add_generation_prompt=prompt, return_assistant_tokens_mask=marks, **variables)

        try:
            return attempt(text_arguments=False)
        except RENDERING as error:
            if any(m.tool_calls for messages in prefixes for m in messages):  # some templates concatenate arguments, so they want text
                try:
                    return attempt(text_arguments=True)
                except RENDERING:
                    pass
            raise TemplateError(f"the chat template refuses it: {str(error)[:200]}") from error

    @cached_property
    def _special_tokens(self) -> dict[str, Any]:
        return dict(self.tokenizer.special_tokens_map)

    # ---- token ids ----

    def ids(self, messages: Sequence[Message], prompt: bool, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of the rendered messages, what `apply_chat_template` returns. Raises TemplateError when the template refuses the messages."""
        return self.encode(self.render([messages], prompt, tools)[0]).tolist()

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

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text; nothing is added, the template writes its own first token."""
        pieces = self.pieces(text)
        table = self.table(text[a:b] for a, b in pieces)
        return np.concatenate([table[text[a:b]] for a, b in pieces]) if pieces else np.empty(0, np.int32)

    def pieces(self, text: str) -> list[tuple[int, int]]:
        """Cut before every mark that the tokenizer always splits at: ids of the pieces, joined, are the ids of the text."""
        starts = [m.start() for m in self._split_at.finditer(text)] if self._split_at else []
        edges = sorted({0, *starts, len(text)})
        return list(pairwise(edges))

    def table(self, texts: Iterable[str]) -> dict[str, np.ndarray]:
        """Ids by text, each text tokenized once; short ones (headers, system prompts) are remembered."""
        wanted = dict.fromkeys(texts)
        found = {text: self._ids[text] for text in wanted if text in self._ids}
        fresh = [text for text in wanted if text not in found]
        if len(self._ids) > CACHED_PIECES:
            self._ids.clear()
        for text, ids in zip(fresh, self._tokenize(fresh), strict=True):
            found[text] = ids
            if len(text) <= CACHED_LENGTH:
                self._ids[text] = ids
        return found

    def _tokenize(self, texts: list[str]) -> list[np.ndarray]:
        if not texts:
            return []
        if not self.tokenizer.is_fast:
            rows: Any = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            return [np.array(row, np.int32) for row in rows]
        backend: Any = self.tokenizer
        backend = backend.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        looked_up = [self._look_up(text) for text in texts]
        asked = [text for text, ids in zip(texts, looked_up, strict=True) if ids is None]
        encoded = iter(backend.encode_batch_fast(asked, add_special_tokens=False)) if asked else iter(())
        return [np.array(next(encoded).ids if ids is None else ids, np.int32) for ids in looked_up]

    def _look_up(self, piece: str) -> list[int] | None:
        """Ids of a piece out of the dictionary of words; None if it has to be tokenized."""
        if self._words is None or self._split_at is None:
            return None
        mark = self._split_at.match(piece)
        start = mark.end() if mark else 0
        if self._split_at.search(piece, start):
            return None
        ids = self._words.ids(piece[start:])
        return [self._mark_ids[mark.group()], *ids] if mark and ids is not None else ids

    @cached_property
    def _words(self) -> Words | None:
        added: Any = self.tokenizer.added_tokens_decoder
        plain = all(not (t.normalized or t.lstrip or t.rstrip or t.single_word) for t in added.values())
        backend: Any = self.tokenizer
        return Words.of(backend.backend_tokenizer) if plain and self.tokenizer.is_fast else None

    @cached_property
    def _mark_ids(self) -> dict[str, int]:
        added: Any = self.tokenizer.added_tokens_decoder
        return {token.content: number for number, token in added.items()}

    def tokens_before(self, piece: str, characters: int, whole: bool) -> int:
        """How many tokens of a piece begin in its first characters, or with `whole` also end there. Raises TemplateError without offsets."""
        if not self.tokenizer.is_fast:
            raise TemplateError("whose answers begin or end within a token, which a tokenizer without offsets cannot tell")
        offsets: Any = self.tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return sum((end if whole else start + 1) <= characters for start, end in offsets)

    @cached_property
    def _split_at(self) -> re.Pattern[str] | None:
        """Marks that are tokens wherever their text stands. Those that also take spaces around them, or depend on what is next to them, are left out;
        so are all of a tokenizer without a fast backend, of which nothing is promised."""
        added: Any = self.tokenizer.added_tokens_decoder
        plain = [t.content for t in added.values() if not (t.normalized or t.lstrip or t.rstrip or t.single_word)]
        if not plain or not self.tokenizer.is_fast:
            return None
        return re.compile("|".join(map(re.escape, sorted(plain, key=len, reverse=True))))

    # ---- what the template is like ----

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
    def closing(self) -> str:
        """What the template writes behind an answer, through the end of the text."""
        return self.render([[Message("user", "a"), Message("assistant", PROBE)]], prompt=False)[0].rpartition(PROBE)[2]

    @cached_property
    def end_mark(self) -> str:
        """The first mark behind an answer, or, where the template writes none, the one that opens the next question: the target then stops by writing that."""
        if mark := self.first_mark(self.closing):
            return mark
        asked_again = self.render([[Message("user", "a"), Message("assistant", PROBE), Message("user", "b")]], prompt=False)[0].rpartition(PROBE)[2]
        mark = self.first_mark(asked_again)
        return mark if asked_again.startswith(mark) else ""

    def first_mark(self, text: str) -> str:
        """The mark that stands first in a text; none: an empty text."""
        marks = [str(self.tokenizer.convert_ids_to_tokens(i)) for i in self.special_ids]
        return min((m for m in marks if m in text), key=lambda m: (text.index(m), -len(m)), default="")

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn: the end-of-sequence token, and the end mark."""
        eos: Any = self.tokenizer.eos_token_id
        mark: Any = self.tokenizer.convert_tokens_to_ids(self.end_mark) if self.end_mark else None
        return tuple(dict.fromkeys(i for i in [eos, mark] if i is not None))

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        """The same as text; the template's own mark is the last."""
        return tuple(str(self.tokenizer.convert_ids_to_tokens(i)) for i in self.end_ids)

    @cached_property
    def empty_thinking(self) -> tuple[str, ...]:
        """What the template adds to a prompt when thinking is switched off, most often an empty `<think>` block."""
        asked, found = [[Message("user", PROBE)]], list[str]()
        plain = self.render(asked, prompt=True)[0].rpartition(PROBE)[2]
        for switch in ("enable_thinking", "thinking"):
            if switch not in self.jinja():
                continue
            other = ChatTemplate(self.tokenizer, "", self.source, self.variables | {switch: False}).render(asked, prompt=True)[0].rpartition(PROBE)[2]
            # The switch may also stand in the system prompt or behind the question.
            if block := other.partition(plain)[2]:
                found.append(block)
        return tuple(found)

    @cached_property
    def _null_content(self) -> bool:
        """Whether the template writes a tool call only where the content is null and not empty, as clients send it (DeepSeek's)."""
        call = Message("assistant", "", tool_calls=(CALL,))
        for text_arguments in (False, True):
            for null in (False, True):
                chat = [_row(Message("user", "a"), False, False), _row(call, text_arguments, null)]
                try:
                    text = render_jinja_template([chat], None, chat_template=self.jinja((CALL,)), **self._special_tokens, **self.variables)[0][0]
                except RENDERING:
                    continue
                if CALL["function"]["name"] in text:
                    return null
        return False

    @cached_property
    def writes_results(self) -> bool:
        """Whether what a tool answered appears in the text; some templates skip roles that they do not know."""
        chat = [Message("user", "a"), Message("assistant", "", tool_calls=(CALL,)), Message("tool", PROBE, tool_call_id=CALL["id"])]
        try:
            return PROBE in self.render([chat], True, (CALL,))[0]
        except TemplateError:
            return True  # it does not skip them but refuses, and says so of each conversation

    @cached_property
    def thinks_in_content(self) -> bool:
        """Whether thinking can be switched on but is left out unless it stands in the content (SmolLM3's)."""
        chat = [Message("user", "a"), Message("assistant", "b", reasoning=PROBE)]
        return "enable_thinking" in self.jinja() and PROBE not in self.render([chat], False)[0]

    @cached_property
    def header(self) -> str:
        """What stands between a user's text and the answer: how assistant turns are found in text that is rendered already."""
        with_header = self.render([[Message("user", PROBE)]], prompt=True)[0]
        without = self.render([[Message("user", PROBE)]], prompt=False)[0]
        added = with_header[len(without) :] if with_header.startswith(without) else ""
        return added if added.strip() else with_header.rpartition(PROBE)[2]

    @cached_property
    def lead(self) -> str | None:
        """What the template writes between the header and an answer's text, most often nothing; None if an answer stands behind another header."""
        before = self.render([[Message("user", "a"), Message("assistant", PROBE)]], prompt=False)[0].partition(PROBE)[0]
        return before.rpartition(self.header)[2] if self.header and self.header in before else None


def _row(m: Message, text_arguments: bool, null: bool) -> dict[str, Any]:
    """What a server hands to the template: no null fields, arguments as an object."""
    row: dict[str, Any] = {"role": m.role, "content": None if null and m.tool_calls and not m.content else m.content}
    optional = {"reasoning_content": m.reasoning, "name": m.name, "tool_call_id": m.tool_call_id}
    row |= {key: value for key, value in optional.items() if value is not None}
    if m.tool_calls:
        row["tool_calls"] = [_call(call, text_arguments) for call in m.tool_calls]
    return row


def _call(call: Mapping[str, Any], text_arguments: bool) -> dict[str, Any]:
    function = call.get("function", call)
    given: Any = arguments(function)
    if text_arguments:
        original = function.get("arguments")
        given = original if isinstance(original, str) else json.dumps(given, ensure_ascii=False)
    around = {key: value for key, value in call.items() if key not in ("name", "arguments", "function") and value is not None}
    return {"type": "function"} | around | {"function": {**function, "arguments": given}}
