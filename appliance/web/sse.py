"""Server-sent events: `data:` lines and comments, and names where an API has them; nothing else.

`id:`, `retry:` and empty `event:` lines break some clients; comments are part of the standard and every client skips them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import orjson

DONE = b"data: [DONE]\n\n"

HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would hold the stream back until a buffer is full
}


def event(data: object) -> bytes:
    """One event. JSON has no raw line breaks, so one `data:` line holds it."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_event(name: str, data: object) -> bytes:
    """One event with a name, as Anthropic's clients read them."""
    return b"event: " + name.encode() + b"\n" + event(data)


def comment(text: str) -> bytes:
    """A line that clients skip; proxies and sockets see that the stream lives."""
    return b": " + " ".join(text.split()).encode() + b"\n\n"


class KeepAlive:
    """Says when a comment is due: after `period_s` of wall clock without bytes. Confined to one stream."""

    def __init__(self, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = period_s
        self._clock = clock
        self._last = clock()

    def sent(self) -> None:
        """Bytes have just been sent."""
        self._last = self._clock()

    def left_s(self) -> float:
        """Seconds until a comment is due; 0 when it is."""
        return max(0.0, self._last + self._period_s - self._clock())
