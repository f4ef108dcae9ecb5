"""Whether the client of the running request is still there.

A client that leaves is otherwise noticed only when bytes are sent to it, and a request that waits sends none.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Mapping
from typing import Any

_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class Client:
    """The other end of one request's connection. Confined to the request's thread."""

    def __init__(self, connection: socket.socket | None) -> None:
        self._connection = connection
        self._poll = select.poll()
        if connection is not None:
            self._poll.register(connection, select.POLLRDHUP)

    @classmethod
    def of(cls, environ: Mapping[str, Any]) -> Client:
        """The client behind a WSGI environment. Outside gunicorn there is no socket, and the client counts as present."""
        return cls(environ.get("gunicorn.socket"))

    def is_gone(self) -> bool:
        """True once the client has closed its end. Never blocks."""
        return any(events & _GONE for _, events in self._poll.poll(0))

    def give_up_after(self, limit_s: float) -> None:
        """A client that stays, but stops sending its body or reading its answer for `limit_s`, loses its connection."""
        if self._connection is not None:
            self._connection.settimeout(limit_s)

    def ignore_rest(self) -> None:
        """What has not come of the request yet is not waited for, not even to skip it; the connection ends with the answer."""
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it has gone
                self._connection.shutdown(socket.SHUT_RD)
