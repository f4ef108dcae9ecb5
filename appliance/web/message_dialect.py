"""Answers as Anthropic's messages: whole, or as events.

    message_start   ping ...   content_block_start  content_block_delta ...  content_block_stop   ...   message_delta  message_stop

Pings fill the time in the line, in a long prompt, and between deltas; the comment before one says what the stream waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from appliance.errors import TandemError
from appliance.web import sse
from appliance.web.answering import Answer
from appliance.web.errors import anthropic_body
from appliance.web.generation import Begun, Ended, Piece
from appliance.web.message_blocks import MessageBlocks

_PING = sse.named_event("ping", {"type": "ping"})


class MessageDialect:
    """Serves one request, which has one answer; implements `answering.Dialect`."""

    def __init__(self, message_id: str, model: str, blocks: MessageBlocks, *, request_id: str) -> None:
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._blocks = blocks
        self._request_id = request_id

    def opening(self, answers: Sequence[Answer]) -> bytes:
        """Before a lane has taken the request nobody knows how much it will reuse; the last usage of the stream says it."""
        message: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answers[0])}
        return _events([{"type": "message_start", "message": message}]) + _PING

    def waiting(self, word: str) -> bytes:
        return sse.comment(word) + _PING

    def progress(self, step: Begun | Piece | Ended, answers: Sequence[Answer]) -> bytes:
        del answers
        match step:
            case Begun():
                return b""
            case Piece():
                return _events(self._blocks.feed(step.text))
            case Ended():
                return _events(self._blocks.finish())

    def closing(self, answers: Sequence[Answer]) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(answers[0].ended), "usage": _usage(answers[0])}
        return _events([delta, {"type": "message_stop"}])

    def failure(self, error: TandemError) -> bytes:
        return sse.named_event("error", anthropic_body(error, self._request_id))

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        self._blocks.feed("".join(answer.text))
        self._blocks.finish()
        return {**self._head, "content": self._blocks.content(), **self._stop(answer.ended), "usage": _usage(answer)}

    def _stop(self, ended: Ended | None) -> dict[str, Any]:
        """A call is told before a stop string: the client must know that it has to run the tool."""
        was_cut = ended is None or ended.finish_reason == "length"
        stop = None if ended is None else ended.stop
        if self._blocks.are_complete or (self._blocks.calls_tools and not was_cut):
            reason, stop = "tool_use", None
        elif was_cut:
            reason = "max_tokens"
        else:
            reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}


def _usage(answer: Answer) -> dict[str, int]:
    """The three kinds of input make up the prompt. Nothing is written to a cache for a request; what is computed is kept anyway."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": len(answer.token_ids),
    }


def _events(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(sse.named_event(event["type"], event) for event in events)
