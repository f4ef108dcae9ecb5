"""The shape of `/v1/chat/completions`: its choices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from appliance.text.tokenizer import Tokenizer
from appliance.web.answering import Answer
from appliance.web.generation import Ended, Piece
from appliance.web.logprobs import chat_logprobs
from appliance.web.replies import Reply
from appliance.web.schemas import ChatBody


class ChatChoices:
    """Serves one request. A reply is split into content, reasoning and tool calls while it comes."""

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, body: ChatBody, *, in_reasoning: bool) -> None:
        """`in_reasoning`: the prompt ends in `<think>`, so the reply begins with reasoning."""
        self._head = {"id": request_id, "created": int(time.time()), "model": model, "system_fingerprint": None}
        self._tokenizer = tokenizer
        self._wants_logprobs = body.logprobs
        self._wants_ids = body.return_token_ids
        self._tools = bool(body.tools) and body.tool_choice != "none"
        self._in_reasoning = in_reasoning
        self._begun = body.begun
        self._replies: dict[int, Reply] = {}

    def begin(self, index: int) -> Sequence[dict[str, Any]]:
        return (_delta(index, {"role": "assistant", "content": ""}),)

    def piece(self, piece: Piece) -> Sequence[dict[str, Any]]:
        choices = [_delta(piece.index, delta) for delta in self._reply(piece.index).feed(piece.text)]
        has_extras = piece.logprobs or (piece.token_ids and self._wants_ids)
        if has_extras and not choices:
            choices = [_delta(piece.index, {})]
        if has_extras:
            choices[0] |= self._extras(piece)
        return choices

    def end(self, ended: Ended) -> Sequence[dict[str, Any]]:
        reply = self._reply(ended.index)
        choices = [_delta(ended.index, delta) for delta in reply.finish()]
        return [*choices, _delta(ended.index, {}) | {"finish_reason": _finish_reason(ended, reply)}]

    def chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk", "choices": list(choices)}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._head | {"object": "chat.completion", "choices": [self._choice(answer) for answer in answers]}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        reply = self._reply(answer.index)
        reply.feed("".join(answer.text))
        reply.finish()
        choice = {"index": answer.index, "message": reply.message(), "logprobs": None}
        choice["finish_reason"] = _finish_reason(answer.ended, reply) if answer.ended else None
        return choice | self._extras(answer)

    def _extras(self, part: Piece | Answer) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._wants_logprobs:
            extras["logprobs"] = chat_logprobs(self._tokenizer, part.token_ids, part.logprobs)
        if self._wants_ids:
            extras["token_ids"] = list(part.token_ids)
        return extras

    def _reply(self, index: int) -> Reply:
        if index not in self._replies:
            self._replies[index] = Reply(tools=self._tools, in_reasoning=self._in_reasoning)
            self._replies[index].feed(self._begun)
        return self._replies[index]


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _finish_reason(ended: Ended, reply: Reply) -> str:
    return "tool_calls" if reply.has_tool_calls and ended.finish_reason == "stop" else ended.finish_reason
