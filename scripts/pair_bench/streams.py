"""A server's desk with real engines, no HTTP, and the requests to it. Prompts are random token ids, so that nothing is reused."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from appliance.desk.config import DeskConfig, LaneConfig
from appliance.desk.desk import Desk
from appliance.desk.status import DeskStatus, PairPhase, Phase
from appliance.errors import TandemError
from appliance.protocol import Finished, FinishReason, Generate, Tokens
from appliance.settings import Settings
from appliance.web.appliance import read_appliance
from scripts.pair_bench.record import Deadline, NotMeasuredError

LOOK_S = 0.02
REQUEST_LIMIT_S, REST_LIMIT_S, START_LIMIT_S = 90.0, 60.0, 150.0
"""Longer than these takes nothing that goes well."""
FILLING_S = 10.0
"""Longest that idle lanes may go on saying that their slots are not full."""
COUNTERS = ("swaps", "served_rows", "late_experts", "link_losses", "prompt_bytes_from_arena", "prompt_bytes_from_peer")


@dataclass
class Stream:
    """One request: when its tokens came, in seconds of one clock."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)
    prompt_ms: float = 0.0
    failure: str | None = None

    def rate(self, first_s: float = 0.0, last_s: float = float("inf")) -> float | None:
        """Tokens per second of those that came between two times."""
        times = [when for when in self.token_s if first_s <= when <= last_s]
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None

    def longest_gap_s(self, first_s: float, last_s: float) -> float:
        """The longest silence that begins or ends between two times."""
        gaps = [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False) if b >= first_s and a <= last_s]
        return max(gaps, default=0.0)

    def silences(self, least_s: float) -> list[tuple[float, float]]:
        """When each silence of at least so long began, and how long it was."""
        pairs = zip(self.token_s, self.token_s[1:], strict=False)
        return [(a, b - a) for a, b in pairs if b - a >= least_s]


@dataclass(frozen=True)
class Underway:
    """A request that was sent."""

    stream: Stream
    thread: threading.Thread

    def finish(self) -> Stream:
        """Waits for its end. Raises NotMeasuredError if it failed."""
        self.thread.join()
        if self.stream.failure is not None:
            raise NotMeasuredError(self.stream.failure)
        return self.stream

    def wait_for_tokens(self, num: int) -> None:
        wait_for_tokens(self.stream.token_s, num, self.thread)


class Bench:
    """One desk and the requests to it. Confined to one thread."""

    def __init__(self, desk: Desk, vocab: int, prompt_tokens: int, deadline: Deadline) -> None:
        self._desk = desk
        self._dice = random.Random(time.time_ns())
        self._vocab = vocab
        self._prompt_tokens = prompt_tokens
        self._deadline = deadline
        self._count = 0

    def start(self, new_tokens: int) -> Underway:
        self._count += 1
        prompt = [self._dice.randrange(self._vocab) for _ in range(self._prompt_tokens)]
        left_s = max(min(self._deadline.left_s, REQUEST_LIMIT_S), 1.0)
        request = Generate(id=f"bench-{self._count}", prompt=prompt, max_tokens=new_tokens, ignore_eos=True, deadline_s=left_s)
        stream = Stream(time.monotonic())
        thread = threading.Thread(target=self._follow, args=(request, stream, left_s))
        thread.start()
        return Underway(stream, thread)

    def wait_for(self, phase: PairPhase) -> None:
        """Both lanes idle, their caches full, and the pair in that phase if there is one. Raises NotMeasuredError."""
        idle_since: float | None = None
        limit = Deadline(min(self._deadline.left_s, REST_LIMIT_S))
        while limit.left_s > 0:
            status = self._desk.status()
            if status.phase is Phase.FAILED:
                raise NotMeasuredError(f"the server failed: {status.reason}")
            if not _is_idle(status, phase):
                idle_since = None
            elif not _is_filling(status) or time.monotonic() - (idle_since or time.monotonic()) > FILLING_S:
                return
            else:
                idle_since = idle_since or time.monotonic()
            time.sleep(LOOK_S)
        raise NotMeasuredError(f"the pair did not come to rest in time; {_state(self._desk.status())}")

    def wake_parts(self) -> dict[str, float | None]:
        pair = self._desk.status().pair
        return {} if pair is None else {"detach_s": pair.detach_s, "wake_s": pair.wake_s}

    def counters(self) -> Counter[str]:
        """Routed rows by tier and other counters, of both engines together, when both are idle."""
        together: Counter[str] = Counter()
        for lane in self._desk.status().lanes:
            if lane.stats:
                together.update(lane.stats.rows_by_tier)
                together.update({name: getattr(lane.stats, name) for name in COUNTERS})
        return together

    def _follow(self, request: Generate, stream: Stream, limit_s: float) -> None:
        try:
            with self._desk.submit(request) as ticket:
                while not isinstance(event := ticket.next_event(limit_s), Finished):
                    if event is None:
                        stream.failure = f"request {request.id} was silent until the end of the time"
                        return
                    if isinstance(event, Tokens):
                        stream.token_s += [time.monotonic()] * len(event.ids)
        except TandemError as error:
            stream.failure = f"request {request.id} was refused: {error.message}"
            return
        if event.reason is not FinishReason.LENGTH or len(stream.token_s) < request.max_tokens:
            stream.failure = f"request {request.id} ended as {event.reason.value} after {len(stream.token_s)} tokens: {event.error_text}"
        stream.prompt_ms = event.timings.prompt_ms


def wait_for_tokens(tokens: Sized, num: int, thread: threading.Thread) -> None:
    """Until so many are there, or the thread that gathers them ends."""
    limit = Deadline(REQUEST_LIMIT_S)
    while len(tokens) < num and thread.is_alive() and limit.left_s > 0:
        time.sleep(0.001)


@contextmanager
def bench_of(settings: Settings, slots: Sequence[int | None], prompt_tokens: int, deadline: Deadline) -> Iterator[Bench]:
    """A desk whose lanes are ready and warm. `slots`: of each lane's card. Raises TandemError or NotMeasuredError."""
    known = [num for num in slots if num is not None]
    appliance = read_appliance(settings.model_copy(update={"slots": max(known, default=None)}))
    desk = Desk(with_slots(appliance.desk, slots)).start()
    try:
        bench = Bench(desk, appliance.model.vocab, prompt_tokens, deadline)
        loading = Deadline(min(deadline.left_s, START_LIMIT_S))
        while desk.status().phase is Phase.LOADING and loading.left_s > 0:
            time.sleep(LOOK_S)
        bench.wait_for(PairPhase.ASLEEP)
        bench.start(new_tokens=32).finish()  # caches are warm after the first request
        bench.wait_for(PairPhase.ASLEEP)
        yield bench
    finally:
        desk.stop(0)


def with_slots(config: DeskConfig, slots: Sequence[int | None]) -> DeskConfig:
    """The same lanes with so many slots on each card, and the lead's peer tier with as many as the helper."""
    lanes = [_lane_with(lane, own, slots[-1]) for lane, own in zip(config.lanes, slots, strict=False)]
    return replace(config, lanes=tuple(lanes))


def _lane_with(lane: LaneConfig, own: int | None, peer: int | None) -> LaneConfig:
    if own is None:
        return lane
    argv = list(lane.argv)
    place = argv.index("--settings") + 1
    argv[place] = json.dumps(json.loads(argv[place]) | {"slots": own})
    if "--peer-slots" in argv:
        argv[argv.index("--peer-slots") + 1] = str(peer)
    return replace(lane, argv=tuple(argv))


def _is_idle(status: DeskStatus, phase: PairPhase) -> bool:
    is_idle = all(lane.state == "idle" and not (lane.stats and lane.stats.busy) for lane in status.lanes)
    return is_idle and (status.pair is None or status.pair.phase is phase)


def _is_filling(status: DeskStatus) -> bool:
    return any(lane.stats is not None and lane.stats.is_filling for lane in status.lanes)


def _state(status: DeskStatus) -> str:
    lanes = ", ".join(f"{lane.name} {lane.state}{f' ({lane.reason})' if lane.reason else ''}" for lane in status.lanes)
    reason = None if status.pair is None else status.pair.reason(time.monotonic())
    pair = "" if status.pair is None else f"; the pair is {status.pair.phase}{f' ({reason})' if reason else ''}"
    return lanes + pair
