"""What one engine has beyond its own card: the peer tier and the link. Either may be absent; with neither, nothing happens here."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from appliance.engine.experts import Uses
from appliance.engine.link import LinkEnd
from appliance.engine.peer import PeerTier


class PairStats(TypedDict):
    """The pair's part of a runner's stats."""

    peer_experts: int
    link_serving: bool
    served_rows: int
    late_experts: int
    link_losses: int


class Pair:
    """Confined to the engine loop."""

    def __init__(self, peer: PeerTier | None, link: LinkEnd | None) -> None:
        self.peer = peer
        self.link = link

    @property
    def is_filling(self) -> bool:
        """Slots of the peer card are not full yet."""
        return self.peer is not None and self.peer.is_filling

    @property
    def num_swaps(self) -> int:
        """On the peer card."""
        return self.peer.num_swaps if self.peer is not None else 0

    def drained(self) -> AbstractContextManager[None]:
        """Inside, the own card computes nothing for the other engine."""
        return self.link.drained() if self.link is not None else nullcontext()

    def begin_window(self, num_rows: int) -> None:
        """Before every run of so many rows."""
        if self.link is not None:
            self.link.begin_window(num_rows)

    def take_loss(self) -> bool:
        """Whether the last run is void because the other engine did not answer; true once."""
        return self.link is not None and self.link.take_loss()

    @property
    def has_peer_now(self) -> bool:
        return self.peer is not None and self.peer.is_attached

    def held_elsewhere(self) -> NDArray[np.bool_] | None:
        """[layers, experts]: what another card holds for this engine; None if there is no such card now."""
        by_peer = self.peer.held if self.peer is not None and self.has_peer_now else None
        by_partner = self.link.partner_holds() if self.link is not None else None
        if by_peer is None or by_partner is None:
            return by_partner if by_peer is None else by_peer
        return by_peer | by_partner

    def between_windows(self, uses: Uses, own_held: NDArray[np.bool_]) -> None:
        """Swaps and fills on the peer card."""
        if self.peer is not None:
            self.peer.between_windows(uses, own_held)

    def stats(self) -> PairStats:
        peer, link = self.peer, self.link
        return PairStats(
            peer_experts=peer.num_resident if peer else 0,
            link_serving=link.is_serving if link else False,
            served_rows=link.served_rows if link else 0,
            late_experts=link.late_experts if link else 0,
            link_losses=link.num_losses if link else 0,
        )

    def close(self) -> None:
        """Waits for copies under way and leaves the link. No window follows."""
        if self.peer is not None:
            self.peer.close()
        if self.link is not None:
            self.link.close()
