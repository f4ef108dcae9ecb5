"""The life of the server process: loading, draining, ending, and engines or workers that die. Real processes throughout."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest

from appliance.errors import SettingsError
from appliance.web.server import listen
from tests.eventually import eventually
from tests.fakes_web import FakeServer, running_server, write_vocabulary

LIMIT_S = 30.0
SLOW = "--answer 97,98,99 --window-ms 25"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "v.gguf")


class Stream:
    """An open streaming answer, read line by line."""

    def __init__(self, response: httpx2.Response) -> None:
        self._lines = response.iter_lines()
        self.lines: list[str] = []

    def read_until(self, condition: Callable[[str], bool]) -> str:
        """The first line that meets the condition; StopIteration if the stream ends before."""
        while True:
            self.lines.append(next(self._lines))
            if condition(self.lines[-1]):
                return self.lines[-1]

    def read_to_the_end(self) -> list[dict[str, Any]]:
        """The rest of its events, which must end with [DONE]."""
        self.lines += list(self._lines)
        data = [line.removeprefix("data: ") for line in self.lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        return [json.loads(event) for event in data[:-1]]


@contextlib.contextmanager
def streaming(server: FakeServer, prompt: str = "HI", max_tokens: int = 40) -> Iterator[Stream]:
    """A streaming answer that has begun."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        stream = Stream(response)
        stream.read_until(lambda line: line.startswith("data: "))
        yield stream


def descendants(server: FakeServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def test_while_loading_it_lives_refuses_and_tells_how_far_it_is(vocabulary: Path) -> None:
    with running_server(vocabulary, lanes=1, engine="--load-s 4") as server:
        server.wait_for(lambda status: status["load"] is not None and 0 < status["load"]["done_bytes"] < status["load"]["total_bytes"])
        ready = httpx2.get(f"{server.url}/readyz")
        assert ready.status_code == 503
        assert int(ready.headers["Retry-After"]) >= 1
        assert ready.json()["phase"] == "loading"
        assert ready.json()["load"]["stage"] == "dense"
        assert (
            ready.json()["reason"]
            == ready.json()["error"]["message"]
            == "the model is loading: the lead has not been up yet (lead starting)"
        )
        assert httpx2.get(f"{server.url}/livez").status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(model="default", prompt="x")
            assert refused.value.status_code == 503
            assert refused.value.code == "not_ready"
            assert int(refused.value.response.headers["Retry-After"]) >= 1
            assert client.models.list().data
        server.wait_until_ready()
        assert httpx2.get(f"{server.url}/readyz").status_code == 200


def test_a_model_that_cannot_be_loaded_ends_the_server_with_a_sentence(vocabulary: Path, tmp_path: Path) -> None:
    with running_server(vocabulary, engine="--load-error 'the fake card is full'", log=tmp_path / "log") as server:
        assert server.process.wait(60) == 1
    assert "tandem: " in (tmp_path / "log").read_text()
    assert "the fake card is full" in (tmp_path / "log").read_text()


def test_sigterm_lets_running_answers_finish_and_refuses_new_ones(vocabulary: Path, tmp_path: Path) -> None:
    with running_server(vocabulary, engine=SLOW, drain_s=20, log=tmp_path / "log") as server:
        server.wait_until_ready()
        children = descendants(server)
        with streaming(server, max_tokens=60) as stream:
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx2.get(f"{server.url}/readyz").json()["phase"] == "draining", "draining", limit_s=LIMIT_S)
            refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "not_ready"
            assert "Retry-After" in refused.headers
            events = stream.read_to_the_end()
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert "".join(choice["text"] for event in events for choice in event["choices"]) == "abc" * 20
        assert server.process.wait(30) == 0
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    begin, end = (line for line in lines if "drain" in line["event"])
    assert (begin["running"], begin["drain_s"]) == (1, 20)
    assert end["took_s"] > 0


def test_an_answer_that_outlasts_the_drain_ends_with_an_error_event(vocabulary: Path) -> None:
    with running_server(vocabulary, lanes=1, engine=SLOW, drain_s=0.5) as server:
        server.wait_until_ready()
        with streaming(server, max_tokens=3000) as stream:
            server.process.send_signal(signal.SIGTERM)
            events = stream.read_to_the_end()
        assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
        assert server.process.wait(30) == 0


def test_ctrl_c_ends_at_once(vocabulary: Path) -> None:
    with running_server(vocabulary, lanes=1, engine=SLOW, drain_s=600) as server:
        server.wait_until_ready()
        with streaming(server, max_tokens=3000) as stream:
            server.process.send_signal(signal.SIGINT)
            assert "error" in stream.read_to_the_end()[-1]
        assert server.process.wait(15) == 0


def test_an_engine_that_dies_ends_its_stream_with_an_error_and_leaves_the_other_alone(vocabulary: Path) -> None:
    with running_server(vocabulary, engine=f"{SLOW} --die-at 60") as server:
        server.wait_until_ready()
        with streaming(server, max_tokens=50) as healthy, streaming(server, prompt="p" * 40, max_tokens=100) as doomed:
            events = doomed.read_to_the_end()
            assert events[-1]["error"]["code"] == "engine_died"
            assert healthy.read_to_the_end()[-1]["choices"][0]["finish_reason"] == "length"
        server.wait_until_ready()
        assert sum(lane["restarts"] for lane in server.status()["lanes"]) == 1
        assert httpx2.get(f"{server.url}/livez").status_code == 200


def test_without_streaming_a_dead_engine_is_503_and_the_client_may_try_again(vocabulary: Path) -> None:
    with running_server(vocabulary, lanes=1, engine="--answer 97,98 --die-at 60") as server:
        server.wait_until_ready()
        answer = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "p" * 40, "max_tokens": 100}, timeout=60)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_died"
        assert "Retry-After" in answer.headers


def test_a_worker_that_is_killed_is_replaced_with_fresh_engines(vocabulary: Path) -> None:
    with running_server(vocabulary, lanes=1, engine=SLOW) as server:
        server.wait_until_ready()
        (worker,) = psutil.Process(server.process.pid).children()
        engines = worker.children(recursive=True)
        worker.kill()
        eventually(
            lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in engines), "engines end", limit_s=LIMIT_S
        )
        eventually(lambda: worker not in psutil.Process(server.process.pid).children(), "another worker", limit_s=LIMIT_S)
        server.wait_until_ready()
        with streaming(server, max_tokens=3) as stream:
            assert stream.read_to_the_end()


def test_nothing_outlives_a_killed_server_not_even_for_the_answers_that_run(vocabulary: Path) -> None:
    with running_server(vocabulary, lanes=1, engine=SLOW) as server:
        server.wait_until_ready()
        with streaming(server, max_tokens=3000) as stream:
            children = descendants(server)
            server.process.kill()
            assert not psutil.wait_procs(children, timeout=5)[1]
            with pytest.raises(httpx2.HTTPError):
                stream.read_to_the_end()


def test_nothing_outlives_a_server_that_is_killed_while_it_loads(vocabulary: Path) -> None:
    with running_server(vocabulary, lanes=1, engine="--load-s 60") as server:
        server.wait_for(lambda status: status["load"] is not None and status["load"]["done_bytes"] > 0)
        children = descendants(server)
        assert len(children) > 1
        server.process.kill()
        assert not psutil.wait_procs(children, timeout=5)[1]


def test_signals_that_would_start_a_second_pair_of_engines_are_ignored(vocabulary: Path) -> None:
    with running_server(vocabulary, lanes=1, engine=SLOW) as server:
        server.wait_until_ready()
        before = {child.pid for child in descendants(server)}
        with streaming(server, max_tokens=40) as stream:
            for number in (signal.SIGHUP, signal.SIGTTIN, signal.SIGUSR2):
                os.kill(server.process.pid, number)
            assert stream.read_to_the_end()[-1]["choices"][0]["finish_reason"] == "length"
        assert {child.pid for child in descendants(server)} == before


def test_a_taken_port_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port}.*--port"):
            listen("127.0.0.1", port)
