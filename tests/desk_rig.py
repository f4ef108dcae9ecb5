"""What the tests of the desk share: real desks over fake engines, and a check for leaks."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from appliance.desk.config import LANE_NAMES, DeskConfig, LaneConfig, Limits
from appliance.desk.desk import Desk
from appliance.desk.status import LaneStatus, Phase
from appliance.desk.ticket import Ticket
from appliance.protocol import Event, Finished, Generate, Sampling
from tests.eventually import DEADLINE_S, eventually
from tests.fakes_engine import fake_engine_argv

QUICK = Limits(cancel_s=1.0, restart_delays_s=(0.0, 0.1, 0.2, 0.4), stats_period_s=0.1, term_after_s=0.5, kill_after_s=1.0)
LOADER = (
    sys.executable,
    "-c",
    'for done in (1, 2): print(\'LOAD {"stage":"arena","done_bytes":%d,"total_bytes":2,"left_s":%d}\' % (done, 2 - done), flush=True)',
)


def config(*engines: tuple[str, ...], loader: tuple[str, ...] = LOADER, max_queue: int = 8, limits: Limits = QUICK) -> DeskConfig:
    """One lane for each tuple of options of the fake engine."""
    lanes = tuple(
        LaneConfig(name, f"host:{index}", tuple(fake_engine_argv("--card", f"host:{index}", *options)))
        for index, (name, options) in enumerate(zip(LANE_NAMES, engines, strict=False))
    )
    return DeskConfig(lanes, loader, max_queue, limits)


@contextmanager
def desk_of(desk_config: DeskConfig, until: Phase = Phase.READY) -> Iterator[Desk]:
    """A started desk in the phase `until`, every lane settled; stopped at once afterwards."""
    desk = Desk(desk_config).start()
    try:
        eventually(lambda: desk.status().phase is until, f"phase {until}", desk.status)
        if until is Phase.READY:
            eventually(lambda: all(lane.state == "idle" for lane in desk.status().lanes), "all lanes idle", desk.status)
        yield desk
    finally:
        desk.stop(0)


def ask(name: str, prompt: list[int] | None = None, max_tokens: int = 4, **more: object) -> Generate:
    return Generate.model_validate({"id": name, "prompt": prompt or [1, 2, 3], "max_tokens": max_tokens, "sampling": Sampling(), **more})


def next_event(ticket: Ticket) -> Event:
    event = ticket.next_event(DEADLINE_S)
    if event is None:
        raise AssertionError(f"no event for {ticket.request_id} within {DEADLINE_S:g} s")
    return event


def wait_for(ticket: Ticket, kind: type[Event]) -> list[Event]:
    """The events up to the first one of that kind."""
    events = [next_event(ticket)]
    while not isinstance(events[-1], kind):
        if isinstance(events[-1], Finished):
            raise AssertionError(f"{ticket.request_id} ended without {kind.__name__}: {events[-1]}")
        events.append(next_event(ticket))
    return events


def finish(ticket: Ticket) -> Finished:
    """The terminal event."""
    last = wait_for(ticket, Finished)[-1]
    assert isinstance(last, Finished)
    return last


def lane(desk: Desk, name: str) -> LaneStatus:
    return next(status for status in desk.status().lanes if status.name == name)


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fails when the block leaves a thread, a child process or a descriptor."""
    me = psutil.Process()
    gc.collect()
    threads, children, descriptors = set(threading.enumerate()), set(me.children()), set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert set(me.children()) <= children
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors)
