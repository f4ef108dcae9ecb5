"""Synthetic routing of a conversation, and caches to compare with: what a swap policy is measured on.

A trace is [windows, layers, top_k] expert numbers. Every topic has its own Zipf order of the experts of each layer; topics
change now and then; and an expert that was used lately is likelier to be used again. With the values of `TRACES`, least
recently used hits about what it hits in real models (67 % with an eighth of the experts, 81 to 89 % with a quarter).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.memory.policy import Policy, Swap, fill_order

Trace = NDArray[np.int64]


@dataclass(frozen=True)
class TraceShape:
    layers: int
    experts: int
    top_k: int
    zipf: float
    """Exponent of the topics' popularity."""
    topic_windows: int
    """Mean length of a topic."""
    topics: int
    stickiness: float
    """What a use adds to an expert's log-probability; it fades by 5 % a window."""


TRACES = {
    "flat": TraceShape(6, 128, 8, 0.7, 400, 8, 3.0),
    "steep": TraceShape(6, 128, 8, 1.0, 400, 8, 2.0),
    "fine": TraceShape(3, 512, 10, 0.9, 500, 8, 2.0),
}


@dataclass(frozen=True)
class CacheResult:
    hit_ratio: float
    swaps_per_window: float


def make_trace(shape: TraceShape, windows: int, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    log_popularity = -shape.zipf * np.log(1 + np.arange(shape.experts))
    size = (shape.layers, shape.experts)
    topics = [np.stack([log_popularity[rng.permutation(shape.experts)] for _ in range(shape.layers)]) for _ in range(shape.topics)]
    topic = topics[0]
    recent = np.zeros(size)
    trace = np.empty((windows, shape.layers, shape.top_k), np.int64)
    for window in range(windows):
        if rng.random() < 1 / shape.topic_windows:
            topic = topics[rng.integers(shape.topics)]
        scores = topic + recent + rng.gumbel(size=size)
        used = np.argpartition(-scores, shape.top_k - 1, axis=1)[:, : shape.top_k]
        trace[window] = used
        recent *= 0.95
        np.put_along_axis(recent, used, shape.stickiness, axis=1)
    return trace


def run_least_recently_used(trace: Trace, shape: TraceShape, slots: int) -> CacheResult:
    """Every miss is copied in at once: the textbook cache, which costs a swap per miss."""
    held: OrderedDict[int, None] = OrderedDict((flat, None) for flat in range(slots))
    hits = swaps = 0
    for window in trace + shape.experts * np.arange(shape.layers)[:, None]:
        for flat in window.reshape(-1).tolist():
            if flat in held:
                hits += 1
                held.move_to_end(flat)
            else:
                held.popitem(last=False)
                held[flat] = None
                swaps += 1
    return CacheResult(hits / trace.size, swaps / len(trace))


def run_static(trace: Trace, shape: TraceShape, slots: int, learned_from: Trace) -> CacheResult:
    """The experts that another text used most."""
    uses = np.zeros((shape.layers, shape.experts))
    np.add.at(uses, (np.arange(shape.layers)[None, :, None], learned_from), 1)
    held = np.zeros(uses.shape, np.bool_)
    held.reshape(-1)[np.argsort(-uses, axis=None, kind="stable")[:slots]] = True
    return CacheResult(float(held[np.arange(shape.layers)[None, :, None], trace].mean()), 0.0)


def run_policy(policy: Policy, trace: Trace, shape: TraceShape, slots: int, limit: int) -> CacheResult:
    """A cache of one size class as the engine runs it: a swap lands one window after it was begun."""
    blob_bytes = np.full((shape.layers, shape.experts), 256)
    resident = np.zeros(blob_bytes.shape, np.bool_)
    in_flight = np.zeros(blob_bytes.shape, np.bool_)
    for place in fill_order(np.zeros(blob_bytes.shape), blob_bytes, {256: slots}):
        resident[place.layer, place.expert] = True
    layers = np.repeat(np.arange(shape.layers), shape.top_k)
    once = np.ones(layers.size, np.int64)
    hits = num_swaps = 0
    landing: list[Swap] = []
    for window in trace:
        for swap in landing:
            resident[swap.layer, swap.expert] = True
        in_flight[:] = False
        experts = window.reshape(-1)
        hits += int(resident[layers, experts].sum())
        policy.observe(layers, experts, once, 1)
        landing = policy.propose(resident, in_flight, limit)
        for swap in landing:
            resident[swap.victim_layer, swap.victim_expert] = False
            in_flight[[swap.layer, swap.victim_layer], [swap.expert, swap.victim_expert]] = True
        num_swaps += len(landing)
    return CacheResult(hits / trace.size, num_swaps / len(trace))
