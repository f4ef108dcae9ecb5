"""Which experts belong into a card's slots: the fill at start, and the swaps between windows. Pure: it moves no bytes.

Experts are numbered by (layer, expert); a table over them is an array [layers, experts]. Slots come in size classes, one
per blob size, and a swap stays within its class; `blob_bytes_table` gives every expert's class (0: there is no such expert).

`SwapPolicy` scores an expert by its uses, each worth half as much after `HALF_LIFE_TURNS`. Only an expert that the last window
missed may come in, and only for a resident that scores clearly less. Whether that pays it finds out afterwards: where newcomers are
used no more than their victims, as where a router has no habits, it goes on with few swaps. docs/arena.md has the measurements
behind the constants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from appliance.memory.layout import ArenaLayout

BoolTable = npt.NDArray[np.bool_]
IntTable = npt.NDArray[np.int64]
FloatTable = npt.NDArray[np.float64]

HALF_LIFE_TURNS = 1.0
"""In turns: experts / top-k, the mean number of rows between two uses of one expert."""
MARGIN_RATIO = 1.25
MARGIN_USES = 0.4
"""A newcomer's score must exceed `MARGIN_RATIO` times the victim's by this many uses."""
COPY_COST_USES = 1.0
"""A swap must gain so many uses to have been worth its copy."""
LEAST_PACE = 1 / 64
PACE_STEP = 1.05
"""Swaps that do not gain slow down to this share of those allowed, by this factor a window."""
PRIOR_USES = 0.1
"""What the hottest rank of the profile is worth at the start, the coldest 0: it decides between experts not used yet."""

_RESCALE_AT = 1e100
_FORGOTTEN_HALF_LIVES = 64.0


@dataclass(frozen=True, slots=True)
class ExpertId:
    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class Swap:
    """The slot of (victim_layer, victim_expert) is to hold (layer, expert), a blob of the same size."""

    layer: int
    expert: int
    victim_layer: int
    victim_expert: int


class Policy(Protocol):
    """What the expert cache asks. Confined to the engine loop."""

    def observe(self, layers: IntTable, experts: IntTable, counts: IntTable, rows: int) -> None:
        """One window or chunk of `rows` rows used expert (layers[i], experts[i]) for counts[i] of them; arrays [n], pairs distinct."""

    def propose(self, resident: BoolTable, in_flight: BoolTable, limit: int) -> list[Swap]:
        """At most `limit` swaps, most useful first; no expert is in two of them.

        Newcomers are neither `resident` nor `in_flight`, victims `resident` and not `in_flight`. An expert is in flight while
        a swap that names it, either way, has not landed.
        """


def blob_bytes_table(layout: ArenaLayout) -> IntTable:
    """[layers, experts] int64: the blob size of each expert, which is its size class; 0 where a layer has no such expert."""
    layers = 1 + max(blobs.layer for blobs in layout.layers)
    experts = max(blobs.num_experts for blobs in layout.layers)
    table = np.zeros((layers, experts), dtype=np.int64)
    for blobs in layout.layers:
        table[blobs.layer, : blobs.num_experts] = blobs.blob.nbytes
    return table


def rank_experts(uses: FloatTable, blob_bytes: IntTable) -> IntTable:
    """Flat indices (layer * experts + expert) of all experts, most used first.

    Ties go to the lower expert number and then to the lower layer, so that a profile without uses spreads over all layers.
    """
    layers, experts = np.nonzero(blob_bytes)
    order = np.lexsort((layers, experts, -uses[layers, experts]))
    return np.ravel_multi_index((layers[order], experts[order]), blob_bytes.shape).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Share:
    """Which of a profile's ranks one of `count` caches, at most two, takes first, so that they hold different experts."""

    index: int = 0
    count: int = 1
    second_ratio: float = 0.5
    """What the second of two takes of the ranks, spread evenly over them; 0.5 is every second rank."""

    def takes(self, num_ranks: int) -> BoolTable:
        """[ranks]"""
        second_ratio = self.second_ratio if self.count > 1 else 0.0
        of_second: BoolTable = np.diff(np.floor(np.arange(num_ranks + 1) * second_ratio)) > 0
        return of_second if self.index == 1 else ~of_second


WHOLE = Share()


def fill_order(uses: FloatTable, blob_bytes: IntTable, slots: Mapping[int, int], share: Share = WHOLE) -> list[ExpertId]:
    """`fill_ranks` as experts."""
    num_experts = blob_bytes.shape[1]
    return [ExpertId(*divmod(flat, num_experts)) for flat in fill_ranks(uses, blob_bytes, slots, share).tolist()]


def fill_ranks(uses: FloatTable, blob_bytes: IntTable, slots: Mapping[int, int], share: Share = WHOLE) -> IntTable:
    """Flat indices of the experts that fill `slots` (blob size -> number of slots), hottest first.

    Of each class's ranking the cache takes its share first, and only when that is used up the hottest of the rest.
    """
    ranking = rank_experts(uses, blob_bytes)
    chosen = np.zeros(blob_bytes.size, dtype=np.bool_)
    for nbytes, num_slots in slots.items():
        ranks = ranking[blob_bytes.flat[ranking] == nbytes]
        own = share.takes(ranks.size)
        chosen[np.concatenate([ranks[own], ranks[~own]])[:num_slots]] = True
    return ranking[chosen[ranking]]


class SwapPolicy:
    """Swaps towards the experts in use now. Confined to the engine loop.

    A use is worth `_unit`, and instead of all scores shrinking, `_unit` grows: a window costs work only for what it used.
    """

    def __init__(self, blob_bytes: IntTable, uses: FloatTable, *, experts_per_row: int) -> None:
        """`uses` are the profile's, both tables [layers, experts].

        `experts_per_row` is the model's top-k; with the number of experts it sets how fast uses are forgotten.
        """
        self._shape = blob_bytes.shape
        self._class_masks = [blob_bytes.reshape(-1) == nbytes for nbytes in np.unique(blob_bytes[blob_bytes > 0])]
        self._half_life_rows = HALF_LIFE_TURNS * blob_bytes.shape[1] / experts_per_row
        ranking = rank_experts(uses, blob_bytes)
        self._scores: FloatTable = np.zeros(blob_bytes.size)
        self._scores[ranking] = np.linspace(PRIOR_USES, 0.0, ranking.size)
        self._unit = 1.0
        self._used: list[IntTable] = []
        self._gain = _Gain(blob_bytes.size, self._half_life_rows)

    def observe(self, layers: IntTable, experts: IntTable, counts: IntTable, rows: int) -> None:
        self._unit *= 2.0 ** min(rows / self._half_life_rows, _FORGOTTEN_HALF_LIVES)
        if self._unit > _RESCALE_AT:
            self._scores /= self._unit
            self._unit = 1.0
        flat = layers * self._shape[1] + experts
        self._scores[flat] += counts * self._unit
        self._used.append(flat)
        self._gain.observe(flat, counts, rows)

    def propose(self, resident: BoolTable, in_flight: BoolTable, limit: int) -> list[Swap]:
        used, self._used = self._used, []
        if not used or (limit := self._gain.allowed(limit)) <= 0:
            return []
        recent = used[0] if len(used) == 1 else np.unique(np.concatenate(used))
        flat_resident, flat_busy = resident.reshape(-1), in_flight.reshape(-1)
        newcomers = recent[~(flat_resident[recent] | flat_busy[recent])]
        eligible = flat_resident & ~flat_busy
        pairs: list[tuple[float, int, int]] = []
        for mask in self._class_masks:
            rivals = newcomers[mask[newcomers]]
            if rivals.size:
                pairs += self._pair(rivals, np.flatnonzero(eligible & mask), limit)
        pairs.sort(reverse=True)
        chosen = [(newcomer, victim) for _, newcomer, victim in pairs[:limit]]
        self._gain.began(chosen)
        num_experts = self._shape[1]
        return [Swap(*divmod(newcomer, num_experts), *divmod(victim, num_experts)) for newcomer, victim in chosen]

    def score(self, layer: int, expert: int) -> float:
        """Uses of the expert, decayed to the last observed row."""
        return float(self._scores[layer * self._shape[1] + expert] / self._unit)

    def _pair(self, newcomers: IntTable, victims: IntTable, limit: int) -> list[tuple[float, int, int]]:
        """(gain, newcomer, victim): the hottest newcomer with the coldest victim, and so on while it pays."""
        number = min(limit, newcomers.size, victims.size)
        if number == 0:
            return []
        hottest = _smallest(newcomers, -self._scores[newcomers], number)
        coldest = _smallest(victims, self._scores[victims], number)
        coming, going = self._scores[hottest], self._scores[coldest]
        pays = coming > going * MARGIN_RATIO + MARGIN_USES * self._unit
        return list(zip((coming - going)[pays].tolist(), hottest[pays].tolist(), coldest[pays].tolist(), strict=True))


class _Gain:
    """What the swaps of the last turns were worth: uses of their newcomers less those of their victims, against their copies."""

    def __init__(self, num_experts: int, memory_rows: float) -> None:
        self._memory_rows = memory_rows
        self._signs = np.zeros(num_experts, dtype=np.int8)
        """1 for a newcomer of late, -1 for a victim."""
        self._recent: deque[tuple[int, int, int]] = deque()
        """(row, newcomer, victim)"""
        self._row = 0
        self._gained = 0.0
        self._paid = 0.0
        self._pace = 1.0
        self._owed = 0.0

    def observe(self, flat: IntTable, counts: IntTable, rows: int) -> None:
        """What `rows` rows used."""
        self._row += rows
        kept = 0.5 ** min(rows / self._memory_rows, _FORGOTTEN_HALF_LIVES)
        self._gained = self._gained * kept + float((self._signs[flat] * counts).sum())
        self._paid *= kept
        while self._recent and self._recent[0][0] < self._row - 2 * self._memory_rows:
            _, newcomer, victim = self._recent.popleft()
            self._signs[[newcomer, victim]] = 0
        faster = self._gained >= self._paid
        self._pace = min(1.0, self._pace * PACE_STEP) if faster else max(LEAST_PACE, self._pace / PACE_STEP)

    def allowed(self, limit: int) -> int:
        """How many of `limit` swaps may begin now."""
        self._owed = min(self._owed + limit * self._pace, float(max(limit, 0)))
        return int(self._owed)

    def began(self, swaps: Sequence[tuple[int, int]]) -> None:
        """These (newcomer, victim) are on their way."""
        self._owed -= len(swaps)
        self._paid += COPY_COST_USES * len(swaps)
        for newcomer, victim in swaps:
            self._signs[newcomer], self._signs[victim] = 1, -1
            self._recent.append((self._row, newcomer, victim))


class AlwaysSwap:
    """Swaps `limit` experts in every window, useful or not: it shows that placement does not change the answer.

    Confined to the engine loop.
    """

    def __init__(self, blob_bytes: IntTable) -> None:
        self._shape = blob_bytes.shape
        self._classes = blob_bytes.reshape(-1)
        self._next = 0

    def observe(self, layers: IntTable, experts: IntTable, counts: IntTable, rows: int) -> None:
        """Nothing that it is told matters to it."""

    def propose(self, resident: BoolTable, in_flight: BoolTable, limit: int) -> list[Swap]:
        turn = np.roll(np.arange(self._classes.size), -self._next)
        self._next = (self._next + max(limit, 1)) % self._classes.size
        free = ~in_flight.reshape(-1)[turn]
        held = resident.reshape(-1)[turn]
        swaps: list[Swap] = []
        for nbytes in np.unique(self._classes[self._classes > 0]):
            usable = free & (self._classes[turn] == nbytes)
            pairs = zip(turn[usable & ~held].tolist(), turn[usable & held].tolist(), strict=False)
            swaps += [Swap(*divmod(new, self._shape[1]), *divmod(old, self._shape[1])) for new, old in pairs]
        first = self._next % max(len(swaps), 1)
        return (swaps[first:] + swaps[:first])[:limit]


def _smallest(items: IntTable, keys: FloatTable, number: int) -> IntTable:
    """The `number` items with the smallest keys, smallest first."""
    if number < items.size:
        within = np.flatnonzero(keys <= np.partition(keys, number - 1)[number - 1])  # ties may make it a few more
        items, keys = items[within], keys[within]
    return items[np.argsort(keys, kind="stable")[:number]]
