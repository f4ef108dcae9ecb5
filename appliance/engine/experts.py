"""The expert cache of one card: its slots, what lies in them, and the swaps between windows.

A swap takes three steps, so that nothing is read while it is written (DESIGN 3):

    boundary n        the victim leaves the residency table, behind all earlier work of the card
    meanwhile         the newcomer is copied into the slot on the copy thread
    boundary n + k    the copy is through: the newcomer enters the table

Memory that was taken again is filled in the same way, without victims: some experts at every boundary, so that the card serves
meanwhile. First come those that no card holds, hottest first, then copies of what another card holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from appliance.engine.cards import Card
from appliance.memory.layout import ArenaLayout
from appliance.memory.policy import ExpertId, Policy, Swap, blob_bytes_table
from appliance.memory.slots import SlotClass
from appliance.models.recording import Table
from appliance.units import MIB
from cuda_ext import _native as native

FILL_BYTES = 128 * MIB
MIN_FILLS, MAX_FILLS = 8, 64
"""Experts on their way into empty slots at one time: what so many bytes are, within these numbers."""

PART_BYTES = 4096 * MIB
"""Given back to the system, or taken from it, at one time: some 10 ms of a GPU's."""

_ABSENT = -1


@dataclass(frozen=True, slots=True)
class Uses:
    """What `rows` rows used since the last boundary: expert (layers[i], experts[i]) for counts[i] of them; arrays [n] int64."""

    layers: NDArray[np.int64]
    experts: NDArray[np.int64]
    counts: NDArray[np.int64]
    rows: int


@dataclass(frozen=True, slots=True)
class _Copy:
    """A newcomer on its way into a slot; `victim` is who was there."""

    newcomer: tuple[int, int]
    victim: tuple[int, int] | None
    slot: int
    ticket: int


_Start: TypeAlias = tuple[tuple[int, int], tuple[int, int] | None, int]
"""Newcomer, victim and slot."""


class ExpertCache:
    """Confined to the engine loop; the card reads the table while it runs."""

    def __init__(
        self,
        card: Card,
        table: Table,
        layout: ArenaLayout,
        policy: Policy,
        max_swaps: int,
        *,
        slots_card: Card | None = None,
        may_duplicate: bool = True,
    ) -> None:
        """`slots_card` has the slots and copies into them; None: `card`, in whose order tables change.

        `may_duplicate`: slots that stay empty otherwise take what another card holds. Of no use where that card is looked up first.
        """
        self._card = card
        self._slots_card = slots_card or card
        self._table = table
        self._layout = layout
        self._policy = policy
        self._max_swaps = max_swaps
        self._max_fills = min(max(MIN_FILLS, FILL_BYTES // layout.largest_blob_bytes), MAX_FILLS)
        shape = (len(layout.layers), max(blobs.num_experts for blobs in layout.layers))
        self._uses: NDArray[np.uint32] = table.uses.bytes()[: 4 * shape[0] * shape[1]].view(np.uint32).reshape(shape)
        self._resident = np.zeros(shape, dtype=np.bool_)
        self._in_flight = np.zeros(shape, dtype=np.bool_)
        self._slot_of: dict[tuple[int, int], int] = {}
        self._copies: list[_Copy] = []
        self._may_duplicate = may_duplicate
        self._sizes = blob_bytes_table(layout).reshape(-1)
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        """Who may fill empty slots, hottest first; flat indices (layer * experts + expert)."""
        self._has_more_fills = False
        """As far as the last boundary knows."""
        self._memories: list[native.View] = []
        """Of all slots, by size."""
        self._numbers: dict[int, list[int]] = {}
        """All slots, by blob size, the last first."""
        self._free_slots: dict[int, list[int]] = {}
        self._given_slots: dict[int, list[int]] = {}
        """By blob size: slots whose memory the system has back."""
        self.total_uses = np.zeros(shape, dtype=np.float64)
        """[layers, experts]: rows that used each expert since the start."""
        self.num_swaps = 0
        """Newcomers that have landed."""

    @property
    def num_slots(self) -> int:
        """Those that have memory."""
        return self._table.num_slots - sum(len(slots) for slots in self._given_slots.values())

    @property
    def num_resident(self) -> int:
        return len(self._slot_of)

    @property
    def resident(self) -> NDArray[np.bool_]:
        """[layers, experts]: what the table holds now. A copy."""
        return self._resident.copy()

    @property
    def held(self) -> NDArray[np.bool_]:
        """[layers, experts]: resident, or on the way in or out. A copy."""
        return self._resident | self._in_flight

    @property
    def is_filling(self) -> bool:
        """Empty slots are still being filled at boundaries."""
        return self._has_more_fills or any(copy.victim is None for copy in self._copies)

    @property
    def holds_all(self) -> bool:
        """Every expert is resident, and nothing is on its way."""
        return len(self._slot_of) == self._layout.num_experts and not self._copies

    def add_slots(self, classes: Sequence[SlotClass], *, present: bool = True) -> None:
        """Allocates the planned slots, all empty; if not `present`, they get memory when it is taken again."""
        for slots in classes:
            if slots.slots == 0:
                continue
            memory = self._slots_card.allocate_slots(slots.nbytes, present)
            numbers = [self._table.add_slot(memory.part(i * slots.blob_bytes, slots.blob_bytes)) for i in range(slots.slots)]
            self._memories.append(memory)
            self._numbers.setdefault(slots.blob_bytes, []).extend(reversed(numbers))
            self._free_slots.setdefault(slots.blob_bytes, [])
            empty = self._free_slots if present else self._given_slots
            empty.setdefault(slots.blob_bytes, []).extend(reversed(numbers))

    def fill(self, order: Sequence[ExpertId], progress: Callable[[int, int], None]) -> None:
        """Copies experts into free slots, first come first served, and returns when all are resident.

        `progress(done_bytes, total_bytes)` is called after every blob.
        """
        chosen = [(expert, slot) for expert in order if (slot := self._take_slot(expert.layer)) is not None]
        total_bytes = sum(self._blob_bytes(expert.layer) for expert, _ in chosen)
        done_bytes = 0
        for expert, slot in chosen:
            ticket = self._slots_card.copy(self._table.slot(slot), self._table.blob(expert.layer, expert.expert), 0)
            self._slots_card.wait_copied(ticket)
            done_bytes += self._blob_bytes(expert.layer)
            progress(done_bytes, total_bytes)
        self._card.wait(self._card.update(self._table, [self._enter(expert.layer, expert.expert, slot) for expert, slot in chosen]))

    def give_back(self, nbytes: int) -> int:
        """Gives the memory of slots back until it is at least `nbytes`. Returns how much it was.

        The last slots go first: a GPU gets its memory back in segments of many slots, and the hottest experts were put into the first.
        """
        self._has_more_fills = False
        self.settle()
        held_bytes = sum(size * (len(slots) - len(self._given_slots.get(size, []))) for size, slots in self._numbers.items())
        if nbytes >= held_bytes:
            for _ in self.giving_back_all():
                pass
            return held_bytes
        given_bytes = 0
        holders = {slot: place for place, slot in self._slot_of.items()}
        slots = [(slot, self._blob_bytes(layer)) for slot, (layer, _) in holders.items()]
        slots += [(slot, size) for size, free in self._free_slots.items() for slot in free]
        leaving = []
        for slot, size in sorted(slots, reverse=True):
            if given_bytes >= nbytes:
                break
            leaving.append((slot, size))
            given_bytes += size
        evicted = [holders[slot] for slot, _ in leaving if slot in holders]
        for place in evicted:
            self._free_slots.setdefault(self._blob_bytes(place[0]), []).append(self._slot_of.pop(place))
            self._resident[place] = False
        self._card.wait(self._card.update(self._table, [(*place, _ABSENT) for place in evicted]))
        for slot, size in leaving:
            self._give(size, slot)
        return given_bytes

    def giving_back_all(self) -> Iterator[None]:
        """Gives the memory of all slots back, a part at every step, so that no window waits long.

        No slot can be found any more after the first step; the memory is with the system when the steps end. Nothing else may be
        asked of the cache until then.
        """
        self._has_more_fills = False
        self.settle()
        evicted = [(*place, _ABSENT) for place in self._slot_of]
        self._slot_of.clear()
        self._resident[:] = False
        self._free_slots = {size: [] for size in self._numbers}
        self._given_slots = {size: list(numbers) for size, numbers in self._numbers.items()}
        self._card.wait(self._card.update(self._table, evicted))
        yield
        for memory in self._memories:
            for part in _parts(memory):
                part.discard()
                yield

    def take_again(self, order: Iterable[int]) -> None:
        """All steps of `taking_again` at once."""
        for _ in self.taking_again(order):
            pass

    def taking_again(self, order: Iterable[int]) -> Iterator[None]:
        """Takes the memory of all slots again, a part at every step, so that no window waits long. The boundaries after the last step fill
        them in `order`, flat indices (layer * experts + expert). Nothing else may be asked of the cache before.

        Raises MemoryError, with the slots taken so far given back, when the system does not have it any more.
        """
        if self.num_slots == 0:
            yield from self._taking_all()
        else:
            self._take_given()
        self._given_slots.clear()
        self._order = np.fromiter(order, dtype=np.int64)
        self._has_more_fills = True

    def _taking_all(self) -> Iterator[None]:
        try:
            for memory in self._memories:
                for part in _parts(memory):
                    part.touch()
                    yield
        except MemoryError:
            for memory in self._memories:
                memory.discard()
            raise
        self._free_slots = {size: list(numbers) for size, numbers in self._numbers.items()}

    def _take_given(self) -> None:
        taken: list[tuple[int, int]] = []
        try:
            for size, slots in self._given_slots.items():
                for slot in slots:
                    self._table.slot(slot).touch()
                    taken.append((size, slot))
        except MemoryError:
            for _, slot in taken:
                self._table.slot(slot).discard()
            raise
        for size, slot in taken:
            self._free_slots[size].append(slot)

    def forget_uses(self) -> None:
        """Drops the use counts of the runs so far, such as a warm-up's."""
        self._uses[:] = 0

    def read_uses(self, rows: int) -> Uses:
        """What the last `rows` rows used; the counts begin anew."""
        flat_uses = self._uses.reshape(-1)
        used = np.flatnonzero(flat_uses != 0)  # five times as fast as of the numbers themselves, and this is done in every window
        counts = flat_uses[used].astype(np.int64)
        flat_uses[used] = 0
        return Uses(*np.divmod(used, self._uses.shape[1]), counts, rows)

    def between_windows(self, uses: Uses, elsewhere: NDArray[np.bool_] | None = None) -> None:
        """Tells the policy what was used, lets landed newcomers in, starts new swaps and fills.

        `elsewhere`, [layers, experts]: what another card holds for this engine; it is brought here only for slots that nothing
        else is left for.
        """
        self.note(uses)
        entries = self._land()
        starting = self._start_fills(elsewhere)
        starting += self._start_swaps(self._in_flight if elsewhere is None else self._in_flight | elsewhere)
        entries += [(*victim, _ABSENT) for _, victim, _ in starting if victim is not None]
        if not entries and not starting:
            return
        self._card.wait(self._card.update(self._table, entries))
        for newcomer, victim, slot in starting:
            copied = self._slots_card.copy(self._table.slot(slot), self._table.blob(*newcomer), 0)
            self._copies.append(_Copy(newcomer, victim, slot, copied))

    def settle(self) -> None:
        """Waits for the swaps under way and lets their newcomers in."""
        for copy in self._copies:
            self._slots_card.wait_copied(copy.ticket)
        self._card.wait(self._card.update(self._table, self._land()))

    def note(self, uses: Uses) -> None:
        """Adds to the totals, and tells the policy."""
        if uses.layers.size == 0:
            return
        self.total_uses[uses.layers, uses.experts] += uses.counts
        if self._max_swaps > 0:
            self._policy.observe(uses.layers, uses.experts, uses.counts, uses.rows)

    def _start_swaps(self, busy: NDArray[np.bool_]) -> list[_Start]:
        """(newcomer, victim, slot) of the swaps that begin now."""
        limit = self._max_swaps - sum(copy.victim is not None for copy in self._copies)
        swaps = self._policy.propose(self._resident, busy, limit) if limit > 0 else []
        return [((swap.layer, swap.expert), (swap.victim_layer, swap.victim_expert), self._leave(swap)) for swap in swaps]

    def _start_fills(self, elsewhere: NDArray[np.bool_] | None) -> list[_Start]:
        """(newcomer, nobody, slot) of the empty slots that are filled now."""
        limit = self._max_fills - sum(copy.victim is None for copy in self._copies)
        starting = self._fill_from(elsewhere, limit)
        if elsewhere is not None and self._may_duplicate:
            starting += self._fill_from(None, limit - len(starting))
        self._has_more_fills = len(starting) >= limit and any(self._free_slots.values())
        return starting

    def _fill_from(self, elsewhere: NDArray[np.bool_] | None, limit: int) -> list[_Start]:
        """At most `limit` fills with what is neither here nor `elsewhere`."""
        sizes = [size for size, free in self._free_slots.items() if free]
        if limit <= 0 or not sizes:
            return []
        held = self.held if elsewhere is None else self.held | elsewhere
        if np.count_nonzero(held) == self._layout.num_experts:
            return []
        wanted = self._order[~held.reshape(-1)[self._order]]
        starting: list[_Start] = []
        for flat in wanted[np.isin(self._sizes[wanted], sizes)].tolist():
            place = divmod(flat, self._resident.shape[1])
            if (slot := self._take_slot(place[0])) is None:
                continue
            self._in_flight[place] = True
            starting.append((place, None, slot))
            if len(starting) == limit:
                break
        return starting

    def _land(self) -> list[tuple[int, int, int]]:
        """Table entries of the newcomers whose copies are through."""
        landed: list[_Copy] = []
        under_way: list[_Copy] = []
        for copy in self._copies:
            (landed if self._slots_card.copied(copy.ticket) else under_way).append(copy)
        self._copies = under_way
        for copy in landed:
            self._in_flight[copy.newcomer] = False
            if copy.victim is not None:
                self._in_flight[copy.victim] = False
                self.num_swaps += 1
        return [self._enter(*copy.newcomer, copy.slot) for copy in landed]

    def _enter(self, layer: int, expert: int, slot: int) -> tuple[int, int, int]:
        self._resident[layer, expert] = True
        self._slot_of[layer, expert] = slot
        return layer, expert, slot

    def _leave(self, swap: Swap) -> int:
        """Marks a swap's two experts as in flight; returns the victim's slot."""
        self._in_flight[swap.layer, swap.expert] = True
        self._in_flight[swap.victim_layer, swap.victim_expert] = True
        self._resident[swap.victim_layer, swap.victim_expert] = False
        return self._slot_of.pop((swap.victim_layer, swap.victim_expert))

    def _give(self, blob_bytes: int, slot: int) -> int:
        """Moves an empty slot to those without memory; returns its size."""
        self._free_slots[blob_bytes].remove(slot)
        self._table.slot(slot).discard()
        self._given_slots.setdefault(blob_bytes, []).append(slot)
        return blob_bytes

    def _take_slot(self, layer: int) -> int | None:
        free = self._free_slots.get(self._blob_bytes(layer))
        return free.pop() if free else None

    def _blob_bytes(self, layer: int) -> int:
        return self._layout.layers[layer].blob.nbytes


def _parts(memory: native.View) -> Iterator[native.View]:
    for begin in range(0, memory.nbytes, PART_BYTES):
        yield memory.part(begin, min(PART_BYTES, memory.nbytes - begin))
