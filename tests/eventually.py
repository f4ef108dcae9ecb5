"""Waiting with a deadline for what others do."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 60.0


def eventually(condition: Callable[[], bool], what: str, state: Callable[[], object] = lambda: "", *, limit_s: float = DEADLINE_S) -> None:
    """Polls until the condition holds; fails with `state()` after the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s:g} s: {what}; {state()}")
        time.sleep(0.005)
