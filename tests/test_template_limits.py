"""Hostile templates: each ends in an error of the request, soon, and the next request is served."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.errors import ContextLengthError, CorruptModelError, NotReadyError, RequestError
from appliance.text.template_process import TemplateLimits, TemplateProcess
from tests.chat_templates import HOSTILE

LIMITS = TemplateLimits(render_s=2.0, memory_bytes=256 << 20, max_characters=1 << 20)
VARIABLES = {"messages": [{"content": "x"}]}
Open = Callable[..., TemplateProcess]


@pytest.fixture
def opened() -> Iterator[Open]:
    processes = []

    def open_process(source: str, limits: TemplateLimits = LIMITS) -> TemplateProcess:
        processes.append(TemplateProcess({"default": source, "good": "{{ messages[0].content }}"}, limits))
        return processes[-1]

    yield open_process
    for process in processes:
        process.close()


def children() -> set[int]:
    own = Path(f"/proc/{os.getpid()}/task")
    return {int(pid) for task in own.iterdir() for pid in (task / "children").read_text().split()}


def state_of(pid: int) -> str | None:
    """The letter that Linux gives the state of a process; None: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return None


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_an_error_and_the_next_rendering_works(opened: Open, name: str) -> None:
    process = opened(HOSTILE[name])
    begun = time.monotonic()
    with pytest.raises(RequestError, match="chat template"):
        process.render("default", VARIABLES)
    assert time.monotonic() - begun < 20
    assert process.render("good", VARIABLES) == "x"


@pytest.mark.parametrize("source", ["{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "{{ 10 ** (10 ** 10) }}"])
def test_a_template_that_cannot_be_compiled_within_the_limits_is_refused(source: str) -> None:
    with pytest.raises(CorruptModelError, match="chat template"):
        TemplateProcess({"default": source}, TemplateLimits(start_s=4.0))


def test_the_process_is_started_again_after_it_was_killed(opened: Open) -> None:
    before = children()
    process = opened("{{ messages[0].content }}")
    (pid,) = children() - before
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process.render("default", VARIABLES) == "x"


def test_the_template_sees_no_environment(opened: Open) -> None:
    before = children()
    opened("x")
    (pid,) = children() - before
    assert Path(f"/proc/{pid}/environ").read_bytes().count(b"=") <= 1  # LC_CTYPE, which Python sets itself


def test_closing_ends_the_process_and_what_runs_in_it(opened: Open) -> None:
    before = children()
    process = opened(HOSTILE["endless loops"], TemplateLimits(render_s=60.0))
    (pid,) = children() - before
    failures: list[Exception] = []

    def render() -> None:
        try:
            process.render("default", VARIABLES)
        except RequestError as error:
            failures.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    deadline = time.monotonic() + 20
    while state_of(pid) != "R":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.close()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert len(failures) == 1
    assert children() == before
    with pytest.raises(NotReadyError):
        process.render("good", VARIABLES)


def test_a_process_that_nobody_holds_any_more_ends(opened: Open) -> None:
    before = children()
    TemplateProcess({"default": "x"}, LIMITS)
    assert children() == before
    opened("x")


def test_the_process_ends_with_the_one_that_started_it() -> None:
    program = (
        "import os, pathlib, sys\n"
        "from appliance.text.template_process import TemplateLimits, TemplateProcess\n"
        "process = TemplateProcess({'default': 'x'}, TemplateLimits())\n"
        "print(pathlib.Path(f'/proc/self/task/{os.getpid()}/children').read_text(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while state_of(pid) not in ("Z", None):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_many_threads_render_at_once(opened: Open) -> None:
    process = opened("{{ messages[0].content }}")
    texts: list[str] = []

    def render(number: int) -> None:
        texts.append(process.render("default", {"messages": [{"content": f"{number}" * 50_000}]}))

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == [f"{number}" * 50_000 for number in range(8)]


def test_text_as_long_as_the_limit_is_given_and_longer_text_is_refused(opened: Open) -> None:
    process = opened("{{ messages[0].content }}")
    longest = "é" * LIMITS.max_characters
    assert process.render("default", {"messages": [{"content": longest}]}) == longest
    with pytest.raises(ContextLengthError, match=f"more than {LIMITS.max_characters} characters"):
        process.render("default", {"messages": [{"content": longest + "é"}]})
