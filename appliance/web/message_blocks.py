"""A reply while it comes, as content blocks of a message and as the events that build them up at the client's side."""

from __future__ import annotations

import base64
import hashlib
import uuid
from typing import Any

import orjson

from appliance.text.reply import Content, Reasoning, ReplyPart, ReplyStream, ToolCall


class MessageBlocks:
    """The blocks of one message, in order; only the last one grows. Confined to one request."""

    def __init__(self, *, tools: bool, one_call: bool, in_reasoning: bool) -> None:
        """
        Args:
            tools: Look for tool calls.
            one_call: Nothing behind the first call is part of the message.
            in_reasoning: The prompt ended inside `<think>`, so the reply begins with thinking.
        """
        self._parts = ReplyStream(in_reasoning=in_reasoning, tools=tools)
        self._one_call = one_call
        self._blocks: list[dict[str, Any]] = []
        self._open: list[str] | None = None
        """What the last block has of its text, while more may come."""

    @property
    def calls_tools(self) -> bool:
        return any(block["type"] == "tool_use" for block in self._blocks)

    @property
    def are_complete(self) -> bool:
        """Whatever else comes is no part of the message."""
        return self._one_call and self.calls_tools

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The events for more of the reply; none while it is not certain what it belongs to."""
        return [event for part in self._parts.feed(text) for event in self._take(part)]

    def finish(self) -> list[dict[str, Any]]:
        """The events for what was held back, and the end of the last block."""
        return [*(event for part in self._parts.finish() for event in self._take(part)), *self._close()]

    def content(self) -> list[dict[str, Any]]:
        """All blocks, at the end."""
        return self._blocks

    def _take(self, part: ReplyPart) -> list[dict[str, Any]]:
        if self.are_complete:
            return []
        match part:
            case Content(text):
                return self._extend("text", text) if text else []
            case Reasoning(text):
                return self._extend("thinking", text) if text else []
            case ToolCall(_, name, arguments, raw):
                given = _object(arguments)
                return self._extend("text", raw) if given is None else self._call(name, arguments, given)

    def _extend(self, kind: str, text: str) -> list[dict[str, Any]]:
        """`kind` is the block's type, and the name of its text."""
        begin = []
        if self._open is None or self._blocks[-1]["type"] != kind:
            extra = {"signature": ""} if kind == "thinking" else {}
            begin = [*self._close(), self._begin({"type": kind, kind: "", **extra})]
            self._open = []
        self._open.append(text)
        return [*begin, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, name: str, arguments: str, given: dict[str, Any]) -> list[dict[str, Any]]:
        block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": name, "input": {}}
        events = [*self._close(), self._begin(block), self._delta({"type": "input_json_delta", "partial_json": arguments}), self._stop()]
        self._blocks[-1]["input"] = given
        return events

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        block, text = self._blocks[-1], "".join(self._open)
        self._open = None
        block[block["type"]] = text
        if block["type"] != "thinking":
            return [self._stop()]
        block["signature"] = _signature(text)
        return [self._delta({"type": "signature_delta", "signature": block["signature"]}), self._stop()]

    def _begin(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append(block)
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _stop(self) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": len(self._blocks) - 1}


def _object(arguments: str) -> dict[str, Any] | None:
    """The arguments as they can be sent, or None: NaN, and depths that no client follows, are no JSON."""
    try:
        given: dict[str, Any] = orjson.loads(arguments)
        orjson.dumps(given)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    return given


def _signature(thinking: str) -> str:
    """Some clients send thinking back only if it is signed. We read it either way, so a checksum will do."""
    return base64.b64encode(hashlib.sha256(thinking.encode("utf-8", "replace")).digest()).decode()
