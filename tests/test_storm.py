"""Two hundred requests at the real server that are read, left half-way or lose their engine: each ends once, and nothing stays behind."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx2
import psutil

from tests.real_server import RealServer, real_server

REQUESTS = 200
CLIENTS = 6
KILLS = 6
QUESTION = {"role": "user", "content": "What is a harbor?"}


def test_two_hundred_requests_with_cancels_and_kills_each_end_once_and_leave_nothing_behind() -> None:
    rng = random.Random(20)
    with real_server("--max-queue", "16") as server:
        one_request(server, random.Random(0), "read")
        worker = server.descendants()[0]
        before = footprint(worker)
        fates = [rng.choice(("read", "leave", "leave at once", "not streamed")) for _ in range(REQUESTS)]
        killed = set(rng.sample(range(REQUESTS), KILLS))
        with ThreadPoolExecutor(CLIENTS) as clients:
            jobs = []
            for number, fate in enumerate(fates):
                jobs.append(clients.submit(one_request, server, random.Random(number), fate))
                if number in killed:
                    jobs.append(clients.submit(kill_an_engine, server, random.Random(number)))
            outcomes = Counter(job.result() for job in jobs)
        status = server.wait_for(settled, "both lanes idle and nothing running")
        counters = status["counters"]
        assert counters["accepted"] == counters["finished"] + counters["cancelled"] + counters["failed"], (counters, outcomes)
        assert outcomes["killed"] == KILLS
        assert outcomes["answered"] > 0, outcomes
        assert counters["cancelled"] > 0, outcomes
        one_request(server, random.Random(1), "read")
        after = footprint(worker)
        assert after["children"] == before["children"]
        assert after["threads"] <= before["threads"] + CLIENTS + 2, (before, after)
        assert after["descriptors"] <= before["descriptors"] + CLIENTS + 4, (before, after)
        assert [path.suffix for path in server.shm_dir.iterdir()] == [".arena"]


def one_request(server: RealServer, rng: random.Random, fate: str) -> str:
    """Sends one request and treats it as `fate` says. Returns `answered`, `failed`, `refused` or `left`."""
    body = {"messages": [QUESTION], "max_tokens": rng.randrange(1, 120), "temperature": 1.5, "seed": rng.randrange(1000)}
    url = f"{server.url}/v1/chat/completions"
    if fate == "not streamed":
        answer = httpx2.post(url, json=body, timeout=60)
        return {200: "answered", 429: "refused", 503: "failed"}[answer.status_code]
    with httpx2.stream("POST", url, json=body | {"stream": True}, timeout=60) as response:
        if response.status_code != 200:
            assert response.status_code in (429, 503)
            return "refused"
        lines = []
        leave_after = {"read": None, "leave": rng.randrange(2, 30), "leave at once": 1}[fate]
        for line in response.iter_lines():
            lines.append(line)
            if leave_after is not None and len(lines) >= leave_after:
                return "left"
    assert lines.count("data: [DONE]") == 1, lines[-5:]
    ends = sum('"finish_reason":"' in line for line in lines)
    errors = sum(line.startswith('data: {"error"') for line in lines)
    assert ends + errors == 1, lines
    return "answered" if ends else "failed"


def kill_an_engine(server: RealServer, rng: random.Random) -> str:
    pids = [lane["pid"] for lane in server.wait_for(lambda s: any(lane["pid"] for lane in s["lanes"]), "an engine")["lanes"] if lane["pid"]]
    try:
        os.kill(rng.choice(pids), signal.SIGKILL)
    except ProcessLookupError:
        return kill_an_engine(server, rng)
    return "killed"


def settled(status: dict[str, object]) -> bool:
    lanes, queue = status["lanes"], status["queue_length"]
    return queue == 0 and all(lane["state"] == "idle" for lane in lanes)  # type: ignore[attr-defined]


def footprint(worker: psutil.Process) -> dict[str, int]:
    return {"children": len(worker.children(recursive=True)), "threads": worker.num_threads(), "descriptors": worker.num_fds()}
