"""What the engines of a lane have counted, one after the other: their own counters begin at 0 with each process, these never fall."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from appliance.protocol import Stats


@dataclass(frozen=True, slots=True)
class LaneTotals:
    """Since the desk was started. What an engine did between its last report and its death is not in them."""

    rows_by_tier: Mapping[str, int] = field(default_factory=dict)
    windows: int = 0
    swaps: int = 0
    served_rows: int = 0
    late_experts: int = 0
    link_losses: int = 0
    parked_conversations: int = 0
    resumed_conversations: int = 0

    def plus(self, stats: Stats | None) -> LaneTotals:
        """With the last report of one more engine."""
        if stats is None:
            return self
        tiers = {
            tier: self.rows_by_tier.get(tier, 0) + stats.rows_by_tier.get(tier, 0) for tier in {**self.rows_by_tier, **stats.rows_by_tier}
        }
        counts = (one.name for one in fields(self) if one.name != "rows_by_tier")
        return LaneTotals(rows_by_tier=tiers, **{name: getattr(self, name) + getattr(stats, name) for name in counts})
