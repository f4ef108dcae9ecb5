"""Both ends of an engine's conversation with the desk: lines in from one descriptor, lines out to another.

Neither side can stop the other for ever:

* The reader thread empties stdin at all times, so a desk that writes is never held up by a long window.
* The writer keeps lines in memory while the pipe is full, so a desk that is slow to read does not hold up a window. Over
  `HIGH_WATER_BYTES` it waits, which pauses the generation; a desk that reads nothing for `STALL_LIMIT_S` counts as gone,
  and the engine ends as if the pipe had been closed.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import overload

from appliance.engine.commands import Cancel, Command, EndOfInput, Refusal, parse_command
from appliance.protocol import MAX_LINE_BYTES, ControlErrorCode

HIGH_WATER_BYTES = 1024 * 1024
STALL_LIMIT_S = 60.0
_READ_BYTES = 64 * 1024


class Inbox:
    """The commands that wait for the engine loop, in order. Thread-safe."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._interrupt: Callable[[], None] = lambda: None

    def on_urgent(self, interrupt: Callable[[], None]) -> None:
        """From now on calls `interrupt`, in the thread that puts, when a command has come that should not wait for a long chunk."""
        self._interrupt = interrupt

    def put(self, command: Command) -> None:
        self._commands.put(command)
        if isinstance(command, Cancel | EndOfInput):
            self._interrupt()

    def take(self) -> Command | None:
        """The next command, or None when there is none now."""
        try:
            return self._commands.get_nowait()
        except queue.Empty:
            return None

    @overload
    def wait(self) -> Command: ...
    @overload
    def wait(self, timeout_s: float) -> Command | None: ...
    def wait(self, timeout_s: float | None = None) -> Command | None:
        """The next command; blocks until there is one, or gives None after `timeout_s`."""
        try:
            return self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return None


class LineReader:
    """A daemon thread that parses the lines of one descriptor into an inbox, and an `EndOfInput` at its end.

    `on_end` is called in that thread after the `EndOfInput` was put.
    """

    def __init__(self, descriptor: int, inbox: Inbox, on_end: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._inbox = inbox
        self._on_end = on_end
        self._pending = bytearray()
        self._is_too_long = False
        self._thread = threading.Thread(target=self._read, name="line-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the thread, which comes with the end of the input."""
        self._thread.join(timeout_s)

    def _read(self) -> None:
        while chunk := self._read_some():
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                self._grow(end)
                self._inbox.put(self._take_line())
            self._grow(rest)
        self._inbox.put(EndOfInput())
        self._on_end()

    def _read_some(self) -> bytes:
        try:
            return os.read(self._descriptor, _READ_BYTES)
        except OSError:  # such as EIO of a terminal that went away: as good as its end
            return b""

    def _grow(self, part: bytes) -> None:
        if len(self._pending) + len(part) > MAX_LINE_BYTES:
            self._is_too_long = True
            self._pending.clear()
        if not self._is_too_long:
            self._pending += part

    def _take_line(self) -> Command:
        line, is_too_long = bytes(self._pending), self._is_too_long
        self._pending.clear()
        self._is_too_long = False
        if is_too_long:
            return Refusal(ControlErrorCode.MALFORMED, f"a line is longer than {MAX_LINE_BYTES} bytes")
        return parse_command(line)


class LineWriter:
    """Writes lines to one descriptor. Confined to the thread that runs the engine.

    A pipe that polls as writable takes at least PIPE_BUF bytes at once, so no write blocks although the descriptor does not
    have to be switched to non-blocking (which would switch it for everyone who shares it).
    """

    def __init__(self, descriptor: int, *, stall_limit_s: float = STALL_LIMIT_S, high_water_bytes: int = HIGH_WATER_BYTES) -> None:
        self._descriptor = descriptor
        self._stall_limit_s = stall_limit_s
        self._high_water_bytes = high_water_bytes
        self._pending = bytearray()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def write(self, line: str) -> None:
        """Writes a line, or keeps it until the pipe has room.

        Raises BrokenPipeError if the desk has closed the pipe or stopped reading it.
        """
        self._pending += line.encode("utf-8", errors="replace")
        self._push(wait_s=0.0)
        if len(self._pending) > self._high_water_bytes:
            self._drain_to(self._high_water_bytes)

    def flush(self) -> None:
        """Blocks until every line lies in the pipe. Raises as `write` does."""
        self._drain_to(0)

    def _drain_to(self, size_bytes: int) -> None:
        progress_at = time.monotonic()
        while len(self._pending) > size_bytes:
            if self._push(wait_s=0.1):
                progress_at = time.monotonic()
            elif time.monotonic() - progress_at > self._stall_limit_s:
                raise BrokenPipeError(f"the desk has read nothing for {self._stall_limit_s:g} s; {len(self._pending)} bytes wait for it")

    def _push(self, wait_s: float) -> bool:
        """Writes what fits; waits up to `wait_s` for room for the first part. Returns whether anything was written."""
        has_written = False
        while self._pending and self._poll.poll(0 if has_written else wait_s * 1000):
            written = os.write(self._descriptor, self._pending[: select.PIPE_BUF])
            del self._pending[:written]
            has_written = True
        return has_written
