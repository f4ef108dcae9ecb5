"""Whether each engine computes only where it may: from the counters that both report while they serve.

The second card's slots belong to the helper while the pair is awake, and to the lead while it sleeps. Two reports of one engine in
one such time must agree about what it computed with slots that it does not own, and none may say that it holds any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.desk.status import DeskStatus, LaneStatus, PairPhase
from appliance.protocol import Stats

LOOK_S = 0.004


@dataclass(frozen=True, slots=True)
class _Time:
    """In which the second card's slots belong to one engine without interruption."""

    phase: PairPhase
    detaches: int
    attaches: int
    wakes: int
    sleeps: int


@dataclass
class Owners:
    """Confined to one thread."""

    failures: set[str] = field(default_factory=set)
    num_judged: int = 0
    """Reports of an engine that had to keep off the second card."""
    _now: _Time | None = None
    _since_s: float = 0.0
    _first: dict[tuple[str, int | None], Stats] = field(default_factory=dict)
    """The first report of each process in this time."""
    _judged_at: dict[str, float] = field(default_factory=dict)

    def look(self, status: DeskStatus, now_s: float) -> None:
        pair = status.pair
        if pair is None:
            return
        time_now = _Time(pair.phase, pair.detaches, pair.attaches, pair.wakes, pair.sleeps)
        if time_now != self._now:
            self._now, self._since_s = time_now, now_s
            self._first.clear()
        for lane in status.lanes:
            stats, reported_s = lane.stats, lane.stats_at
            if stats is None or reported_s is None or reported_s <= self._since_s or self._judged_at.get(lane.name) == reported_s:
                continue
            self._judged_at[lane.name] = reported_s
            if lane.name == "lead" and pair.phase is PairPhase.AWAKE:
                self._judge(lane, stats, "peer_experts", {"peer": _rows(stats, "peer"), "fetched": _rows(stats, "fetched")})
            if lane.name == "helper" and pair.phase is PairPhase.ASLEEP:
                self._judge(lane, stats, "resident_experts", {"own": _rows(stats, "own"), "served": stats.served_rows})

    def _judge(self, lane: LaneStatus, stats: Stats, held: str, rows: dict[str, int]) -> None:
        self.num_judged += 1
        if num := getattr(stats, held):
            self.failures.add(f"the {lane.name} held {num} experts of the second card, which was not its own")
        first = self._first.setdefault((lane.name, lane.pid), stats)
        before = {"peer": _rows(first, "peer"), "fetched": _rows(first, "fetched"), "own": _rows(first, "own"), "served": first.served_rows}
        for name, count in rows.items():
            if count != before[name]:
                self.failures.add(f"the {lane.name} computed {count - before[name]} {name} rows on the second card, which was not its own")


class Watch:
    """Looks at a desk again and again until it is stopped."""

    def __init__(self, status: Callable[[], DeskStatus]) -> None:
        self.owners = Owners()
        self._status = status
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> Owners:
        self._is_over.set()
        self._thread.join()
        return self.owners

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.owners.look(self._status(), time.monotonic())


def _rows(stats: Stats, tier: str) -> int:
    return stats.rows_by_tier.get(tier, 0)
