"""One accepted request, as the one who sent it sees it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType

from appliance.protocol import Event, Finished


class Ticket:
    """The events of one request, in order, the last of them one `Finished`.

    Thread-safe; one thread at a time should take events. As a context manager it cancels what has not ended, so that a
    reader that fails leaves no lane busy.
    """

    def __init__(self, request_id: str, post_cancel: Callable[[str, bool], None]) -> None:
        self.request_id = request_id
        self._post_cancel = post_cancel
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._finished = threading.Event()
        self._read_to_the_end = False

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """Waits for the next event, `timeout_s` seconds at most (None: as long as it takes).

        None when nothing has come by then, and at once when the terminal event has been taken already.
        """
        if self._read_to_the_end:
            return None
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._read_to_the_end = isinstance(event, Finished)
        return event

    @property
    def finished(self) -> bool:
        """The terminal event is there, taken or not."""
        return self._finished.is_set()

    def cancel(self) -> None:
        """Gives the request up. Never blocks, may be called again; the terminal event still comes."""
        self._end(is_complete=False)

    def complete(self) -> None:
        """Like `cancel`, when what there is of the answer is all of it: it counts as finished."""
        self._end(is_complete=True)

    def _end(self, is_complete: bool) -> None:
        if not self._cancelled.is_set() and not self.finished:
            self._cancelled.set()
            self._post_cancel(self.request_id, is_complete)

    def deliver(self, event: Event) -> None:
        """For the desk thread only."""
        if isinstance(event, Finished):
            self._finished.set()
        self._events.put(event)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()
