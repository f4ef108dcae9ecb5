"""Which share of expert uses a cache would have held: least recently used, and the best that knows the future.

Both see the uses that were recorded, window after window, layer after layer, and begin with the contents that the engine's cache had.
Both may copy any number of experts at any time, which no real cache can: they bound what a policy could reach.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from appliance.memory.policy import BoolTable, IntTable, Policy, Swap

Use = int
"""layer * experts + expert"""


class RecordingPolicy:
    """Another policy, and what it was told. Confined to the engine loop."""

    def __init__(self, policy: Policy, num_experts: int) -> None:
        """`num_experts`: per layer."""
        self._policy = policy
        self._num_experts = num_experts
        self.windows: list[NDArray[np.int64]] = []
        """Uses of each window or chunk, layers in order."""

    def observe(self, layers: IntTable, experts: IntTable, counts: IntTable, rows: int) -> None:
        self.windows.append(layers * self._num_experts + experts)
        self._policy.observe(layers, experts, counts, rows)

    def propose(self, resident: BoolTable, in_flight: BoolTable, limit: int) -> list[Swap]:
        return self._policy.propose(resident, in_flight, limit)


def lru_hits(uses: Sequence[Use], num_slots: int, held: Iterable[Use] = ()) -> float:
    """Ratio of uses that a least-recently-used cache holds; `held`: at the start, the least recent first."""
    cache = OrderedDict.fromkeys(list(held)[:num_slots])
    hits = 0
    for use in uses:
        if use in cache:
            hits += 1
            cache.move_to_end(use)
        elif num_slots:
            if len(cache) == num_slots:
                cache.popitem(last=False)
            cache[use] = None
    return hits / len(uses) if uses else 0.0


def clairvoyant_hits(uses: Sequence[Use], num_slots: int, held: Iterable[Use] = ()) -> float:
    """Ratio that the optimum holds: on a miss the one whose next use is farthest goes, or the newcomer is not kept at all.

    L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966, with bypass.
    """
    never = len(uses)
    next_uses = _next_uses(uses)
    first: dict[Use, int] = {}
    for index, use in enumerate(uses):
        first.setdefault(use, index)
    cache = {use: first.get(use, never) for use in list(held)[:num_slots]}
    farthest = [(-when, use) for use, when in cache.items()]
    heapq.heapify(farthest)
    hits = 0
    for index, use in enumerate(uses):
        hits += use in cache
        if use not in cache and len(cache) == num_slots:
            while farthest and cache.get(farthest[0][1]) != -farthest[0][0]:
                heapq.heappop(farthest)  # said before its latest use
            if not farthest or -farthest[0][0] <= next_uses[index]:
                continue
            del cache[heapq.heappop(farthest)[1]]
        cache[use] = next_uses[index]
        heapq.heappush(farthest, (-next_uses[index], use))
    return hits / len(uses) if uses else 0.0


def _next_uses(uses: Sequence[Use]) -> list[int]:
    """For each use the index of the next one of the same expert; len(uses) where there is none."""
    following = [len(uses)] * len(uses)
    latest: dict[Use, int] = {}
    for index in range(len(uses) - 1, -1, -1):
        following[index] = latest.get(uses[index], len(uses))
        latest[uses[index]] = index
    return following
