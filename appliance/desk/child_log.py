"""What a child writes to stderr: passed on to our log, and searched for the reason of its death."""

from __future__ import annotations

import json
from dataclasses import dataclass

import structlog

from appliance.desk.line_splitter import LineSplitter

_LONGEST_LINE_BYTES = 64 * 1024
_LONGEST_LAST_WORDS = 500
_CRASH = "Fatal Python error: "
"""How Python's fault handler begins; what follows it are stacks."""
_LEVELS = frozenset({"debug", "info", "warning", "error", "critical"})
_COMPLAINTS = frozenset({"error", "critical"})

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Record:
    """One line in our own form of the log."""

    level: str
    message: str
    fields: dict[str, object]


class ChildLog:
    """Confined to the child's thread."""

    def __init__(self, lane: str) -> None:
        self.last_words: str | None = None
        """The last line that nobody meant as a log line (a traceback's last, a library's cry), or the last error logged."""
        self.has_complained = False
        """It was an error logged."""
        self._lane = lane
        self._lines = LineSplitter(_LONGEST_LINE_BYTES)
        self._has_crashed = False

    def take(self, data: bytes) -> None:
        """More bytes of stderr."""
        for text in self._lines.feed(data):
            if text is None:
                _log.warning("a line of more than the limit was dropped", lane=self._lane, limit_bytes=_LONGEST_LINE_BYTES)
            elif text.strip():
                self._take_line(text.strip())

    def _take_line(self, text: str) -> None:
        record = _parse(text)
        if record is None:
            _log.info(text, lane=self._lane)
            self._remember(text, is_complaint=False)
        else:
            getattr(_log, record.level)(record.message, **{**record.fields, "lane": self._lane})
            if record.level in _COMPLAINTS:
                self._remember(record.message, is_complaint=True)

    def _remember(self, words: str, *, is_complaint: bool) -> None:
        if not self._has_crashed:
            self._has_crashed = words.startswith(_CRASH)
            self.last_words = words[:_LONGEST_LAST_WORDS]
            self.has_complained = is_complaint


def _parse(text: str) -> _Record | None:
    """None for what is not a line of our own log."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("level") not in _LEVELS or not isinstance(fields.get("event"), str):
        return None
    level, message = fields.pop("level"), fields.pop("event")
    fields.pop("timestamp", None)
    return _Record(level, message, fields)
