"""Log set-up, the same for every process: structured lines on stderr, never on stdout, which belongs to the protocol.

Everyone logs through `structlog.get_logger()`; what libraries log through the standard module comes out in the same form.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO

import structlog
from structlog.typing import Processor

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]


def configure_logging(level: LogLevel, log_format: LogFormat = "auto", *, stream: TextIO | None = None, **context: str) -> None:
    """Sends all logging of this process to `stream` (None: stderr). `context`, such as lane="lead", goes into every line.

    `auto` writes for people if the stream is a terminal, else one JSON object per line. Call it once, before the first log line.
    """
    stream = sys.stderr if stream is None else stream
    is_console = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _adder(context),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if is_console:
        render: list[Processor] = [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    else:
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _adder(context: dict[str, str]) -> Processor:
    def add_context(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**context, **event}

    return add_context
