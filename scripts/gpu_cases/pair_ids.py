"""Answers of a pair of real engines in every state that it can be in: ids, and the bits of log-probabilities, are those of one engine
whose one card holds all experts.

Half of the requests are greedy, half are sampled with a seed; half of either ask for the 20 likeliest log-probabilities of every
token, which are as good as the logits' bits. Their beginnings differ, so no request goes on from another's state.

    peer tier                    one request at a time, the lead has both cards, no link
    pair, one at a time          the same with the link; the helper never wakes
    both busy, link              two at a time, each computes the other's rows
    both busy, no link           two at a time, each for itself
    into the wake                one request wakes the helper beside a running one, another comes meanwhile
    into the sleep               a request comes while the helper gives its slots back and the lead is busy
    swaps in every window        two at a time with the link, then one at a time; all caches always swap
    helper killed, lead killed   kill -9 in the middle of both answers, again and again
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil

from appliance.desk.status import PairPhase
from appliance.errors import TandemError
from appliance.protocol import Generate, Sampling
from scripts.gpu_cases.findings import Findings, Part
from scripts.gpu_cases.gpu_users import GpuUsers
from scripts.gpu_cases.owners import Owners
from scripts.gpu_cases.pair_desk import ENGINE, SWAPPING_ENGINE, Answer, NoRestError, PairDesk, Underway, desk_of
from scripts.gpu_cases.pair_model import CHUNK, SHAPE, Place, place_of

ON_EACH_CARD = 0.35
TOP_LOGPROBS = 20
STAYS_AWAKE_S = 3600.0
LINK_HOLD_S, WAKE_HOLD_S, SLEEP_HOLD_S = 1.5, 0.1, 0.02
SHORT_SHARE = 8
"""A request after which the helper falls asleep has so many times fewer tokens than the one beside it."""
FIRST_TOKENS = 4
"""After which a request is surely in its decode."""
IDLE_SHARE = 0.1
"""Of the lead's CPU time, that a sleeping helper may have."""
MISSES = ("host", "streamed")


@dataclass(frozen=True)
class Size:
    num_prompts: int
    num_tokens: int
    num_kills: int
    """Of each engine."""
    threads: int
    experts: int = SHAPE.experts
    """Of each layer."""


FULL, QUICK = Size(20, 256, 2, 4, 96), Size(6, 96, 1, 2)
Answers = dict[str, Answer]


@dataclass(frozen=True)
class State:
    """One of the states of a pair: how its desk is set, and how the requests go there."""

    name: str
    elastic: dict[str, Any]
    send: Callable[[PairDesk, Sequence[Generate], Findings], Answers]
    judge: Callable[[PairDesk, Findings], None]
    engine: str = ENGINE
    ends_asleep: bool = False
    """Then both engines have reported what they have done for each other, too."""


def run(cards: tuple[str, ...], *, quick: bool) -> Iterator[Part]:
    size = QUICK if quick else FULL
    with place_of(cards, threads=size.threads, shape=replace(SHAPE, experts=size.experts)) as place:
        start = time.monotonic()
        expected, alone = one_card(place, size)
        yield Part("one card", time.monotonic() - start, alone)
        misses: dict[str, int] = {}
        for state in states(size):
            start = time.monotonic()
            found = in_state(place, state, size, expected, misses)
            yield Part(state.name, time.monotonic() - start, found)


def requests(size: Size) -> list[Generate]:
    """Prompts of many lengths, windows and more than one chunk among them."""
    rng = np.random.default_rng(5)
    lengths = [1, 5, 8, 9, 30, CHUNK, CHUNK + 3, 2 * CHUNK + 20]
    made = []
    for number in range(size.num_prompts):
        prompt = [number, *rng.integers(0, SHAPE.vocab, lengths[number % len(lengths)] - 1).tolist()]
        sampling = Sampling(temperature=1.2, top_k=40, top_p=0.95, seed=number) if number % 2 else Sampling()
        top = TOP_LOGPROBS if number // 2 % 2 else None
        made.append(
            Generate(id=f"r{number}", prompt=prompt, max_tokens=size.num_tokens, sampling=sampling, ignore_eos=True, top_logprobs=top)
        )
    return made


def one_card(place: Place, size: Size) -> tuple[Answers, Findings]:
    found = Findings()
    with desk_of(place.settings(cards=place.cards[:1]), [place.num_experts]) as (desk, _):
        start = time.monotonic()
        expected = _one_at_a_time(desk, requests(size), found)
        found.notes["tok/s"] = round(size.num_prompts * size.num_tokens / (time.monotonic() - start))
        desk.wait_until_at_rest()
        found.expect(set(_used(desk.rows())) == {"own"}, f"rows were computed elsewhere: {desk.rows()}")
    for name, answer in expected.items():
        found.expect(answer.is_whole, f"{name} {answer.how}")
    found.notes["different tokens"] = len({token for answer in expected.values() for token in answer.ids})
    return expected, found


def in_state(place: Place, state: State, size: Size, expected: Answers, misses: dict[str, int]) -> Findings:
    found = Findings()
    slots = [round(ON_EACH_CARD * place.num_experts)] * 2
    users = GpuUsers(place.cards)
    try:
        with desk_of(place.settings(**state.elastic), slots, state.engine) as (desk, owners):
            desk.wait_for(lambda: desk.phase is PairPhase.ASLEEP and _is_attached(desk), "the lead has the second card")
            users.look(desk)
            start, before = time.monotonic(), _cpu_seconds(desk)
            answers = state.send(desk, requests(size), found)
            found.notes["tok/s"] = round(sum(len(answer.ids) for answer in answers.values()) / (time.monotonic() - start))
            if not any(lane.restarts for lane in desk.status().lanes):
                found.notes["CPU seconds"] = {name: round(after - before[name], 2) for name, after in _cpu_seconds(desk).items()}
            desk.wait_until_at_rest()
            users.look(desk)
            if state.ends_asleep:
                desk.wait_until_at_rest(PairPhase.ASLEEP)
                users.look(desk)
            compare(answers, expected, found)
            _judge_owners(owners, users, found)
            found.notes["rows by tier"] = desk.rows()
            misses[state.name] = found.notes["misses"] = sum(desk.rows().get(tier, 0) for tier in MISSES)  # type: ignore[assignment]
            state.judge(desk, found)
    except (NoRestError, TandemError) as error:
        found.failures.append(str(error))
    with_link, without = misses.get(BOTH_LINKED), misses.get(BOTH_APART)
    if state.name == BOTH_APART and with_link is not None and without is not None:
        found.notes["misses with link"] = with_link
        found.expect(with_link < without, f"the link spared no misses: {with_link} with it, {without} without")
    return found


def compare(answers: Answers, expected: Answers, found: Findings) -> None:
    """What there is of an answer must be the beginning of the expected one; whole answers are counted."""
    for name, answer in answers.items():
        want, num = expected[name], len(answer.ids)
        if answer.ids != want.ids[:num]:
            first = next(index for index in range(num) if answer.ids[index] != want.ids[index])
            found.failures.append(f"{name}: another token at {first} of {num}")
        elif answer.logprobs != want.logprobs[: len(answer.logprobs)]:
            found.failures.append(f"{name}: other log-probabilities")
    found.notes["answers"] = len(answers)
    found.notes["tokens"] = sum(len(answer.ids) for answer in answers.values())


def _expect_whole(answers: Answers, found: Findings) -> None:
    for name, answer in answers.items():
        found.expect(answer.is_whole, f"{name} {answer.how} after {len(answer.ids)} tokens")


def _judge_owners(owners: Owners, users: GpuUsers, found: Findings) -> None:
    found.failures += sorted(owners.failures.copy())
    found.notes["reports that kept off the other's card"] = owners.num_judged
    found.expect(owners.num_judged > 0, "no report came while a card was the other engine's")
    users.judge(found)


# How requests go


def _one_at_a_time(desk: PairDesk, asked: Sequence[Generate], found: Findings) -> Answers:
    answers = {request.id: desk.ask(request) for request in asked}
    _expect_whole(answers, found)
    return answers


def _two_at_a_time(desk: PairDesk, asked: Sequence[Generate], found: Findings) -> Answers:
    with ThreadPoolExecutor(2) as clients:
        answers = {request.id: answer for request, answer in zip(asked, clients.map(desk.ask, asked), strict=True)}
    _expect_whole(answers, found)
    return answers


def _two_then_one(desk: PairDesk, asked: Sequence[Generate], found: Findings) -> Answers:
    half = len(asked) // 2
    answers = _two_at_a_time(desk, asked[:half], found)
    desk.wait_until_at_rest(PairPhase.ASLEEP)
    return answers | _one_at_a_time(desk, asked[half:], found)


def _into_the_wake(desk: PairDesk, asked: Sequence[Generate], found: Findings) -> Answers:
    """Of three, the first decodes alone, the second wakes the helper, and the third comes when it wakes."""
    begun: dict[str, Underway] = {}
    num_met = 0
    for first in range(0, len(asked), 3):
        desk.wait_until_at_rest(PairPhase.ASLEEP)
        one, *others = asked[first : first + 3]
        begun[one.id] = desk.start(one)
        begun[one.id].wait_for_tokens(FIRST_TOKENS)
        for request in others:
            begun[request.id] = desk.start(request)
            num_met += desk.phase is PairPhase.WAKING
        for request in (one, *others):
            begun[request.id].finish()
    found.notes["came into a wake"] = num_met
    found.expect(num_met > 0, "no request met the helper waking")
    answers = {name: underway.answer for name, underway in begun.items()}
    _expect_whole(answers, found)
    return answers


def _into_the_sleep(desk: PairDesk, asked: Sequence[Generate], found: Findings) -> Answers:
    """Of three, the second ends early on the helper, and the third comes when the helper falls asleep while the first goes on."""
    answers: Answers = {}
    num_met = 0
    for first in range(0, len(asked), 3):
        desk.wait_until_at_rest(PairPhase.ASLEEP)
        one, *others = asked[first : first + 3]
        begun = [desk.start(one)]
        begun[0].wait_for_tokens(FIRST_TOKENS)
        if others:
            answers[others[0].id] = desk.ask(others[0].model_copy(update={"max_tokens": others[0].max_tokens // SHORT_SHARE}))
        if len(others) > 1:
            desk.wait_for(lambda: desk.phase is not PairPhase.AWAKE, "the helper falls asleep")
            num_met += desk.phase is PairPhase.FALLING_ASLEEP and desk.lane("lead").request is not None
            begun.append(desk.start(others[1]))
        answers |= {request.id: underway.finish() for request, underway in zip([one, *others[1:]], begun, strict=True)}
    found.notes["came into a sleep"] = num_met
    found.expect(num_met > 0, "no request met the helper falling asleep beside a busy lead")
    _expect_whole(answers, found)
    return answers


def _with_kills(victim: str, num_kills: int) -> Callable[[PairDesk, Sequence[Generate], Findings], Answers]:
    def send(desk: PairDesk, asked: Sequence[Generate], found: Findings) -> Answers:
        """Two at a time; of the first pairs one loses its engine in the middle."""
        answers: Answers = {}
        num_lost = 0
        for first in range(0, len(asked), 2):
            desk.wait_until_at_rest()
            both = asked[first : first + 2]
            begun = [desk.start(request) for request in both]
            is_killed = first < 2 * num_kills and len(both) == 2
            if is_killed:
                for underway in begun:
                    underway.wait_for_tokens(FIRST_TOKENS)
                _kill(desk, victim)
            ended = {request.id: underway.finish() for request, underway in zip(both, begun, strict=True)}
            lost = [answer for answer in ended.values() if not answer.is_whole]
            num_lost += len(lost)
            found.expect(len(lost) <= is_killed, f"of a pair {len(lost)} did not end whole: {[answer.how for answer in lost]}")
            for answer in lost:
                found.expect(answer.end is not None and answer.end.error_code == "engine_died", f"a request {answer.how}")
            answers |= ended
        found.notes["answers cut short"] = num_lost
        found.expect(num_lost > 0, f"none of {num_kills} kills came in the middle of an answer")
        return answers

    return send


def _kill(desk: PairDesk, victim: str) -> None:
    pid = desk.lane(victim).pid
    assert pid is not None, f"the {victim} has no process"
    os.kill(pid, signal.SIGKILL)
    desk.wait_for(lambda: desk.lane(victim).pid != pid, f"the desk sees the death of the {victim}")


# What must have happened


def _used(rows: dict[str, int]) -> list[str]:
    return [tier for tier, count in rows.items() if count]


def _is_attached(desk: PairDesk) -> bool:
    stats = desk.lane("lead").stats
    return stats is not None and stats.peer_experts > 0 and not stats.is_filling


def _cpu_seconds(desk: PairDesk) -> dict[str, float]:
    """Of the processes that the lanes have now."""
    seconds = {}
    for lane in desk.status().lanes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(lane.pid).cpu_times()
            seconds[lane.name] = times.user + times.system
    return seconds


def _lead_alone(desk: PairDesk, found: Findings) -> None:
    pair = desk.status().pair
    assert pair is not None
    found.expect(pair.wakes == 0, f"the helper woke {pair.wakes} times")
    found.expect(desk.rows("lead").get("peer", 0) > 0, "no row was computed on the second card")
    found.expect(not _used(desk.rows("helper")), f"the sleeping helper computed {desk.rows('helper')}")
    seconds = found.notes["CPU seconds"]
    assert isinstance(seconds, dict)
    found.expect(seconds["helper"] <= IDLE_SHARE * seconds["lead"], f"the sleeping helper did something: CPU seconds {seconds}")
    found.expect(desk.rows().get("linked", 0) == 0, "rows were linked with nobody")


def _both_helped(desk: PairDesk, found: Findings) -> None:
    served, linked = desk.served_rows(), desk.rows().get("linked", 0)
    found.notes |= {"served for the other": served, "windows run again": desk.link_losses()}
    for name in ("lead", "helper"):
        found.expect(desk.lane(name).totals.served_rows > 0, f"the {name} computed nothing for the other")
        found.expect(desk.rows(name).get("linked", 0) > 0, f"the {name} was helped with nothing")
    if desk.link_losses() == 0:
        found.expect(served == linked, f"{linked} rows were taken from the other, and {served} computed for it")


def _nobody_helped(desk: PairDesk, found: Findings) -> None:
    found.expect(desk.served_rows() == 0 and desk.rows().get("linked", 0) == 0, "rows were linked without a link")
    found.expect(all(_used(desk.rows(name)) for name in ("lead", "helper")), "one lane computed everything")


def _woke(desk: PairDesk, found: Findings) -> None:
    pair = desk.status().pair
    assert pair is not None
    found.notes |= {"wakes": pair.wakes, "failed wakes": pair.failed_wakes, "sleeps": pair.sleeps}
    found.expect(pair.wakes > 0 and pair.sleeps > 0, f"{pair.wakes} wakes and {pair.sleeps} sleeps")
    found.expect(pair.failed_wakes == 0, f"{pair.failed_wakes} wakes failed, the last because {pair.last_failure}")


def _swapped(desk: PairDesk, found: Findings) -> None:
    windows = sum(lane.totals.windows for lane in desk.status().lanes)
    swaps = sum(lane.totals.swaps for lane in desk.status().lanes)
    found.notes |= {"windows": windows, "swaps": swaps}
    found.notes["served for the other"] = desk.served_rows()
    found.expect(swaps >= windows, f"{swaps} swaps in {windows} windows")
    found.expect(desk.rows().get("linked", 0) > 0, "nobody was helped")


def _lost_an_engine(victim: str) -> Callable[[PairDesk, Findings], None]:
    def judge(desk: PairDesk, found: Findings) -> None:
        found.notes |= {"restarts": {lane.name: lane.restarts for lane in desk.status().lanes}, "windows run again": desk.link_losses()}
        other = "lead" if victim == "helper" else "helper"
        found.expect(desk.lane(other).restarts == 0, f"the {other} was started again, too")
        found.expect(desk.rows().get("linked", 0) > 0, "nobody was helped")

    return judge


BOTH_LINKED, BOTH_APART = "both busy, link", "both busy, no link"


def states(size: Size) -> list[State]:
    awake = {"hold_s": STAYS_AWAKE_S}
    kills = [
        State(f"{victim} killed", awake, _with_kills(victim, size.num_kills), _lost_an_engine(victim)) for victim in ("helper", "lead")
    ]
    return [
        State("peer tier", awake | {"link": False}, _one_at_a_time, _lead_alone),
        State("pair, one at a time", awake, _one_at_a_time, _lead_alone),
        State(BOTH_LINKED, {"hold_s": LINK_HOLD_S}, _two_at_a_time, _both_helped, ends_asleep=True),
        State(BOTH_APART, awake | {"link": False}, _two_at_a_time, _nobody_helped),
        State("into the wake", {"hold_s": WAKE_HOLD_S}, _into_the_wake, _woke),
        State("into the sleep", {"hold_s": SLEEP_HOLD_S}, _into_the_sleep, _woke),
        State("swaps in every window", {"hold_s": WAKE_HOLD_S}, _two_then_one, _swapped, engine=SWAPPING_ENGINE, ends_asleep=True),
        *kills,
    ]
