"""Progress of a long stage: `LOAD` lines for the process that started this one, and one line that rewrites itself for people."""

from __future__ import annotations

import time
from typing import TextIO

from appliance.protocol import LoadProgress, Word, line
from appliance.units import format_bytes

REPORT_INTERVAL_S = 0.2


class ProgressReport:
    """Tells how far one stage is, on stdout for the desk and on a terminal for people."""

    def __init__(self, stage: str, total_bytes: int, out: TextIO, terminal: TextIO | None) -> None:
        self._stage = stage
        self._total_bytes = total_bytes
        self._out = out
        self._terminal = terminal
        self._began = time.monotonic()
        self._last = -REPORT_INTERVAL_S

    def update(self, done_bytes: int) -> bool:
        """Says it if the last time is `REPORT_INTERVAL_S` ago, or if the stage is complete; whether it was said."""
        now = time.monotonic()
        if done_bytes < self._total_bytes and now - self._last < REPORT_INTERVAL_S:
            return False
        self._last = now
        elapsed_s = now - self._began
        rate = round(done_bytes / elapsed_s) if elapsed_s > 0 else 0
        left_s = round((self._total_bytes - done_bytes) / rate, 1) if rate > 0 else None
        self._say(LoadProgress(stage=self._stage, done_bytes=done_bytes, total_bytes=self._total_bytes, bytes_per_s=rate, left_s=left_s))
        return True

    def skip(self) -> None:
        """Says that the stage is complete without anything having been done."""
        self._say(LoadProgress(stage=self._stage, done_bytes=self._total_bytes, total_bytes=self._total_bytes))

    def _say(self, progress: LoadProgress) -> None:
        self._out.write(line(Word.LOAD, progress))
        self._out.flush()
        if self._terminal is None:
            return
        done, total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
        left = f", {progress.left_s:.0f} s left" if progress.left_s is not None else ""
        end = "\n" if progress.done_bytes >= progress.total_bytes else ""
        self._terminal.write(f"\r\x1b[K{self._stage}: {done} of {total}, {format_bytes(int(progress.bytes_per_s))}/s{left}{end}")
        self._terminal.flush()
