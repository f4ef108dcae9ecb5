"""The words of a link's channel in every order of steps, deaths and new beginnings: nobody takes rows for another's.

The model has one requester and one server, each of which may die between any two of its steps and begin anew. The steps on the words are
the native module's own (`cuda_ext/src/link/channel_words.h`); request and rows are single values, written in two halves, so that a
reader of something half-written is seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cuda_ext import _native as native

MAX_REQUESTS = 4
MAX_DEATHS = 3


@dataclass(frozen=True)
class World:
    """Everything that is remembered, in the file and in both processes."""

    words: bytes = bytes(native.LINK_CHANNEL_WORDS_BYTES)
    request: tuple[int, int] = (0, 0)
    """The number of the request, written as two halves."""
    rows: tuple[int, int] = (0, 0)
    """The number of the request that they answer."""
    requester: str = "idle"
    server: str = "new"
    asking: int = 0
    """Number of the requester's present request."""
    reading: int = 0
    """Number that the server has read."""
    num_requests: int = 0
    num_deaths: int = 0
    trust: str = ""
    """What went wrong."""


def steps(world: World) -> Iterator[World]:
    """Every world that one step leads to."""
    yield from requester_steps(world)
    yield from server_steps(world)
    if world.num_deaths < MAX_DEATHS:
        yield replace(world, requester="idle", num_deaths=world.num_deaths + 1)
        yield replace(world, server="new", num_deaths=world.num_deaths + 1)


def requester_steps(world: World) -> Iterator[World]:
    memory, words = memory_of(world)
    match world.requester:
        case "idle" if world.num_requests < MAX_REQUESTS and native.link_may_ask(words):
            number = world.num_requests + 1
            yield replace(world, requester="writing", asking=number, num_requests=number, request=(number, world.request[1]))
        case "writing":
            yield replace(world, requester="written", request=(world.asking, world.asking))
        case "written":
            native.link_post(words)
            yield replace(world, requester="waiting", words=memory.tobytes())
        case "waiting" if native.link_may_ask(words):
            if native.link_status(words) == native.LinkStatus.computed and world.rows != (world.asking, world.asking):
                yield replace(world, trust=f"request {world.asking} got rows {world.rows}")
            else:
                yield replace(world, requester="idle")
        case "waiting":
            yield replace(world, requester="idle")  # gives the partner up; the window is run again


def server_steps(world: World) -> Iterator[World]:
    memory, words = memory_of(world)
    match world.server:
        case "new":
            native.link_begin_serving(words)
            yield replace(world, server="idle", words=memory.tobytes())
        case "idle" if native.link_has_request(words):
            if world.request[0] != world.request[1]:
                yield replace(world, trust=f"the server read a half-written request {world.request}")
            yield replace(world, server="read", reading=world.request[0])
        case "read":
            yield replace(world, server="half", rows=(world.reading, world.rows[1]))
        case "half":
            yield replace(world, server="computed", rows=(world.reading, world.reading))
        case "computed":
            native.link_answer(words, native.LinkStatus.computed, 0)
            yield replace(world, server="idle", words=memory.tobytes())


def memory_of(world: World) -> tuple[np.ndarray, native.View]:
    """A copy of the words, and the view that the native steps work on. Keep the first as long as the second is used."""
    raw = np.zeros(native.LINK_CHANNEL_WORDS_BYTES + 64, np.uint8)
    first = -raw.ctypes.data % 64
    memory = raw[first : first + native.LINK_CHANNEL_WORDS_BYTES]
    memory[:] = np.frombuffer(world.words, np.uint8)
    return memory, native.wrap_memory(memory.ctypes.data, memory.nbytes)


def test_in_every_order_of_steps_and_deaths_rows_are_those_of_the_request() -> None:
    seen = {World()}
    waiting = deque(seen)
    num_answered = 0
    while waiting:
        world = waiting.popleft()
        assert not world.trust, world
        for following in steps(world):
            if following not in seen:
                seen.add(following)
                waiting.append(following)
                num_answered += following.server == "computed"
    assert len(seen) > 1000
    assert num_answered > 0
    ends = [world for world in seen if world.num_requests == MAX_REQUESTS and world.requester == "idle"]
    assert ends, "all requests are made in spite of the deaths"


def test_a_wrong_protocol_would_be_found() -> None:
    """Had a new server said `computed` of what its predecessor left, the search above would say so."""
    world = World(server="idle", requester="waiting", asking=1, num_requests=1, request=(1, 1))
    memory, words = memory_of(world)
    native.link_post(words)
    native.link_answer(words, native.LinkStatus.computed, 0)
    found = list(requester_steps(replace(world, words=memory.tobytes())))
    assert found[0].trust == "request 1 got rows (0, 0)"


class ChannelMachine(RuleBasedStateMachine):
    """Longer walks than the search has room for: many requests, many deaths."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        possible = [*requester_steps(self.world), *server_steps(self.world)]
        if possible:
            self.world = data.draw(st.sampled_from(possible))
        self.world = replace(self.world, num_requests=0 if self.world.requester == "idle" else self.world.num_requests)

    @rule()
    def server_dies(self) -> None:
        self.world = replace(self.world, server="new")

    @rule()
    def requester_dies(self) -> None:
        self.world = replace(self.world, requester="idle")

    @invariant()
    def nobody_was_deceived(self) -> None:
        assert not self.world.trust


TestChannelMachine = ChannelMachine.TestCase
TestChannelMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
