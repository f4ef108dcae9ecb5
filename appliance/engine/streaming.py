"""How much of what a GPU misses it reads from the arena itself, and how much the host pool computes: found out by trying.

Which is faster depends on the cores, the bus, the weights' types and how much is missing. The bits do not.
"""

from __future__ import annotations

import fcntl
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from appliance.engine.graph import Graph
from appliance.memory.arena import try_lock

RATIOS = (0.0, 0.25, 0.35, 0.45, 0.55, 0.75, 1.0)
NUM_TRIALS = 9
TOKEN_STRIDE = 7919
"""Tokens of a trial are far from each other: neighbours may want the same experts."""
CLEAR_GAIN_RATIO = 1.1
"""By how much streaming must be faster than none: other work disturbs the trial, and streams are in the way of copies."""
PATIENCE_S = 10.0
"""How long an engine waits for another one's trial."""
_log = structlog.get_logger()


def choose_streamed_ratio(graph: Graph, vocab: int, shm_dir: Path, wanted: float | None = None) -> float:
    """Sets the ratio of the graph's card: the wanted one, or else that whose windows of one row are fastest. Returns it.
    Engines that share an arena try one after the other.

    Overwrites the first positions' keys and values.
    """
    if wanted is not None:
        graph.card.streamed_ratio = wanted  # type: ignore[attr-defined]
        return wanted
    with _alone(shm_dir):
        _window_s(graph, RATIOS[0], vocab)  # what the pool reads for the first time takes it several times as long
        took_s = {ratio: _window_s(graph, ratio, vocab) for ratio in RATIOS}
    best = min(took_s, key=took_s.__getitem__)
    if took_s[best] * CLEAR_GAIN_RATIO > took_s[RATIOS[0]]:
        best = RATIOS[0]
    graph.card.streamed_ratio = best  # type: ignore[attr-defined]
    _log.info(
        "a share of the missing experts is streamed", ratio=best, window_ms={ratio: round(s * 1000, 2) for ratio, s in took_s.items()}
    )
    return best


def _window_s(graph: Graph, ratio: float, vocab: int) -> float:
    graph.card.streamed_ratio = ratio  # type: ignore[attr-defined]
    graph.run([0], 0, 1)  # recorded now
    times = []
    for position in range(NUM_TRIALS):
        start = time.perf_counter()
        graph.run([position * TOKEN_STRIDE % vocab], position, 1)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@contextmanager
def _alone(shm_dir: Path) -> Iterator[None]:
    """Holds a lock on the folder that engines have in common; goes on without it if it is not to be had."""
    folder = os.open(shm_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not try_lock(folder, fcntl.LOCK_EX) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield
    finally:
        os.close(folder)
