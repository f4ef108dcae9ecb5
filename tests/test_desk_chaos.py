"""Requests, cancels and kills at random times against two real engines: every request ends exactly once, nothing leaks."""

from __future__ import annotations

import contextlib
import os
import random
import signal

from appliance.desk.config import Limits
from appliance.desk.desk import Desk
from appliance.desk.status import Phase
from appliance.desk.ticket import Ticket
from appliance.errors import CapacityError
from appliance.protocol import Event, Finished, FinishReason
from tests.desk_rig import ask, config, desk_of, nothing_left_behind
from tests.eventually import DEADLINE_S, eventually

NUM_REQUESTS = 120
NUM_KILLS = 5
ENGINE = ("--window-ms", "3", "--chunk-ms", "3")


def test_random_cancels_and_kills_end_every_request_exactly_once() -> None:
    dice = random.Random(7)
    limits = Limits(cancel_s=5, restart_delays_s=(0.0,) * 2 * NUM_KILLS, stats_period_s=0.1)
    with nothing_left_behind(), desk_of(config(ENGINE, ENGINE, limits=limits)) as desk:
        tickets: list[Ticket] = []
        kills_at = set(dice.sample(range(NUM_REQUESTS), NUM_KILLS))
        while len(tickets) < NUM_REQUESTS:
            if len(tickets) in kills_at:
                kills_at.remove(len(tickets))
                kill_one(desk, dice)
            tickets += submit(desk, dice, f"r{len(tickets)}")
            if dice.random() < 0.6:
                dice.choice(tickets).cancel()
        ends = [read_to_the_end(ticket) for ticket in tickets]
        counters = desk.status().counters
        assert counters.accepted == NUM_REQUESTS
        assert counters.finished == sum(end.reason in (FinishReason.STOP, FinishReason.LENGTH) for end in ends)
        assert counters.cancelled == sum(end.reason is FinishReason.CANCELLED for end in ends)
        assert {end.error_code for end in ends if end.reason is FinishReason.ERROR} <= {"engine_died"}
        assert sum(lane.restarts for lane in desk.status().lanes) <= NUM_KILLS
        assert desk.status().queue_length == 0


def submit(desk: Desk, dice: random.Random, name: str) -> list[Ticket]:
    """One ticket; none while the line is full or no lane is there."""
    request = ask(name, [dice.randrange(300) for _ in range(dice.randrange(1, 60))], max_tokens=dice.randrange(0, 25))
    with contextlib.suppress(CapacityError):
        return [desk.submit(request)]
    eventually(lambda: desk.status().phase is Phase.READY and desk.status().queue_length < 8, "room again", desk.status)
    return []


def kill_one(desk: Desk, dice: random.Random) -> None:
    pid = dice.choice(desk.status().lanes).pid
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def read_to_the_end(ticket: Ticket) -> Finished:
    """The terminal event, after which there must be none."""
    events: list[Event] = []
    while not (events and isinstance(events[-1], Finished)):
        event = ticket.next_event(DEADLINE_S)
        assert event is not None, f"{ticket.request_id} never ended"
        events.append(event)
    assert ticket.next_event(0) is None
    assert all(event.id == ticket.request_id for event in events)
    assert isinstance(events[-1], Finished)
    return events[-1]
