"""The `openai` and `anthropic` clients at the real server with the demo model: real engines, real weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from tests.real_server import RealServer, real_server

HARBOR = "A harbor is a sheltered port where ships can take on or discharge cargo."
QUESTIONS = ("What is a harbor?", "What is a river?", "What is a bridge?", "What is a king?")


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as started:
        yield started


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, question: str, temperature: float = 0.0, seed: int = 1) -> str:
    answer = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": question}], temperature=temperature, seed=seed, max_tokens=64
    )
    return answer.choices[0].message.content or ""


def test_it_knows_what_a_harbor_is_streamed_or_not(client: openai.OpenAI) -> None:
    assert ask(client, QUESTIONS[0]) == HARBOR
    stream = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": QUESTIONS[0]}], temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == HARBOR


def test_the_messages_api_gives_the_same_answers_streamed_or_not(client: openai.OpenAI, server: RealServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as messages_client:
        for question in QUESTIONS:
            prompt: Any = {"model": "default", "messages": [{"role": "user", "content": question}]}
            asked = {**prompt, "max_tokens": 64, "extra_body": {"temperature": 0}}
            whole = messages_client.messages.create(**asked)
            with messages_client.messages.stream(**asked) as events:
                streamed = events.get_final_message()
            for message in (whole, streamed):
                assert [block.text for block in message.content] == [ask(client, question)]
                assert message.stop_reason == "end_turn"
                length = messages_client.messages.count_tokens(**prompt).input_tokens
                assert message.usage.input_tokens + message.usage.cache_read_input_tokens == length


def test_the_same_seed_gives_the_same_text_and_another_seed_another(client: openai.OpenAI) -> None:
    hot = [ask(client, "What is a city?", temperature=2.0, seed=seed) for seed in (7, 7, 8)]
    assert hot[0] == hot[1] != hot[2]


def test_both_lanes_give_the_same_answers_at_once(client: openai.OpenAI, server: RealServer) -> None:
    alone = [ask(client, question) for question in QUESTIONS]
    with ThreadPoolExecutor(2 * len(QUESTIONS)) as clients:
        together = list(clients.map(lambda question: ask(client, question), QUESTIONS * 2))
    assert together == alone * 2
    assert all(lane["stats"]["generated_tokens"] > 0 for lane in server.wait_until_both_idle()["lanes"])


@pytest.mark.parametrize("options", [("--slots", "0"), ("--slots", "192", "--pool-threads", "3"), ("--slots", "20", "--max-swaps", "8")])
def test_placement_and_threads_do_not_change_an_answer(client: openai.OpenAI, options: tuple[str, ...]) -> None:
    expected = [ask(client, question) for question in QUESTIONS]
    with (
        real_server(*options) as other,
        openai.OpenAI(base_url=f"{other.url}/v1", api_key="none", max_retries=0) as other_client,
    ):
        assert [ask(other_client, question) for question in QUESTIONS] == expected
