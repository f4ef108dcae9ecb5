"""A real engine process around the fake model: start, end, death, and what it leaves on its pipes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from appliance.protocol import Fatal, Finished, FinishReason, Generate, Ready, Started, Tokens, Word, line
from tests.engine_rig import DEADLINE_S, ROOT, EngineProcess
from tests.fakes_engine import FakeModel, fake_engine_argv, greedy_answer

PROMPT = [3, 1, 4, 1, 5]


Start = Callable[..., EngineProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts fake engines with the given options and sees to their end."""
    engines: list[EngineProcess] = []

    def start_one(*options: str) -> EngineProcess:
        engines.append(EngineProcess(fake_engine_argv(*options)))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.clean_up()


def test_an_engine_loads_answers_and_ends_with_its_input(start: Start) -> None:
    engine = start("--load-s", "0.1", "--context", "100", "--slots", "5", "--card", "host:1")
    assert json.loads(engine.wait_for(Word.LOAD))["stage"] == "dense"
    ready = Ready.model_validate_json(engine.wait_for(Word.READY))
    assert (ready.pid, ready.card, ready.context, ready.slots) == (engine.pid, "host:1", 100, 5)
    engine.generate(PROMPT, 4)
    assert engine.answer() == greedy_answer(FakeModel(), PROMPT, 4)
    engine.close_stdin()
    assert engine.exit_code() == 0
    assert engine.rest() == []


def test_a_cancel_ends_a_long_answer_at_once(start: Start) -> None:
    engine = start("--window-ms", "5")
    engine.generate(PROMPT, 4000)
    engine.wait_until(lambda event: isinstance(event, Tokens))
    cancelled_at = time.monotonic()
    engine.send("CANCEL a\n")
    finished = engine.wait_until(lambda event: isinstance(event, Finished))
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.CANCELLED
    assert time.monotonic() - cancelled_at < 1


def test_a_cancel_does_not_wait_for_a_long_chunk(start: Start) -> None:
    engine = start("--chunk-ms", "600000")
    engine.generate(PROMPT, 10)
    engine.wait_until(lambda event: isinstance(event, Started))
    cancelled_at = time.monotonic()
    engine.send("CANCEL a\n")
    engine.wait_until(lambda event: isinstance(event, Finished))
    assert time.monotonic() - cancelled_at < 1


def test_lines_that_came_while_loading_are_obeyed_afterwards(start: Start) -> None:
    engine = start("--load-s", "0.2")
    engine.generate(PROMPT, 2)
    engine.wait_for(Word.READY)
    assert len(engine.answer()) == 2


def test_what_libraries_print_comes_out_on_stderr(start: Start) -> None:
    engine = start("--print", "a library says hello")
    engine.wait_for(Word.READY)
    engine.close_stdin()
    assert engine.rest() == []
    assert "a library says hello" in engine.errors()


def test_a_failed_start_is_one_fatal_line_and_exit_code_1(start: Start) -> None:
    engine = start("--load-error", "the card has no memory left")
    assert Fatal.model_validate_json(engine.wait_for(Word.FATAL)) == Fatal(code="engine_error", text="the card has no memory left")
    assert engine.rest() == []
    assert engine.exit_code() == 1


def test_a_card_that_fails_ends_the_request_first_and_then_the_process(start: Start) -> None:
    engine = start("--fail-at", "7")
    engine.generate(PROMPT, 50)
    finished = engine.wait_until(lambda event: isinstance(event, Finished))
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.error_code) == (FinishReason.ERROR, "engine_error")
    assert Fatal.model_validate_json(engine.wait_for(Word.FATAL)).text == "the fake card failed"
    assert engine.rest() == []
    assert engine.exit_code() == 3


def test_the_input_may_end_while_a_request_runs(start: Start) -> None:
    engine = start("--window-ms", "5")
    engine.generate(PROMPT, 4000)
    engine.wait_until(lambda event: isinstance(event, Tokens))
    engine.close_stdin()
    finished = engine.wait_until(lambda event: isinstance(event, Finished))
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.CANCELLED
    assert engine.exit_code() == 0


def test_the_input_may_end_while_the_engine_loads(start: Start) -> None:
    engine = start("--load-s", "600")
    engine.wait_for(Word.LOAD)
    engine.close_stdin()
    assert engine.exit_code() == 0


def test_an_engine_that_hangs_still_ends_with_its_input(start: Start) -> None:
    engine = start("--hang-at", "6")
    engine.generate(PROMPT, 50)
    engine.wait_until(lambda event: isinstance(event, Tokens))
    engine.close_stdin()
    assert engine.exit_code() == 0


def test_ctrl_c_is_left_to_the_desk(start: Start) -> None:
    engine = start()
    engine.wait_for(Word.READY)
    engine.signal(signal.SIGINT)
    engine.generate(PROMPT, 2)
    assert len(engine.answer()) == 2


def test_sigterm_ends_an_engine(start: Start) -> None:
    engine = start()
    engine.wait_for(Word.READY)
    engine.signal(signal.SIGTERM)
    assert engine.exit_code() == -signal.SIGTERM


def test_an_engine_does_not_outlive_the_process_that_started_it() -> None:
    """The parent is killed while the engine's stdin stays open in this process, so only the kernel can tell the engine."""
    reading, writing = os.pipe()
    starter = f"import subprocess, sys, time; subprocess.Popen({fake_engine_argv()!r}, stdin={reading}); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", starter], cwd=ROOT, pass_fds=[reading], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        while not (text := parent.stdout.readline()).startswith(b"READY "):
            assert text.startswith(b"LOAD ")
        ready = Ready.model_validate_json(text.removeprefix(b"READY "))
        parent.kill()
        deadline = time.monotonic() + DEADLINE_S
        while psutil.pid_exists(ready.pid) and psutil.Process(ready.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the engine lives on"
            time.sleep(0.01)
    os.close(reading)
    os.close(writing)


def test_a_desk_that_reads_late_gets_every_line() -> None:
    with subprocess.Popen(fake_engine_argv(), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        request = Generate(id="a", prompt=PROMPT, max_tokens=1500, top_logprobs=5)
        engine.stdin.write(line(Word.GEN, request).encode() + b"STATS\n" * 2000)
        engine.stdin.flush()
        wait_until_full(engine.stdout.fileno())
        lines: list[str] = []
        while not lines or '"finished"' not in lines[-1]:
            lines.append(engine.stdout.readline().decode())
        engine.stdin.close()
        assert sum('"tokens"' in text for text in lines) == 1500
        assert sum(text.startswith("CTL STATS") for text in lines) == 2000
        assert engine.wait(DEADLINE_S) == 0


def wait_until_full(reading_end: int) -> None:
    """Until a writer of the pipe would have to wait."""
    writing_end = os.open(f"/proc/self/fd/{reading_end}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        writable = select.poll()
        writable.register(writing_end, select.POLLOUT)
        deadline = time.monotonic() + DEADLINE_S
        while writable.poll(0):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.close(writing_end)


def test_a_desk_that_only_closes_its_reading_end_ends_the_engine() -> None:
    with subprocess.Popen(fake_engine_argv("--window-ms", "1"), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        engine.stdin.write(line(Word.GEN, Generate(id="a", prompt=PROMPT, max_tokens=4000)).encode())
        engine.stdin.flush()
        while b"tokens" not in engine.stdout.readline():
            pass
        engine.stdout.close()
        assert engine.wait(DEADLINE_S) == 4


def real_engine(settings: str, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "appliance.engine.process", "--settings", settings, "--card", "host:0", "--lane", "lead", *options]
    return subprocess.run(argv, cwd=ROOT, input="", capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("settings", ["not json", '{"bogus": 1}', '{"chunk": 1}'])
def test_bad_settings_are_a_fatal_line(settings: str) -> None:
    result = real_engine(settings, "--threads", "1")
    assert result.returncode == 1
    assert Fatal.model_validate_json(result.stdout.removeprefix("FATAL ")).code == "bad_setting"


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--threads", "x"],
        ["--threads", "1", "--share", "2/2"],
        ["--threads", "1", "--share", "x"],
        ["--threads", "1", "--peer-device", "host:0"],
        ["--threads", "1", "--peer-slots", "3"],
        ["--threads", "1", "--peer-hot", "1.5"],
        ["--threads", "1", "--share", "0/3"],
    ],
)
def test_a_wrong_command_line_is_exit_code_2(options: list[str]) -> None:
    result = real_engine("{}", *options)
    assert result.returncode == 2
    assert "usage" in result.stderr


def test_started_tells_the_number_of_cached_tokens(start: Start) -> None:
    engine = start()
    engine.generate(PROMPT, 3)
    engine.answer()
    engine.generate(PROMPT, 3, "b")
    started = engine.wait_until(lambda event: isinstance(event, Started))
    assert isinstance(started, Started)
    assert (started.id, started.cached_tokens) == ("b", len(PROMPT) - 1)
