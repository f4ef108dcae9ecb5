"""Runs the templates of a model file in a process of their own, within limits of time, memory and output."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from appliance.errors import CapacityError, ContextLengthError, CorruptModelError, NotReadyError, RequestError

_WORKER = Path(__file__).with_name("template_worker.py")
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may cost."""

    render_s: float = 5.0
    """Wall-clock time. A long conversation takes milliseconds."""
    start_s: float = 60.0
    """Wall-clock time to start the process and compile the templates."""
    memory_bytes: int = 512 << 20
    """Address space of the process."""
    max_characters: int = 8 << 20
    """Of the text."""


class TemplateProcess:
    """Templates by name, rendered one at a time. The process is started again when it had to be killed. Thread-safe."""

    def __init__(self, sources: Mapping[str, str], limits: TemplateLimits) -> None:
        """Starts the process. Raises CorruptModelError if a template cannot be compiled."""
        self._sources = dict(sources)
        self._limits = limits
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def render(self, name: str, variables: Mapping[str, object]) -> str:
        """The text that template `name` makes of `variables`, which must be plain JSON values.

        Raises RequestError with the template's own message, or if it breaks a limit; CapacityError if others have kept the
        process busy for too long.
        """
        request = _line({"template": name, "variables": variables})
        if not self._lock.acquire(timeout=2 * self._limits.render_s):
            raise CapacityError("the chat template is busy with other requests; try again")
        try:
            answer = self._ask(request)
        finally:
            self._lock.release()
        if "too_long" in answer:
            raise ContextLengthError(
                f"prompt is too long: the model's chat template makes more than {self._limits.max_characters} characters of it; shorten it",
                param="messages",
            )
        if "error" in answer:
            raise RequestError(f"the model's chat template does not accept this conversation: {answer['error']}", param="messages")
        return answer["text"]

    def close(self) -> None:
        """Ends the process, and with it a rendering that is under way. Idempotent."""
        self._closed = True
        self._process.kill()
        with self._lock:
            self._stop()

    def _ask(self, request: bytes) -> dict[str, str]:
        if self._closed:
            raise NotReadyError("the server is shutting down; send the request again")
        if self._process.poll() is not None:
            self._stop()
            self._start()
        try:
            return _exchange(self._process, request, self._limits.render_s)
        except TimeoutError:
            self._stop()
            raise RequestError(
                f"the model's chat template did not finish within {self._limits.render_s:g} s; send a shorter conversation",
                param="messages",
            ) from None
        except OSError:
            self._stop()
            raise RequestError(
                f"the model's chat template broke off: it may use {self._limits.memory_bytes >> 20} MiB; send a shorter conversation",
                param="messages",
            ) from None

    def _start(self) -> None:
        # No environment: the templates shall find no secrets in it, whatever they manage to read.
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={},
            cwd="/",
            start_new_session=True,
        )
        self._stop = weakref.finalize(self, _end, self._process)
        order = {
            "sources": self._sources,
            "memory_bytes": self._limits.memory_bytes,
            "max_characters": self._limits.max_characters,
        }
        try:
            answer = _exchange(self._process, _line(order), self._limits.start_s)
        except OSError:
            self._stop()
            raise CorruptModelError(
                f"the chat template could not be compiled in {self._limits.start_s:g} s and {self._limits.memory_bytes >> 20} MiB"
            ) from None
        if "error" in answer:
            self._stop()
            raise CorruptModelError(f"the chat template is not valid: {answer['error']}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode("ascii") + b"\n"


def _exchange(process: subprocess.Popen[bytes], request: bytes, time_limit_s: float) -> dict[str, str]:
    """Writes a line and reads one. Raises TimeoutError, or another OSError if the process died."""
    deadline = time.monotonic() + time_limit_s
    unsent = memoryview(request)
    received = bytearray()
    with selectors.DefaultSelector() as pipes:
        sink, source = _unblocked(process.stdin), _unblocked(process.stdout)
        pipes.register(sink, selectors.EVENT_WRITE)
        pipes.register(source, selectors.EVENT_READ)
        while not received.endswith(b"\n"):
            ready = {key.fd for key, _ in pipes.select(max(0.0, deadline - time.monotonic()))}
            if not ready or time.monotonic() > deadline:
                raise TimeoutError
            if sink in ready:
                unsent = unsent[os.write(sink, unsent[:_READ_BYTES]) :]
                if not unsent:
                    pipes.unregister(sink)
            if source in ready:
                received += _read(source)
    answer: dict[str, str] = json.loads(received)
    return answer


def _unblocked(pipe: IO[bytes] | None) -> int:
    if pipe is None or pipe.closed:
        raise BrokenPipeError("the process is gone")
    os.set_blocking(pipe.fileno(), False)
    return pipe.fileno()


def _read(source: int) -> bytes:
    received = os.read(source, _READ_BYTES)
    if not received:
        raise BrokenPipeError("the process died")
    return received
