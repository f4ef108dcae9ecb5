"""The log of every process: one form, one stream."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from appliance.log import LogLevel, configure_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where the log goes in a test; the set-up is undone afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def records(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(text) for text in stream.getvalue().splitlines()]


def test_a_line_is_json_with_its_values_and_the_context(stream: io.StringIO) -> None:
    configure_logging("info", stream=stream, lane="lead")
    structlog.get_logger().info("ready", slots=4)
    (record,) = records(stream)
    assert record.pop("timestamp")
    assert record == {"event": "ready", "slots": 4, "lane": "lead", "level": "info"}


def test_libraries_come_out_in_the_same_form(stream: io.StringIO) -> None:
    configure_logging("info", stream=stream, lane="helper")
    logging.getLogger("some.library").warning("careful: %d", 3)
    (record,) = records(stream)
    assert (record["event"], record["lane"], record["level"]) == ("careful: 3", "helper", "warning")


@pytest.mark.parametrize(("level", "num_lines"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_less_severe_lines_are_left_out(stream: io.StringIO, level: LogLevel, num_lines: int) -> None:
    configure_logging(level, stream=stream)
    for name in ("debug", "info", "warning", "error"):
        getattr(structlog.get_logger(), name)("text")
    assert len(records(stream)) == num_lines


def test_an_exception_is_part_of_its_line(stream: io.StringIO) -> None:
    configure_logging("info", stream=stream)
    structlog.get_logger().error("failed", exc_info=ValueError("seven"))
    (record,) = records(stream)
    assert "ValueError: seven" in str(record["exception"])


def test_the_console_form_is_for_people(stream: io.StringIO) -> None:
    configure_logging("info", "console", stream=stream)
    structlog.get_logger().info("ready", slots=4)
    assert "ready" in stream.getvalue()
    assert "slots=4" in stream.getvalue()
    assert not stream.getvalue().startswith("{")
