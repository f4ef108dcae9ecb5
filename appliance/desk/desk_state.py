"""All that the desk knows and decides, without processes, threads or clocks: inputs and times go in, actions come out.

A request's life: `Submit` puts it at the end of the waiting line; after every input the head of the line goes to an idle lane,
if there is one (the lane that can reuse most of its prompt); the engine's events pass through; one `Finished` ends it. That
`Finished` comes from the engine, or from here when the engine is gone, the request still waits, or the desk shuts down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from appliance.desk.actions import Action, Deliver, StartLoader, StopLoader
from appliance.desk.config import ElasticConfig, Limits
from appliance.desk.inputs import (
    Cancel,
    Drain,
    Ending,
    EngineEnded,
    EngineSaid,
    Input,
    LoaderEnded,
    LoaderSaid,
    Submit,
    Tick,
)
from appliance.desk.lane import Lane, longest_prefix_lane
from appliance.desk.pair import Pair
from appliance.desk.queue import WaitingLine
from appliance.desk.status import Counters, DeskStatus, Phase
from appliance.errors import CapacityError, ContextLengthError, EngineDiedError, NotReadyError, RequestError, TandemError
from appliance.protocol import Event, Fatal, Finished, FinishReason, Generate, LoadProgress, Started, Timings, Tokens

_LONGEST_RETRY_S = 60


class DeskState:
    """Confined to the desk thread. `now` is a monotonic clock's, in seconds."""

    def __init__(self, lanes: Sequence[tuple[str, str]], max_queue: int, limits: Limits, elastic: ElasticConfig | None = None) -> None:
        """`lanes`: (name, card), the lead first; `elastic` needs two."""
        self._lanes = {name: Lane(name, card, limits) for name, card in lanes}
        self._pair = None if elastic is None else _pair_of(list(self._lanes.values()), elastic)
        self._line = WaitingLine(max_queue)
        self._counters = Counters()
        self._complete: set[str] = set()
        """Requests that were cancelled because their answer was complete, until they end."""
        self._loader_runs = False
        self._load: LoadProgress | None = None
        self._loader_fatal: Fatal | None = None
        self._was_lead_up = False
        self._drains = False
        self._drain_until: float | None = None

    def begin(self) -> list[Action]:
        """The first step: the arena."""
        self._loader_runs = True
        return [StartLoader()]

    def handle(self, happened: Input, now: float) -> list[Action]:
        """Takes one input in. Returns what to do, in this order.

        Raises, for `Submit` only and without any other effect, NotReadyError, QueueFullError or RequestError.
        """
        actions = self._take(happened, now)
        for lane in self._lanes.values():
            actions += lane.tick(now)
        actions += self._end_drain(now)
        actions += self._give_up()
        actions += self._route(now)
        if self._pair is not None and not self._drains:
            actions += self._pair.step(len(self._line), now)
            actions += self._route(now)  # a helper that was about to fall asleep may take the next request at once
        self._was_lead_up |= self._lead.takes_requests
        actions += [Deliver(queued) for queued in self._line.tell_places()]
        for action in actions:
            if isinstance(action, Deliver):
                self._count(action.event)
                if isinstance(action.event, Finished):
                    self._complete.discard(action.event.id)
        return actions

    @property
    def next_timer_s(self) -> float | None:
        """When `handle(Tick())` is due, if nothing else happens before."""
        times = [lane.next_timer_s for lane in self._lanes.values()] + [self._drain_until]
        if self._pair is not None and not self._drains:
            times.append(self._pair.next_timer_s)
        return min((time for time in times if time is not None), default=None)

    @property
    def has_ended(self) -> bool:
        """Drained, and every process is gone."""
        return self._drains and not self._loader_runs and all(lane.has_ended for lane in self._lanes.values())

    @property
    def phase(self) -> Phase:
        lanes = self._lanes.values()
        if self._drains:
            return Phase.DRAINING
        if all(lane.has_ended for lane in lanes):
            return Phase.FAILED
        return Phase.READY if any(lane.takes_requests for lane in lanes) else Phase.LOADING

    def _take(self, happened: Input, now: float) -> list[Action]:
        match happened:
            case Submit():
                return self._submit(happened.request, now)
            case Cancel():
                return self._cancel(happened, now)
            case EngineSaid():
                if self._pair is not None:
                    self._pair.hear(happened.lane, happened.line, now)
                return self._lanes[happened.lane].hear(happened.line, now)
            case EngineEnded():
                return self._lanes[happened.lane].end(happened.ending, now)
            case LoaderSaid():
                return self._hear_loader(happened.line)
            case LoaderEnded():
                return self._end_loader(happened.ending, now)
            case Drain():
                return self._drain(now + happened.drain_s)
            case Tick():
                return []

    # Requests

    def _submit(self, request: Generate, now: float) -> list[Action]:
        try:
            self._check(request, now)
        except CapacityError:
            self._counters = replace(self._counters, rejected=self._counters.rejected + 1)
            raise
        self._counters = replace(self._counters, accepted=self._counters.accepted + 1)
        self._line.append(request)
        return []

    def _check(self, request: Generate, now: float) -> None:
        if self.phase is not Phase.READY:
            raise self._not_ready()
        if request.id in self._line or any(lane.run and lane.run.request.id == request.id for lane in self._lanes.values()):
            raise RequestError(f"the request id {request.id} is in use; give each request its own")
        context = self._context()
        if context is not None and len(request.prompt) > context:
            raise ContextLengthError(f"the prompt has {len(request.prompt)} tokens and the context holds {context}; shorten it")
        is_wake_coming = self._pair is not None and len(self._line) == 0 and self._pair.can_wake(now)
        if not is_wake_coming and not self._idle_lanes():
            self._line.check_room()

    def _not_ready(self) -> NotReadyError:
        match self.phase:
            case Phase.DRAINING:
                return NotReadyError("the server is shutting down; send the request again when it is back", retry_after_s=10)
            case Phase.FAILED:
                return NotReadyError(f"no lane works: {self._reason()}", retry_after_s=_LONGEST_RETRY_S)
        load = self._load_now()
        left_s = load.left_s if load is not None and load.left_s is not None else 1.0
        retry_after_s = max(1, min(_LONGEST_RETRY_S, round(left_s)))
        return NotReadyError(f"no lane is ready yet ({self._states()}); try again in {retry_after_s} s", retry_after_s=retry_after_s)

    def _cancel(self, cancel: Cancel, now: float) -> list[Action]:
        if cancel.request_id in self._line:
            self._line.remove(cancel.request_id)
            return [_terminal(cancel.request_id, FinishReason.CANCELLED, None)]
        for lane in self._lanes.values():
            if lane.run is not None and lane.run.request.id == cancel.request_id:
                if cancel.is_complete:
                    self._complete.add(cancel.request_id)
                return lane.cancel(now)
        return []

    def _route(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while (head := self._line.head) is not None:
            lane = longest_prefix_lane(self._idle_lanes(), head.prompt)
            if lane is None:
                break
            actions += lane.assign(self._line.remove(head.id), now)
        return actions

    def _idle_lanes(self) -> list[Lane]:
        """Those that may get a request now."""
        pair = self._pair
        return [lane for lane in self._lanes.values() if lane.is_idle and (pair is None or pair.may_route(lane))]

    def _give_up(self) -> list[Action]:
        """Those who wait for lanes that will never come back are told so."""
        if self.phase is not Phase.FAILED:
            return []
        return self._dismiss_waiting(EngineDiedError(f"no lane works any more: {self._reason()}"))

    def _dismiss_waiting(self, error: TandemError) -> list[Action]:
        return [_terminal(self._line.remove(request_id).id, FinishReason.ERROR, error) for request_id in self._line.ids]

    # Start and end

    def _hear_loader(self, said: LoadProgress | Fatal) -> list[Action]:
        if isinstance(said, Fatal):
            self._loader_fatal = said
        else:
            self._load = said
        return []

    def _end_loader(self, ending: Ending, now: float) -> list[Action]:
        self._loader_runs = False
        self._load = None
        if self._drains:
            return []
        if ending.exit_code == 0:
            return [action for lane in self._lanes.values() for action in lane.start(now)]
        words = self._loader_fatal.text if self._loader_fatal else ending.last_words
        reason = replace(ending, last_words=words).sentence("the loader")
        for lane in self._lanes.values():
            lane.fail(reason)
        return []

    def _drain(self, until: float) -> list[Action]:
        """A second call may shorten the wait, never lengthen it."""
        self._drain_until = until if self._drain_until is None else min(until, self._drain_until)
        if self._drains:
            return []
        self._drains = True
        return self._dismiss_waiting(self._not_ready()) + ([StopLoader()] if self._loader_runs else [])

    def _end_drain(self, now: float) -> list[Action]:
        if not self._drains:
            return []
        actions: list[Action] = []
        is_over = self._drain_until is not None and now >= self._drain_until
        if is_over:
            self._drain_until = None
        for lane in self._lanes.values():
            actions += lane.dismiss(self._not_ready()) if is_over else []
            actions += lane.leave()
        return actions

    # What it says of itself

    def status(self, pids: Mapping[str, int]) -> DeskStatus:
        """`pids`: lane name to process id, for lanes that have a process."""
        phase = self.phase
        return DeskStatus(
            phase=phase,
            reason=self._reason() if phase is Phase.FAILED else None,
            load=self._load_now() if phase is Phase.LOADING else None,
            context=self._context(),
            lanes=tuple(lane.status(pids.get(lane.name)) for lane in self._lanes.values()),
            queue_length=len(self._line),
            counters=self._counters,
            pair=self._pair.status() if self._pair is not None else None,
            unready_reason=self._unready_reason(),
        )

    def _unready_reason(self) -> str | None:
        """Requests are accepted as soon as any lane takes them; others are sent here when the lead has come up, or will not."""
        match self.phase:
            case Phase.DRAINING:
                return "the server is shutting down"
            case Phase.FAILED:
                return f"the model cannot be served: {self._reason()}"
        if not self._was_lead_up and not self._lead.has_ended:
            return f"the model is loading: the lead has not been up yet ({self._states()})"
        if self._lead.takes_requests or self._has_helper():
            return None
        return f"no lane takes requests now ({self._states()})"

    def _has_helper(self) -> bool:
        others = [lane for lane in self._lanes.values() if lane is not self._lead]
        return any(lane.takes_requests for lane in others) and (self._pair is None or self._pair.offers_helper())

    @property
    def _lead(self) -> Lane:
        return next(iter(self._lanes.values()))

    def _states(self) -> str:
        return ", ".join(f"{lane.name} {lane.state}" for lane in self._lanes.values())

    def _reason(self) -> str | None:
        return next((lane.reason for lane in self._lanes.values() if lane.reason), None)

    def _load_now(self) -> LoadProgress | None:
        return self._load or next((lane.load for lane in self._lanes.values() if lane.load), None)

    def _context(self) -> int | None:
        return min((lane.ready.context for lane in self._lanes.values() if lane.ready), default=None)

    def _count(self, event: Event) -> None:
        now = self._counters
        match event:
            case Started():
                self._counters = replace(
                    now, prompt_tokens=now.prompt_tokens + event.prompt_tokens, cached_tokens=now.cached_tokens + event.cached_tokens
                )
            case Tokens():
                self._counters = replace(now, generated_tokens=now.generated_tokens + len(event.ids))
            case Finished(reason=FinishReason.ERROR):
                self._counters = replace(now, failed=now.failed + 1)
            case Finished(reason=FinishReason.CANCELLED) if event.id not in self._complete:
                self._counters = replace(now, cancelled=now.cancelled + 1)
            case Finished():
                self._counters = replace(now, finished=now.finished + 1)

    def check_integrity(self) -> None:
        """Raises RuntimeError, with both sides of the broken equation, when something was lost or counted twice."""
        for lane in self._lanes.values():
            lane.check_integrity()
        count = self._counters
        running = sum(lane.run is not None for lane in self._lanes.values())
        ended = count.finished + count.cancelled + count.failed
        if count.accepted != ended + running + len(self._line):
            raise RuntimeError(f"{count.accepted} accepted, but {ended} ended + {running} running + {len(self._line)} waiting")
        if self._pair is not None:
            self._pair.check_integrity()
        if len(self._line) and self._idle_lanes():
            raise RuntimeError(f"{len(self._line)} wait although a lane is idle")


def _pair_of(lanes: Sequence[Lane], elastic: ElasticConfig) -> Pair:
    lead, helper = lanes
    return Pair(lead, helper, elastic)


def _terminal(request_id: str, reason: FinishReason, error: TandemError | None) -> Deliver:
    code, text = (error.code, error.message) if error else (None, None)
    return Deliver(Finished(id=request_id, reason=reason, error_code=code, error_text=text, timings=Timings()))
