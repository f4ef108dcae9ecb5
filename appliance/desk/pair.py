"""When the helper sleeps and wakes, and what both engines are told for it. Pure: takes what happened, returns lines to send.

    asleep   the lead uses the second card as its peer tier, the helper holds no expert slots
    awake    both serve; each computes the other's rows

There is one goal, asleep or awake, and for each engine what it has been told and has answered. After every input each engine gets
the next line that brings it nearer to the goal, one at a time. So a transition may be turned round at any point, and an engine that
died in the middle of one begins at its start. Two rules hold at any time, whatever fails:

* the slots of the second card belong to one engine: the helper is told to take them only when the lead is known to have given
  them back (or has no process), and the other way round;
* rows are asked only of an engine that holds its slots.

A wake that fails is undone in the same way, and the helper is barred for a while: the request goes to the lead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from appliance.desk.actions import Action, SendLine
from appliance.desk.config import ElasticConfig
from appliance.desk.lane import Lane
from appliance.desk.lane_state import LaneState
from appliance.desk.lines import ControlAnswer, ControlError, EngineLine
from appliance.desk.status import PairPhase, PairStatus
from appliance.protocol import Reply, Word, line
from appliance.units import MIB

_WITHOUT_PROCESS = frozenset({LaneState.WAITING, LaneState.STARTING, LaneState.DEAD, LaneState.FAILED, LaneState.STOPPED})
"""An engine starts without slots on the second card, so a starting one holds none either."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Order:
    """One control line, and what its answer makes true."""

    word: Word
    argument: str
    reply: Reply
    memory: bool | None = None
    held: int | None = None
    serving: bool | None = None


@dataclass(slots=True)
class _Side:
    """One engine, as it has answered."""

    lane: Lane
    is_up: bool = False
    may_hold: bool = False
    """It may have slots on the second card."""
    has_memory: bool = False
    """It has said that it has them."""
    held: int = 0
    serving: bool = False
    pending: _Order | None = None
    pending_since: float = 0.0
    idle_since: float | None = None
    """While it has no request: a line that came in the last step of one is answered after it."""
    retry_at: float = 0.0
    """Nothing is told it before, because it refused something."""
    refusal: str | None = None
    """What, as a sentence; of the last time."""

    def forget(self) -> None:
        """The engine takes no lines any more."""
        self.is_up = self.has_memory = self.serving = False
        self.held = 0
        self.pending = None
        self.retry_at = 0.0

    def answer_due_s(self, limit_s: float) -> float | None:
        """When a pending line should have been answered; None while nothing is pending or a request may be in its way."""
        if self.pending is None or self.idle_since is None:
            return None
        return max(self.pending_since, self.idle_since) + limit_s

    def is_free(self, now: float) -> bool:
        return self.is_up and self.pending is None and now >= self.retry_at


class Pair:
    """Confined to the desk thread."""

    def __init__(self, lead: Lane, helper: Lane, config: ElasticConfig) -> None:
        self._lead = _Side(lead)
        self._helper = _Side(helper)
        self._config = config
        self._wants_awake = False
        self._used_at = float("-inf")
        """When two requests were there last."""
        self._wake_began = 0.0
        self._barred_until = float("-inf")
        self._now = 0.0
        """Of the last step."""
        self._status = PairStatus()

    def may_route(self, lane: Lane) -> bool:
        """Whether an idle lane may get a request now."""
        return lane is not self._helper.lane or self._is_helper_awake

    def can_wake(self, now: float) -> bool:
        return not self._wants_awake and now >= self._barred_until and self._helper.is_up and self._helper.lane.is_idle

    def offers_helper(self) -> bool:
        """Whether the helper has, gets or may be given the next request, as of the last step."""
        return self._wants_awake or self.can_wake(self._now)

    @property
    def _is_helper_awake(self) -> bool:
        """It has its slots, and has not been told to give them back."""
        order = self._helper.pending
        return self._wants_awake and self._helper.has_memory and not (order is not None and order.memory is False)

    def hear(self, lane_name: str, said: EngineLine, now: float) -> None:
        """Takes in what an engine says; anything but an answer to an order is none of its business."""
        side = self._lead if lane_name == self._lead.lane.name else self._helper
        order = side.pending
        if order is None:
            return
        if isinstance(said, ControlAnswer) and said.text.partition(" ")[0] == order.reply:
            side.pending = None
            self._obeyed(side, order, now)
        elif isinstance(said, ControlError) and said.text.startswith(f"{order.word}: "):
            side.pending = None
            self._refused(side, order, said.text, now)

    def step(self, num_waiting: int, now: float) -> list[Action]:
        """After every input, behind routing: `num_waiting` requests found no lane."""
        self._look(num_waiting, now)
        if self._wants_awake:
            self._check_wake(now)
        actions = self._replace_silent(now)
        if self._wants_awake and self._is_sleep_due(num_waiting, now):
            self._wants_awake = False
            _log.info("the helper falls asleep")
        if num_waiting and self.can_wake(now):
            self._wake(now)
        return actions + self._next_orders(now)

    @property
    def next_timer_s(self) -> float | None:
        """When `step` is due, if nothing else happens before."""
        times = [side.retry_at for side in (self._lead, self._helper) if side.is_up and side.retry_at > 0]
        limit_s = self._config.wake_limit_s
        times += [due for side in (self._lead, self._helper) if (due := side.answer_due_s(limit_s)) is not None]
        if self._wants_awake:
            times.append(self._used_at + self._config.hold_s if self._helper.has_memory else self._wake_began + self._config.wake_limit_s)
        else:
            times.append(self._barred_until)
        return min((time for time in times if time > self._now), default=None)

    @property
    def phase(self) -> PairPhase:
        if self._wants_awake:
            return PairPhase.AWAKE if self._is_helper_awake else PairPhase.WAKING
        return PairPhase.FALLING_ASLEEP if self._helper.may_hold else PairPhase.ASLEEP

    def status(self) -> PairStatus:
        return replace(
            self._status,
            phase=self.phase,
            link_up=self._lead.serving and self._helper.serving,
            barred_until=max(0.0, self._barred_until),
            obstacle=self._obstacle(),
        )

    def _obstacle(self) -> str | None:
        lane = self._helper.lane
        if not self._helper.is_up:
            return f"the helper's engine is {lane.state}" + (f": {lane.reason}" if lane.reason else "")
        return next((side.refusal for side in (self._helper, self._lead) if side.retry_at > 0), None)

    # What happens

    def _look(self, num_waiting: int, now: float) -> None:
        self._now = now
        for side in (self._lead, self._helper):
            if side.is_up and not side.lane.takes_requests:
                if side is self._helper and self._wants_awake:
                    self._give_up_wake(side.lane.reason or "the helper's engine ended", now, is_failure=not side.has_memory)
                side.forget()
            if side.lane.state in _WITHOUT_PROCESS:
                side.may_hold = False
            side.is_up = side.lane.takes_requests
            if not side.lane.is_idle:
                side.idle_since = None
            elif side.idle_since is None:
                side.idle_since = now
            if 0 < side.retry_at <= now:
                side.retry_at = 0.0
        if num_waiting or (self._lead.lane.run is not None and self._helper.lane.run is not None):
            self._used_at = now

    def _obeyed(self, side: _Side, order: _Order, now: float) -> None:
        if order.memory is not None:
            side.has_memory = side.may_hold = order.memory
        if order.held is not None:
            side.held = order.held
        if order.serving is not None:
            side.serving = order.serving
        was = self._status
        if order.word is Word.PEER_DETACH:
            self._status = replace(was, detaches=was.detaches + 1, detach_s=round(now - self._wake_began, 4))
        elif order.word is Word.PEER_ATTACH:
            self._status = replace(was, attaches=was.attaches + 1)
        elif order.memory is False:
            self._status = replace(was, sleeps=was.sleeps + 1)
        elif order.memory:
            wake_s = round(now - self._wake_began, 4)
            self._status = replace(was, wakes=was.wakes + 1, wake_s=wake_s, wake_total_s=round(was.wake_total_s + wake_s, 4))
            self._used_at = now
            _log.info("the helper is awake", wake_s=wake_s)

    def _refused(self, side: _Side, order: _Order, text: str, now: float) -> None:
        """A refused line has changed nothing (`docs/protocol.md`)."""
        _log.warning("an engine refused a line of the pair", lane=side.lane.name, text=text)
        side.may_hold = side.has_memory
        side.retry_at = now + self._config.bar_s
        side.refusal = f"the {side.lane.name} refused {text}"
        if self._wants_awake and order.memory is not None:
            self._give_up_wake(side.refusal, now, is_failure=True)

    def _wake(self, now: float) -> None:
        self._wants_awake = True
        self._wake_began = self._used_at = now
        self._lead.retry_at = self._helper.retry_at = 0.0
        _log.info("waking the helper")

    def _check_wake(self, now: float) -> None:
        if not self._helper.has_memory and now - self._wake_began >= self._config.wake_limit_s:
            self._give_up_wake(f"{self._who_is_late()} within {self._config.wake_limit_s:g} s", now, is_failure=True)

    def _who_is_late(self) -> str:
        if not self._lead.may_hold:
            return "the helper did not take its slots"
        return f"the lead{', busy with a request,' if self._lead.lane.run is not None else ''} did not give the second card back"

    def _give_up_wake(self, reason: str, now: float, *, is_failure: bool) -> None:
        self._wants_awake = False
        if is_failure:
            self._barred_until = now + self._config.bar_s
            self._status = replace(self._status, failed_wakes=self._status.failed_wakes + 1, last_failure=reason)
            _log.warning("the helper was not woken", reason=reason, barred_s=self._config.bar_s)

    def _is_sleep_due(self, num_waiting: int, now: float) -> bool:
        is_idle = self._helper.has_memory and self._helper.lane.is_idle and self._lead.is_up
        return is_idle and num_waiting == 0 and now - self._used_at >= self._config.hold_s

    def _replace_silent(self, now: float) -> list[Action]:
        """An engine without a request that does not answer hangs, and nobody knows what memory it holds."""
        actions: list[Action] = []
        for side in (self._lead, self._helper):
            due = side.answer_due_s(self._config.wake_limit_s)
            if side.pending is not None and due is not None and now >= due:
                word = side.pending.word
                side.pending = None
                actions += side.lane.replace_engine(f"engine {side.lane.name} did not answer {word} within {self._config.wake_limit_s:g} s")
        if actions:
            self._look(0, now)
        return actions

    # What engines are told

    def _next_orders(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for side, orders in ((self._lead, self._lead_orders), (self._helper, self._helper_orders)):
            order = next(iter(orders()), None) if side.is_free(now) else None
            if order is None:
                continue
            side.pending, side.pending_since = order, now
            side.may_hold |= bool(order.memory)
            actions.append(SendLine(side.lane.name, line(order.word, *([order.argument] if order.argument else []))))
        return actions

    def _lead_orders(self) -> Sequence[_Order]:
        lead, helper = self._lead, self._helper
        orders: list[_Order] = []
        held = self._held_threads()
        serving = self._config.link and self._wants_awake and helper.has_memory
        if lead.serving and not serving:
            orders.append(_serve(False))
        if lead.may_hold and self._wants_awake:
            orders.append(_Order(Word.PEER_DETACH, "", Reply.PEER, memory=False))
        if lead.held != held:
            orders.append(_Order(Word.POOL_HOLD, str(held), Reply.HOLD, held=held))
        if self._config.peer and not lead.has_memory and not self._wants_awake and not helper.may_hold:
            orders.append(_Order(Word.PEER_ATTACH, "", Reply.PEER, memory=True))
        if serving and not lead.serving:
            orders.append(_serve(True))
        return orders

    def _held_threads(self) -> int:
        """The lead's, while the helper's own threads compute."""
        run = self._helper.lane.run
        computes = run is not None and (self._config.prompts_take_threads or run.generated_tokens > 0)
        return self._config.hold_threads if computes else 0

    def _helper_orders(self) -> Sequence[_Order]:
        lead, helper = self._lead, self._helper
        serving = self._config.link and self._wants_awake and helper.has_memory
        if helper.serving and not serving:
            return [_serve(False)]
        if helper.may_hold and not self._wants_awake:
            return [_Order(Word.VRAM, str(self._slots_mib()), Reply.VRAM, memory=False)] if helper.lane.is_idle else []
        if self._wants_awake and not helper.has_memory and not lead.may_hold:
            return [_Order(Word.VRAM, "", Reply.VRAM, memory=True)]
        return [_serve(True)] if serving and not helper.serving else []

    def _slots_mib(self) -> int:
        """All of the helper's slots."""
        ready = self._helper.lane.ready
        return -(-ready.plan_bytes.get("expert slots", 0) // MIB) if ready is not None else 0

    def check_integrity(self) -> None:
        """Raises RuntimeError when both engines may have slots on the second card."""
        if self._lead.may_hold and self._helper.may_hold and self._config.peer:
            raise RuntimeError("both engines may hold slots of the second card")


def _serve(serving: bool) -> _Order:
    return _Order(Word.LINK_SERVE, str(int(serving)), Reply.LINK, serving=serving)
