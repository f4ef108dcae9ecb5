"""One request from `Started` to its last token: checks, prompt in chunks, decode in windows.

A `Generation` is advanced by one chunk or one window at a time; between two steps the engine loop obeys control lines. It
writes every event but the terminal one, which the loop writes exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NotRequired, Protocol, TypedDict

from appliance.engine.logits import LogitsRow
from appliance.engine.sampler import Choice, Sampler
from appliance.engine.session import Session
from appliance.errors import ContextLengthError, RequestError
from appliance.protocol import Event, FinishReason, Generate, PromptProgress, Started, Timings, Tokens
from cuda_ext import _native as native


class WindowInterruptedError(Exception):
    """A run was given up because it was interrupted; nothing it wrote is valid. Raised to the engine loop, never to a client."""


class RunnerStats(TypedDict):
    """Counters since the runner was made, and what it is."""

    rows_by_tier: dict[str, int]
    swaps: int
    resident_experts: int
    slots: int
    isa: str
    pool_threads: int
    pool_held: int
    peer_experts: NotRequired[int]
    is_filling: NotRequired[bool]
    link_serving: NotRequired[bool]
    served_rows: NotRequired[int]
    late_experts: NotRequired[int]
    link_losses: NotRequired[int]
    prompt_bytes_from_arena: NotRequired[int]
    prompt_bytes_from_peer: NotRequired[int]
    unpinned_bytes: NotRequired[int]


class Runner(Protocol):
    """What the engine loop needs of a model on a card. Confined to the engine loop.

    Key/value state is indexed by absolute position: `run` at a position overwrites what was there.
    """

    @property
    def max_rows(self) -> int:
        """Most tokens of one `run`."""

    @property
    def context(self) -> int:
        """Positions that there is key/value memory for."""

    @property
    def vocab(self) -> int: ...

    @property
    def plan_bytes(self) -> Mapping[str, int]:
        """Card memory by consumer."""

    def run(self, tokens: Sequence[int], position: int, num_logits: int, chooser: native.Chooser | None = None) -> Sequence[LogitsRow]:
        """Computes `tokens` at the positions from `position` on.

        Returns the logits of the last `num_logits` tokens, valid until the next run; where there is one and a `chooser`, its row may have
        chosen the next token by that. Raises
        EngineError when the card failed, and the process is then of no more use. A runner that can be interrupted raises
        WindowInterruptedError.
        """

    def between_windows(self) -> None:
        """Puts landed swaps into the residency table and starts new ones."""

    def stats(self) -> RunnerStats: ...

    def close(self) -> None: ...


class Generation:
    """One accepted request. Confined to the engine loop."""

    def __init__(self, request: Generate, runner: Runner, session: Session, emit: Callable[[Event], None]) -> None:
        """Raises RequestError if the request cannot be served by this model; nothing has been emitted then."""
        _check(request, runner)
        self._request = request
        self._runner = runner
        self._session = session
        self._emit = emit
        self._sampler = Sampler(request.sampling, runner.vocab, request.prompt, request.top_logprobs)
        self._stop_ids = frozenset() if request.ignore_eos else frozenset(request.stop_ids)
        self._max_tokens = min(request.max_tokens, runner.context - len(request.prompt))
        self._thinks = request.thinking is not None and request.thinking.begin is None
        self._answer: list[int] = []
        self._num_cached = session.reusable(request.prompt)
        self._position = self._num_cached
        """The first position whose state has not been computed for this request."""
        self._started_at = time.monotonic()
        self._prompt_done_at: float | None = None
        emit(Started(id=request.id, prompt_tokens=len(request.prompt), cached_tokens=self._num_cached))

    @property
    def request_id(self) -> str:
        return self._request.id

    @property
    def num_computed_prompt_tokens(self) -> int:
        return min(self._position, len(self._request.prompt)) - self._num_cached

    @property
    def num_generated_tokens(self) -> int:
        return len(self._answer)

    @property
    def next_rows(self) -> int:
        """How many rows the next `advance` computes."""
        return max(1, min(len(self._request.prompt) - self._position, self._runner.max_rows))

    def advance(self) -> FinishReason | None:
        """Computes one chunk of the prompt or one window. Returns why the answer is complete, or None if it is not.

        After a WindowInterruptedError the same step can be tried again. After any other exception the answer cannot go on.
        """
        if self._is_overdue():
            return FinishReason.LENGTH
        if self._position < len(self._request.prompt):
            return self._prompt_chunk()
        return self._decode_window()

    def timings(self) -> Timings:
        """What the request has cost so far."""
        now = time.monotonic()
        prompt_done_at = now if self._prompt_done_at is None else self._prompt_done_at
        return Timings(
            prompt_tokens=len(self._request.prompt),
            cached_tokens=self._num_cached,
            generated_tokens=len(self._answer),
            prompt_ms=(prompt_done_at - self._started_at) * 1000,
            decode_ms=(now - prompt_done_at) * 1000,
        )

    def _prompt_chunk(self) -> FinishReason | None:
        prompt = self._request.prompt
        chunk = prompt[self._position : self._position + self._runner.max_rows]
        is_last = self._position + len(chunk) == len(prompt)
        logits = self._run(chunk, num_logits=1 if is_last else 0)
        self._emit(PromptProgress(id=self._request.id, done=self._position, total=len(prompt)))
        if not is_last:
            return None
        self._prompt_done_at = time.monotonic()
        return FinishReason.LENGTH if self._max_tokens == 0 else self._take(logits[-1])

    def _decode_window(self) -> FinishReason | None:
        return self._take(self._run([self._answer[-1]], num_logits=1)[-1])

    def _run(self, tokens: Sequence[int], num_logits: int) -> Sequence[LogitsRow]:
        self._session.truncate(self._position)
        chooser = self._sampler.chooser(self._position + len(tokens)) if num_logits else None
        logits = self._runner.run(tokens, self._position, num_logits, chooser)
        self._session.extend(tokens)
        self._position += len(tokens)
        return logits

    def _take(self, logits: LogitsRow) -> FinishReason | None:
        """Chooses the token that follows the last computed position and tells the desk."""
        choice = self._within_thinking(self._sampler.choose(logits, self._position))
        self._sampler.accept(choice.token)
        self._answer.append(choice.token)
        self._emit(_tokens_event(self._request.id, choice))
        if choice.token in self._stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self._answer) == self._max_tokens else None

    def _within_thinking(self, choice: Choice) -> Choice:
        """The choice, or the end of thoughts that have had their tokens."""
        limit = self._request.thinking
        if limit is None:
            return choice
        if not self._answer and choice.token == limit.begin:
            self._thinks = True
        is_over = self._thinks and len(self._answer) >= limit.max_tokens
        if is_over or choice.token == limit.end:
            self._thinks = False
        return replace(choice, token=limit.end) if is_over else choice

    def _is_overdue(self) -> bool:
        limit_s = self._request.deadline_s
        return limit_s is not None and time.monotonic() - self._started_at > limit_s


def _tokens_event(request_id: str, choice: Choice) -> Tokens:
    return Tokens(id=request_id, ids=[choice.token], logprobs=None if choice.logprobs is None else [choice.logprobs])


def _check(request: Generate, runner: Runner) -> None:
    num_prompt = len(request.prompt)
    largest = max(request.prompt)
    if largest >= runner.vocab:
        raise RequestError(f"the prompt holds token {largest}, but the vocabulary has ids 0 to {runner.vocab - 1}", param="prompt")
    if num_prompt + min(request.max_tokens, 1) > runner.context:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens, but prompt and answer together may have {runner.context}; shorten the prompt",
            param="prompt",
        )
