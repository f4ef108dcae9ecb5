"""A chat reply while it comes: split into reasoning, content and tool calls, in OpenAI's words."""

from __future__ import annotations

from typing import Any


class Reply:
    """One choice's reply. Confined to one request."""

    def __init__(self, *, tools: bool) -> None:
        self._tools = tools
        self._content: list[str] = []

    @property
    def has_tool_calls(self) -> bool:
        return False

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The deltas for more text."""
        if not text:
            return []
        self._content.append(text)
        return [{"content": text}]

    def finish(self) -> list[dict[str, Any]]:
        """The deltas for what was held back."""
        return []

    def message(self) -> dict[str, Any]:
        """The whole reply."""
        return {"role": "assistant", "content": "".join(self._content), "refusal": None}
