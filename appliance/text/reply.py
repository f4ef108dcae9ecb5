"""Splits a model's reply into what it thinks, what it says, and the tools it calls, while it is being written.

    <think>
    reasoning
    </think>

    content
    <tool_call>
    {"name": "look_up", "arguments": {"word": "tandem"}}
    </tool_call>

This is the form of Qwen3, DeepSeek-R1, Hermes and their relatives. What does not follow it is content, character for character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from appliance.text.tokenizer import Tokenizer

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_MAY_BE_OBJECT = re.compile(r"\s*(?:\{|\Z)")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_TAIL_TOKENS = 16
"""More than `<think>` and a line break after it can have."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thoughts."""

    text: str
    raw: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer proper."""

    text: str
    raw: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call."""

    index: int
    """0 for the first of the reply."""
    name: str
    arguments: str
    """A JSON object, as text."""
    raw: str


ReplyPart = Reasoning | Content | ToolCall
"""`raw` is what the model wrote, tags and blank lines included: put together, the parts' `raw` are the reply."""


class _Place(Enum):
    START = auto()
    """Nothing but white space so far: `<think>` may follow."""
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    """The text not given out yet is white space, `<tool_call>`, and what has come of the call."""


def ends_in_think(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether the template has opened the model's reasoning itself, at the end of the prompt."""
    return tokenizer.decode(prompt[-_TAIL_TOKENS:]).rstrip().endswith(_THINK)


def thinking_tokens(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """The tokens that begin and end reasoning, or None where the vocabulary has none of their own."""
    begin, end = (tokenizer.encode(tag, add_special=False, parse_special=True) for tag in (_THINK, _END_THINK))
    return (begin[0], end[0]) if len(begin) == len(end) == 1 else None


def begun_call(name: str | None) -> str:
    """The beginning of a reply that calls a tool, this one or (None) one that the model chooses.

    It does not end in a space: vocabularies have that in front of what follows.
    """
    begun = f'{_CALL}\n{{"name":'
    return begun if name is None else f'{begun} {json.dumps(name, ensure_ascii=False)}, "arguments":'


def without_open_think(prompt: str) -> str:
    """`prompt` with its reasoning closed, if it ends inside of it, so that an answer can follow."""
    stripped = prompt.rstrip()
    return f"{stripped}\n\n{_END_THINK}\n\n" if stripped.endswith(_THINK) else prompt


class ReplyStream:
    """Takes a reply's text in pieces and gives out its parts as soon as they are certain.

    White space next to a tag belongs to the tag; elsewhere every character comes out. A call that is not a JSON object with
    a name and an object of arguments comes out as content. Confined to the thread of its request.
    """

    def __init__(self, in_reasoning: bool = False, tools: bool = True) -> None:
        """
        Args:
            in_reasoning: The prompt ended inside `<think>`, so the reply begins with reasoning.
            tools: Look for tool calls.
        """
        self._place = _Place.REASONING if in_reasoning else _Place.START
        self._tools = tools
        self._text = ""
        """Received and not given out."""
        self._swallowed = ""
        """Tags and white space that begin the `raw` of the next part."""
        self._behind_tag = in_reasoning
        self._num_calls = 0
        self._num_searched = 0
        """Characters of an unfinished call in which its end does not begin, so that a long one is not searched again and again."""
        self._parts: list[ReplyPart] = []
        self._steps = {
            _Place.START: self._step_start,
            _Place.REASONING: self._step_reasoning,
            _Place.CONTENT: self._step_content,
            _Place.CALL: self._step_call,
        }

    def feed(self, text: str) -> list[ReplyPart]:
        """The parts that have become certain with `text`."""
        self._text += text
        return self._advance(final=False)

    def finish(self) -> list[ReplyPart]:
        """The rest, at the end of the reply. What is left of tags and white space makes a part without text."""
        parts = self._advance(final=True)
        if self._swallowed:
            parts.append(Content("", self._swallowed))
            self._swallowed = ""
        return parts

    def _advance(self, final: bool) -> list[ReplyPart]:
        while self._text and self._steps[self._place](final):
            pass
        parts, self._parts = self._parts, []
        return parts

    # Each step takes what it can from the front of the text and says whether another step may follow.

    def _step_start(self, final: bool) -> bool:
        stripped = self._text.lstrip()
        if stripped.startswith(_THINK):
            self._swallow(len(self._text) - len(stripped) + len(_THINK))
            self._place = _Place.REASONING
        elif final or not _THINK.startswith(stripped):
            self._place = _Place.CONTENT
        else:
            return False
        return True

    def _step_reasoning(self, final: bool) -> bool:
        end = self._text.find(_END_THINK)
        if end < 0:
            self._give(Reasoning, len(self._text) if final else _certain(self._text, _END_THINK))
            return False
        self._give(Reasoning, len(self._text[:end].rstrip()))
        self._swallow(self._text.index(_END_THINK) + len(_END_THINK))
        self._place = _Place.CONTENT
        return True

    def _step_content(self, final: bool) -> bool:
        begin = self._text.find(_CALL) if self._tools else -1
        if begin < 0:
            self._give(Content, len(self._text) if final or not self._tools else _certain(self._text, _CALL))
            return False
        self._give(Content, len(self._text[:begin].rstrip()))
        self._place = _Place.CALL
        return True

    def _step_call(self, final: bool) -> bool:
        begin = self._text.index(_CALL) + len(_CALL)
        end = _end_of_call(self._text, begin, max(begin, self._num_searched))
        if end is None and not final and _MAY_BE_OBJECT.match(self._text, begin):
            self._num_searched = max(begin, len(self._text) - len(_END_CALL) + 1)
            return False
        self._num_searched = 0
        call = _parse_call(self._text[begin:end])
        self._place = _Place.CONTENT
        if call is None:
            self._give(Content, begin)  # only the tag: a call that begins later is still found
            return True
        raw_end = len(self._text) if end is None else end + len(_END_CALL)
        self._parts.append(ToolCall(self._num_calls, *call, raw=self._swallowed + self._text[:raw_end]))
        self._num_calls += 1
        self._text, self._swallowed, self._behind_tag = self._text[raw_end:], "", True
        return True

    def _swallow(self, length: int) -> None:
        self._swallowed += self._text[:length]
        self._text = self._text[length:]
        self._behind_tag = True

    def _give(self, kind: type[Reasoning] | type[Content], length: int) -> None:
        """Gives out the first `length` characters, without the white space behind a tag."""
        text, self._text = self._text[:length], self._text[length:]
        if self._behind_tag:
            stripped = text.lstrip()
            self._swallowed += text[: len(text) - len(stripped)]
            text = stripped
        if text:
            self._parts.append(kind(text, self._swallowed + text))
            self._swallowed, self._behind_tag = "", False


def _certain(text: str, tag: str) -> int:
    """Length of the front of `text` that is surely not part of `tag`, nor white space that may stand before it."""
    partial = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
    return len(text[: len(text) - partial].rstrip())


def _end_of_call(text: str, begin: int, search_from: int) -> int | None:
    """Where the first `</tool_call>` stands that is not inside a string of the JSON that begins at `begin`."""
    end = text.find(_END_CALL, search_from)
    while end >= 0 and _in_string(text[begin:end]):
        end = text.find(_END_CALL, end + 1)
    return None if end < 0 else end


def _in_string(json_text: str) -> bool:
    """Whether the end of `json_text` lies inside a string: an odd number of quotes stands before it."""
    return re.sub(r"\\.", "", json_text, flags=re.DOTALL).count('"') % 2 == 1


def _parse_call(json_text: str) -> tuple[str, str] | None:
    """Name and arguments, or None if it is no call."""
    try:
        call = json.loads(json_text)
        arguments = call["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(call["name"], str) or not isinstance(arguments, dict):
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return _whole_characters(call["name"]), _whole_characters(json.dumps(arguments, ensure_ascii=False))


def _whole_characters(text: str) -> str:
    """Half an emoji that the model has escaped (`\\ud83d`) is no text that could be sent."""
    return _LONE_SURROGATE.sub("\ufffd", text)
