"""Log lines about a long stage, now and then."""

from __future__ import annotations

import time

import structlog

from appliance.protocol import LoadProgress
from appliance.units import format_bytes

REPORT_S = 5.0

log = structlog.get_logger()


class ProgressLog:
    """Confined to one thread."""

    def __init__(self) -> None:
        self._reported_at = 0.0
        self._stage: str | None = None

    def show(self, load: LoadProgress) -> None:
        """Logs a new stage, and then the progress every `REPORT_S`."""
        if load.stage == self._stage and time.monotonic() - self._reported_at < REPORT_S:
            return
        self._reported_at, self._stage = time.monotonic(), load.stage
        left = {} if load.left_s is None else {"left_s": round(load.left_s, 1)}
        progress = f"{format_bytes(load.done_bytes)} of {format_bytes(load.total_bytes)}"
        log.info("loading", stage=load.stage, progress=progress, per_s=format_bytes(round(load.bytes_per_s)), **left)
