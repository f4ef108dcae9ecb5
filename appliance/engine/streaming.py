"""How much of what a GPU misses it reads from the arena itself, and how much the host pool computes: found out by trying.

Which is faster depends on the cores, the bus, the weights' types and how much is missing. The bits do not.
"""

from __future__ import annotations

import statistics
import time

import structlog

from appliance.engine.graph import Graph

RATIOS = (0.0, 0.25, 0.5, 0.75)
NUM_TRIALS = 5
_log = structlog.get_logger()


def choose_streamed_ratio(graph: Graph, wanted: float | None = None) -> float:
    """Sets the ratio of the graph's card: the wanted one, or else that whose windows of one row are fastest. Returns it.

    Overwrites the first positions' keys and values.
    """
    if wanted is not None:
        graph.card.streamed_ratio = wanted  # type: ignore[attr-defined]
        return wanted
    took_s = {ratio: _window_s(graph, ratio) for ratio in RATIOS}
    best = min(took_s, key=took_s.__getitem__)
    graph.card.streamed_ratio = best  # type: ignore[attr-defined]
    _log.info(
        "a share of the missing experts is streamed", ratio=best, window_ms={ratio: round(s * 1000, 2) for ratio, s in took_s.items()}
    )
    return best


def _window_s(graph: Graph, ratio: float) -> float:
    graph.card.streamed_ratio = ratio  # type: ignore[attr-defined]
    graph.run([0], 0, 1)  # recorded now
    times = []
    for position in range(NUM_TRIALS):
        start = time.perf_counter()
        graph.run([position], position, 1)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
