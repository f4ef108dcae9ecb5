"""Rows of a benchmark, written to a file as they are found: a run that is stopped leaves what it had, and names what it had not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class NotMeasuredError(Exception):
    """A row could not be measured; a clause."""


class Deadline:
    """The end of the time for everything."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())


class Record:
    """Confined to one thread."""

    def __init__(self, path: Path, about: dict[str, Any], names: Sequence[str]) -> None:
        """`names`: of all rows there are to be."""
        self._path = path
        self._about = about
        self._missing = dict.fromkeys(names, "the run ended before")
        self.rows: dict[str, dict[str, Any]] = {}
        self._write()

    def measure(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Prints and keeps the row. Raises NotMeasuredError as `measure` does."""
        self.rows[name] = row = measure()
        del self._missing[name]
        print(f"{name}: {json.dumps(row)}", flush=True)
        self._write()

    def miss(self, names: Sequence[str], reason: str) -> None:
        """These rows will not come; those that came already stay."""
        for name in names:
            if name in self._missing:
                self._missing[name] = reason
                print(f"{name}: NOT MEASURED, {reason}", flush=True)
        self._write()

    def _write(self) -> None:
        found = {"about": self._about, "rows": self.rows, "not_measured": self._missing}
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(found, indent=1) + "\n")
        unfinished.rename(self._path)
