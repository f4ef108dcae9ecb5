"""A server's desk with real engines, no HTTP, over the small model of the pair's cases, and requests whose answers are kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from appliance.desk.config import DeskConfig, Limits
from appliance.desk.desk import Desk
from appliance.desk.status import DeskStatus, LaneStatus, PairPhase, Phase
from appliance.errors import TandemError
from appliance.protocol import Finished, FinishReason, Generate, TokenLogprobs, Tokens
from appliance.settings import Settings
from appliance.web.appliance import read_appliance
from scripts.gpu_cases.owners import Owners, Watch
from scripts.pair_bench.streams import wait_for_tokens, with_slots

ENGINE = "appliance.engine.process"
SWAPPING_ENGINE = "scripts.gpu_cases.swapping_engine"
REQUEST_S, REST_S, START_S = 90.0, 60.0, 120.0
"""Longer than these takes nothing that goes well."""
LOOK_S = 0.001
LIMITS = Limits(stats_period_s=0.05, restart_delays_s=(0.0,) * 20)


class NoRestError(Exception):
    """A desk did not come to where it had to; a sentence."""


@dataclass
class Answer:
    """What came of a request, and what more came while it runs."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Finished | None = None
    refusal: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.end is not None and self.end.reason is FinishReason.LENGTH

    @property
    def how(self) -> str:
        """How it ended, for a sentence."""
        if self.end is None:
            return f"was refused: {self.refusal}" if self.refusal else "never ended"
        return f"ended as {self.end.reason.value}" + (f" ({self.end.error_code}: {self.end.error_text})" if self.end.error_code else "")


@dataclass(frozen=True)
class Underway:
    answer: Answer
    thread: threading.Thread

    def finish(self) -> Answer:
        self.thread.join()
        return self.answer

    def wait_for_tokens(self, num: int) -> None:
        wait_for_tokens(self.answer.ids, num, self.thread)


class PairDesk:
    """Confined to one thread, but `start` and `ask`."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def start(self, request: Generate) -> Underway:
        """Returns when the desk has taken it."""
        answer = Answer()
        is_taken = threading.Event()
        thread = threading.Thread(target=self._follow, args=(request, answer, is_taken))
        thread.start()
        is_taken.wait(REQUEST_S)
        return Underway(answer, thread)

    def ask(self, request: Generate) -> Answer:
        return self.start(request).finish()

    def status(self) -> DeskStatus:
        return self._desk.status()

    def lane(self, name: str) -> LaneStatus:
        return next(lane for lane in self._desk.status().lanes if lane.name == name)

    @property
    def phase(self) -> PairPhase | None:
        pair = self._desk.status().pair
        return None if pair is None else pair.phase

    def rows(self, *lanes: str) -> dict[str, int]:
        """Routed rows by tier, of all engines that those lanes have had; of both lanes by default."""
        rows: dict[str, int] = {}
        for lane in self._desk.status().lanes:
            if not lanes or lane.name in lanes:
                for tier, count in lane.totals.rows_by_tier.items():
                    rows[tier] = rows.get(tier, 0) + count
        return rows

    def served_rows(self) -> int:
        return sum(lane.totals.served_rows for lane in self._desk.status().lanes)

    def link_losses(self) -> int:
        return sum(lane.totals.link_losses for lane in self._desk.status().lanes)

    def wait_until_at_rest(self, phase: PairPhase | None = None) -> None:
        """Both lanes idle and their last counters told, and the pair in that phase if one is named. Raises NoRestError."""
        what = "both lanes idle" + (f" and the pair {phase.value}" if phase else "")
        self.wait_for(lambda: _is_at_rest(self._desk.status(), phase), what, REST_S)

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = REST_S) -> None:
        """Raises NoRestError."""
        end_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end_s or self._desk.status().phase is Phase.FAILED:
                raise NoRestError(f"not within {limit_s:g} s: {what}; {_state(self._desk.status())}")
            time.sleep(LOOK_S)

    def _follow(self, request: Generate, answer: Answer, is_taken: threading.Event) -> None:
        try:
            with self._desk.submit(request) as ticket:
                is_taken.set()
                end_s = time.monotonic() + REQUEST_S
                while (event := ticket.next_event(max(0.0, end_s - time.monotonic()))) is not None:
                    if isinstance(event, Tokens):
                        answer.logprobs += event.logprobs or []
                        answer.ids += event.ids
                    elif isinstance(event, Finished):
                        answer.end = event
        except TandemError as error:
            answer.refusal = error.message
        finally:
            is_taken.set()


@contextmanager
def desk_of(settings: Settings, slots: Sequence[int], engine: str = ENGINE) -> Iterator[tuple[PairDesk, Owners]]:
    """A desk whose lanes are idle; `slots`: of each lane's card, `engine`: the module that is started. Who computed where is judged
    while it is there.

    Raises TandemError or NoRestError.
    """
    appliance = read_appliance(settings.model_copy(update={"slots": max(slots)}))
    desk = Desk(replace(_with_engine(with_slots(appliance.desk, slots), engine), limits=LIMITS)).start()
    watch = Watch(desk.status)
    try:
        pair = PairDesk(desk)
        pair.wait_for(lambda: _is_at_rest(desk.status(), None), "the engines are ready", START_S)
        yield pair, watch.owners
    finally:
        watch.stop()
        desk.stop(0)


def _with_engine(config: DeskConfig, module: str) -> DeskConfig:
    lanes = [replace(lane, argv=tuple(module if word == ENGINE else word for word in lane.argv)) for lane in config.lanes]
    return replace(config, lanes=tuple(lanes))


def _is_at_rest(status: DeskStatus, phase: PairPhase | None) -> bool:
    stats = [lane.stats for lane in status.lanes if lane.state == "idle" and lane.stats is not None]
    if len(stats) < len(status.lanes) or any(one.busy or one.is_filling for one in stats):
        return False
    has_told_all = sum(one.generated_tokens for one in stats) >= status.counters.generated_tokens
    is_new = any(lane.restarts for lane in status.lanes)  # the counters of a dead engine's last moments are lost
    return (has_told_all or is_new) and (phase is None or (status.pair is not None and status.pair.phase is phase))


def _state(status: DeskStatus) -> str:
    lanes = ", ".join(f"{lane.name} {lane.state}{f' ({lane.reason})' if lane.reason else ''}" for lane in status.lanes)
    return lanes if status.pair is None else f"{lanes}; the pair is {status.pair.to_json(time.monotonic())}"
