"""What OpenAI's two answering routes have in common: chunks of choices, usage, timings, comments, and `[DONE]` at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from appliance.errors import TandemError
from appliance.protocol import Timings
from appliance.web import sse
from appliance.web.answering import Answer
from appliance.web.errors import openai_body
from appliance.web.generation import Begun, Ended, Piece
from appliance.web.schemas import AnswerBody


class Choices(Protocol):
    """The shape in which one route speaks of choices. One instance serves one request."""

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


class OpenAIDialect:
    """Serves one request; implements `answering.Dialect`."""

    def __init__(self, choices: Choices, body: AnswerBody) -> None:
        self._choices = choices
        self._include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._answers_per_prompt = body.n

    def opening(self, answers: Sequence[Answer]) -> bytes:
        del answers
        return sse.comment("accepted")

    def waiting(self, word: str) -> bytes:
        return sse.comment(word)

    def progress(self, step: Begun | Piece | Ended, answers: Sequence[Answer]) -> bytes:
        match step:
            case Begun():
                choices = self._choices.begin(step.index)
            case Piece():
                choices = self._choices.piece(step)
            case Ended():
                choices = self._choices.end(step)
        chunks = [self._choices.chunk([choice]) for choice in choices]
        if chunks and all(answer.ended for answer in answers):
            chunks[-1]["timings"] = _timings(answers)
        return b"".join(map(sse.event, chunks))

    def closing(self, answers: Sequence[Answer]) -> bytes:
        if not self._include_usage:
            return sse.DONE
        return sse.event(self._choices.chunk([]) | {"usage": self._usage(answers)}) + sse.DONE

    def failure(self, error: TandemError) -> bytes:
        return sse.event(openai_body(error)) + sse.DONE

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._choices.whole(answers) | {"usage": self._usage(answers), "timings": _timings(answers)}

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Each prompt once: `n` answers, one after the other, have the same. All answers."""
        firsts = answers[:: self._answers_per_prompt]
        prompt = sum(answer.prompt_tokens for answer in firsts)
        completion = sum(len(answer.token_ids) for answer in answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in firsts)},
        }


def _timings(answers: Sequence[Answer]) -> Mapping[str, Any]:
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
