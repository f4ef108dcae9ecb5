"""Tells the terminal how loading goes, and ends the server if it never becomes ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from appliance.desk.desk import Desk
from appliance.desk.status import DeskStatus, Phase
from appliance.units import format_bytes

log = structlog.get_logger()

_LOOK_S = 0.2
_REPORT_S = 5.0


class StartWatch:
    """A thread that reads the desk's status until it is ready, failed or draining, or until `stop`."""

    def __init__(self, desk: Desk, url: str, on_failure: Callable[[str], None]) -> None:
        """`on_failure` gets the sentence if the desk fails before it was ever ready."""
        self._desk = desk
        self._url = url
        self._on_failure = on_failure
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="start-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """From any thread, also twice."""
        self._stopped.set()

    def _watch(self) -> None:
        reported_at, reported_stage = 0.0, None
        while not self._stopped.wait(_LOOK_S):
            status = self._desk.status()
            if status.phase is not Phase.LOADING:
                self._conclude(status)
                return
            stage = status.load.stage if status.load else None
            if stage != reported_stage or time.monotonic() - reported_at > _REPORT_S:
                reported_at, reported_stage = time.monotonic(), stage
                _report(status)

    def _conclude(self, status: DeskStatus) -> None:
        if status.phase is Phase.READY:
            log.info("ready", url=self._url, lanes={lane.name: lane.state.value for lane in status.lanes})
        elif status.phase is Phase.FAILED:
            self._on_failure(status.reason or "the model could not be loaded; see the log")


def _report(status: DeskStatus) -> None:
    load = status.load
    if load is None:
        return
    left = {} if load.left_s is None else {"left_s": round(load.left_s, 1)}
    progress = f"{format_bytes(load.done_bytes)} of {format_bytes(load.total_bytes)}"
    log.info("loading", stage=load.stage, progress=progress, per_s=format_bytes(round(load.bytes_per_s)), **left)
