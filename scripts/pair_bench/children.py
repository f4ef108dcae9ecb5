"""Child processes with a limit. Their lines go into one log; a line `RESULT {json}` tells what they found, piece by piece."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = "RESULT "
LEAST_S = 3.0
"""Less time than this starts no child."""


@dataclass(frozen=True)
class Ended:
    """How a child ended: `ok`, `FAILED`, `stopped at its limit` or `not started`, and what it found till then."""

    result: str
    seconds: float
    found: dict[str, Any]
    last_line: str = ""

    @property
    def note(self) -> str:
        return "" if self.result == "ok" else f"{self.result}: {self.last_line}".rstrip(": ")


class Child:
    """Started at once, in a process group of its own. Confined to one thread."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, *, is_shown: bool = True, niceness: int = 0) -> None:
        """`is_shown`: its lines are printed, too."""
        self._name = name
        self._log = log
        self._is_shown = is_shown
        self._found: dict[str, Any] = {}
        self._last_line = ""
        self._start_s = time.monotonic()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            ["nice", "-n", str(niceness), *argv],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def finish(self, limit_s: float) -> Ended:
        """Waits so long at most, then kills what is left of the whole group."""
        try:
            code: int | None = self._process.wait(max(limit_s, 0))
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own children too: they hold cards and memory
        self._process.wait()
        self._reader.join(5)
        result = "ok" if code == 0 else "stopped at its limit" if code is None else f"FAILED with code {code}"
        return Ended(result, round(time.monotonic() - self._start_s, 1), self._found, self._last_line)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines, self._log.open("a") as log:
            for line in lines:
                log.write(f"[{self._name}] {line}")
                log.flush()
                self._take(line.rstrip())

    def _take(self, line: str) -> None:
        if line.startswith(RESULT):
            self._found |= json.loads(line.removeprefix(RESULT))
        if line:
            self._last_line = line
        if self._is_shown or line.startswith(RESULT):
            print(f"[{self._name}] {line[:600]}", flush=True)


def run_child(name: str, argv: Sequence[str], log: Path, limit_s: float, *, is_shown: bool = True) -> Ended:
    if limit_s < LEAST_S:
        return Ended("not started", 0.0, {}, "no time was left")
    return Child(name, argv, log, is_shown=is_shown).finish(limit_s)


def say(found: dict[str, Any]) -> None:
    """In a child: what it has found."""
    print(RESULT + json.dumps(found), flush=True)
