"""Child processes and their lines: what they may do to the desk, and what the desk may not do to them."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from appliance.desk.child_log import ChildLog
from appliance.desk.child_process import ChildProcess
from appliance.desk.inputs import Ending
from appliance.desk.line_splitter import LineSplitter
from appliance.desk.lines import ControlAnswer, ControlError, parse_line
from appliance.errors import EngineError
from appliance.protocol import MAX_LINE_BYTES, ControlErrorCode, Fatal, Finished, FinishReason, LoadProgress, Word, line
from tests.desk_rig import nothing_left_behind
from tests.eventually import DEADLINE_S, eventually


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    with nothing_left_behind():
        yield


class Listener:
    """A child that runs a piece of Python, and everything it said."""

    def __init__(self, code: str) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        self.endings: queue.Queue[Ending] = queue.Queue()
        self.child = ChildProcess(
            "lead", [sys.executable, "-c", code], lambda _child, text: self.lines.put(text), lambda _child, how: self.endings.put(how)
        )

    def line(self) -> str:
        return self.lines.get(timeout=DEADLINE_S)

    def ending(self) -> Ending:
        ending = self.endings.get(timeout=DEADLINE_S)
        assert self.child.join(DEADLINE_S)
        return ending


@pytest.fixture
def run() -> Iterator[Callable[[str], Listener]]:
    listeners: list[Listener] = []

    def start(code: str) -> Listener:
        listeners.append(Listener(code))
        return listeners[-1]

    yield start
    for listener in listeners:
        listener.child.kill()
        assert listener.child.join(DEADLINE_S)


Run = Callable[[str], Listener]
ECHO = "import sys\nfor line in sys.stdin: print(line.strip()[:50], flush=True)"


def test_lines_go_both_ways_and_end_of_file_ends_it(run: Run) -> None:
    echo = run(ECHO)
    echo.child.send("one\ntwo\n")
    assert (echo.line(), echo.line()) == ("one", "two")
    echo.child.stop(DEADLINE_S, DEADLINE_S)
    assert echo.ending() == Ending(exit_code=0)


def test_what_was_sent_before_the_end_arrives(run: Run) -> None:
    count = run("import sys; print(len(sys.stdin.read()))")
    count.child.send("x" * 3_000_000)
    count.child.stop(DEADLINE_S, DEADLINE_S)
    assert count.line() == "3000000"


def test_child_that_does_not_read_blocks_nobody(run: Run) -> None:
    deaf = run("import time; print('up', flush=True); time.sleep(60)")
    deaf.line()
    began = time.monotonic()
    deaf.child.send("x" * 4_000_000 + "\n")
    deaf.child.stop(0.1, 0.2)
    assert time.monotonic() - began < 0.5
    assert deaf.ending() == Ending(signal=signal.SIGTERM)


def test_child_that_ignores_sigterm_is_killed(run: Run) -> None:
    stubborn = run("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)")
    stubborn.line()
    stubborn.child.stop(0.05, 0.2)
    assert stubborn.ending() == Ending(signal=signal.SIGKILL)


def test_last_lines_of_a_dying_child_arrive(run: Run) -> None:
    dying = run("import os\nfor n in range(2000): print(n)\nimport sys; sys.stdout.flush(); os.kill(os.getpid(), 9)")
    assert dying.ending() == Ending(signal=signal.SIGKILL)
    assert [dying.lines.get_nowait() for _ in range(2000)] == [str(number) for number in range(2000)]


def test_death_is_noticed_although_a_grandchild_holds_the_pipes(run: Run) -> None:
    code = "import subprocess, os; p = subprocess.Popen(['sleep', '60'], start_new_session=True); print(p.pid, flush=True); os._exit(3)"
    began = time.monotonic()
    parent = run(code)
    assert parent.ending() == Ending(exit_code=3)
    assert time.monotonic() - began < 20
    os.kill(int(parent.line()), signal.SIGKILL)


def test_child_that_closes_stdout_and_lives_on_is_killed(run: Run) -> None:
    mute = run("import os, time; os.close(1); time.sleep(60)")
    assert mute.ending() == Ending(signal=signal.SIGKILL)


def test_child_that_closes_stderr_lives_on(run: Run) -> None:
    quiet = run("import os; os.close(2)\n" + ECHO)
    quiet.child.send("still here\n")
    assert quiet.line() == "still here"


def test_line_over_the_limit_kills_it(run: Run) -> None:
    chatty = run(f"import sys, time; sys.stdout.write('x' * {MAX_LINE_BYTES + 2} + chr(10)); sys.stdout.flush(); time.sleep(60)")
    ending = chatty.ending()
    assert ending.signal == signal.SIGKILL
    assert ending.last_words == f"it wrote a line of more than {MAX_LINE_BYTES} bytes"


def test_program_that_does_not_exist_leaves_nothing() -> None:
    with pytest.raises(FileNotFoundError):
        ChildProcess("lead", ["/no/such/program"], lambda *_: None, lambda *_: None)


def test_last_words_are_those_of_the_traceback(run: Run) -> None:
    assert run("raise RuntimeError('no such card')").ending() == Ending(exit_code=1, last_words="RuntimeError: no such card")


def test_last_words_of_a_segmentation_fault_name_it_and_not_its_stack(run: Run) -> None:
    ending = run("import faulthandler, os, signal; faulthandler.enable(); os.kill(os.getpid(), signal.SIGSEGV)").ending()
    assert ending == Ending(signal=signal.SIGSEGV, last_words="Fatal Python error: Segmentation fault")


def test_children_hold_no_descriptors_of_each_other(run: Run) -> None:
    first = run(ECHO)
    second = run(ECHO)
    for listener in (first, second):
        listener.child.send("up\n")
        listener.line()
    open_files = [
        {os.readlink(f"/proc/{child.pid}/fd/{number}") for number in os.listdir(f"/proc/{child.pid}/fd")}
        for child in (first.child, second.child)
    ]
    assert not {name for name in open_files[0] & open_files[1] if name.startswith("pipe:")}


def test_child_is_out_of_reach_of_the_terminals_interrupt(run: Run) -> None:
    echo = run(ECHO)
    assert os.getsid(echo.child.pid) == echo.child.pid


def test_ended_child_is_reaped_and_takes_no_harm_from_late_calls(run: Run) -> None:
    gone = run("")
    gone.ending()
    assert not psutil.pid_exists(gone.child.pid)
    gone.child.send("late\n")
    gone.child.stop(0, 0)
    gone.child.kill()


def test_flood_on_stderr_does_not_hold_up_stdout(run: Run) -> None:
    code = "import sys\nfor n in range(20000): sys.stderr.write('noise' * 20 + chr(10))\nprint('done', flush=True)"
    with structlog.testing.capture_logs() as logged:
        noisy = run(code)
        assert noisy.line() == "done"
        noisy.ending()
    assert len(logged) == 20000


def test_own_log_lines_keep_level_and_fields() -> None:
    with structlog.testing.capture_logs() as logged:
        log = ChildLog("helper")
        log.take(b'{"event": "slow", "level": "warning", "timestamp": "t", "wait_s": 2}\nplain text\n{"a": 1}\n')
    assert logged == [
        {"event": "slow", "log_level": "warning", "wait_s": 2, "lane": "helper"},
        {"event": "plain text", "log_level": "info", "lane": "helper"},
        {"event": '{"a": 1}', "log_level": "info", "lane": "helper"},
    ]


def test_everyday_log_lines_are_not_last_words() -> None:
    log = ChildLog("lead")
    with structlog.testing.capture_logs():
        log.take(b'{"event": "card failed", "level": "error"}\n{"event": "listening", "level": "info"}\n')
    assert log.last_words == "card failed"


@given(st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"")), max_size=8), st.integers(1, 7))
def test_lines_do_not_depend_on_how_bytes_come(lines: list[bytes], size: int) -> None:
    data = b"".join(part + b"\n" for part in lines)
    splitter = LineSplitter(10)
    got = [text for start in range(0, len(data), size) for text in splitter.feed(data[start : start + size])]
    assert got == [part.decode(errors="replace") if len(part) <= 10 else None for part in lines]


def test_lines_of_the_protocol_are_read() -> None:
    progress = LoadProgress(stage="arena", done_bytes=1, total_bytes=2)
    finished = Finished(id="a", reason=FinishReason.STOP)
    fatal = Fatal(code="bad_model", text="two words")
    for word, message in ((Word.LOAD, progress), (Word.EV, finished), (Word.FATAL, fatal)):
        assert parse_line(line(word, message)) == message
    assert parse_line("CTL ERR busy r1: request r2 is running") == ControlError(ControlErrorCode.BUSY, "r1: request r2 is running")
    assert parse_line("CTL HOLD 2") == ControlAnswer("HOLD 2")


@pytest.mark.parametrize("text", ["", "hello", "WARNING: all is lost", "evolution {}", "GEN {}"])
def test_lines_of_others_are_none_of_ours(text: str) -> None:
    assert parse_line(text) is None


@pytest.mark.parametrize("text", ["EV {", 'EV {"event":"tokens","id":"a"}', "READY 1", "CTL STATS {}", "CTL ERR what is this", "LOAD"])
def test_unreadable_line_of_the_protocol_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        parse_line(text)


@given(st.text(max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    for word in ("", *Word):
        with contextlib.suppress(EngineError):
            parse_line(f"{word} {text}")


@pytest.mark.parametrize(
    ("ending", "sentence"),
    [
        (Ending(exit_code=1, last_words="no"), "it ended with exit code 1: no"),
        (Ending(exit_code=3), "it ended with exit code 3"),
        (Ending(signal=9), "it was killed by SIGKILL, which is also what the kernel does when memory is full"),
        (Ending(signal=64), "it was killed by SIGRTMAX"),
        (Ending(last_words="x: No such file"), "it could not be started: x: No such file"),
    ],
)
def test_ending_reads_as_a_sentence(ending: Ending, sentence: str) -> None:
    assert ending.sentence("it") == sentence


def test_children_die_with_a_killed_parent() -> None:
    """End of file reaches them, whatever else they have asked for."""
    code = (
        "import sys, os\n"
        "from appliance.desk.child_process import ChildProcess\n"
        "child = ChildProcess('lead', [sys.executable, '-c', 'import sys; sys.stdin.read()'], lambda *_: None, lambda *_: None)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    pid = int(result.stdout)
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "the child is gone")
