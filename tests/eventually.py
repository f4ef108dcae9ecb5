"""Waiting with a deadline for what others do."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 60.0


def eventually(condition: Callable[[], bool], what: str, state: Callable[[], object] = lambda: "") -> None:
    """Polls until the condition holds; fails with `state()` after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {DEADLINE_S:g} s: {what}; {state()}")
        time.sleep(0.005)
