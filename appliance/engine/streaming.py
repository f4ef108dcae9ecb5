"""How much of what a GPU misses it reads from the arena itself, and how much the host pool computes: found out while windows run.

Which is faster depends on the cores, the bus, the weights' types and how much is missing, and is another question when the pair wakes
or sleeps: half of the pool's threads, other experts missing. The bits do not depend on it, so windows that are wanted anyway try it.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat

import structlog

RATIOS = (0.0, 0.2, 0.35, 0.5, 0.75, 1.0)
FIRST_RATIO = 0.35
"""Before anything was tried."""
NUM_ROUNDS = 3
ROUND_WINDOWS = 4
"""A ratio has so many windows one after the other, of which the first does not count: the pool may have slept before it."""
FIRST_PAUSE, LONGEST_PAUSE, PAUSE_GROWTH = 16, 4096, 8
"""Windows before the first survey and at most between two, and by how much each pause is longer than the one before: early findings
are doubtful, since what the pool reads for the first time takes it several times as long."""
NEWS_WEIGHT = 0.75
"""Of a survey, against all earlier ones."""
CLEAR_GAIN_RATIO = 0.98
"""Of the time that windows take now: what is faster than that is taken instead."""
_log = structlog.get_logger()


@dataclass(slots=True)
class _Findings:
    """What is known of one situation."""

    best: float
    pause: int = FIRST_PAUSE
    left: int = FIRST_PAUSE
    """Windows until the next survey."""
    plan: Iterator[tuple[float, bool]] | None = None
    """The rest of the survey under way: ratios, and whether the window counts."""
    seconds: dict[float, list[float]] = field(default_factory=dict)
    """Of the survey under way."""
    costs: dict[float, float] = field(default_factory=dict)
    """Time of a window relative to the mean of all ratios, by ratio."""


class StreamedShare:
    """Chooses the streamed share of each window of one row. Confined to the engine loop."""

    def __init__(self, wanted: float | None = None) -> None:
        """`wanted`: this and no other, 0..1."""
        self._wanted = wanted
        self._findings: dict[Hashable, _Findings] = {}
        self._usual = FIRST_RATIO
        self._counted: tuple[_Findings, float] | None = None

    @property
    def usual(self) -> float:
        """For windows of several rows."""
        return self._usual if self._wanted is None else self._wanted

    def begin_window(self, situation: Hashable) -> float:
        """The ratio of the window that begins. `situation`: what else may make another ratio the best, such as the pair's state."""
        if self._wanted is not None:
            return self._wanted
        found = self._findings.setdefault(situation, _Findings(self._usual))
        self._counted = None
        if found.plan is None and found.left == 0:
            found.plan = _survey()
        step = next(found.plan, None) if found.plan is not None else None
        if step is not None:
            ratio, counts = step
            if counts:
                self._counted = (found, ratio)
            return ratio
        if found.plan is not None:
            self._conclude(found)
        found.left -= 1
        self._usual = found.best
        return found.best

    def end_window(self, seconds: float) -> None:
        """How long the window took that began last. One that was void is left out."""
        if self._counted is None:
            return
        found, ratio = self._counted
        found.seconds.setdefault(ratio, []).append(seconds)

    def _conclude(self, found: _Findings) -> None:
        found.plan = None
        found.pause = found.left = min(PAUSE_GROWTH * found.pause, LONGEST_PAUSE)
        if len(found.seconds) < len(RATIOS):  # windows were void
            found.seconds = {}
            return
        medians = {ratio: statistics.median(seconds) for ratio, seconds in found.seconds.items()}
        mean = statistics.mean(medians.values())
        for ratio, median in medians.items():
            cost = median / mean
            known = found.costs.get(ratio, cost)
            found.costs[ratio] = known + NEWS_WEIGHT * (cost - known)
        found.seconds = {}
        best = min(found.costs, key=found.costs.__getitem__)
        if found.costs[best] >= CLEAR_GAIN_RATIO * found.costs.get(found.best, 1.0):
            return
        found.best = best
        window_ms = {ratio: round(1000 * median, 2) for ratio, median in medians.items()}
        _log.info("another share of the missing experts is streamed", ratio=best, window_ms=window_ms)


def _survey() -> Iterator[tuple[float, bool]]:
    for _ in range(NUM_ROUNDS):
        for ratio in RATIOS:
            yield from chain([(ratio, False)], repeat((ratio, True), ROUND_WINDOWS - 1))
