"""A child whose stdin and stdout carry protocol lines: the loader and the engines.

One thread per child does all its input and output without ever blocking on it, so neither a child that does not read nor one
that floods can hold up the desk, and a death is noticed at once, by the process itself (pidfd) rather than by its pipes:

    send() ──outbox──> stdin         stdout ──> on_line(text)
    stop(), kill() ──> signals       stderr ──> the log, and the last words        process ends ──> on_end(Ending), once
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from appliance.desk.child_log import ChildLog
from appliance.desk.inputs import Ending
from appliance.desk.line_splitter import LineSplitter
from appliance.protocol import MAX_LINE_BYTES
from appliance.settings import gpu_environment

_READ_BYTES = 64 * 1024
_CLOSED_STDOUT_GRACE_S = 1.0

_log = structlog.get_logger()


class ChildProcess:
    """`send`, `stop`, `kill` and `join` may be called from any thread and never block (`join`: up to its limit).

    Make it in a thread that lives as long as the child may: the parent-death signal that children ask for is sent when the
    *thread* that started them ends. The callbacks run in the child's own thread.
    """

    def __init__(
        self, name: str, argv: Sequence[str], on_line: Callable[[ChildProcess, str], None], on_end: Callable[[ChildProcess, Ending], None]
    ) -> None:
        """Starts it, in a session of its own: Ctrl-C at the terminal is for the server, which drains first.

        Raises OSError if it cannot be started.
        """
        self.name = name
        self._on_line = on_line
        self._on_end = on_end
        self._lock = threading.Lock()
        self._outbox = bytearray()
        self._closes_stdin = False
        self._signals: list[tuple[float, signal.Signals]] = []
        """(when, which), in order."""
        self._fault: str | None = None
        """What the desk found wrong with it."""
        self._stdout = LineSplitter(MAX_LINE_BYTES)
        self._stderr = ChildLog(name)
        with contextlib.ExitStack() as undo:
            self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._wakeup)
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                env=gpu_environment(),
            )
            undo.callback(self._abandon)
            self._pidfd = os.pidfd_open(self._process.pid)
            undo.callback(os.close, self._pidfd)
            self._thread = threading.Thread(target=self._serve, name=f"desk-{name}", daemon=True)
            self._thread.start()
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, text: str) -> None:
        """Writes later what the pipe does not take now. Nothing happens when the child is gone."""
        with self._lock:
            self._outbox += text.encode()
        self._wake()

    def stop(self, term_after_s: float, kill_after_s: float) -> None:
        """End of file on its stdin now (after what was sent), SIGTERM and SIGKILL if it is still there later."""
        now = time.monotonic()
        with self._lock:
            self._closes_stdin = True
            if not self._signals:
                self._signals = [(now + term_after_s, signal.SIGTERM), (now + kill_after_s, signal.SIGKILL)]
        self._wake()

    def kill(self) -> None:
        """SIGKILL now."""
        with self._lock:
            self._closes_stdin = True
            self._signals = [(time.monotonic(), signal.SIGKILL)]
        self._wake()

    def join(self, timeout_s: float) -> bool:
        """Waits until the process has been reaped, its descriptors are closed and `on_end` has returned."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The child's own thread

    def _serve(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                self._loop(selector)
            ending = self._reap()
        except Exception:
            _log.exception("the thread of a child failed", lane=self.name)
            self._process.kill()
            ending = self._reap()
        self._on_end(self, ending)

    def _loop(self, selector: selectors.BaseSelector) -> None:
        stdin, stdout, stderr = self._pipes()
        for stream in (stdin, stdout, stderr):
            os.set_blocking(stream, False)
        selector.register(stdout, selectors.EVENT_READ)
        selector.register(stderr, selectors.EVENT_READ)
        selector.register(self._pidfd, selectors.EVENT_READ)
        selector.register(self._wakeup, selectors.EVENT_READ)
        while True:
            self._write(selector, stdin)
            ready = {key.fd for key, _ in selector.select(self._send_due_signals())}
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            if stdout in ready and not _read_once(stdout, self._take_stdout):
                selector.unregister(stdout)
                self._expect_end()
            if stderr in ready and not _read_once(stderr, self._stderr.take):
                selector.unregister(stderr)
            if self._pidfd in ready:
                _read_rest(stdout, self._take_stdout)
                _read_rest(stderr, self._stderr.take)
                self._stderr.take(b"\n")
                return

    def _pipes(self) -> tuple[int, int, int]:
        process = self._process
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise RuntimeError("the child was started without pipes")
        return process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno()

    def _write(self, selector: selectors.BaseSelector, stdin: int) -> None:
        """Writes what the pipe takes; watches for room while something is left."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        with self._lock:
            try:
                while self._outbox:
                    del self._outbox[: os.write(stdin, self._outbox)]
            except BlockingIOError:
                pass
            except OSError:  # the child reads no more; its end follows, or its silence is noticed
                self._outbox.clear()
            is_waiting, is_done = bool(self._outbox), self._closes_stdin
        is_watched = stdin in selector.get_map()
        if is_waiting and not is_watched:
            selector.register(stdin, selectors.EVENT_WRITE)
        elif is_watched and not is_waiting:
            selector.unregister(stdin)
        if is_done and not is_waiting:
            self._process.stdin.close()

    def _send_due_signals(self) -> float | None:
        """Returns the seconds until the next one, None when there is none."""
        with self._lock:
            now = time.monotonic()
            while self._signals and self._signals[0][0] <= now:
                self._process.send_signal(self._signals.pop(0)[1])
            return self._signals[0][0] - now if self._signals else None

    def _expect_end(self) -> None:
        """Its stdout ended, so it should: what no longer speaks is of no use."""
        with self._lock:
            if not self._signals:
                self._signals = [(time.monotonic() + _CLOSED_STDOUT_GRACE_S, signal.SIGKILL)]

    def _take_stdout(self, data: bytes) -> None:
        for text in self._stdout.feed(data):
            if text is None:
                self._fault = f"it wrote a line of more than {MAX_LINE_BYTES} bytes"
                self.kill()
            else:
                self._on_line(self, text)

    def _reap(self) -> Ending:
        with self._lock:
            self._signals.clear()
            code = self._process.wait()
            os.close(self._wakeup)
            self._wakeup = -1
        os.close(self._pidfd)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        ending = Ending(last_words=self._fault or self._stderr.last_words, is_logged=self._fault is None and self._stderr.has_complained)
        return replace(ending, signal=-code) if code < 0 else replace(ending, exit_code=code)

    def _wake(self) -> None:
        with self._lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _abandon(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def _read_once(descriptor: int, take: Callable[[bytes], None]) -> bool:
    """False at the end of the file."""
    try:
        data = os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return True
    if data:
        take(data)
    return bool(data)


def _read_rest(descriptor: int, take: Callable[[bytes], None]) -> None:
    """What lies in the pipe of a process that has ended; others who hold its end open do not matter."""
    with contextlib.suppress(BlockingIOError):
        while data := os.read(descriptor, _READ_BYTES):
            take(data)
