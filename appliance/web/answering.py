"""How a generation reaches its client: as a stream of server-sent events, or whole. The same for every dialect.

A client that leaves is noticed within `_LOOK_S`, in the line, in the prompt and while tokens come, and its lanes are freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from flask import Response, jsonify, request

from appliance.errors import TandemError
from appliance.protocol import TokenLogprobs
from appliance.web import sse
from appliance.web.client import Client
from appliance.web.generation import Begun, Ended, Generation, Order, Piece, Prompting, Step, Waiting
from appliance.web.service import Service

log = structlog.get_logger(__name__)

_LOOK_S = 0.2
"""How often a waiting request looks whether its client is still there."""
_CLIENT_CLOSED_REQUEST = 499


class _ClientGone(Exception):
    """Nobody reads this answer any more."""


@dataclass(slots=True)
class Answer:
    """One choice as far as it has come. Confined to one request."""

    index: int
    prompt_tokens: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose state was reused; known at the end."""
        return self.ended.timings.cached_tokens if self.ended else 0

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)


class Dialect(Protocol):
    """The shape in which one API speaks of answers. One instance serves one request; it gets every step of a stream, in order."""

    def opening(self, answers: Sequence[Answer]) -> bytes:
        """The first bytes of a stream, sent at once."""

    def waiting(self, word: str) -> bytes:
        """What keeps a stream from falling silent; `word` says what it waits for."""

    def progress(self, step: Begun | Piece | Ended, answers: Sequence[Answer]) -> bytes:
        """The events for what has come of an answer; empty while nothing is certain."""

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """The end of a stream whose answers are complete."""

    def failure(self, error: TandemError) -> bytes:
        """The end of a stream that failed."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body for a request that does not stream."""


def answer(service: Service, orders: Sequence[Order], dialect: Dialect, *, stream: bool) -> Response:
    """Submits the orders and answers the current request. Raises what the desk raises as long as nothing was sent."""
    generation = Generation(service.desk, service.tokenizer, orders)
    client = Client.of(request.environ)
    answers = [Answer(index, len(order.generate.prompt)) for index, order in enumerate(orders)]
    if not stream:
        return _whole(generation, client, answers, dialect)
    response = Response(_Stream(generation, client, answers, dialect, service.settings.keepalive_s).events(), headers=sse.HEADERS)
    response.call_on_close(generation.cancel)  # also when the client left before the first byte and the generator never ran
    return response


def _whole(generation: Generation, client: Client, answers: Sequence[Answer], dialect: Dialect) -> Response:
    try:
        while not generation.ended:
            step = generation.next_step(_LOOK_S)
            if client.is_gone():
                return Response(status=_CLIENT_CLOSED_REQUEST)
            _note(answers, step)
    finally:
        generation.cancel()
    return jsonify(dialect.whole(answers))


def _note(answers: Sequence[Answer], step: Step | None) -> None:
    if isinstance(step, Piece):
        answers[step.index].add(step)
    elif isinstance(step, Ended):
        answers[step.index].ended = step


class _Stream:
    """One streamed response."""

    def __init__(self, generation: Generation, client: Client, answers: Sequence[Answer], dialect: Dialect, keepalive_s: float) -> None:
        self._generation = generation
        self._client = client
        self._answers = answers
        self._dialect = dialect
        self._keepalive_s = keepalive_s

    def events(self) -> Iterator[bytes]:
        """The body. Whatever happens, it ends as its API says, unless the client is gone."""
        yield self._dialect.opening(self._answers)
        try:
            yield from self._until_ended()
            yield self._dialect.closing(self._answers)
        except _ClientGone:
            return
        except TandemError as error:
            yield self._dialect.failure(error)
        except Exception:
            log.exception("a stream failed unexpectedly")
            yield self._dialect.failure(TandemError("something went wrong inside the server; its log says what"))

    def _until_ended(self) -> Iterator[bytes]:
        keep_alive = sse.KeepAlive(self._keepalive_s)
        last_word = "waiting"
        while not self._generation.ended:
            step = self._generation.next_step(min(_LOOK_S, keep_alive.left_s()))
            if self._client.is_gone():
                raise _ClientGone
            _note(self._answers, step)
            if isinstance(step, Waiting | Prompting):
                last_word = _word_for(step)
                yield self._dialect.waiting(last_word)
                keep_alive.sent()
            elif step is not None and (events := self._dialect.progress(step, self._answers)):
                last_word = "working"
                yield events
                keep_alive.sent()
            elif keep_alive.left_s() == 0:
                yield self._dialect.waiting(last_word)
                keep_alive.sent()


def _word_for(step: Waiting | Prompting) -> str:
    return f"queued {step.place}" if isinstance(step, Waiting) else f"prompt {step.done}/{step.total}"
