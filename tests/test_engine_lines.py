"""Lines in and out of an engine: nothing is lost, nothing blocks for ever, garbage is refused."""

from __future__ import annotations

import os
import threading
import time

import pytest

from appliance.engine.commands import Cancel, Command, EndOfInput, ReportStats
from appliance.engine.pipes import Inbox, LineReader, LineWriter
from appliance.protocol import MAX_LINE_BYTES, Generate


class Pipe:
    """A pipe whose ends are closed in the end."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in (self.reading, self.writing):
            try:
                os.close(descriptor)
            except OSError:  # the test has closed it
                continue


def test_a_full_pipe_does_not_hold_up_the_writer() -> None:
    with Pipe() as pipe:
        writer = LineWriter(pipe.writing)
        texts = [f"line {number} {'x' * 1000}\n" for number in range(500)]
        for text in texts:
            writer.write(text)
        received = bytearray()
        reading = threading.Thread(target=lambda: received.extend(read_all(pipe.reading)))
        reading.start()
        writer.flush()
        os.close(pipe.writing)
        reading.join(10)
        assert received.decode() == "".join(texts)


def test_a_desk_that_stopped_reading_counts_as_gone() -> None:
    with Pipe() as pipe:
        writer = LineWriter(pipe.writing, stall_limit_s=0.2, high_water_bytes=1000)
        started_at = time.monotonic()
        with pytest.raises(BrokenPipeError, match="has read nothing"):
            writer.write(200 * ("x" * 1000 + "\n"))
        assert 0.2 < time.monotonic() - started_at < 5


def test_a_closed_pipe_is_noticed() -> None:
    with Pipe() as pipe:
        os.close(pipe.reading)
        with pytest.raises(BrokenPipeError):
            LineWriter(pipe.writing).write("x\n")


def test_lines_are_found_whatever_the_writes_are() -> None:
    with Pipe() as pipe:
        inbox, reader = start_reader(pipe)
        for part in (b"CANCEL ", b"a", b"\nCANCEL b\r\nSTA", b"TS\nCANCEL unfinished"):
            os.write(pipe.writing, part)
        os.close(pipe.writing)
        reader.join(10)
        assert drain(inbox) == [Cancel("a"), Cancel("b"), ReportStats(), EndOfInput()]


def test_a_line_over_the_limit_is_refused_and_the_next_one_obeyed() -> None:
    with Pipe() as pipe:
        inbox, reader = start_reader(pipe)
        part = b"x" * 65536
        for _ in range(MAX_LINE_BYTES // len(part) + 1):
            os.write(pipe.writing, part)
        os.write(pipe.writing, b"\nSTATS\n")
        os.close(pipe.writing)
        reader.join(10)
        refusal, stats, end = drain(inbox)
        assert "longer than" in str(refusal)
        assert (stats, end) == (ReportStats(), EndOfInput())


def test_a_long_prompt_is_read() -> None:
    with Pipe() as pipe:
        inbox, reader = start_reader(pipe)
        request = Generate(id="a", prompt=[123456] * 200_000, max_tokens=5)
        writer = threading.Thread(target=write_all, args=(pipe.writing, f"GEN {request.model_dump_json()}\n".encode()))
        writer.start()
        writer.join(10)
        os.close(pipe.writing)
        reader.join(10)
        assert drain(inbox) == [request, EndOfInput()]


def start_reader(pipe: Pipe) -> tuple[Inbox, LineReader]:
    inbox = Inbox()
    reader = LineReader(pipe.reading, inbox, on_end=lambda: None)
    reader.start()
    return inbox, reader


def drain(inbox: Inbox) -> list[Command]:
    commands = []
    while (command := inbox.take()) is not None:
        commands.append(command)
    return commands


def read_all(descriptor: int) -> bytes:
    result = bytearray()
    while part := os.read(descriptor, 65536):
        result += part
    return bytes(result)


def write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
