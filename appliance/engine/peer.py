"""The peer tier: a second card as more expert cache of the same engine, with slots and a residency table of its own.

A routed expert is looked up on the own card first and then on the peer's. The two caches hold different experts: what one of them
has, the other does not bring in. A host card's program reads the peer's slots itself; between GPUs a window asks the peer card, which
computes the rows and sends them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from appliance.engine.cards import Card
from appliance.engine.experts import ExpertCache, Uses
from appliance.errors import MemoryBudgetError
from appliance.memory.layout import ArenaLayout
from appliance.memory.policy import Policy
from appliance.memory.slots import SlotClass
from appliance.memory.workspace import ALIGNMENT
from appliance.models.recording import Table
from appliance.peer_check import check_peers
from cuda_ext import _native as native

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """What the second card gives."""

    card: str
    slot_classes: tuple[SlotClass, ...]
    is_direct: bool | None = None
    """Whether two GPUs write into each other's memory, or else through the host's. None: what a trial finds."""


def peer_tables_bytes(layout: ArenaLayout) -> int:
    """The second card's residency table, and counters that stay 0: the own card counts all uses."""
    return 2 * -(-4 * len(layout.layers) * max(blobs.num_experts for blobs in layout.layers) // 64) * 64 + ALIGNMENT


def reaches(own: str, peer: str) -> bool:
    """Whether two GPUs were seen to reach each other; says in the log if they do not. One always reaches itself."""
    if own == peer:
        return True
    report = check_peers(*(int(card.partition(":")[2]) for card in (own, peer)))
    if not report.reaches:
        _log.warning("rows of the second card go through host memory", cards=[own, peer], reason=report.reason)
    return report.reaches


class PeerRows(Protocol):
    """A second GPU that computes rows for an engine's windows."""

    streamed_ratio: float
    """Share of what no card holds that it reads from the arena; at most what the own card leaves."""

    def attach(self) -> None:
        """Before experts come into its slots."""

    def detach(self) -> None:
        """Before its slots lose their memory; no window may follow while experts are there."""


class PeerTier:
    """Starts detached: it has no slots until `attach`. Confined to the engine loop."""

    def __init__(
        self,
        plan: PeerPlan,
        own: Card,
        peer: Card,
        table: Table,
        layout: ArenaLayout,
        policy: Policy,
        max_swaps: int,
        open_rows: Callable[[Table], PeerRows] | None = None,
    ) -> None:
        """`table`: the own card's, which looks here from now on. Tables change in the order of `own`'s commands.

        `open_rows`: for GPUs, what answers the own card's windows from the peer's table. Raises MemoryError.
        """
        self._plan = plan
        shape = len(layout.layers), max(blobs.num_experts for blobs in layout.layers)
        peer_table = peer.new_table(*shape, peer.allocate("tables", peer_tables_bytes(layout)))
        for blobs in layout.layers:
            peer_table.set_layer(blobs.layer, table.layer_blobs(blobs.layer), blobs.blob.nbytes)
        self._cache = ExpertCache(own, peer_table, layout, policy, max_swaps, slots_card=peer, may_duplicate=False)
        self._cache.add_slots(plan.slot_classes, present=False)
        self._slots_bytes = sum(slots.nbytes for slots in plan.slot_classes)
        self._card = peer
        self._is_attached = False
        self._rows = open_rows(peer_table) if open_rows else None
        if isinstance(peer_table, native.ExpertTable) and isinstance(table, native.ExpertTable):
            table.set_peer(peer_table)

    def set_streamed_ratio(self, ratio: float) -> None:
        """For GPUs: as `PeerRows.streamed_ratio`."""
        if self._rows is not None:
            self._rows.streamed_ratio = ratio

    @property
    def is_attached(self) -> bool:
        return self._is_attached

    @property
    def resident(self) -> NDArray[np.bool_]:
        """[layers, experts]: what this card's table holds now. A copy."""
        return self._cache.resident

    @property
    def num_resident(self) -> int:
        return self._cache.num_resident

    @property
    def num_swaps(self) -> int:
        return self._cache.num_swaps

    @property
    def held(self) -> NDArray[np.bool_]:
        """[layers, experts]: what this card has or is about to have."""
        return self._cache.held

    @property
    def is_filling(self) -> bool:
        return self._cache.is_filling

    def attaching(self, order: Iterable[int]) -> Iterator[None]:
        """Takes the slots, a part at every step; windows may run between two steps. The boundaries after the last one fill them in `order`,
        as `ExpertCache.taking_again` says.

        Raises MemoryBudgetError; it is detached then.
        """
        if self._is_attached:
            return
        try:
            yield from self._cache.taking_again(order)
            if self._rows is not None:
                self._rows.attach()
        except MemoryError:
            self._cache.give_back(self._slots_bytes)
            raise MemoryBudgetError(
                f"card {self._plan.card} does not have the {self._slots_bytes} bytes of its expert slots now; something else holds them"
            ) from None
        self._is_attached = True

    def detaching(self) -> Iterator[None]:
        """Gives the slots back, a part at every step. Windows may run between two steps: from the first on they do not look here any
        more."""
        if not self._is_attached:
            return
        self._is_attached = False
        if self._rows is not None:
            self._rows.detach()
        yield from self._cache.giving_back_all()

    def between_windows(self, uses: Uses, own_held: NDArray[np.bool_]) -> None:
        """Swaps and fills, with what the own card does not have."""
        if self._is_attached:
            self._cache.between_windows(uses, own_held)

    def close(self) -> None:
        """Waits for copies under way. No window follows."""
        self._cache.settle()
        if self._rows is not None:
            self._rows.detach()
        self._card.unpin()
