"""One lane: its engine's life and the request that it works on. Pure: takes what happened, returns what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from appliance.desk.actions import Action, Deliver, KillEngine, SendLine, StartEngine, StopEngine
from appliance.desk.config import Limits
from appliance.desk.conversation import Conversation
from appliance.desk.inputs import Ending
from appliance.desk.lane_state import HAS_ENDED, HAS_REQUEST, TAKES_REQUESTS, LaneState, check_step
from appliance.desk.lines import ControlAnswer, ControlError, EngineLine
from appliance.desk.run import Run
from appliance.desk.status import LaneStatus
from appliance.desk.totals import LaneTotals
from appliance.errors import EngineDiedError, EngineError, EngineTimeoutError, TandemError
from appliance.protocol import (
    PROTOCOL_VERSION,
    Fatal,
    Finished,
    FinishReason,
    Generate,
    LoadProgress,
    PromptProgress,
    Ready,
    Started,
    Stats,
    Tokens,
    Word,
    line,
)

_log = structlog.get_logger()


class Lane:
    """Confined to the desk thread. Times are those of one monotonic clock, in seconds."""

    def __init__(self, name: str, card: str, limits: Limits) -> None:
        self.name = name
        self.card = card
        self.state = LaneState.WAITING
        self.run: Run | None = None
        self.conversation = Conversation()
        self.ready: Ready | None = None
        """What the present engine said of itself; None before that."""
        self.reason: str | None = None
        """Why the last engine is gone."""
        self.restarts = 0
        self._limits = limits
        self._load: LoadProgress | None = None
        self._stats: Stats | None = None
        self._stats_at: float | None = None
        """When they came."""
        self._past = LaneTotals()
        """Of the engines before."""
        self._fatal: Fatal | None = None
        self._was_ever_ready = False
        self._deaths_in_row = 0
        self._ready_since = 0.0
        self._leaves = False
        self._timers: dict[str, tuple[float, Callable[[float], list[Action]]]] = {}
        """Name to (when, what then). Only the present state's; leaving a state clears them."""

    @property
    def is_idle(self) -> bool:
        return self.state is LaneState.IDLE

    @property
    def takes_requests(self) -> bool:
        return self.state in TAKES_REQUESTS

    @property
    def has_ended(self) -> bool:
        """Failed or stopped, and its process is gone."""
        return self.state in HAS_ENDED

    @property
    def load(self) -> LoadProgress | None:
        """The stage a starting engine is in."""
        return self._load if self.state is LaneState.STARTING else None

    @property
    def next_timer_s(self) -> float | None:
        return min((when for when, _ in self._timers.values()), default=None)

    # What the desk asks for

    def start(self, now: float) -> list[Action]:
        """Starts an engine; the lane is waiting or dead."""
        if self.state is LaneState.DEAD:
            self.restarts += 1
        self._enter(LaneState.STARTING)
        self._load = self._fatal = None
        self._expect_start_line(now)
        return [StartEngine(self.name)]

    def assign(self, request: Generate, now: float) -> list[Action]:
        """Gives an idle lane its next request."""
        self._enter(LaneState.BUSY)
        self.run = Run(request)
        if request.deadline_s is not None:
            self._set_timer("overdue", now + request.deadline_s + self._limits.overdue_s, self._overdue)
        self._set_timer("poll", now + self._limits.stats_period_s, self._poll)
        return [SendLine(self.name, line(Word.GEN, request))]

    def cancel(self, now: float) -> list[Action]:
        """Ends the running request; the engine's terminal event still follows. Nothing to do when it is being cancelled."""
        if self.run is None or self.state is LaneState.CANCELLING:
            return []
        self._enter(LaneState.CANCELLING)
        self._set_timer("cancel", now + self._limits.cancel_s, self._cancel_unanswered)
        return [SendLine(self.name, line(Word.CANCEL, self.run.request.id))]

    def leave(self) -> list[Action]:
        """Ends the engine as soon as it has no request, and for good."""
        self._leaves = True
        match self.state:
            case LaneState.WAITING | LaneState.DEAD:
                self._enter(LaneState.STOPPED)
            case LaneState.STARTING:
                self._enter(LaneState.STOPPING)
                return [KillEngine(self.name)]
            case LaneState.IDLE:
                self._enter(LaneState.STOPPING)
                return [StopEngine(self.name)]
        return []

    def dismiss(self, error: TandemError) -> list[Action]:
        """Ends the running request with `error` and lets the engine leave."""
        if self.run is None:
            return []
        ended = self._end_run(FinishReason.ERROR, error)
        self._enter(LaneState.STOPPING)
        return [ended, StopEngine(self.name)]

    def replace_engine(self, why: str) -> list[Action]:
        """Kills an engine that takes requests; a new one follows. A running request ends with an error."""
        return self._kill(why)

    def fail(self, reason: str) -> None:
        """There will be no engine here; the lane waits for one."""
        self.reason = reason
        self._enter(LaneState.FAILED)

    def tick(self, now: float) -> list[Action]:
        """Does what is due."""
        actions: list[Action] = []
        while due := next(((name, do) for name, (when, do) in self._timers.items() if when <= now), None):
            name, do = due
            del self._timers[name]
            actions += do(now)
        return actions

    # What the engine says

    def hear(self, said: EngineLine, now: float) -> list[Action]:
        """One line of the engine. A killed engine's last lines count no more."""
        if self.state is LaneState.STOPPING and not isinstance(said, Fatal):
            return []
        match said:
            case LoadProgress():
                self._load = said
                if self.state is LaneState.STARTING:
                    self._expect_start_line(now)
            case Ready():
                return self._get_ready(said, now)
            case Finished() | Started() | PromptProgress() | Tokens():
                return self._hear_event(said, now)
            case Stats():
                self._stats, self._stats_at = said, now
                self._timers.pop("answer", None)
                if self.state is LaneState.BUSY or (self.is_idle and said.is_filling):  # an engine that does nothing is left alone
                    self._set_timer("poll", now + self._limits.stats_period_s, self._poll)
            case ControlAnswer() if self.is_idle:
                return self._poll(now)  # it is awake, and what it did shows in its counters
            case ControlError():
                return self._hear_error(said, now)
            case Fatal():
                self._fatal = self._fatal or said
            case _:
                _log.debug("engine answered", lane=self.name, answer=said.text if isinstance(said, ControlAnswer) else said)
        return []

    def end(self, ending: Ending, now: float) -> list[Action]:
        """The process is gone."""
        words = self._fatal.text if self._fatal else ending.last_words
        self.reason = Ending(ending.exit_code, ending.signal, words).sentence(f"engine {self.name} ({self.card})")
        actions: list[Action] = []
        if self.state is LaneState.CANCELLING:
            actions.append(self._end_run(FinishReason.CANCELLED, None))
        elif self.run is not None:
            actions.append(self._end_run(FinishReason.ERROR, EngineDiedError(f"{self.reason}; send the request again")))
        self._enter(self._state_after_death(ending, now))
        self._forget_engine()
        if self.state is LaneState.DEAD:
            delay_s = self._limits.restart_delays_s[self._deaths_in_row - 1]
            self._set_timer("restart", now + delay_s, self.start)
        return actions

    # Private

    def _get_ready(self, ready: Ready, now: float) -> list[Action]:
        if self.state is not LaneState.STARTING:
            return self._kill(f"engine {self.name} said READY twice")
        if ready.protocol != PROTOCOL_VERSION:
            return self._kill(f"engine {self.name} speaks protocol {ready.protocol}, the desk {PROTOCOL_VERSION}; install one version")
        self._enter(LaneState.IDLE)
        self.ready = ready
        self.reason = None
        self._ready_since = now
        self._was_ever_ready = True
        return self._poll(now)

    def _hear_event(self, event: Finished | Started | PromptProgress | Tokens, now: float) -> list[Action]:
        run = self.run
        if run is None or event.id != run.request.id:
            _log.warning("event for a request that this lane does not have", lane=self.name, request_id=event.id)
            return []
        if isinstance(event, Finished):
            return self._finish(event, now)
        run.note(event, now)
        self.conversation.note(run.request, event)
        return [Deliver(event.model_copy(update={"lane": self.name}) if isinstance(event, Started) else event)]

    def _finish(self, event: Finished, now: float) -> list[Action]:
        self.run = None
        self._enter(LaneState.IDLE)
        if event.reason is not FinishReason.ERROR:
            self._deaths_in_row = 0
        return [Deliver(event), *self._poll(now)]

    def _hear_error(self, error: ControlError, now: float) -> list[Action]:
        """A refused GEN gets no terminal event from the engine; its text begins with the request's id."""
        _log.warning("engine refused a line", lane=self.name, code=error.code.value, text=error.text)
        run = self.run
        if run is None or run.is_started or not error.text.startswith(f"{run.request.id}: "):
            return []
        ended = self._end_run(FinishReason.ERROR, EngineError(f"engine {self.name} refused the request: {error.text}"))
        self._enter(LaneState.IDLE)
        return [ended, *self._poll(now)]

    def _poll(self, now: float) -> list[Action]:
        """Asks for the counters; the next question comes a period after the answer, and only while there is something to do."""
        self._timers.pop("poll", None)
        if self.state is LaneState.BUSY:
            self._set_timer("answer", now + self._limits.answer_s, self._answer_missing)
        return [SendLine(self.name, line(Word.STATS))]

    def _expect_start_line(self, now: float) -> None:
        self._set_timer("start", now + self._limits.start_silence_s, self._start_silent)

    def _start_silent(self, _now: float) -> list[Action]:
        return self._kill(f"engine {self.name} said nothing for {self._limits.start_silence_s:g} s while it started")

    def _cancel_unanswered(self, _now: float) -> list[Action]:
        self._deaths_in_row = 0  # it may only have been slow, which is no crash loop however often users cancel
        ended = self._end_run(FinishReason.CANCELLED, None)
        return [ended, *self._kill(f"engine {self.name} did not obey CANCEL within {self._limits.cancel_s:g} s")]

    def _overdue(self, _now: float) -> list[Action]:
        return self._kill_stuck(f"engine {self.name} did not end the request within its deadline")

    def _answer_missing(self, _now: float) -> list[Action]:
        return self._kill_stuck(f"engine {self.name} did not answer within {self._limits.answer_s:g} s")

    def _kill_stuck(self, why: str) -> list[Action]:
        ended = self._end_run(FinishReason.ERROR, EngineTimeoutError(f"{why}; send the request again"))
        return [ended, *self._kill(why)]

    def _kill(self, why: str) -> list[Action]:
        _log.error("engine is killed", lane=self.name, why=why)
        actions: list[Action] = []
        if self.run is not None:
            actions.append(self._end_run(FinishReason.ERROR, EngineDiedError(f"{why}; send the request again")))
        self._enter(LaneState.STOPPING)
        self._fatal = Fatal(code=EngineError.code, text=why)
        return [*actions, KillEngine(self.name)]

    def _end_run(self, reason: FinishReason, error: TandemError | None) -> Deliver:
        """The terminal event that the engine does not write."""
        if self.run is None:
            raise RuntimeError(f"lane {self.name} has no request to end")
        run, self.run = self.run, None
        code, text = (error.code, error.message) if error else (None, None)
        return Deliver(Finished(id=run.request.id, reason=reason, error_code=code, error_text=text, timings=run.timings()))

    def _state_after_death(self, ending: Ending, now: float) -> LaneState:
        if self._leaves:
            return LaneState.STOPPED
        if not self._was_ever_ready and self.state is LaneState.STARTING and ending.signal is None:
            return LaneState.FAILED  # its own decision: what it refused once it will refuse again
        if self.ready is not None and now - self._ready_since >= self._limits.stable_s:
            self._deaths_in_row = 0
        self._deaths_in_row += 1
        if self._deaths_in_row > len(self._limits.restart_delays_s):
            self.reason = f"{self.reason} (death {self._deaths_in_row} in a row; the lane is given up)"
            return LaneState.FAILED
        return LaneState.DEAD

    def _forget_engine(self) -> None:
        self._past = self._past.plus(self._stats)
        self.ready = self._load = self._stats = self._stats_at = self._fatal = None
        self.conversation.clear()

    def _enter(self, state: LaneState) -> None:
        check_step(self.state, state)
        self.state = state
        self._timers.clear()

    def _set_timer(self, name: str, when: float, do: Callable[[float], list[Action]]) -> None:
        self._timers[name] = (when, do)

    def status(self, pid: int | None) -> LaneStatus:
        return LaneStatus(
            name=self.name,
            card=self.card,
            state=self.state,
            reason=self.reason,
            pid=pid,
            restarts=self.restarts,
            load=self.load,
            context=self.ready.context if self.ready else None,
            context_used=len(self.conversation),
            request=self.run.status() if self.run else None,
            stats=self._stats,
            stats_at=self._stats_at,
            totals=self._past.plus(self._stats),
        )

    def check_integrity(self) -> None:
        """Raises RuntimeError when what must hold between any two inputs does not."""
        if (self.run is not None) != (self.state in HAS_REQUEST):
            raise RuntimeError(f"lane {self.name} is {self.state} and its request is {self.run}")
        if (self.ready is not None) < (self.state in TAKES_REQUESTS):
            raise RuntimeError(f"lane {self.name} is {self.state} without READY")


def longest_prefix_lane(lanes: Sequence[Lane], prompt: list[int]) -> Lane | None:
    """The idle lane that can reuse most of the prompt; of equal ones the first. None when no lane is idle."""
    idle = [lane for lane in lanes if lane.is_idle]
    return max(idle, key=lambda lane: lane.conversation.shared_prefix(prompt), default=None)
