"""The elastic pair as its users meet it: a real server, two real engines, the demo model."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.real_server import RealServer, real_server

ELASTIC = ("--elastic-enabled", "true", "--elastic-hold-s", "1.5", "--context", "512", "--elastic-bar-s", "0.5")
TOKENS = 250
STORY = "Once upon a time there was a small house at the edge of a large wood, and in it lived a cat. " * 4


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server(*ELASTIC) as started:
        yield started


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What a plain engine with one card answers."""
    with real_server("--cards", "host:0", "--context", "512", lanes=1) as plain:
        return {prompt: answer(plain, prompt, TOKENS) for prompt in (STORY, STORY[::-1], "x")}


def answer(server: RealServer, prompt: str, max_tokens: int) -> str:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    reply = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def together(server: RealServer, *prompts: str, max_tokens: int = TOKENS) -> list[str]:
    answers: dict[int, str] = {}

    def ask(index: int) -> None:
        answers[index] = answer(server, prompts[index], max_tokens)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[index] for index in range(len(prompts))]


def rows(server: RealServer, lane: str) -> dict[str, int]:
    stats: dict[str, Any] = next(one for one in server.status()["lanes"] if one["name"] == lane)["stats"]
    return dict(stats["rows_by_tier"])


def asleep(server: RealServer) -> dict[str, Any]:
    return server.wait_for(lambda s: s["pair"]["phase"] == "asleep" and lanes_idle(s), "the helper asleep")


def lanes_idle(status: dict[str, Any]) -> bool:
    return [lane["state"] for lane in status["lanes"]] == ["idle", "idle"]


def test_one_request_has_both_cards_and_the_answer_of_one(server: RealServer, expected: dict[str, str]) -> None:
    asleep(server)
    assert answer(server, STORY, TOKENS) == expected[STORY]
    assert rows(server, "lead")["peer"] > 0
    assert server.status()["pair"]["wakes"] == 0


def test_two_requests_have_a_card_each_and_help_each_other(server: RealServer, expected: dict[str, str]) -> None:
    asleep(server)
    before = server.status()["pair"]["wakes"]
    assert together(server, STORY, STORY[::-1]) == [expected[STORY], expected[STORY[::-1]]]
    pair = server.status()["pair"]
    assert pair["wakes"] == before + 1
    assert pair["failed_wakes"] == 0
    assert rows(server, "helper").get("linked", 0) + rows(server, "lead").get("linked", 0) > 0
    asleep(server)
    assert answer(server, "x", TOKENS) == expected["x"]


def test_a_conversation_of_the_helper_goes_on_at_the_lead(server: RealServer) -> None:
    asleep(server)
    together(server, STORY, STORY[::-1])
    asleep(server)
    body = {"prompt": STORY[::-1] + " and more", "max_tokens": 1, "temperature": 0}
    first = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    body["prompt"] = STORY + " and more"
    second = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    for usage in (first["usage"], second["usage"]):
        assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] // 2
    assert server.status()["pair"]["phase"] == "asleep"
    server.wait_for(lambda _: metrics(server)['tandem_conversations_resumed_total{card="host:0",lane="lead"}'] > 0, "the lead's report")
    now = metrics(server)
    assert now["tandem_parked_bytes"] > 4096 * now["tandem_parked_conversations"] > 0
    assert now['tandem_conversations_parked_total{card="host:1",lane="helper"}'] > 0
    assert now["tandem_helper_wakes_total"] == now["tandem_helper_sleeps_total"] > 0
    assert now["tandem_helper_wake_seconds_total"] >= now["tandem_helper_last_wake_seconds"] > 0


def metrics(server: RealServer) -> dict[str, float]:
    """By the text before the value."""
    lines = httpx2.get(f"{server.url}/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["helper", "lead"])
def test_the_other_stream_goes_on_when_one_engine_is_killed(victim: str, server: RealServer, expected: dict[str, str]) -> None:
    asleep(server)
    survivors: list[str] = []
    texts: dict[str, str] = {}

    def ask(prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        reply = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=120)
        texts[prompt] = reply.json()["choices"][0]["text"] if reply.status_code == 200 else reply.json()["error"]["code"]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in (STORY, STORY[::-1])]
    for thread in threads:
        thread.start()
    status = server.wait_for(lambda s: [lane["state"] for lane in s["lanes"]] == ["busy", "busy"], "both busy")
    os.kill(next(lane["pid"] for lane in status["lanes"] if lane["name"] == victim), signal.SIGKILL)
    for thread in threads:
        thread.join()
    survivors = [prompt for prompt, text in texts.items() if text == expected[prompt]]
    assert len(survivors) == 1, texts
    assert "engine_died" in texts.values()
    asleep(server)
    assert answer(server, STORY, TOKENS) == expected[STORY]
