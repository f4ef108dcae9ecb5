"""Bytes to lines."""

from __future__ import annotations

from collections.abc import Iterator


class LineSplitter:
    """Collects the bytes of one pipe into lines of at most `limit` bytes. Confined to one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._length = 0

    def feed(self, data: bytes) -> Iterator[str | None]:
        """The lines that `data` completes, without their newlines; None for one that was over the limit."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._collect(end)
            yield self._take()
        self._collect(rest)

    def _collect(self, part: bytes) -> None:
        self._length += len(part)
        if self._length > self._limit:
            self._parts.clear()
        else:
            self._parts.append(part)

    def _take(self) -> str | None:
        text = b"".join(self._parts).decode("utf-8", errors="replace") if self._length <= self._limit else None
        self._parts.clear()
        self._length = 0
        return text
