"""Deals a card's slots out to size classes. Pure.

Layers of one model may have blobs of different sizes, and a slot holds a blob of one size, so a card has slots of several
classes. Every layer routes equally many rows, so each class gets slots in proportion to its experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from appliance.memory.layout import ArenaLayout


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Slots of one size on one card; `num_experts` blobs of the model have that size."""

    blob_bytes: int
    num_experts: int
    slots: int

    @property
    def nbytes(self) -> int:
        return self.blob_bytes * self.slots


def slot_order(layout: ArenaLayout) -> tuple[int, ...]:
    """Blob sizes of the first, second, ... slot that a card gets; as long as the model has experts.

    Webster's divisor method: every prefix is in proportion (within one slot), and, unlike with largest remainders, one slot
    more never takes a slot from any class. So more memory never means fewer slots of a size.
    """
    turns: list[tuple[float, int]] = []
    for blob_bytes, num_experts in _experts_by_size(layout).items():
        turns.extend(((index + 0.5) / num_experts, blob_bytes) for index in range(num_experts))
    return tuple(blob_bytes for _, blob_bytes in sorted(turns))


def slots_that_fit(order: Sequence[int], budget_bytes: int) -> int:
    """How many slots of `slot_order` fit into a budget."""
    return sum(1 for used_bytes in accumulate(order) if used_bytes <= budget_bytes)


def deal_slots(layout: ArenaLayout, slots: int) -> tuple[SlotClass, ...]:
    """The classes of a card with `slots` slots in all, by blob size; classes without a slot are listed too."""
    dealt = Counter(slot_order(layout)[:slots])
    return tuple(SlotClass(size, num_experts, dealt[size]) for size, num_experts in sorted(_experts_by_size(layout).items()))


def _experts_by_size(layout: ArenaLayout) -> dict[int, int]:
    experts: Counter[int] = Counter()
    for blobs in layout.layers:
        experts[blobs.blob.nbytes] += blobs.num_experts
    return dict(experts)
