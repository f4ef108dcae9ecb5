"""What the desk decides, without processes: a state machine over every order of what can happen, and single decisions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.desk.actions import Action, Deliver, KillEngine, SendLine, StartEngine, StartLoader, StopEngine, StopLoader
from appliance.desk.config import Limits
from appliance.desk.desk_state import DeskState
from appliance.desk.inputs import Cancel, Drain, Ending, EngineEnded, EngineSaid, Input, LoaderEnded, LoaderSaid, Submit, Tick
from appliance.desk.lines import ControlAnswer, ControlError, EngineLine
from appliance.desk.status import Phase
from appliance.errors import NotReadyError, QueueFullError, RequestError
from appliance.protocol import (
    ControlErrorCode,
    Fatal,
    Finished,
    FinishReason,
    Generate,
    LoadProgress,
    PromptProgress,
    Queued,
    Ready,
    Started,
    Stats,
    Tokens,
    Word,
)

LANES = (("lead", "host:0"), ("helper", "host:1"))
LIMITS = Limits(restart_delays_s=(0.0, 1.0))
MAX_QUEUE = 3
READY = Ready(pid=1, card="host:0", context=64, slots=1, plan_bytes={})
STATS = Stats(
    rows_by_tier={}, windows=0, prompt_tokens=0, generated_tokens=0, swaps=0, resident_experts=0, slots=0, context_used=0,
    busy=False, isa="portable", pool_threads=1, pool_held=0,
)  # fmt: skip


class Engine:
    """The desk's view of one engine, kept from the actions alone."""

    def __init__(self) -> None:
        self.is_running = False
        self.is_ready = False
        self.is_doomed = False
        self.request_id: str | None = None
        self.is_started = False

    def start(self) -> None:
        assert not self.is_running, "two engines on one card"
        self.__init__()  # type: ignore[misc]
        self.is_running = True


class DeskMachine(RuleBasedStateMachine):
    """Drives `DeskState` with every input in every order and plays tickets and engines itself."""

    def __init__(self) -> None:
        super().__init__()
        self.state = DeskState(LANES, MAX_QUEUE, LIMITS)
        self.now = 0.0
        self.count = 0
        self.engines = {name: Engine() for name, _ in LANES}
        self.loader_runs = False
        self.drains = False
        self.accepted: list[str] = []
        self.assigned: list[str] = []
        self.cancelled: set[str] = set()
        self.ends: Counter[str] = Counter()
        self.places: dict[str, int] = {}

    @initialize(is_warm=st.sampled_from([True, True, True, False]))
    def begin(self, is_warm: bool) -> None:
        self.do(self.state.begin())
        if is_warm:
            self.loader_ends(0)
            for name in self.alive():
                self.engines[name].is_ready = True
                self.feed(EngineSaid(name, READY))

    def feed(self, happened: Input) -> None:
        self.do(self.state.handle(happened, self.now))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartLoader():
                    self.loader_runs = True
                case StopLoader():
                    assert self.loader_runs
                case StartEngine():
                    self.engines[action.lane].start()
                case SendLine():
                    self.send(self.engines[action.lane], action.text)
                case StopEngine() | KillEngine():
                    engine = self.engines[action.lane]
                    assert engine.is_running
                    assert not engine.is_doomed, "ended twice"
                    engine.is_doomed = True
                case Deliver():
                    self.deliver(action)

    def send(self, engine: Engine, text: str) -> None:
        assert engine.is_running, f"a line to nobody: {text}"
        assert not engine.is_doomed, f"a line to an engine that is told to leave: {text}"
        word, _, body = text.strip().partition(" ")
        assert engine.is_ready, "a line before READY"
        if word == Word.GEN:
            assert engine.request_id is None, "two requests on one lane"
            engine.request_id, engine.is_started = Generate.model_validate_json(body).id, False
            self.assigned.append(engine.request_id)
        elif word == Word.CANCEL:
            assert body == engine.request_id

    def deliver(self, action: Deliver) -> None:
        event = action.event
        assert self.ends[event.id] == 0, f"{event} after the end"
        if isinstance(event, Queued):
            assert event.id not in self.assigned
            assert self.places.get(event.id) != event.place, "told twice"
            self.places[event.id] = event.place
        if isinstance(event, Finished):
            self.ends[event.id] += 1
            if event.reason is FinishReason.CANCELLED:
                assert event.id in self.cancelled, "cancelled, though nobody asked for it"
            for engine in self.engines.values():
                if engine.request_id == event.id and not engine.is_doomed and engine.is_running:
                    engine.request_id = None

    def alive(self) -> list[str]:
        return [name for name, engine in self.engines.items() if engine.is_running]

    def running(self) -> list[str]:
        return [name for name in self.alive() if self.engines[name].request_id and not self.engines[name].is_doomed]

    # Inputs

    @rule(length=st.integers(1, 5))
    def submit(self, length: int) -> None:
        self.count += 1
        name = f"r{self.count}"
        request = Generate(id=name, prompt=[1] * length, max_tokens=8, deadline_s=60)
        waiting = self.state.status({}).queue_length
        if self.state.phase is not Phase.READY:
            with pytest.raises(NotReadyError):
                self.state.handle(Submit(request), self.now)
        elif waiting == MAX_QUEUE:
            with pytest.raises(QueueFullError):
                self.state.handle(Submit(request), self.now)
        else:
            self.accepted.append(name)
            self.feed(Submit(request))

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.accepted))
        if not self.ends[name]:
            self.cancelled.add(name)
        self.feed(Cancel(name))

    @precondition(lambda self: self.loader_runs)
    @rule(code=st.sampled_from([0, 0, 0, 0, 1]))
    def loader_ends(self, code: int) -> None:
        self.loader_runs = False
        self.feed(LoaderEnded(Ending(exit_code=code)))

    @precondition(lambda self: self.loader_runs)
    @rule()
    def loader_says(self) -> None:
        self.feed(LoaderSaid(LoadProgress(stage="arena", done_bytes=1, total_bytes=2)))

    @precondition(lambda self: any(not self.engines[name].is_ready and not self.engines[name].is_doomed for name in self.alive()))
    @rule(data=st.data())
    def engine_is_ready(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in self.alive() if not self.engines[n].is_ready and not self.engines[n].is_doomed]))
        self.engines[name].is_ready = True
        self.feed(EngineSaid(name, READY))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), kind=st.sampled_from(["started", "prompt", "tokens", "stop", "length", "error", "refused"]))
    def engine_works(self, data: st.DataObject, kind: str) -> None:
        name = data.draw(st.sampled_from(self.running()))
        engine = self.engines[name]
        request_id = engine.request_id
        assert request_id is not None
        if kind == "refused" and engine.is_started:
            kind = "error"
        engine.is_started |= kind == "started"
        lines: dict[str, EngineLine] = {
            "started": Started(id=request_id, prompt_tokens=1, cached_tokens=0),
            "prompt": PromptProgress(id=request_id, done=1, total=1),
            "tokens": Tokens(id=request_id, ids=[5]),
            "stop": Finished(id=request_id, reason=FinishReason.STOP),
            "length": Finished(id=request_id, reason=FinishReason.LENGTH),
            "error": Finished(id=request_id, reason=FinishReason.ERROR),
            "refused": ControlError(ControlErrorCode.MALFORMED, f"{request_id}: no"),
        }
        if kind in ("stop", "length", "error", "refused"):
            engine.request_id = None
        self.feed(EngineSaid(name, lines[kind]))

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), said=st.sampled_from([STATS, Fatal(code="x", text="y"), ControlError(ControlErrorCode.BUSY, "zz: no")]))
    def engine_says_something_else(self, data: st.DataObject, said: Stats | Fatal | ControlError) -> None:
        self.feed(EngineSaid(data.draw(st.sampled_from(self.alive())), said))

    @precondition(lambda self: any(self.engines[name].is_doomed for name in self.alive()))
    @rule(data=st.data())
    def doomed_engine_says_what_it_wrote_before(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in self.alive() if self.engines[n].is_doomed]))
        late = self.engines[name].request_id or "r1"
        lines: list[EngineLine] = [READY, Tokens(id=late, ids=[1]), Finished(id=late, reason=FinishReason.STOP)]
        self.feed(EngineSaid(name, data.draw(st.sampled_from(lines))))

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), ending=st.sampled_from([Ending(signal=9), Ending(signal=9), Ending(exit_code=1)]))
    def engine_ends(self, data: st.DataObject, ending: Ending) -> None:
        name = data.draw(st.sampled_from(self.alive()))
        self.engines[name].is_running = False
        self.feed(EngineEnded(name, ending))

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.0, 6.0, 100.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @rule()
    def the_next_timer_is_due(self) -> None:
        due = self.state.next_timer_s
        if due is not None:
            self.now = max(self.now, due)
            self.feed(Tick())
            later = self.state.next_timer_s
            assert later is None or later > self.now, "a timer that stays due is a busy loop"

    @rule(drain_s=st.sampled_from([0.0, 5.0]))
    @precondition(lambda self: self.count > 3)
    def drain(self, drain_s: float) -> None:
        self.drains = True
        self.feed(Drain(drain_s))

    # What must always hold

    @invariant()
    def state_is_sound(self) -> None:
        self.state.check_integrity()

    @invariant()
    def everyone_is_waiting_running_or_ended_once(self) -> None:
        running = {engine.request_id for engine in self.engines.values() if engine.is_running and not engine.is_doomed}
        waiting = [name for name in self.accepted if name not in self.assigned and not self.ends[name]]
        for name in self.accepted:
            assert (name in running) + (name in waiting) + self.ends[name] == 1, name
        assert {name: self.places[name] for name in waiting} == {name: place for place, name in enumerate(waiting, start=1)}
        assert len(waiting) == self.state.status({}).queue_length

    @invariant()
    def order_of_arrival_is_kept(self) -> None:
        order = [self.accepted.index(name) for name in self.assigned]
        assert order == sorted(order)

    @invariant()
    def draining_desk_ends_with_its_engines(self) -> None:
        assert self.state.has_ended == (self.drains and not self.loader_runs and not self.alive())

    def teardown(self) -> None:
        """However far it came: after a stop, everything ends."""
        self.feed(Drain(0.0))
        if self.loader_runs:
            self.loader_ends(-1)
        for name in self.alive():
            self.engines[name].is_running = False
            self.feed(EngineEnded(name, Ending(exit_code=0)))
        assert self.state.has_ended
        assert self.state.next_timer_s is None
        assert all(self.ends[name] == 1 for name in self.accepted)


TestDeskMachine = DeskMachine.TestCase
TestDeskMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


class Session:
    """A state with ready lanes and a clock, for single decisions."""

    def __init__(self, num_lanes: int = 2, limits: Limits = LIMITS, starting: str | None = None) -> None:
        self.state = DeskState(LANES[:num_lanes], MAX_QUEUE, limits)
        self.now = 0.0
        self.state.begin()
        self.feed(LoaderEnded(Ending(exit_code=0)))
        for name, _ in LANES[:num_lanes]:
            if name != starting:
                self.feed(EngineSaid(name, READY))

    def feed(self, happened: Input) -> list[Action]:
        return self.state.handle(happened, self.now)

    def submit(self, name: str, prompt: list[int]) -> str | None:
        """The lane that got it, None if it waits."""
        actions = self.feed(Submit(Generate(id=name, prompt=prompt, max_tokens=8)))
        return next((action.lane for action in actions if isinstance(action, SendLine) and action.text.startswith("GEN")), None)

    def serve(self, lane: str, name: str, prompt: list[int], answer: list[int]) -> None:
        for event in (
            Started(id=name, prompt_tokens=len(prompt), cached_tokens=0),
            PromptProgress(id=name, done=len(prompt), total=len(prompt)),
            Tokens(id=name, ids=answer),
            Finished(id=name, reason=FinishReason.STOP),
        ):
            self.feed(EngineSaid(lane, event))


def test_first_request_goes_to_the_lead() -> None:
    assert Session().submit("a", [1, 2]) == "lead"


def test_answer_belongs_to_the_conversation() -> None:
    session = Session()
    assert session.submit("a", [1, 2]) == "lead"
    assert session.submit("b", [1, 2]) == "helper"
    session.serve("lead", "a", [1, 2], [3, 4])
    session.serve("helper", "b", [1, 2], [3, 5])
    assert session.submit("c", [1, 2, 3, 5, 6]) == "helper"


def test_prompt_given_up_half_way_counts_as_far_as_it_was_computed() -> None:
    session = Session()
    session.submit("a", [1, 2, 3, 4])
    session.submit("b", [1, 2, 9])
    session.feed(EngineSaid("lead", Started(id="a", prompt_tokens=4, cached_tokens=0)))
    session.feed(EngineSaid("lead", PromptProgress(id="a", done=2, total=4)))
    session.feed(EngineSaid("lead", Finished(id="a", reason=FinishReason.CANCELLED)))
    session.serve("helper", "b", [1, 2, 9], [])
    assert session.state.status({}).lanes[0].context_used == 2


def test_dead_engine_holds_no_conversation() -> None:
    session = Session()
    session.submit("a", [1, 2])
    session.serve("lead", "a", [1, 2], [3])
    session.feed(EngineEnded("lead", Ending(signal=9)))
    assert session.state.status({}).lanes[0].context_used == 0


def unready(session: Session) -> str | None:
    return session.state.status({}).unready_reason


def test_nobody_is_sent_here_before_the_lead_has_come_up() -> None:
    session = Session(starting="lead")
    assert unready(session) == "the model is loading: the lead has not been up yet (lead starting, helper idle)"
    session.feed(EngineSaid("lead", READY))
    assert unready(session) is None


def test_a_lead_that_will_never_come_up_does_not_keep_the_helper_from_serving() -> None:
    session = Session(starting="lead")
    session.feed(EngineEnded("lead", Ending(exit_code=1)))
    assert unready(session) is None


def test_one_dead_engine_leaves_it_ready_and_two_do_not() -> None:
    session = Session()
    session.feed(EngineEnded("helper", Ending(signal=9)))
    assert unready(session) is None
    session.feed(EngineSaid("helper", READY))
    session.feed(EngineEnded("lead", Ending(signal=9)))
    assert unready(session) is None
    session.feed(EngineEnded("helper", Ending(signal=9)))
    assert unready(session) == "no lane takes requests now (lead starting, helper dead)"
    session.feed(Drain(0.0))
    assert unready(session) == "the server is shutting down"


def test_restarts_come_at_once_and_then_ever_later() -> None:
    session = Session(1, Limits(restart_delays_s=(0.0, 1.0, 4.0)))
    waited = []
    for _ in range(3):
        died_at = session.now
        actions = session.feed(EngineEnded("lead", Ending(signal=11)))
        while StartEngine("lead") not in actions:
            session.now = session.state.next_timer_s or session.now
            actions = session.feed(Tick())
        waited.append(session.now - died_at)
        session.feed(EngineSaid("lead", READY))
    assert waited == [0.0, 1.0, 4.0]
    session.feed(EngineEnded("lead", Ending(signal=11)))
    assert session.state.phase is Phase.FAILED


def test_request_that_ends_well_begins_a_new_row_of_deaths() -> None:
    session = Session(1, Limits(restart_delays_s=(0.0,)))
    for number in range(5):
        session.feed(EngineEnded("lead", Ending(signal=11)))
        session.feed(Tick())
        session.feed(EngineSaid("lead", READY))
        assert session.submit(f"r{number}", [1]) == "lead"
        session.serve("lead", f"r{number}", [1], [2])
    assert session.state.phase is Phase.READY


def test_engine_that_is_slow_to_cancel_is_replaced_however_often() -> None:
    session = Session(1, Limits(cancel_s=5, restart_delays_s=(0.0, 1.0)))
    for number in range(5):
        session.submit(f"r{number}", [1])
        session.feed(Cancel(f"r{number}"))
        session.now += 5
        assert KillEngine("lead") in session.feed(Tick())
        assert StartEngine("lead") in session.feed(EngineEnded("lead", Ending(signal=9)))
        session.feed(EngineSaid("lead", READY))


@pytest.mark.parametrize(("is_complete", "finished", "cancelled"), [(True, 1, 0), (False, 0, 1)])
def test_an_answer_cut_at_a_stop_string_counts_as_finished(is_complete: bool, finished: int, cancelled: int) -> None:
    session = Session(1)
    session.submit("a", [1])
    session.feed(Cancel("a", is_complete))
    session.feed(EngineSaid("lead", Finished(id="a", reason=FinishReason.CANCELLED)))
    counters = session.state.status({}).counters
    assert (counters.finished, counters.cancelled) == (finished, cancelled)


def test_engine_of_another_protocol_is_killed_with_a_sentence() -> None:
    session = Session(1)
    session.feed(EngineEnded("lead", Ending(signal=9)))
    actions = session.feed(EngineSaid("lead", READY.model_copy(update={"protocol": 99})))
    assert KillEngine("lead") in actions
    session.feed(EngineEnded("lead", Ending(signal=9)))
    assert "speaks protocol 99, the desk 1" in (session.state.status({}).lanes[0].reason or "")


def test_refused_request_ends_with_the_engines_words() -> None:
    session = Session(1)
    session.submit("a", [1])
    actions = session.feed(EngineSaid("lead", ControlError(ControlErrorCode.MALFORMED, "a: prompt.0: must be positive")))
    ended = next(action.event for action in actions if isinstance(action, Deliver))
    assert isinstance(ended, Finished)
    assert ended.error_text == "engine lead refused the request: a: prompt.0: must be positive"
    assert session.state.status({}).lanes[0].state == "idle"


def test_starting_engine_that_says_nothing_is_killed() -> None:
    state = DeskState(LANES[:1], 1, Limits(start_silence_s=10))
    state.begin()
    state.handle(LoaderEnded(Ending(exit_code=0)), 0.0)
    state.handle(EngineSaid("lead", LoadProgress(stage="dense", done_bytes=1, total_bytes=2)), 8.0)
    assert state.handle(Tick(), 17.0) == []
    assert state.handle(Tick(), 18.0) == [KillEngine("lead")]


def test_duplicate_id_is_refused_even_while_it_waits() -> None:
    session = Session(1)
    session.submit("a", [1])
    session.submit("b", [1])
    for name in "ab":
        with pytest.raises(RequestError):
            session.submit(name, [1])


def lines_to_lead(actions: list[Action]) -> list[str]:
    return [action.text.strip() for action in actions if isinstance(action, SendLine) and action.lane == "lead"]


def test_an_idle_lane_is_asked_for_its_counters_while_it_does_something_and_then_left_alone() -> None:
    state = DeskState(LANES, MAX_QUEUE, LIMITS)
    state.begin()
    state.handle(LoaderEnded(Ending(exit_code=0)), 0.0)
    assert lines_to_lead(state.handle(EngineSaid("lead", READY), 0.0)) == ["STATS"]
    state.handle(EngineSaid("helper", READY), 0.0)
    assert lines_to_lead(state.handle(EngineSaid("lead", STATS), 1.0)) == []
    assert state.next_timer_s is None
    assert lines_to_lead(state.handle(EngineSaid("lead", ControlAnswer("PEER ON")), 2.0)) == ["STATS"]
    state.handle(EngineSaid("lead", STATS.model_copy(update={"is_filling": True})), 2.0)
    assert state.next_timer_s == 2.0 + LIMITS.stats_period_s
    assert lines_to_lead(state.handle(Tick(), 2.0 + LIMITS.stats_period_s)) == ["STATS"]
    state.handle(EngineSaid("lead", STATS), 4.0)
    assert state.next_timer_s is None
    assert state.status({}).lanes[0].stats_at == 4.0
