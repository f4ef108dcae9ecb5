"""How a generation reaches its client: as a stream of server-sent events, or whole. The same for every dialect.

A client that leaves is noticed within `_LOOK_S`, in the line, in the prompt and while tokens come, and its lanes are freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from flask import Response, jsonify, request

from appliance.errors import TandemError
from appliance.protocol import Timings, TokenLogprobs
from appliance.web import sse
from appliance.web.client import Client
from appliance.web.errors import error_body
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

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)


class Dialect(Protocol):
    """The shape in which one API speaks of choices. One instance serves one request."""

    def begin(self, index: int) -> Sequence[dict[str, Any]]:
        """The choice objects that open an answer in a stream."""

    def piece(self, piece: Piece) -> Sequence[dict[str, Any]]:
        """The choice objects for more of an answer."""

    def end(self, ended: Ended) -> Sequence[dict[str, Any]]:
        """The choice objects that complete an answer; the last one has the finish_reason."""

    def chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The envelope of a chunk in a stream."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer to a request that does not stream, without usage and timings."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What the client wants beside the choices."""

    stream: bool
    include_usage: bool
    answers_per_prompt: int
    """`n`: so many orders, one after the other, have the same prompt, which counts once in the usage."""


def answer(service: Service, orders: Sequence[Order], dialect: Dialect, delivery: Delivery) -> Response:
    """Submits the orders and answers the current request. Raises what the desk raises as long as nothing was sent."""
    generation = Generation(service.desk, service.tokenizer, orders)
    client = Client.of(request.environ)
    answers = [Answer(index, len(order.generate.prompt)) for index, order in enumerate(orders)]
    if not delivery.stream:
        return _whole(generation, client, answers, dialect, delivery.answers_per_prompt)
    stream = _Stream(generation, client, answers, dialect, service.settings.keepalive_s)
    response = Response(stream.events(delivery), headers=sse.HEADERS)
    response.call_on_close(generation.cancel)  # also when the client left before the first byte and the generator never ran
    return response


def _whole(generation: Generation, client: Client, answers: Sequence[Answer], dialect: Dialect, answers_per_prompt: int) -> Response:
    try:
        while not generation.ended:
            step = generation.next_step(_LOOK_S)
            if client.is_gone():
                return Response(status=_CLIENT_CLOSED_REQUEST)
            if isinstance(step, Piece):
                answers[step.index].add(step)
            elif isinstance(step, Ended):
                answers[step.index].ended = step
    finally:
        generation.cancel()
    return jsonify(dialect.whole(answers) | {"usage": usage(answers, answers_per_prompt), "timings": timings(answers)})


class _Stream:
    """One streamed response."""

    def __init__(self, generation: Generation, client: Client, answers: Sequence[Answer], dialect: Dialect, keepalive_s: float) -> None:
        self._generation = generation
        self._client = client
        self._answers = answers
        self._dialect = dialect
        self._keepalive_s = keepalive_s

    def events(self, delivery: Delivery) -> Iterator[bytes]:
        """The body. Whatever happens, it ends with `[DONE]` unless the client is gone."""
        yield sse.comment("accepted")
        try:
            yield from self._until_ended()
            if delivery.include_usage:
                yield sse.event(self._dialect.chunk([]) | {"usage": usage(self._answers, delivery.answers_per_prompt)})
        except _ClientGone:
            return
        except TandemError as error:
            yield sse.event(error_body(error))
        except Exception:
            log.exception("a stream failed unexpectedly")
            yield sse.event(error_body(TandemError("something went wrong inside the server; its log says what")))
        yield sse.DONE

    def _until_ended(self) -> Iterator[bytes]:
        keep_alive = sse.KeepAlive(self._keepalive_s)
        last_word = "waiting"
        while not self._generation.ended:
            step = self._generation.next_step(min(_LOOK_S, keep_alive.left_s()))
            if self._client.is_gone():
                raise _ClientGone
            if isinstance(step, Waiting | Prompting):
                last_word = _comment_for(step)
                yield sse.comment(last_word)
                keep_alive.sent()
            elif step is not None and (parts := self._chunks(step)):
                last_word = "working"
                yield b"".join(parts)
                keep_alive.sent()
            elif keep_alive.left_s() == 0:
                yield sse.comment(last_word)
                keep_alive.sent()

    def _chunks(self, step: Step) -> list[bytes]:
        match step:
            case Begun():
                choices = self._dialect.begin(step.index)
            case Piece():
                self._answers[step.index].add(step)
                choices = self._dialect.piece(step)
            case Ended():
                self._answers[step.index].ended = step
                choices = self._dialect.end(step)
            case _:
                choices = ()
        chunks = [self._dialect.chunk([choice]) for choice in choices]
        if all(answer.ended for answer in self._answers) and chunks:
            chunks[-1]["timings"] = timings(self._answers)
        return [sse.event(chunk) for chunk in chunks]


def _comment_for(step: Waiting | Prompting) -> str:
    return f"queued {step.place}" if isinstance(step, Waiting) else f"prompt {step.done}/{step.total}"


def usage(answers: Sequence[Answer], answers_per_prompt: int) -> dict[str, Any]:
    """OpenAI's count of tokens: each prompt once, all answers."""
    prompt = sum(answer.prompt_tokens for answer in answers[::answers_per_prompt])
    completion = sum(len(answer.token_ids) for answer in answers)
    cached = sum(answer.ended.timings.cached_tokens for answer in answers[::answers_per_prompt] if answer.ended)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings(answers: Sequence[Answer]) -> Mapping[str, Any]:
    """What the answers cost together: counts are sums, times are those of the slowest."""
    ended = [answer.ended for answer in answers if answer.ended]
    each: list[Timings] = [one.timings for one in ended]
    generated = sum(one.generated_tokens for one in each)
    decoded = sum(max(0, one.generated_tokens - 1) for one in each)  # the first token comes with the prompt
    decode_ms = max(one.decode_ms for one in each)
    return {
        "prompt_tokens": sum(one.prompt_tokens for one in each),
        "cached_tokens": sum(one.cached_tokens for one in each),
        "generated_tokens": generated,
        "queue_ms": round(max(one.queue_ms for one in ended), 3),
        "prompt_ms": round(max(one.prompt_ms for one in each), 3),
        "decode_ms": round(decode_ms, 3),
        "tokens_per_second": round(1000 * decoded / decode_ms, 3) if decoded and decode_ms > 0 else None,
    }
