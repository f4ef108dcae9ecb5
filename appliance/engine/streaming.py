"""How much of what a GPU misses it reads from the arena itself, and how much the host pool computes: found out while windows run.

Which is faster depends on the cores, the bus, the weights' types and how much is missing, and is another question when the pair wakes
or sleeps: half of the pool's threads, other experts missing. The bits do not depend on it, so windows that are wanted anyway try it.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import structlog

RATIOS = (0.0, 0.2, 0.35, 0.5, 0.75, 1.0)
FIRST_RATIO = 0.2
"""Before anything was tried: what a GPU beside sixteen cores comes to (docs/benchmarks/gpu.md)."""
NUM_ROUNDS = 2
"""In the second one the ratios come in the other order, and what is taken must be faster in both: times drift."""
ROUND_WINDOWS = 4
"""A ratio has so many windows one after the other, of which the first does not count: the pool may have slept before it."""
FIRST_PAUSE, LONGEST_PAUSE, PAUSE_GROWTH = 16, 4096, 8
"""Windows before the first survey and behind one that found another ratio, and at most between two; by how much each pause is longer
than the one before."""
WIDE_PAUSE = 1024
"""Surveys behind a pause as long as this try all ratios: there may be a better one behind one that is no better."""
CLEAR_GAIN_RATIO = 0.98
"""Of the time that windows take now: what is faster than that, in the mean of both rounds, is taken instead."""
_log = structlog.get_logger()


class _Survey:
    """Windows with each ratio in turn, and what they took."""

    def __init__(self, best: float, ratios: Sequence[float]) -> None:
        self.best = best
        self._seconds: list[dict[float, list[float]]] = [{ratio: [] for ratio in ratios} for _ in range(NUM_ROUNDS)]
        self.steps = self._steps()
        """The ratio of each window, and where its time belongs; None for one that does not count."""

    def _steps(self) -> Iterator[tuple[float, list[float] | None]]:
        for number, by_ratio in enumerate(self._seconds):
            for ratio in list(by_ratio) if number % 2 == 0 else reversed(by_ratio):
                yield from chain([(ratio, None)], repeat((ratio, by_ratio[ratio]), ROUND_WINDOWS - 1))

    def medians(self) -> list[dict[float, float]]:
        """Of each round. Empty if windows of some ratio were void in one of them."""
        if not all(seconds for by_ratio in self._seconds for seconds in by_ratio.values()):
            return []
        return [{ratio: statistics.median(seconds) for ratio, seconds in by_ratio.items()} for by_ratio in self._seconds]


@dataclass(slots=True, eq=False)
class _Findings:
    """What is known of one situation."""

    best: float
    pause: int = FIRST_PAUSE
    left: int = FIRST_PAUSE
    """Windows until the next survey."""
    survey: _Survey | None = None
    """The one under way."""

    def drop_survey(self) -> None:
        if self.survey is not None:
            self.survey, self.left = None, FIRST_PAUSE

    def conclude(self, survey: _Survey) -> None:
        self.survey = None
        self.pause = self.left = min(PAUSE_GROWTH * self.pause, LONGEST_PAUSE)
        rounds = survey.medians()
        if not rounds:
            return
        costs = {ratio: [medians[ratio] / medians[survey.best] for medians in rounds] for ratio in rounds[0]}
        faster = {ratio: statistics.mean(each) for ratio, each in costs.items() if max(each) < 1.0}
        best = min(faster, key=faster.__getitem__, default=survey.best)
        if faster.get(best, 1.0) >= CLEAR_GAIN_RATIO:
            return
        self.best, self.pause, self.left = best, FIRST_PAUSE, FIRST_PAUSE
        window_ms = {ratio: round(1000 * median, 2) for ratio, median in rounds[-1].items()}
        _log.info("another share of the missing experts is streamed", ratio=best, window_ms=window_ms)


class StreamedShare:
    """Chooses the streamed share of each window of one row. Confined to the engine loop."""

    def __init__(self, wanted: float | None = None) -> None:
        """`wanted`: this and no other, 0..1."""
        self._wanted = wanted
        self._findings: dict[Hashable, _Findings] = {}
        self._usual = FIRST_RATIO
        self._found: _Findings | None = None
        """Of the last window."""
        self._counted: list[float] | None = None
        """Where its time belongs."""

    @property
    def usual(self) -> float:
        """For windows of several rows."""
        return self._usual if self._wanted is None else self._wanted

    def begin_window(self, situation: Hashable) -> float:
        """The ratio of the window that begins. `situation`: what else may make another ratio the best, such as the pair's state."""
        if self._wanted is not None:
            return self._wanted
        found = self._findings.setdefault(situation, _Findings(self._usual))
        if self._found is not None and self._found is not found:
            self._found.drop_survey()  # its windows would be compared with much later ones
        self._found, self._counted = found, None
        if found.survey is None and found.left == 0:
            found.survey = _Survey(found.best, RATIOS if found.pause >= WIDE_PAUSE else _neighbours(found.best))
        step = next(found.survey.steps, None) if found.survey is not None else None
        if step is not None:
            ratio, self._counted = step
            return ratio
        if found.survey is not None:
            found.conclude(found.survey)
        found.left -= 1
        self._usual = found.best
        return found.best

    def leave_out(self) -> None:
        """The window that began last had to wait for something else."""
        self._counted = None

    def end_window(self, seconds: float) -> None:
        """How long the window took that began last. One that was void is left out."""
        if self._counted is not None:
            self._counted.append(seconds)


def _neighbours(ratio: float) -> tuple[float, ...]:
    """It and the next ones. What is far from the best takes up to twice its time, and nobody is to wait for that."""
    place = RATIOS.index(ratio)
    return RATIOS[max(0, place - 1) : place + 2]
