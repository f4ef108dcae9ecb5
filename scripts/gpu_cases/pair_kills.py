"""kill -9 of the lead, of the helper and of the web process of a real server, in every phase of its pair, again and again.

After each kill every stream has ended as docs/desk.md says, and what it said till then is what it always says; both lanes serve again;
no process and no file in shared memory is left over. In the end the memory of both cards is what it was before.

    idle             nobody asks
    one request      the lead answers with both cards
    waking           a second request wakes the helper beside it
    both busy        each lane has a request
    falling asleep   the helper gives its slots back while the lead goes on

Three servers, one for each victim, go through the phases side by side, and decode in turns: processes that share a GPU have it in slices
of milliseconds. A helper wakes and falls asleep within milliseconds, so one engine
is stopped (SIGSTOP) before it is told what it then does not answer until the kill. Which phase a kill met is asked before it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from appliance.memory.gpus import free_gpu_bytes
from appliance.units import MIB
from scripts.gpu_cases.findings import Findings, Part
from scripts.gpu_cases.pair_model import Place, place_of
from scripts.gpu_cases.served import PROMPTS, SHORT_TOKENS, TRIES, Served, Stream, is_at_rest, is_ready_to_wake
from tests.real_server import RealServer, real_server

VICTIMS = ("lead", "helper", "web")
ON_EACH_CARD = 0.35
HOLD_S, BAR_S = 0.2, 0.2
PARKED_MIB = 2
"""All that may come into shared memory while a server runs."""
SPARE_BYTES = 64 * MIB
"""By which a card's free memory may differ: an engine takes hundreds."""
FIRST_TOKENS = 4


@dataclass(frozen=True)
class Size:
    rounds: int
    tokens: int
    budget_s: float
    """For all rounds."""


FULL, QUICK = Size(5, 400, 165.0), Size(1, 800, 400.0)


@dataclass
class Rounds:
    """What the rounds of one victim in one phase have shown."""

    num: int = 0
    num_met: int = 0
    """Kills before which the pair was still in the phase."""
    num_cut: int = 0
    """Streams that lost their engine or server."""
    longest_s: float = 0.0
    """From a kill until both lanes have served."""
    failures: list[str] = field(default_factory=list)


def run(cards: tuple[str, ...], *, quick: bool) -> Iterator[Part]:
    size = QUICK if quick else FULL
    before = free_gpu_bytes()
    memory, turn = Findings(), threading.Lock()
    with ExitStack() as stack:
        place = stack.enter_context(place_of(cards))
        with memory.timed("servers ready s"), ThreadPoolExecutor(len(VICTIMS)) as pool:
            servers = list(pool.map(lambda _: stack.enter_context(_server(place)), VICTIMS))
            served = dict(zip(VICTIMS, pool.map(lambda server: Served(server, size.tokens, turn), servers), strict=True))
        for one in served.values():
            stack.callback(one.close)
        start, at_rest = time.monotonic(), free_gpu_bytes()
        shared = {victim: one.shared_bytes() for victim, one in served.items()}
        for number, phase in enumerate(PHASES):
            begun = time.monotonic()
            found = _in_phase(phase, served, size, start + (number + 1) * size.budget_s / len(PHASES))
            yield Part(phase, time.monotonic() - begun, found)
        for victim, one in served.items():
            one.wait_for(is_at_rest, "at rest")
            grown = one.shared_bytes() - shared[victim]
            memory.notes[f"shared memory grew, {victim} killed, KiB"] = round(grown / 1024)
            memory.expect(
                grown <= PARKED_MIB * MIB, f"{grown / MIB:.1f} MiB more are in shared memory of the server whose {victim} was killed"
            )
        _compare_memory(memory, "the kills", at_rest, free_gpu_bytes(), SPARE_BYTES)
    _compare_memory(memory, "everything", before, free_gpu_bytes(), SPARE_BYTES)
    yield Part("memory", 0.0, memory)


def _server(place: Place) -> contextlib.AbstractContextManager[RealServer]:
    options = place.options() | {"slots": round(ON_EACH_CARD * place.num_experts), "elastic_enabled": "true"}
    options |= {"elastic_hold_s": HOLD_S, "elastic_bar_s": BAR_S, "parked_mib": PARKED_MIB}
    del options["shm_dir"], options["state_dir"]
    words = [word for name, value in options.items() if name != "model" for word in (f"--{name.replace('_', '-')}", str(value))]
    return real_server(str(place.model.path), *words, root=Path.cwd())


def _compare_memory(found: Findings, what: str, before: dict[str, int], after: dict[str, int], spare: int) -> None:
    for card, free in before.items():
        lost = free - after[card]
        found.notes[f"{card}: MiB less after {what}"] = round(lost / MIB)
        found.expect(lost <= spare, f"{card}: {lost / MIB:.0f} MiB less are free after {what}")


# The phases


def _in_phase(phase: str, served: dict[str, Served], size: Size, end_s: float) -> Findings:
    found = Findings()
    with ThreadPoolExecutor(len(served)) as pool:
        done = dict(zip(served, pool.map(lambda victim: _rounds(phase, victim, served[victim], size, end_s), served), strict=True))
    for victim, rounds in done.items():
        found.failures += [f"{victim}: {failure}" for failure in rounds.failures]
        found.notes[victim] = f"{rounds.num} kills, {rounds.num_met} met the phase, {rounds.num_cut} streams cut short"
        found.notes[f"{victim}: s to serve again, at most"] = round(rounds.longest_s, 2)
        if not rounds.failures:
            found.expect(rounds.num == size.rounds, f"{victim}: only {rounds.num} of {size.rounds} rounds in the time")
            found.expect(rounds.num_met > 0, f"{victim}: no kill met the pair {PHASES[phase].name}")
            found.expect(rounds.num_cut > 0 or victim not in PHASES[phase].surely_loses, f"{victim}: no stream was lost with it")
    return found


def _rounds(phase: str, victim: str, served: Served, size: Size, end_s: float) -> Rounds:
    rounds = Rounds()
    try:
        for number in range(size.rounds):
            if number and time.monotonic() > end_s:
                break
            _round(phase, victim, served, rounds)
            rounds.num += 1
    except (TimeoutError, AssertionError) as error:
        rounds.failures.append(f"round {rounds.num + 1}: {error}")
        served.go_on()
    return rounds


def _round(phase: str, victim: str, served: Served, rounds: Rounds) -> None:
    with served.turn:
        streams = _bring(phase, served, rounds.num)
        running = [stream for stream in streams if stream.end is None]
        met = served.kill(victim)
        start = time.monotonic()
        for stream in running:
            stream.finish()
    rounds.num_met += met == PHASES[phase].name
    _judge(phase, victim, streams, running, served.expected, rounds)
    served.check_both_lanes()
    rounds.longest_s = max(rounds.longest_s, time.monotonic() - start)
    served.check_leftovers()


def _bring(phase: str, served: Served, number: int) -> list[Stream]:
    """Again if the streams were over too soon, as they may be where this process has to wait for a core."""
    for _ in range(TRIES):
        served.wait_for(is_ready_to_wake, "both lanes idle, the helper asleep")
        streams = PHASES[phase].bring(served, number)
        if served.phase() == PHASES[phase].name:
            break
        served.go_on()
        for stream in streams:
            stream.finish()
    return streams


def _judge(
    phase: str, victim: str, streams: Sequence[Stream], running: Sequence[Stream], expected: list[list[int]], rounds: Rounds
) -> None:
    """Raises AssertionError."""
    for stream, want in zip(streams, expected, strict=False):
        assert stream.end is not None, "a stream neither went on nor ended"
        assert stream.ids == want[: len(stream.ids)], f"a stream of {len(stream.ids)} tokens said something else than always"
        assert stream.end != "length" or len(stream.ids) == stream.max_tokens, f"{len(stream.ids)} of {stream.max_tokens} tokens came"
    ends = [stream.end for stream in running]
    lost = [end for end in ends if end != "length"]
    rounds.num_cut += len(lost)
    assert set(lost) <= {"cut" if victim == "web" else "engine_died"}, f"streams ended as {ends}"
    most = PHASES[phase].most_lost[victim]
    assert len(lost) <= most, f"{len(lost)} streams ended with the {victim}, not {most}: {ends}"


@dataclass(frozen=True)
class Phase:
    name: str
    """As the pair calls it."""
    bring: Callable[[Served, int], list[Stream]]
    """Takes the number of the round. Returns the streams, in the order of the prompts, when the pair is there."""
    most_lost: dict[str, int]
    """By what is killed: how many streams it may take along."""
    surely_loses: tuple[str, ...] = ()
    """Whose deaths take a stream along that had most of its tokens before it."""


def _nobody(served: Served, number: int) -> list[Stream]:
    del served, number
    return []


def _one(served: Served, number: int) -> list[Stream]:
    del number
    stream = served.stream(PROMPTS[0], served.num_tokens)
    stream.wait_for_tokens(FIRST_TOKENS)
    return [stream]


def _second_waits(served: Served, number: int) -> list[Stream]:
    """The lead does not give the second card back, or the helper does not take it."""
    streams = _one(served, number)
    served.stop(("lead", "helper")[number % 2])
    streams.append(served.stream(PROMPTS[1], served.num_tokens))
    served.wait_for(lambda status: status["pair"]["phase"] != "asleep" or streams[0].end is not None, "the helper wakes")
    return streams


def _both(served: Served, number: int) -> list[Stream]:
    streams = [*_one(served, number), served.stream(PROMPTS[1], served.num_tokens)]
    streams[1].wait_for_tokens(FIRST_TOKENS)
    return streams


def _second_is_over(served: Served, number: int) -> list[Stream]:
    """The helper does not give the second card back."""
    streams = [*_one(served, number), served.stream(PROMPTS[1], SHORT_TOKENS).finish()]
    served.stop("helper")
    served.wait_for(lambda status: status["pair"]["phase"] != "awake", "the helper falls asleep")
    return streams


PHASES = {
    "idle": Phase("asleep", _nobody, {"lead": 0, "helper": 0, "web": 0}),
    "one request": Phase("asleep", _one, {"lead": 1, "helper": 0, "web": 1}, ("lead", "web")),
    "waking": Phase("waking", _second_waits, {"lead": 1, "helper": 1, "web": 2}, ("lead", "web")),
    "both busy": Phase("awake", _both, {"lead": 1, "helper": 1, "web": 2}, ("lead", "helper", "web")),
    "falling asleep": Phase("falling_asleep", _second_is_over, {"lead": 1, "helper": 0, "web": 1}),
}
