"""The shape of `/v1/completions`: its choices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from appliance.text.tokenizer import Tokenizer
from appliance.web.answering import Answer
from appliance.web.generation import Ended, Piece
from appliance.web.logprobs import completion_logprobs
from appliance.web.schemas import CompletionBody


class CompletionChoices:
    """Serves one request."""

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, body: CompletionBody) -> None:
        self._head = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._wants_logprobs = body.logprobs is not None
        self._wants_ids = body.return_token_ids
        self._offsets: dict[int, int] = {}

    def begin(self, index: int) -> Sequence[dict[str, Any]]:
        del index
        return ()

    def piece(self, piece: Piece) -> Sequence[dict[str, Any]]:
        if not (piece.text or piece.logprobs or (piece.token_ids and self._wants_ids)):
            return ()
        choice: dict[str, Any] = {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": None}
        if self._wants_logprobs:
            offset = self._offsets.get(piece.index, 0)
            choice["logprobs"] = completion_logprobs(self._tokenizer, piece.token_ids, piece.logprobs, offset)
            self._offsets[piece.index] = offset + sum(map(len, choice["logprobs"]["tokens"]))
        if self._wants_ids:
            choice["token_ids"] = list(piece.token_ids)
        return (choice,)

    def end(self, ended: Ended) -> Sequence[dict[str, Any]]:
        return ({"index": ended.index, "text": "", "logprobs": None, "finish_reason": ended.finish_reason},)

    def chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"choices": list(choices)}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._head | {"choices": [self._choice(answer) for answer in answers]}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": answer.index,
            "text": "".join(answer.text),
            "logprobs": None,
            "finish_reason": answer.ended.finish_reason if answer.ended else None,
        }
        if self._wants_logprobs:
            choice["logprobs"] = completion_logprobs(self._tokenizer, answer.token_ids, answer.logprobs, 0)
        if self._wants_ids:
            choice["token_ids"] = answer.token_ids
        return choice
