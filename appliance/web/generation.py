"""One API request at work: its tickets at the desk, their events turned into text.

make Orders -> Generation submits them -> next_step() ... next_step() -> ended
                                          cancel() at any time, from any thread
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.desk.desk import Desk
from appliance.desk.ticket import Ticket
from appliance.errors import NotReadyError
from appliance.protocol import Event, Finished, FinishReason, Generate, PromptProgress, Queued, Started, Timings, TokenLogprobs, Tokens
from appliance.text.text_stream import TextStream
from appliance.text.tokenizer import Tokenizer
from appliance.web.errors import error_from_event


@dataclass(frozen=True, slots=True)
class Order:
    """One answer that is wanted: what the engine is told, and the strings that end the text."""

    generate: Generate
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Waiting:
    """Answer `index` stands in line; `place` 1 is next."""

    index: int
    place: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A lane has taken answer `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Prompting:
    """`done` of `total` prompt tokens are computed."""

    index: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Piece:
    """More of answer `index`. `text` lags behind `token_ids` where a character or a possible stop string is not complete."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token id when they were asked for. The token that ended the answer has none: it is not part of the text."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Answer `index` is complete."""

    index: int
    finish_reason: str
    """`stop` or `length`."""
    timings: Timings
    queue_ms: float
    stop: str | None = None
    """The stop string that ended the text."""


Step = Waiting | Begun | Prompting | Piece | Ended


class Generation:
    """All answers of one request. `next_step` belongs to one thread; `cancel` may be called from any."""

    def __init__(self, desk: Desk, tokenizer: Tokenizer, orders: Sequence[Order]) -> None:
        """Submits every order, or none: raises what `Desk.submit` raises."""
        self._answers: list[_Answer] = []
        self._steps: deque[Step] = deque()
        try:
            for index, order in enumerate(orders):
                self._answers.append(_Answer(index, order, desk.submit(order.generate), TextStream(tokenizer, order.stops)))
        except BaseException:
            self.cancel()
            raise
        self._events = _Events([answer.ticket for answer in self._answers])

    @property
    def ended(self) -> bool:
        """Every answer is complete and every step was taken."""
        return not self._steps and all(answer.ended for answer in self._answers)

    def cancel(self) -> None:
        """Frees the lanes. Does nothing to answers that have ended."""
        for answer in self._answers:
            answer.ticket.cancel()

    def next_step(self, timeout_s: float) -> Step | None:
        """The next thing that happened, or None if nothing did within `timeout_s`.

        Raises the error that ended an answer; the others are cancelled then.
        """
        deadline = time.monotonic() + timeout_s
        while not self._steps:
            arrived = self._events.next_event(max(0.0, deadline - time.monotonic()))
            if arrived is None:
                return None
            index, event = arrived
            try:
                self._steps.extend(self._answers[index].take(event))
            except Exception:
                self.cancel()
                raise
        return self._steps.popleft()


class _Answer:
    """One ticket and its text."""

    def __init__(self, index: int, order: Order, ticket: Ticket, text: TextStream) -> None:
        self.index = index
        self.ticket = ticket
        self.ended = False
        self._text = text
        self._stop_ids = frozenset() if order.generate.ignore_eos else frozenset(order.generate.stop_ids)
        self._submitted = time.monotonic()
        self._queue_ms = 0.0

    def take(self, event: Event) -> list[Step]:
        match event:
            case Queued():
                return [Waiting(self.index, event.place)]
            case Started():
                self._queue_ms = 1000 * (time.monotonic() - self._submitted)
                return [Begun(self.index)]
            case PromptProgress():
                return [Prompting(self.index, event.done, event.total)]
            case Tokens():
                return [] if self._text.stopped else [self._piece(event)]
            case Finished():
                return self._finish(event)

    def _piece(self, event: Tokens) -> Piece:
        visible = len(event.ids)
        if event.ids and event.ids[-1] in self._stop_ids:
            visible -= 1
        text = self._text.feed(event.ids[:visible])
        if self._text.stopped:
            self.ticket.complete()
        return Piece(self.index, text, tuple(event.ids), tuple((event.logprobs or [])[:visible]))

    def _finish(self, event: Finished) -> list[Step]:
        self.ended = True
        if not self._text.stopped:
            if event.reason is FinishReason.ERROR:
                raise error_from_event(event.error_code, event.error_text)
            if event.reason is FinishReason.CANCELLED:
                raise NotReadyError("the server ended this answer because it is shutting down; send the request again")
        rest = self._text.finish()
        reason = "stop" if self._text.stopped or event.reason is FinishReason.STOP else "length"
        ended = Ended(self.index, reason, event.timings, self._queue_ms, self._text.stop)
        return [Piece(self.index, rest), ended] if rest else [ended]


class _Events:
    """The events of several tickets as one stream of (index, event).

    One ticket is read directly. With more, a thread per ticket carries its events over; it ends with the terminal event,
    which every ticket gets whatever happens.
    """

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._only = tickets[0] if len(tickets) == 1 else None
        self._merged: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        if self._only is None:
            for index, ticket in enumerate(tickets):
                threading.Thread(target=self._carry, args=(index, ticket), name=f"events-{ticket.request_id}", daemon=True).start()

    def next_event(self, timeout_s: float) -> tuple[int, Event] | None:
        if self._only is not None:
            event = self._only.next_event(timeout_s)
            return None if event is None else (0, event)
        try:
            return self._merged.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _carry(self, index: int, ticket: Ticket) -> None:
        while (event := ticket.next_event()) is not None:
            self._merged.put((index, event))
