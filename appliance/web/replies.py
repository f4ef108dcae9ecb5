"""A chat reply while it comes: split into reasoning, content and tool calls, in OpenAI's words."""

from __future__ import annotations

import uuid
from typing import Any

from appliance.text.reply import Content, Reasoning, ReplyPart, ReplyStream, ToolCall


class Reply:
    """One choice's reply. Confined to one request."""

    def __init__(self, *, tools: bool, in_reasoning: bool) -> None:
        self._parts = ReplyStream(in_reasoning=in_reasoning, tools=tools)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    @property
    def has_tool_calls(self) -> bool:
        return bool(self._calls)

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The deltas for more text; none while it is not certain what it belongs to."""
        return [delta for part in self._parts.feed(text) for delta in self._take(part)]

    def finish(self) -> list[dict[str, Any]]:
        """The deltas for what was held back."""
        return [delta for part in self._parts.finish() for delta in self._take(part)]

    def message(self) -> dict[str, Any]:
        """The whole reply as a message. Content is null where there are only tool calls."""
        text = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": None if self._calls and not text else text, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _take(self, part: ReplyPart) -> list[dict[str, Any]]:
        match part:
            case Content(text):
                self._content.append(text)
                return [{"content": text}] if text else []
            case Reasoning(text):
                self._reasoning.append(text)
                return [{"reasoning_content": text}] if text else []
            case ToolCall(index, name, arguments):
                call = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}
                self._calls.append(call)
                return [{"tool_calls": [{"index": index, **call}]}]
