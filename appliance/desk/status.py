"""What the desk says of itself: immutable snapshots that any thread may read and keep."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from appliance.desk.lane_state import LaneState
from appliance.desk.totals import LaneTotals
from appliance.protocol import LoadProgress, Stats


class Phase(StrEnum):
    LOADING = "loading"
    """No lane takes requests yet, or all of them are being restarted."""
    READY = "ready"
    """At least one lane takes requests."""
    DRAINING = "draining"
    """Shutting down; new requests are refused."""
    FAILED = "failed"
    """No lane will take requests any more; `reason` says why."""


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """A request that a lane is working on."""

    id: str
    prompt_tokens: int
    prompt_done: int
    """Prompt tokens computed or reused so far."""
    generated_tokens: int
    tokens_per_s: float
    """Of decode so far; 0 before the second token."""


@dataclass(frozen=True, slots=True)
class LaneStatus:
    name: str
    card: str
    state: LaneState
    reason: str | None
    """Why the lane is dead or failed."""
    pid: int | None
    restarts: int
    load: LoadProgress | None
    """While it starts."""
    context: int | None
    """Tokens of prompt and answer together; None before it was ready."""
    context_used: int
    """Tokens of the conversation that it holds."""
    request: RequestStatus | None
    stats: Stats | None
    """The last counters it reported; they begin at 0 when the engine does. An idle lane is not asked, so they may be old."""
    stats_at: float | None = None
    """When that was, on the monotonic clock."""
    totals: LaneTotals = field(default_factory=LaneTotals)
    """Of all its engines."""

    def to_json(self, now: float) -> dict[str, Any]:
        plain = asdict(self, dict_factory=_plain)
        del plain["stats_at"]
        plain["stats_age_s"] = None if self.stats_at is None else round(max(0.0, now - self.stats_at), 1)
        return plain


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the desk was started. accepted = finished + cancelled + failed + waiting + running."""

    accepted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    """Refused at the door: line full, or not ready."""
    prompt_tokens: int = 0
    """Of the requests that a lane took."""
    cached_tokens: int = 0
    """Those of them whose state was reused."""
    generated_tokens: int = 0


class PairPhase(StrEnum):
    ASLEEP = "asleep"
    """One request at a time: the lead has both cards."""
    WAKING = "waking"
    AWAKE = "awake"
    """Two requests at a time."""
    FALLING_ASLEEP = "falling_asleep"


@dataclass(frozen=True, slots=True)
class PairStatus:
    phase: PairPhase = PairPhase.ASLEEP
    wakes: int = 0
    failed_wakes: int = 0
    sleeps: int = 0
    attaches: int = 0
    """Of the second card by the lead."""
    detaches: int = 0
    link_up: bool = False
    """Each engine computes the other's rows."""
    barred_until: float = 0.0
    """On the monotonic clock: until then a failed wake keeps the helper from being woken again."""
    obstacle: str | None = None
    """What else keeps the helper from being woken, or the two from helping each other as they should."""
    last_failure: str | None = None
    """Why the last wake that failed did."""
    detach_s: float | None = None
    """Of the last wake: until the lead had given the second card back."""
    wake_s: float | None = None
    """Of the last wake: until the helper took requests."""
    wake_total_s: float = 0.0
    """Of all wakes together."""

    def barred_s(self, now: float) -> float:
        """How long a failed wake still keeps the helper from being woken again; 0: it may be."""
        return round(max(0.0, self.barred_until - now), 1)

    def reason(self, now: float) -> str | None:
        """Why the helper is not woken now, or what the two lack. None: nothing stands in the way."""
        if now < self.barred_until:
            return f"the last wake failed and the helper is left alone for {self.barred_s(now):g} s more: {self.last_failure}"
        return self.obstacle

    def to_json(self, now: float) -> dict[str, Any]:
        plain = asdict(self)
        del plain["barred_until"], plain["obstacle"]
        return plain | {"barred_s": self.barred_s(now), "reason": self.reason(now)}


@dataclass(frozen=True, slots=True)
class DeskStatus:
    phase: Phase
    reason: str | None
    """Why nothing works, when the phase is failed."""
    load: LoadProgress | None
    """The stage that start-up is in."""
    context: int | None
    """The smallest of the lanes; None before one was ready."""
    lanes: tuple[LaneStatus, ...]
    queue_length: int
    counters: Counters
    pair: PairStatus | None = None
    """None: the lanes do not share their cards."""
    unready_reason: str | None = None
    """Why nobody should be sent here now, in a sentence; None: a request gets a lane."""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; ages as of now."""
        now = time.monotonic()
        plain = asdict(replace(self, lanes=(), pair=None), dict_factory=_plain)
        plain["pair"] = self.pair and self.pair.to_json(now)
        plain["lanes"] = [lane.to_json(now) for lane in self.lanes]
        return plain


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.model_dump(mode="json") if isinstance(value, BaseModel) else value for name, value in items}
