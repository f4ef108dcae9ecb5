"""The expert cache of one card: its slots, what lies in them, and the swaps between windows.

A swap takes three steps, so that nothing is read while it is written (DESIGN 3):

    boundary n        the victim leaves the residency table, behind all earlier work of the card
    meanwhile         the newcomer is copied into the slot on the copy thread
    boundary n + k    the copy is through: the newcomer enters the table
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.memory.layout import ArenaLayout
from appliance.memory.policy import ExpertId, Policy, Swap
from appliance.memory.slots import SlotClass
from cuda_ext import _native as native

_ABSENT = -1


@dataclass(frozen=True, slots=True)
class _Copy:
    """A newcomer on its way into a slot."""

    swap: Swap
    slot: int
    ticket: int


class ExpertCache:
    """Confined to the engine loop; the card reads the table while it runs."""

    def __init__(
        self, card: native.HostCard, table: native.ExpertTable, uses: native.View, layout: ArenaLayout, policy: Policy, max_swaps: int
    ) -> None:
        """`uses` is the table's memory of use counts."""
        self._card = card
        self._table = table
        self._layout = layout
        self._policy = policy
        self._max_swaps = max_swaps
        shape = (len(layout.layers), max(blobs.num_experts for blobs in layout.layers))
        self._uses: NDArray[np.uint32] = uses.bytes()[: 4 * shape[0] * shape[1]].view(np.uint32).reshape(shape)
        self._resident = np.zeros(shape, dtype=np.bool_)
        self._in_flight = np.zeros(shape, dtype=np.bool_)
        self._slot_of: dict[tuple[int, int], int] = {}
        self._copies: list[_Copy] = []
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

    def add_slots(self, classes: Sequence[SlotClass]) -> None:
        """Allocates the planned slots, all empty."""
        for slots in classes:
            if slots.slots == 0:
                continue
            memory = self._card.allocate("expert slots", slots.nbytes)
            numbers = [self._table.add_slot(memory.part(i * slots.blob_bytes, slots.blob_bytes)) for i in range(slots.slots)]
            self._free_slots.setdefault(slots.blob_bytes, []).extend(reversed(numbers))

    def fill(self, order: Sequence[ExpertId], progress: Callable[[int, int], None]) -> None:
        """Copies experts into free slots, first come first served, and returns when all are resident.

        `progress(done_bytes, total_bytes)` is called after every blob.
        """
        chosen = [(expert, slot) for expert in order if (slot := self._take_slot(expert)) is not None]
        total_bytes = sum(self._blob_bytes(expert.layer) for expert, _ in chosen)
        done_bytes = 0
        for expert, slot in chosen:
            ticket = self._card.copy(self._table.slot(slot), self._table.blob(expert.layer, expert.expert), 0)
            self._card.wait_copied(ticket)
            done_bytes += self._blob_bytes(expert.layer)
            progress(done_bytes, total_bytes)
        self._card.wait(self._card.update(self._table, [self._enter(expert.layer, expert.expert, slot) for expert, slot in chosen]))

    def give_back(self, nbytes: int) -> int:
        """Gives the memory of slots back, empty and little used ones first, until it is at least `nbytes`. Returns how much it was."""
        self.settle()
        given_bytes = 0
        empty = [(size, slot) for size, slots in self._free_slots.items() for slot in slots]
        while empty and given_bytes < nbytes:
            given_bytes += self._give(*empty.pop())
        coldest = sorted(self._slot_of, key=lambda expert: float(self.total_uses[expert]))
        leaving = []
        for layer, expert in coldest:
            if given_bytes >= nbytes:
                break
            slot = self._slot_of.pop((layer, expert))
            self._resident[layer, expert] = False
            leaving.append((self._blob_bytes(layer), slot, (layer, expert, _ABSENT)))
            given_bytes += self._blob_bytes(layer)
        self._card.wait(self._card.update(self._table, [entry for _, _, entry in leaving]))
        for size, slot, _ in leaving:
            self._free_slots[size].append(slot)
            self._give(size, slot)
        return given_bytes

    def take_again(self) -> None:
        """Takes the memory of all slots again and fills them with the experts that were used most."""
        for size, slots in self._given_slots.items():
            for slot in slots:
                self._table.slot(slot).touch()
            self._free_slots[size].extend(slots)
        self._given_slots.clear()
        busiest = np.argsort(-self.total_uses, axis=None, kind="stable")
        ranking = [ExpertId(*divmod(int(flat), self.total_uses.shape[1])) for flat in busiest]
        self.settle()
        self.fill([expert for expert in ranking if (expert.layer, expert.expert) not in self._slot_of], lambda _done, _total: None)

    def forget_uses(self) -> None:
        """Drops the use counts of the runs so far, such as a warm-up's."""
        self._uses[:] = 0

    def between_windows(self, rows: int) -> None:
        """Tells the policy what the last `rows` rows used, lets landed newcomers in and starts new swaps."""
        self._observe(rows)
        entries = self._land()
        limit = self._max_swaps - len(self._copies)
        swaps = self._policy.propose(self._resident, self._in_flight, limit) if limit > 0 else []
        slots = [self._leave(swap) for swap in swaps]
        entries += [(swap.victim_layer, swap.victim_expert, _ABSENT) for swap in swaps]
        if not entries:
            return
        ticket = self._card.update(self._table, entries)
        for swap, slot in zip(swaps, slots, strict=True):
            copied = self._card.copy(self._table.slot(slot), self._table.blob(swap.layer, swap.expert), ticket)
            self._copies.append(_Copy(swap, slot, copied))
        self._card.wait(ticket)

    def settle(self) -> None:
        """Waits for the swaps under way and lets their newcomers in."""
        for copy in self._copies:
            self._card.wait_copied(copy.ticket)
        self._card.wait(self._card.update(self._table, self._land()))

    def _observe(self, rows: int) -> None:
        layers, experts = np.nonzero(self._uses)
        if layers.size == 0:
            return
        counts = self._uses[layers, experts].astype(np.int64)
        self._uses[:] = 0
        self.total_uses[layers, experts] += counts
        self._policy.observe(layers, experts, counts, rows)

    def _land(self) -> list[tuple[int, int, int]]:
        """Table entries of the newcomers whose copies are through."""
        landed = [copy for copy in self._copies if self._card.copied(copy.ticket)]
        self._copies = [copy for copy in self._copies if copy not in landed]
        for copy in landed:
            swap = copy.swap
            self._in_flight[swap.layer, swap.expert] = False
            self._in_flight[swap.victim_layer, swap.victim_expert] = False
        self.num_swaps += len(landed)
        return [self._enter(copy.swap.layer, copy.swap.expert, copy.slot) for copy in landed]

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

    def _take_slot(self, expert: ExpertId) -> int | None:
        free = self._free_slots.get(self._blob_bytes(expert.layer))
        return free.pop() if free else None

    def _blob_bytes(self, layer: int) -> int:
        return self._layout.layers[layer].blob.nbytes
