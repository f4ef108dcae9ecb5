"""What the image must do, seen on the image itself: two questions at once, a killed engine, SIGTERM in mid-answer, too little room."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI

from scripts.container.container import Hardened, Server, hardened
from scripts.container.engine import Engine

QUESTION = "What is a harbor?"
END_LIMIT_S = 75
TOOLS = ("cc1", "cc1plus", "collect2", "ld", "as", "nvcc", "cicc", "ptxas", "nvlink", "cmake", "ninja", "make", "pip", "npm", "node", "*.a")
LOOK_AT_MODULE = """
import json
from importlib.resources import files
from cuda_ext import _native
listed = files("cuda_ext").joinpath("cuda_architectures.txt")
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libcuda" in line or "nvidia" in line}
print(json.dumps({
    "architectures": listed.read_text().strip() if listed.is_file() else "",
    "has_cuda": hasattr(_native, "CudaCard"),
    "libraries": sorted(mapped),
}))
"""
EARLY_S = (0.1, 0.5, 1.0, 2.0)
"""Moments of a start at which it is ended."""


class SmokeFailedError(Exception):
    """The image does not do what it must; the sentence says what was seen."""


def smoke_image(engine: Engine, tag: str) -> Iterator[str]:
    """Yields one line for everything that was seen. Raises SmokeFailedError at the first thing that is wrong."""
    try:
        with hardened(engine, tag, Hardened()) as server:
            seconds = server.wait_until_both_idle()
            yield f"ready in {seconds:.1f} s: read-only, no capabilities, 3 GiB of memory, 256 MiB of /dev/shm, uid 12345:0"
            yield from _look_inside(server)
            yield _ask_two_at_once(server)
            yield _kill_an_engine(server)
            yield _end_in_mid_stream(server)
        yield _as_a_pair(engine, tag)
        yield _end_early(engine, tag)
        yield _too_small(engine, tag)
        yield _no_such_card(engine, tag)
    except TimeoutError as error:
        raise SmokeFailedError(str(error)) from None


def _look_inside(server: Server) -> Iterator[str]:
    _require("uid=12345 gid=0" in server.run("id"), f"the user is {server.run('id')}")
    _require("Read-only" in server.run("sh", "-c", "touch /opt/x 2>&1"), "the root file system can be written")
    names = " -o ".join(f"-name '{tool}'" for tool in TOOLS)
    found = server.run("sh", "-c", f"find / -xdev -path /usr/share -prune -o ! -type d \\( {names} \\) -print")
    tools = [line for line in found.splitlines() if line.startswith("/")]  # folders that only root may read are named, too
    _require(not tools, f"the image has {', '.join(tools)}")
    yield "no compiler, no static library and no package manager of a language inside, and its root is read-only"
    yield _native_module(server)
    code = server.container.exec_run(["python3", "-m", "appliance.probe", "/livez"]).exit_code
    _require(code == 0, "the health check's command fails")
    server.wait_for(lambda: _health(server) in ("healthy", "starting"), "no failed health check", 5)
    yield "the health check's command answers 0"


def _native_module(server: Server) -> str:
    """That it loads where there is no driver, needs no library of CUDA, and that cards fall back to the host's."""
    module = json.loads(server.run("python3", "-c", LOOK_AT_MODULE))
    cards = [lane["card"] for lane in server.get("/status")[1]["lanes"]]
    _require(cards == ["host:0", "host:1"], f"without a GPU the cards are {cards}")
    _require(not module["libraries"], f"the native module has loaded {module['libraries']}")
    driver = server.run("sh", "-c", "echo $NVIDIA_DRIVER_CAPABILITIES").strip()
    _require(driver == "compute,utility", f"NVIDIA_DRIVER_CAPABILITIES is {driver!r}")
    if not module["architectures"]:
        _require(not module["has_cuda"], "the native module has CUDA, but does not say for which architectures")
        return "built for host cards only"
    _require(module["has_cuda"], "the native module was built for GPUs and has no CUDA")
    return (
        f"CUDA for {module['architectures']}: the module loads without a driver and any library of CUDA; the cards are then host:0, host:1"
    )


def _health(server: Server) -> str:
    server.container.reload()
    return str(server.container.attrs["State"].get("Health", {}).get("Status"))


def _client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def _ask_two_at_once(server: Server) -> str:
    both = threading.Barrier(2)

    def ask(_number: int) -> tuple[float, float, str]:
        both.wait()
        first, text = None, ""
        stream: Any = _client(server).chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            stream=True,
            max_tokens=400,
            extra_body={"ignore_eos": True},  # long enough for the other one to begin meanwhile, also on a busy machine
        )
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.monotonic()
                text += chunk.choices[0].delta.content
        return first or time.monotonic(), time.monotonic(), text

    with ThreadPoolExecutor(2) as pool:
        (first_a, last_a, text_a), (first_b, last_b, text_b) = pool.map(ask, range(2))
    _require(text_a == text_b and len(text_a) > 10, f"two lanes answered {text_a!r} and {text_b!r}")
    _require(max(first_a, first_b) < min(last_a, last_b), "the two answers did not run at once")
    return f"two questions at once, the same answer from both lanes: {text_a.strip()[:60]!r}"


def _kill_an_engine(server: Server) -> str:
    lead = server.get("/status")[1]["lanes"][0]
    server.run("python3", "-c", f"import os; os.kill({lead['pid']}, 9)")

    def is_back() -> bool:
        lanes = server.get("/status")[1].get("lanes") or [{}]
        return lanes[0].get("restarts", 0) > lead["restarts"] and lanes[0].get("state") == "idle"

    seconds = server.wait_for(is_back, "the killed engine is back", 60)
    answer = _client(server).chat.completions.create(
        model="default", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=50
    )
    _require(bool(answer.choices[0].message.content), "no answer after an engine was killed")
    return f"a killed engine was back in {seconds:.1f} s"


def _end_in_mid_stream(server: Server) -> str:
    stream: Any = _client(server).chat.completions.create(
        model="default", messages=[{"role": "user", "content": QUESTION}], stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    processes = server.container.top()["Processes"]
    began = time.monotonic()
    stopping = threading.Thread(target=lambda: server.container.stop(timeout=END_LIMIT_S))
    stopping.start()
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    stopping.join()
    seconds = time.monotonic() - began
    server.container.reload()
    state = server.container.attrs["State"]
    _require(reasons[-1] == "length", f"the answer that ran at SIGTERM ended with {reasons[-1]}")
    _require(
        state["ExitCode"] == 0 and not state["OOMKilled"], f"SIGTERM ended the container with {state['ExitCode']}: {server.last_words()}"
    )
    return f"SIGTERM in mid-answer: the answer came whole, all {len(processes)} processes ended in {seconds:.1f} s, exit code 0"


def _as_a_pair(engine: Engine, tag: str) -> str:
    """The elastic pair in the same hardened container: link file, parked conversations and watching each other's processes."""
    with hardened(engine, tag, Hardened(command=("serve", "--elastic-enabled", "true"))) as server:
        server.wait_until_both_idle()
        server.wait_for(lambda: _pair(server) == ("asleep", 0), "the helper asleep")
        _ask_two_at_once(server)
        server.wait_for(lambda: _pair(server) == ("awake", 1), "both awake after two questions at once", 10)
        lanes = server.get("/status")[1]["lanes"]
        tiers = {tier: sum(lane["stats"]["rows_by_tier"].get(tier, 0) for lane in lanes) for tier in ("peer", "linked")}
        _require(any(tiers.values()), f"the two cards did nothing for each other: {tiers}")
        left = server.run("sh", "-c", "ls /dev/shm").split()
    _require(any(name.endswith(".link") for name in left), f"there is no link in /dev/shm, only {left}")
    return f"as an elastic pair: woken by the second question, rows by the other card: {tiers}"


def _pair(server: Server) -> tuple[str, int]:
    pair = server.get("/status")[1].get("pair") or {}
    _require(not pair.get("failed_wakes"), f"the helper did not wake: {pair.get('reason')}")
    return str(pair.get("phase")), int(pair.get("wakes", 0))


def _end_early(engine: Engine, tag: str) -> str:
    codes = []
    for delay_s in EARLY_S:
        with hardened(engine, tag, Hardened()) as server:
            time.sleep(delay_s)  # the moment is the test
            began = time.monotonic()
            server.container.stop(timeout=END_LIMIT_S)
            server.container.reload()
            codes.append(server.container.attrs["State"]["ExitCode"])
            _require(codes[-1] == 0, f"SIGTERM {delay_s} s after the start ended with {codes[-1]} after {time.monotonic() - began:.1f} s")
    return f"SIGTERM {', '.join(map(str, EARLY_S))} s after the start: exit code 0 each time"


def _too_small(engine: Engine, tag: str) -> str:
    with hardened(engine, tag, Hardened(shm="4m")) as server:
        code = server.container.wait(timeout=120)["StatusCode"]
        words = server.last_words()
    _require(code == 1, f"too small a /dev/shm ended with {code}, not with 1: {words}")
    sentence = next((line for line in words.splitlines() if line.startswith("tandem: ")), "")
    _require("/dev/shm" in sentence and "MiB" in sentence, f"too small a /dev/shm was not explained: {words}")
    return f"4 MiB of /dev/shm: exit code 1 and {sentence!r}"


def _no_such_card(engine: Engine, tag: str) -> str:
    with hardened(engine, tag, Hardened(command=("serve", "--cards", "cuda:0,cuda:1"))) as server:
        code = server.container.wait(timeout=120)["StatusCode"]
        words = server.last_words()
    _require(code == 1 and "tandem: " in words and "Traceback" not in words, f"GPUs that are not there ended with {code}: {words}")
    return f"GPUs that are not there: exit code 1 and {words.strip().splitlines()[-1]!r}"


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise SmokeFailedError(sentence)
