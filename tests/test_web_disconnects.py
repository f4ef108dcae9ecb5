"""Clients that leave, wait or stop reading, on raw sockets: whatever they do, their lane is free in under a second."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes_web import FakeServer, running_server, write_vocabulary

LIMIT_S = 1.0
"""From the client's leaving to the lane being free."""
KEEPALIVE_S = 0.25
LONG_PROMPT = "a" * 3200
"""A hundred chunks of 0.1 s."""

DATA = b"\ndata: {"

Status = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    """One lane, so that a second request waits."""
    vocabulary = write_vocabulary(tmp_path_factory.mktemp("server") / "v.gguf")
    engine = "--answer 97,98,99 --window-ms 20 --chunk-ms 100"
    with running_server(vocabulary, lanes=1, engine=engine, keepalive_s=KEEPALIVE_S, max_queue=4) as running:
        running.wait_until_ready()
        yield running


TEXT, MESSAGES = "/v1/completions", "/v1/messages"
HALF = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"prompt"'
"""A request that goes no further."""


@contextlib.contextmanager
def request(server: FakeServer, *, stream: bool, prompt: str = "hi", max_tokens: int = 3000, route: str = TEXT) -> Iterator[socket.socket]:
    """Sends a request and leaves its answer to the caller."""
    asked = {"prompt": prompt} if route == TEXT else {"messages": [{"role": "user", "content": prompt}]}
    body = json.dumps({**asked, "max_tokens": max_tokens, "stream": stream, "temperature": 0}).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head.encode() + body)
        yield connection


@contextlib.contextmanager
def occupied(server: FakeServer, max_tokens: int = 3000) -> Iterator[socket.socket]:
    """A stream that has the only lane."""
    server.wait_for(is_free)
    with request(server, stream=True, max_tokens=max_tokens) as connection:
        server.wait_for(lambda status: status["lanes"][0]["request"] is not None)
        yield connection


@contextlib.contextmanager
def waiting(server: FakeServer, place: int, max_tokens: int = 3000) -> Iterator[socket.socket]:
    """A stream that waits at `place` of the line."""
    with request(server, stream=True, max_tokens=max_tokens) as connection:
        server.wait_for(lambda status: status["queue_length"] == place)
        yield connection


def is_free(status: Status) -> bool:
    return bool(status["lanes"][0]["state"] == "idle" and status["queue_length"] == 0)


def in_prompt(status: Status) -> bool:
    running = status["lanes"][0]["request"]
    return bool(running and running["prompt_done"] < running["prompt_tokens"] and running["prompt_done"] > 0)


def in_decode(status: Status) -> bool:
    running = status["lanes"][0]["request"]
    return bool(running and running["generated_tokens"] > 3)


def leave_politely(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def leave_by_reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("leave", [leave_politely, leave_by_reset])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("prompt", "phase"), [(LONG_PROMPT, in_prompt), ("hi", in_decode)])
@pytest.mark.parametrize("route", [TEXT, MESSAGES])
def test_a_client_that_leaves_frees_its_lane(
    server: FakeServer, route: str, prompt: str, phase: Callable[[Status], bool], stream: bool, leave: Callable[[socket.socket], None]
) -> None:
    server.wait_for(is_free)
    with request(server, stream=stream, prompt=prompt, route=route) as connection:
        server.wait_for(phase)
        leave(connection)
        assert server.wait_for(is_free) < LIMIT_S


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_line_disturbs_nobody(server: FakeServer, stream: bool) -> None:
    server.wait_for(is_free)
    with request(server, stream=True) as first:
        server.wait_for(in_decode)
        running = server.status()["lanes"][0]["request"]["id"]
        with request(server, stream=stream) as second:
            server.wait_for(lambda status: status["queue_length"] == 1)
            leave_politely(second)
            assert server.wait_for(lambda status: status["queue_length"] == 0) < LIMIT_S
        assert server.status()["lanes"][0]["request"]["id"] == running
        before = server.status()["lanes"][0]["request"]["generated_tokens"]
        server.wait_for(lambda status: status["lanes"][0]["request"]["generated_tokens"] > before)
        leave_politely(first)
    assert server.wait_for(is_free) < LIMIT_S


def test_a_client_that_leaves_before_its_body_is_complete_costs_nothing(server: FakeServer) -> None:
    server.wait_for(is_free)
    accepted = server.status()["counters"]["accepted"]
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(HALF)
    assert server.status()["counters"]["accepted"] == accepted


def test_clients_that_send_half_a_request_do_not_silence_the_probes(server: FakeServer) -> None:
    """More than the server has threads, each silent for less than the time after which it is given up."""
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5)).sendall(HALF)
        for _ in range(3):
            assert urllib.request.urlopen(f"{server.url}/livez", timeout=5).status == 200


def test_every_departure_was_counted_as_cancelled_once(server: FakeServer) -> None:
    server.wait_for(is_free)
    before = server.status()["counters"]
    for _ in range(5):
        with request(server, stream=True):
            server.wait_for(in_decode)
        server.wait_for(is_free)
    after = server.status()["counters"]
    assert after["cancelled"] - before["cancelled"] == 5
    assert after["accepted"] == after["finished"] + after["cancelled"] + after["failed"]


def read_for(connection: socket.socket, seconds: float, enough: Callable[[bytes], bool]) -> list[tuple[float, bytes]]:
    """What arrives, with the time since the call, until `enough` of all of it or the time is over."""
    begin, parts = time.monotonic(), list[tuple[float, bytes]]()
    connection.settimeout(0.1)
    while time.monotonic() - begin < seconds and not enough(b"".join(part for _, part in parts)):
        with contextlib.suppress(TimeoutError):
            parts.append((time.monotonic() - begin, connection.recv(65536)))
    return parts


def longest_silence(parts: list[tuple[float, bytes]]) -> float:
    times = [moment for moment, _ in parts]
    return max(later - earlier for earlier, later in zip([0.0, *times], times, strict=False))


def test_a_waiting_stream_says_its_place_at_once_and_never_falls_silent(server: FakeServer) -> None:
    with occupied(server), waiting(server, 1), waiting(server, 2) as last:
        parts = read_for(last, 20, lambda text: text.count(b": queued") > 5)
        text = b"".join(part for _, part in parts)
        assert text.count(b": queued 2") > 5
        assert DATA not in text
        assert parts[0][0] < LIMIT_S
        assert longest_silence(parts) < KEEPALIVE_S + 0.75
    server.wait_for(is_free)


def test_a_long_prompt_is_not_silent_and_tells_how_far_it_is(server: FakeServer) -> None:
    server.wait_for(is_free)
    with request(server, stream=True, prompt=LONG_PROMPT) as connection:
        parts = read_for(connection, 20, lambda text: text.count(b": prompt ") > 5)
        assert b": prompt 64/3200" in b"".join(part for _, part in parts)
        assert longest_silence(parts) < KEEPALIVE_S + 0.75
    server.wait_for(is_free)


PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def test_a_message_that_waits_has_begun_and_pings_with_its_place(server: FakeServer) -> None:
    with occupied(server), request(server, stream=True, route=MESSAGES) as last:
        parts = read_for(last, 20, lambda text: text.count(PING) > 5)
        text = b"".join(part for _, part in parts)
        assert text.index(b"event: message_start") < text.index(PING)
        assert b": queued 1\n\n" + PING in text
        assert b"event: content_block_start" not in text
        assert parts[0][0] < LIMIT_S
        assert longest_silence(parts) < KEEPALIVE_S + 0.75
    server.wait_for(is_free)


def test_a_message_with_a_long_prompt_pings(server: FakeServer) -> None:
    server.wait_for(is_free)
    with request(server, stream=True, prompt=LONG_PROMPT, route=MESSAGES) as connection:
        parts = read_for(connection, 20, lambda text: text.count(PING) > 5)
        assert longest_silence(parts) < KEEPALIVE_S + 0.75
    server.wait_for(is_free)


def test_those_in_line_are_served_in_order_and_told_when_they_move_up(server: FakeServer) -> None:
    with occupied(server, max_tokens=60), waiting(server, 1, max_tokens=5) as second, waiting(server, 2, max_tokens=5) as third:
        text = b"".join(part for _, part in read_for(third, 30, lambda text: b"[DONE]" in text))
        assert text.index(b": queued 2") < text.index(b": queued 1") < text.index(DATA)
        earlier = b"".join(part for _, part in read_for(second, 5, lambda text: b"[DONE]" in text))
        assert b"[DONE]" in earlier
    server.wait_for(is_free)


def test_a_full_line_is_429_or_for_messages_529_with_retry_after(server: FakeServer) -> None:
    with contextlib.ExitStack() as clients:
        clients.enter_context(occupied(server))
        for place in range(1, 5):
            clients.enter_context(waiting(server, place))
        refused = clients.enter_context(request(server, stream=False))
        answer = b"".join(part for _, part in read_for(refused, 10, lambda text: b"}}" in text)).decode()
        assert answer.startswith("HTTP/1.1 429 ")
        assert "\r\nRetry-After: " in answer
        assert '"code":"queue_full"' in answer
        message = clients.enter_context(request(server, stream=True, route=MESSAGES))
        answer = b"".join(part for _, part in read_for(message, 10, lambda text: b'"req_' in text)).decode()
        assert answer.startswith("HTTP/1.1 529 OVERLOADED")
        assert "\r\nRetry-After: " in answer
        assert '"type":"overloaded_error"' in answer
    server.wait_for(is_free)
