"""A real server of a pair that is to lose processes: clients whose streams are kept, kills, and what must be there afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil

from scripts.pair_bench.streams import wait_for_tokens
from tests.real_server import RealServer

Status = dict[str, Any]
LIMIT_S = 60.0
PROMPTS = ([3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8])
"""No more tokens than a window has rows: a GPU rounds longer prompts differently, and what is reused of them was computed as one."""
SHORT_TOKENS = 16
TRIES = 5
"""For two requests to meet on two lanes, and for a phase to be met."""


@dataclass
class Stream:
    """A streamed answer: its tokens, and `length`, an error's code, or `cut` for how it ended; None while it goes on."""

    max_tokens: int
    ids: list[int] = field(default_factory=list)
    end: str | None = None
    thread: threading.Thread | None = None

    def finish(self) -> Stream:
        assert self.thread is not None
        self.thread.join(LIMIT_S)
        return self

    def wait_for_tokens(self, num: int) -> None:
        assert self.thread is not None
        wait_for_tokens(self.ids, num, self.thread)


class Served:
    """A real server and its clients. `stream` may be called from any thread."""

    def __init__(self, server: RealServer, num_tokens: int, turn: threading.Lock) -> None:
        """`num_tokens`: of a long answer. `turn`: of the one server that decodes."""
        self.turn = turn
        self._server = server
        self.num_tokens = num_tokens
        self._client = httpx2.Client(base_url=server.url, timeout=LIMIT_S)
        self._stopped: list[int] = []
        with turn:
            self.expected = [self.stream(prompt, num_tokens).finish().ids for prompt in PROMPTS]
            self.wait_for(is_at_rest, "at rest")
        self._num_processes = len(server.descendants())
        self._names = self._shared_names()

    def close(self) -> None:
        self._client.close()

    def status(self) -> Status | None:
        try:
            return dict(self._client.get("/status").json())
        except (httpx2.HTTPError, ValueError):
            return None

    def wait_for(self, condition: Callable[[Status], bool], what: str) -> Status:
        """Raises TimeoutError with the last status."""
        deadline_s = time.monotonic() + LIMIT_S
        status: Status | None = None
        while time.monotonic() < deadline_s:
            status = self.status()
            if status is not None and condition(status):
                return status
            time.sleep(0.002)
        raise TimeoutError(f"not within {LIMIT_S:g} s: {what}; {status}; log {self._server.log.read_text()[-1500:]}")

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Stream:
        stream = Stream(max_tokens)
        stream.thread = threading.Thread(target=self._follow, args=(stream, list(prompt)), daemon=True)
        stream.thread.start()
        return stream

    def stop(self, lane: str) -> None:
        """Until the next kill."""
        pid = self._pid(lane)
        os.kill(pid, signal.SIGSTOP)
        self._stopped.append(pid)

    def kill(self, victim: str) -> str:
        """Returns the phase that the pair was in. What was stopped goes on."""
        phase, pid = self.phase(), self._pid(victim)
        os.kill(pid, signal.SIGKILL)
        self.go_on()
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).wait(5)
        return phase

    def phase(self) -> str:
        return str(self.wait_for(lambda _: True, "a status")["pair"]["phase"])

    def go_on(self) -> None:
        """What was stopped."""
        while self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._stopped.pop(), signal.SIGCONT)

    def _pid(self, name: str) -> int:
        if name == "web":
            return int(psutil.Process(self._server.process.pid).children()[0].pid)
        lanes = self.wait_for(lambda status: all(lane["pid"] for lane in status["lanes"]), "two engines")["lanes"]
        return next(int(lane["pid"]) for lane in lanes if lane["name"] == name)

    def check_both_lanes(self) -> None:
        """Both lanes answer, each a request, as they always do. Raises TimeoutError or AssertionError."""
        before = self.wait_for(is_ready_to_wake, "both lanes idle")
        for _ in range(TRIES):
            with self.turn:
                self._ask_both()
                after = self.wait_for(is_at_rest, "at rest")
            if all(num > 0 for num in _new_windows(before, after)):
                return
        raise AssertionError(f"in {TRIES} tries with two requests at once one lane had none: {_new_windows(before, after)} windows")

    def _ask_both(self) -> None:
        streams = [self.stream(PROMPTS[0], self.num_tokens)]
        streams[0].wait_for_tokens(1)
        streams.append(self.stream(PROMPTS[1], SHORT_TOKENS))
        for stream, expected in zip(streams, self.expected, strict=True):
            stream.finish()
            assert stream.end == "length", f"a request after the kill ended as {stream.end}"
            assert stream.ids == expected[: len(stream.ids)], "a request after the kill was answered with other tokens"

    def check_leftovers(self) -> None:
        """Raises AssertionError."""
        deadline_s = time.monotonic() + 10
        while (strays := self._strays()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not strays, f"processes that nobody owns: {strays}"
        num = len(self._server.descendants())
        assert num == self._num_processes, f"{num} processes, {self._num_processes} before"
        names = self._shared_names()
        assert names == self._names, f"in shared memory {names}, before {self._names}"

    def _follow(self, stream: Stream, prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": stream.max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        end = "cut"
        try:
            with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    end = str(json.loads(response.read())["error"]["code"])
                for line in response.iter_lines():
                    end = _take(stream, line) or end
        except httpx2.HTTPError:
            pass
        stream.end = end

    def _strays(self) -> list[int]:
        """Processes that name this server's shared memory, and are not of its tree."""
        ours = {self._server.process.pid, *(child.pid for child in self._server.descendants())}
        shm = str(self._server.shm_dir)
        return [one.pid for one in psutil.process_iter(["cmdline"]) if shm in " ".join(one.info["cmdline"] or ()) and one.pid not in ours]

    def _shared_names(self) -> list[str]:
        return sorted(path.name for path in self._server.shm_dir.iterdir())

    def shared_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self._server.shm_dir.rglob("*") if path.is_file())


def _take(stream: Stream, line: str) -> str | None:
    """How the stream ends, if the line says so."""
    text = line.removeprefix("data: ")
    if text == line or text == "[DONE]":
        return None
    said = json.loads(text)
    if "error" in said:
        return str(said["error"]["code"])
    for choice in said["choices"]:
        stream.ids += choice.get("token_ids") or []
        if choice["finish_reason"]:
            return str(choice["finish_reason"])
    return None


def is_at_rest(status: Status) -> bool:
    lanes = status["lanes"]
    are_idle = all(
        lane["state"] == "idle" and lane["stats"] and not (lane["stats"]["busy"] or lane["stats"]["is_filling"]) for lane in lanes
    )
    return are_idle and status["pair"]["phase"] == "asleep"


def is_ready_to_wake(status: Status) -> bool:
    return is_at_rest(status) and status["pair"]["reason"] is None


def _new_windows(before: Status, after: Status) -> list[int]:
    return [new["totals"]["windows"] - old["totals"]["windows"] for old, new in zip(before["lanes"], after["lanes"], strict=True)]
