"""Tells the terminal how loading goes, and ends the server if it never becomes ready."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from appliance.desk.desk import Desk
from appliance.desk.status import DeskStatus, Phase
from appliance.sources.progress_log import ProgressLog

log = structlog.get_logger()

_LOOK_S = 0.2


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
        progress = ProgressLog()
        while not self._stopped.wait(_LOOK_S):
            status = self._desk.status()
            if status.unready_reason is None or status.phase in (Phase.DRAINING, Phase.FAILED):
                self._conclude(status)
                return
            if status.load is not None:
                progress.show(status.load)

    def _conclude(self, status: DeskStatus) -> None:
        if status.unready_reason is None:
            log.info("ready", url=self._url, lanes={lane.name: lane.state.value for lane in status.lanes})
        elif status.phase is Phase.FAILED:
            self._on_failure(status.reason or "the model could not be loaded; see the log")
