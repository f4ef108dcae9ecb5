"""The pair as the desk runs it: a state machine over every order of requests, answers, refusals, silences and deaths, and single paths."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
import structlog
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.desk.actions import Action, Deliver, KillEngine, SendLine, StartEngine, StartLoader, StopEngine, StopLoader
from appliance.desk.config import ElasticConfig, Limits
from appliance.desk.desk_state import DeskState
from appliance.desk.inputs import Cancel, Drain, Ending, EngineEnded, EngineSaid, Input, LoaderEnded, Submit, Tick
from appliance.desk.lines import ControlAnswer, ControlError, EngineLine
from appliance.desk.status import PairPhase
from appliance.errors import CapacityError
from appliance.protocol import ControlErrorCode, Finished, FinishReason, Generate, Ready, Started, Tokens, Word
from appliance.units import MIB

LANES = (("lead", "host:0"), ("helper", "host:1"))
LIMITS = Limits(restart_delays_s=(0.0,) * 1000)
ELASTIC = ElasticConfig(hold_s=10.0, wake_limit_s=5.0, bar_s=20.0, hold_threads=2)
READY = Ready(pid=1, card="host:0", context=64, slots=1, plan_bytes={"expert slots": 5 * MIB - 1})
PAIR_WORDS = (Word.PEER_ATTACH, Word.PEER_DETACH, Word.POOL_HOLD, Word.LINK_SERVE, Word.VRAM)


class Engine:
    """One engine process as it really is: what it holds, and the lines that it has not answered."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_running = self.is_ready = self.is_doomed = False
        self.reset()

    def reset(self) -> None:
        self.request_id: str | None = None
        self.unanswered: deque[tuple[Word, str]] = deque()
        self.has_slots = False
        """On the second card. Taking counts from the line on, giving back from its answer on."""
        self.serves = False
        self.held = 0

    def hear(self, word: Word, argument: str) -> None:
        self.unanswered.append((word, argument))
        if word is Word.PEER_ATTACH or (word is Word.VRAM and not argument):
            self.has_slots = True

    def answer(self) -> ControlAnswer:
        word, argument = self.unanswered.popleft()
        if word is Word.PEER_DETACH or (word is Word.VRAM and argument):
            self.has_slots = False
        match word:
            case Word.PEER_ATTACH:
                return ControlAnswer("PEER ON")
            case Word.PEER_DETACH:
                return ControlAnswer("PEER OFF")
            case Word.POOL_HOLD:
                self.held = int(argument)
                return ControlAnswer(f"HOLD {argument}")
            case Word.LINK_SERVE:
                self.serves = argument == "1"
                return ControlAnswer(f"LINK {argument}")
            case _:
                return ControlAnswer("VRAM 1 2")

    def refuse(self) -> ControlError:
        word, argument = self.unanswered.popleft()
        if word is Word.PEER_ATTACH or (word is Word.VRAM and not argument):
            self.has_slots = False  # tried, failed, undone
        return ControlError(ControlErrorCode.FAILED, f"{word}: no")


class Rig:
    """A desk's state, two engines and a clock; checks what must never happen as it happens."""

    def __init__(self, elastic: ElasticConfig = ELASTIC, max_queue: int = 30) -> None:
        self.state = DeskState(LANES, max_queue, LIMITS, elastic)
        self.now = 1000.0
        self.engines = {name: Engine(name) for name, _ in LANES}
        self.ends: Counter[str] = Counter()
        self.assigned: list[tuple[str, str]] = []
        self.sent: list[tuple[str, str]] = []
        self.do(self.state.begin())
        self.feed(LoaderEnded(Ending(exit_code=0)))

    def feed(self, happened: Input) -> None:
        self.do(self.state.handle(happened, self.now))
        self.state.check_integrity()
        assert not (self.engines["lead"].has_slots and self.engines["helper"].has_slots), "two engines in the second card's memory"

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartEngine():
                    engine = self.engines[action.lane]
                    assert not engine.is_running
                    engine.reset()
                    engine.is_running, engine.is_ready, engine.is_doomed = True, False, False
                case SendLine():
                    self.send(self.engines[action.lane], action.text)
                case StopEngine() | KillEngine():
                    self.engines[action.lane].is_doomed = True
                case Deliver(event=Finished() as event):
                    self.ends[event.id] += 1
                case Deliver() | StartLoader() | StopLoader():
                    pass

    def send(self, engine: Engine, text: str) -> None:
        assert engine.is_running, text
        assert engine.is_ready, text
        assert not engine.is_doomed, text
        word, _, rest = text.strip().partition(" ")
        if word == Word.GEN:
            assert engine.request_id is None
            assert engine.name == "lead" or engine.has_slots, "a request for a helper that sleeps"
            engine.request_id = Generate.model_validate_json(rest).id
            self.assigned.append((engine.request_id, engine.name))
        elif word in PAIR_WORDS:
            self.sent.append((engine.name, text.strip()))
            assert not engine.unanswered, "two lines of the pair at once"
            engine.hear(Word(word), rest)

    def submit(self, name: str) -> None:
        self.feed(Submit(Generate(id=name, prompt=[1, 2], max_tokens=8)))

    def ready(self, name: str) -> None:
        self.engines[name].is_ready = True
        self.feed(EngineSaid(name, READY))

    def both_ready(self) -> None:
        self.ready("lead")
        self.ready("helper")
        self.answer_all()

    def say(self, name: str, said: EngineLine) -> None:
        self.feed(EngineSaid(name, said))

    def answer(self, name: str) -> None:
        self.say(name, self.engines[name].answer())

    def answer_all(self) -> None:
        while names := [name for name, engine in self.engines.items() if engine.unanswered and self.is_well(name)]:
            self.answer(names[0])

    def finish(self, lane: str) -> None:
        engine = self.engines[lane]
        request_id, engine.request_id = engine.request_id, None
        assert request_id is not None
        self.say(lane, Finished(id=request_id, reason=FinishReason.STOP))

    def die(self, name: str) -> None:
        engine = self.engines[name]
        engine.is_running = engine.is_ready = False
        engine.reset()
        self.feed(EngineEnded(name, Ending(signal=9)))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    def is_well(self, name: str) -> bool:
        engine = self.engines[name]
        return engine.is_running and engine.is_ready and not engine.is_doomed

    @property
    def phase(self) -> PairPhase:
        pair = self.state.status({}).pair
        assert pair is not None
        return pair.phase

    def lines_since(self, mark: int) -> list[tuple[str, str]]:
        return self.sent[mark:]


class PairMachine(RuleBasedStateMachine):
    """Everything that can happen, in every order."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.count = 0
        self.accepted: list[str] = []
        self.drains = False

    @initialize()
    def begin(self) -> None:
        self.rig.both_ready()

    def well(self) -> list[str]:
        return [name for name in self.rig.engines if self.rig.is_well(name)]

    @rule()
    def submit(self) -> None:
        name = f"r{self.count}"
        self.count += 1
        try:
            self.rig.submit(name)
        except CapacityError:
            return
        self.accepted.append(name)

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.rig.feed(Cancel(data.draw(st.sampled_from(self.accepted))))

    @precondition(lambda self: any(self.rig.engines[name].unanswered for name in self.well()))
    @rule(data=st.data(), obeys=st.sampled_from([True, True, True, False]))
    def answer(self, data: st.DataObject, obeys: bool) -> None:
        name = data.draw(st.sampled_from([n for n in self.well() if self.rig.engines[n].unanswered]))
        engine = self.rig.engines[name]
        self.rig.say(name, engine.answer() if obeys else engine.refuse())

    @precondition(lambda self: any(self.rig.engines[name].request_id for name in self.well()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.rig.finish(data.draw(st.sampled_from([n for n in self.well() if self.rig.engines[n].request_id])))

    @precondition(lambda self: any(engine.is_running for engine in self.rig.engines.values()))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.rig.die(data.draw(st.sampled_from([n for n, engine in self.rig.engines.items() if engine.is_running])))

    @precondition(lambda self: any(e.is_running and not e.is_ready and not e.is_doomed for e in self.rig.engines.values()))
    @rule(data=st.data())
    def get_ready(self, data: st.DataObject) -> None:
        starting = [n for n, e in self.rig.engines.items() if e.is_running and not e.is_ready and not e.is_doomed]
        self.rig.ready(data.draw(st.sampled_from(starting)))

    @rule(seconds=st.sampled_from([0.01, 1.0, 5.0, 10.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.pass_time(seconds)

    @rule()
    def the_next_timer_is_due(self) -> None:
        due = self.rig.state.next_timer_s
        if due is not None:
            self.rig.now = max(self.rig.now, due)
            self.rig.feed(Tick())
            later = self.rig.state.next_timer_s
            assert later is None or later > self.rig.now, "a timer that stays due is a busy loop"

    @invariant()
    def order_of_arrival_is_kept(self) -> None:
        order = [self.accepted.index(name) for name, _ in self.rig.assigned]
        assert order == sorted(order)

    @invariant()
    def rows_are_asked_only_of_a_helper_with_slots(self) -> None:
        for name in self.well():
            if self.rig.engines[name].serves and name == "helper":
                assert self.rig.engines[name].has_slots

    def teardown(self) -> None:
        """However far it came: when everybody is well again, every request ends and the pair comes to rest asleep."""
        for _ in range(400):
            if not self.step_towards_rest():
                break
        assert all(self.rig.ends[name] == 1 for name in self.accepted)
        lead, helper = self.rig.engines["lead"], self.rig.engines["helper"]
        assert self.rig.phase is PairPhase.ASLEEP
        assert (lead.has_slots, lead.held, lead.serves) == (True, 0, False)
        assert (helper.has_slots, helper.serves) == (False, False)
        self.rig.feed(Drain(0.0))

    def step_towards_rest(self) -> bool:
        rig = self.rig
        for name, engine in rig.engines.items():
            if engine.is_doomed and engine.is_running:
                rig.die(name)
                return True
            if engine.is_running and not engine.is_ready:
                rig.ready(name)
                return True
            if engine.unanswered:
                rig.answer(name)
                return True
            if engine.request_id:
                rig.finish(name)
                return True
        due = rig.state.next_timer_s
        if due is None:
            return False
        rig.now = max(rig.now, due)
        rig.feed(Tick())
        return True


TestPairMachine = PairMachine.TestCase
TestPairMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def settled(elastic: ElasticConfig = ELASTIC) -> Rig:
    rig = Rig(elastic)
    rig.both_ready()
    return rig


def awake() -> Rig:
    """Two requests, one on each lane."""
    rig = settled()
    rig.submit("a")
    rig.submit("b")
    rig.answer_all()
    assert rig.assigned == [("a", "lead"), ("b", "helper")]
    return rig


def test_at_the_start_the_lead_takes_the_second_card() -> None:
    rig = settled()
    assert rig.sent == [("lead", "PEER_ATTACH")]
    assert rig.phase is PairPhase.ASLEEP


def test_one_request_leaves_the_helper_asleep() -> None:
    rig = settled()
    rig.submit("a")
    assert rig.assigned == [("a", "lead")]
    assert rig.phase is PairPhase.ASLEEP


def test_the_second_request_wakes_the_helper_in_the_order_that_memory_needs() -> None:
    rig = settled()
    rig.submit("a")
    mark = len(rig.sent)
    rig.submit("b")
    assert rig.lines_since(mark) == [("lead", "PEER_DETACH")]
    assert rig.phase is PairPhase.WAKING
    rig.answer("lead")
    assert rig.lines_since(mark)[1:] == [("helper", "VRAM")]
    assert len(rig.assigned) == 1
    rig.answer("helper")
    assert rig.assigned[1] == ("b", "helper")
    rig.answer_all()
    assert rig.lines_since(mark)[2:] == [("lead", "POOL_HOLD 2"), ("helper", "LINK_SERVE 1"), ("lead", "LINK_SERVE 1")]
    assert rig.phase is PairPhase.AWAKE


def test_threads_of_the_lead_sit_out_only_while_those_of_the_helper_compute() -> None:
    rig = awake()
    mark = len(rig.sent)
    rig.finish("helper")
    rig.answer_all()
    assert rig.lines_since(mark) == [("lead", "POOL_HOLD 0")]
    rig.submit("c")
    assert rig.lines_since(mark)[1:] == [("lead", "POOL_HOLD 2")]


def test_a_gpu_computes_the_helpers_prompt_without_its_threads() -> None:
    rig = settled(replace(ELASTIC, prompts_take_threads=False))
    rig.submit("a")
    rig.submit("b")
    rig.answer_all()
    assert rig.assigned[1] == ("b", "helper")
    assert ("lead", "POOL_HOLD 2") not in rig.sent
    rig.say("helper", Tokens(id="b", ids=[7]))
    assert rig.sent[-1] == ("lead", "POOL_HOLD 2")


def test_the_log_says_that_the_helper_is_awake_when_it_is() -> None:
    rig = settled()
    with structlog.testing.capture_logs() as logged:
        rig.submit("a")
        rig.submit("b")
        assert [entry["event"] for entry in logged] == ["waking the helper"]
        rig.pass_time(1.0)
        rig.answer_all()
    (awake,) = [entry for entry in logged if entry["event"] == "the helper is awake"]
    assert awake["wake_s"] == 1.0


def test_when_two_are_no_longer_there_the_helper_falls_asleep_after_a_while() -> None:
    rig = awake()
    rig.finish("helper")
    rig.answer_all()
    mark = len(rig.sent)
    rig.pass_time(9.9)
    assert rig.lines_since(mark) == []
    rig.pass_time(0.2)
    rig.answer_all()
    assert rig.phase is PairPhase.ASLEEP
    assert set(rig.lines_since(mark)) == {
        ("lead", "LINK_SERVE 0"), ("helper", "LINK_SERVE 0"), ("helper", "VRAM 5"), ("lead", "PEER_ATTACH"),
    }  # fmt: skip
    assert rig.lines_since(mark).index(("helper", "VRAM 5")) < rig.lines_since(mark).index(("lead", "PEER_ATTACH"))


def test_a_request_while_the_helper_falls_asleep_turns_it_round() -> None:
    rig = awake()
    rig.finish("helper")
    rig.pass_time(11)
    assert rig.phase is PairPhase.FALLING_ASLEEP
    rig.submit("c")
    rig.answer_all()
    assert rig.assigned[-1] == ("c", "helper")
    assert rig.phase is PairPhase.AWAKE


def test_polling_never_keeps_the_helper_awake() -> None:
    rig = awake()
    rig.finish("helper")
    for _ in range(110):
        rig.state.status({})
        rig.pass_time(0.1)
    rig.answer_all()
    assert rig.phase is PairPhase.ASLEEP


def test_a_lead_that_cannot_detach_bars_the_helper_and_serves_both() -> None:
    rig = settled()
    rig.submit("a")
    rig.submit("b")
    rig.say("lead", rig.engines["lead"].refuse())
    rig.answer_all()
    assert rig.phase is PairPhase.ASLEEP
    pair = rig.state.status({}).pair
    assert pair is not None
    assert pair.failed_wakes == 1
    assert pair.reason(rig.now + 5) == "the last wake failed and the helper is left alone for 15 s more: the lead refused PEER_DETACH: no"
    assert pair.barred_s(rig.now + 20) == 0
    rig.finish("lead")
    assert rig.assigned == [("a", "lead"), ("b", "lead")]
    rig.submit("c")
    assert rig.phase is PairPhase.ASLEEP
    rig.pass_time(20.1)
    assert rig.phase is PairPhase.WAKING


def why(rig: Rig) -> str | None:
    pair = rig.state.status({}).pair
    assert pair is not None
    return pair.reason(rig.now)


def test_the_reason_is_the_one_of_now() -> None:
    rig = settled()
    assert why(rig) is None
    rig.die("helper")
    assert str(why(rig)).startswith("the helper's engine is starting: engine helper (host:1) was killed by SIGKILL")
    rig.submit("a")
    rig.submit("b")
    assert rig.phase is PairPhase.ASLEEP
    rig.ready("helper")
    assert (why(rig), rig.phase) == (None, PairPhase.WAKING)
    rig.answer("lead")
    rig.say("helper", rig.engines["helper"].refuse())
    assert why(rig) == "the last wake failed and the helper is left alone for 20 s more: the helper refused VRAM: no"
    rig.pass_time(20)
    rig.answer_all()
    assert (why(rig), rig.phase) == (None, PairPhase.AWAKE)
    status = rig.state.status({})
    assert status.to_json()["pair"]["last_failure"] == "the helper refused VRAM: no"


def test_a_line_that_is_refused_between_two_wakes_is_the_reason_while_it_matters() -> None:
    rig = Rig()
    rig.ready("lead")
    rig.ready("helper")
    rig.say("lead", rig.engines["lead"].refuse())
    assert why(rig) == "the lead refused PEER_ATTACH: no"
    rig.pass_time(20)
    rig.answer_all()
    assert why(rig) is None


@pytest.mark.parametrize(
    ("is_detached", "sentence"),
    [
        (False, "the lead, busy with a request, did not give the second card back within 5 s"),
        (True, "the helper did not take its slots within 5 s"),
    ],
)
def test_a_late_wake_names_who_is_late(is_detached: bool, sentence: str) -> None:
    rig = settled()
    rig.submit("a")
    rig.submit("b")
    if is_detached:
        rig.answer("lead")
    rig.pass_time(5)
    assert rig.state.status({}).to_json()["pair"]["last_failure"] == sentence


def test_a_helper_that_finds_its_memory_taken_is_barred_and_the_lead_takes_the_card_again() -> None:
    rig = settled()
    rig.submit("a")
    rig.submit("b")
    rig.answer("lead")
    mark = len(rig.sent)
    rig.say("helper", rig.engines["helper"].refuse())
    rig.answer_all()
    assert ("lead", "PEER_ATTACH") in rig.lines_since(mark)
    assert rig.engines["lead"].has_slots
    assert rig.engines["lead"].held == 0


def test_a_wake_that_takes_too_long_is_given_up_and_a_helper_that_hangs_is_replaced() -> None:
    rig = settled()
    rig.submit("a")
    rig.submit("b")
    rig.answer("lead")
    rig.pass_time(5.1)
    assert rig.engines["helper"].is_doomed
    assert not rig.engines["lead"].unanswered, "the card's memory is not free before the process has ended"
    rig.die("helper")
    rig.answer_all()
    assert ("lead", "PEER_ATTACH") in rig.sent[1:]


def test_a_lead_that_is_deep_in_a_prompt_is_waited_for_and_not_killed() -> None:
    rig = settled()
    rig.submit("a")
    rig.say("lead", Started(id="a", prompt_tokens=2, cached_tokens=0))
    rig.submit("b")
    rig.pass_time(5.1)
    assert rig.phase is PairPhase.ASLEEP
    assert not rig.engines["lead"].is_doomed
    rig.answer_all()
    assert rig.engines["lead"].has_slots


def test_a_line_that_came_in_the_last_step_of_a_long_prompt_is_answered_after_it() -> None:
    rig = settled()
    rig.submit("a")
    rig.submit("b")
    rig.pass_time(6.0)
    rig.finish("lead")
    assert not rig.engines["lead"].is_doomed
    rig.answer_all()
    assert rig.assigned == [("a", "lead"), ("b", "lead")]


def test_the_helper_wakes_for_a_lead_that_died() -> None:
    rig = settled()
    rig.die("lead")
    rig.submit("a")
    rig.answer_all()
    assert rig.assigned == [("a", "helper")]
    mark = len(rig.sent)
    rig.ready("lead")
    rig.answer_all()
    assert ("lead", "PEER_ATTACH") not in rig.lines_since(mark)
    assert ("lead", "LINK_SERVE 1") in rig.lines_since(mark)


def test_the_lead_goes_on_alone_when_the_helper_dies() -> None:
    rig = awake()
    mark = len(rig.sent)
    rig.die("helper")
    assert rig.ends["b"] == 1
    rig.answer_all()
    assert rig.lines_since(mark) == [("lead", "LINK_SERVE 0"), ("lead", "POOL_HOLD 0"), ("lead", "PEER_ATTACH")]
    assert rig.ends["a"] == 0


def test_a_helper_that_must_not_be_woken_is_no_lane_to_be_had() -> None:
    rig = settled()
    rig.die("lead")
    assert rig.state.status({}).unready_reason is None
    rig.submit("a")
    rig.say("helper", rig.engines["helper"].refuse())
    assert rig.state.status({}).unready_reason == "no lane takes requests now (lead starting, helper idle)"
    rig.feed(Cancel("a"))
    assert rig.state.next_timer_s == rig.now + 20
    rig.pass_time(20)
    assert rig.state.status({}).unready_reason is None


def test_twenty_requests_at_once_are_taken_in_order() -> None:
    rig = settled()
    for number in range(20):
        rig.submit(f"r{number}")
    rig.answer_all()
    while any(rig.engines[name].request_id for name in rig.engines):
        rig.finish(next(name for name in ("helper", "lead") if rig.engines[name].request_id))
    assert [name for name, _ in rig.assigned] == [f"r{number}" for number in range(20)]
    assert {lane for _, lane in rig.assigned} == {"lead", "helper"}


def test_a_request_that_leaves_while_the_helper_wakes_disturbs_nobody() -> None:
    rig = settled()
    rig.submit("a")
    rig.submit("b")
    rig.feed(Cancel("b"))
    rig.answer_all()
    assert (rig.ends["a"], rig.ends["b"]) == (0, 1)
    rig.pass_time(10.1)
    rig.answer_all()
    assert rig.phase is PairPhase.ASLEEP


@pytest.mark.parametrize(("peer", "link"), [(False, True), (True, False), (False, False)])
def test_what_is_switched_off_is_never_asked_for(peer: bool, link: bool) -> None:
    rig = settled(ElasticConfig(hold_s=10.0, peer=peer, link=link))
    rig.submit("a")
    rig.submit("b")
    rig.answer_all()
    assert rig.assigned[-1] == ("b", "helper")
    words = {text.split()[0] for _, text in rig.sent}
    assert (("PEER_ATTACH" in words), ("LINK_SERVE" in words)) == (peer, link)


def test_without_room_in_the_line_a_second_request_still_wakes_the_helper() -> None:
    rig = Rig(max_queue=0)
    rig.both_ready()
    rig.submit("a")
    rig.submit("b")
    with pytest.raises(CapacityError):
        rig.submit("c")
