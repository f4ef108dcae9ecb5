"""Server-sent events, read by the openai client's own decoder."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from appliance.web import sse


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.dictionaries(st.text(), st.text() | st.integers(-(2**53), 2**53) | st.none()))
def test_an_event_carries_any_json_unchanged(data: dict[str, object]) -> None:
    (event,) = SSEDecoder().iter_bytes(iter([sse.event(data)]))
    assert json.loads(event.data) == data
    assert event.event is None
    assert event.id is None
    assert event.retry is None


def test_an_event_may_have_a_name() -> None:
    (event,) = SSEDecoder().iter_bytes(iter([sse.named_event("ping", {"type": "ping"})]))
    assert (event.event, event.data) == ("ping", '{"type":"ping"}')


@given(st.text())
def test_a_comment_is_invisible_whatever_it_says(text: str) -> None:
    stream = sse.comment(text) + sse.event({"a": 1}) + sse.comment(text) + sse.DONE
    assert [event.data for event in SSEDecoder().iter_bytes(iter([stream]))] == ['{"a":1}', "[DONE]"]


def test_keep_alive_is_due_after_the_period_without_bytes() -> None:
    clock = Clock()
    keep_alive = sse.KeepAlive(0.75, clock)
    assert keep_alive.left_s() == 0.75
    clock.now += 0.5
    assert keep_alive.left_s() == 0.25
    clock.now += 0.5
    assert keep_alive.left_s() == 0
    keep_alive.sent()
    assert keep_alive.left_s() == 0.75
