"""The waiting line: order of arrival, places, the limit."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from appliance.desk.queue import WaitingLine
from appliance.errors import QueueFullError
from appliance.protocol import Generate, Queued


def request(name: str) -> Generate:
    return Generate(id=name, prompt=[1], max_tokens=1)


def test_each_is_told_its_place_once_and_again_when_it_changes() -> None:
    line = WaitingLine(8)
    for name in "abc":
        line.append(request(name))
    assert line.tell_places() == [Queued(id="a", place=1), Queued(id="b", place=2), Queued(id="c", place=3)]
    assert line.tell_places() == []
    line.remove("a")
    assert line.tell_places() == [Queued(id="b", place=1), Queued(id="c", place=2)]


def test_one_who_leaves_changes_nothing_for_those_before_him() -> None:
    line = WaitingLine(8)
    for name in "abc":
        line.append(request(name))
    line.tell_places()
    line.remove("b")
    assert line.tell_places() == [Queued(id="c", place=2)]


def test_full_line_names_its_limit() -> None:
    line = WaitingLine(1)
    line.check_room()
    line.append(request("a"))
    with pytest.raises(QueueFullError, match=r"1 requests wait already, and max_queue is 1"):
        line.check_room()


def test_one_who_comes_back_goes_to_the_end_and_is_told_so() -> None:
    line = WaitingLine(8)
    line.append(request("a"))
    line.append(request("b"))
    line.tell_places()
    line.remove("a")
    line.append(request("a"))
    assert line.ids == ("b", "a")
    assert line.tell_places() == [Queued(id="b", place=1), Queued(id="a", place=2)]
    line.remove("a")
    line.append(request("a"))
    assert line.tell_places() == [Queued(id="a", place=2)]


class LineAgainstList(RuleBasedStateMachine):
    """The line beside a plain list, which has no places to remember."""

    def __init__(self) -> None:
        super().__init__()
        self.line = WaitingLine(100)
        self.names: list[str] = []
        self.told: dict[str, int] = {}
        self.count = 0

    @rule()
    def append(self) -> None:
        self.count += 1
        self.names.append(f"r{self.count}")
        self.line.append(request(self.names[-1]))

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names))
        self.names.remove(name)
        del self.told[name]
        assert self.line.remove(name).id == name

    @invariant()
    def order_head_and_places_agree(self) -> None:
        self.told.update({queued.id: queued.place for queued in self.line.tell_places()})
        assert self.line.ids == tuple(self.names)
        assert len(self.line) == len(self.names)
        head = self.line.head
        assert (head.id if head else None) == (self.names[0] if self.names else None)
        assert self.told == {name: place for place, name in enumerate(self.names, start=1)}


TestLineAgainstList = LineAgainstList.TestCase
