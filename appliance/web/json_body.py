"""Request bodies as JSON: strict, but for one thing that clients send in good faith, and with errors that say what and where.

A text cut in the middle of an emoji leaves half of its two UTF-16 units. Clients write that half as an escape (`"\\ud83d"`), which is
valid JSON but no character; it is read as U+FFFD, as everywhere where bytes are no text.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from appliance.errors import RequestError
from appliance.json_depth import MAX_DEPTH, values_by_level

_LONE = re.compile(rb"\\u(?:[dD][89abAB]HH(?!\\u[dD][c-fC-F]HH)|(?<!\\u[dD][89abAB]HH\\u)[dD][c-fC-F]HH)".replace(b"H", b"[0-9a-fA-F]"))
"""The escape of a surrogate without its other half, where no backslash is escaped."""
_ESCAPED_BACKSLASH, _STAND_IN = rb"\\", b"\0\0"


MAX_VALUES = 1_250_000
"""In one body: a million token ids and some more. Millions of small values keep everybody else of the process waiting for seconds."""


def parse_json(data: bytes) -> Any:
    """The value of a JSON text in UTF-8. RequestError that says what is wrong, in which line and column (from 1, in characters)."""
    if not data:
        raise RequestError("the body is empty; send a JSON object")
    value = _parse(data)
    depth, num_values = -1, 0
    for num_here in values_by_level(value):
        depth, num_values = depth + 1, num_values + num_here
        if num_values > MAX_VALUES:
            raise RequestError(f"the body has more than {MAX_VALUES} values; send less at a time")
    if depth > MAX_DEPTH:
        raise RequestError(f"the body's objects and lists lie {depth} levels deep in each other; at most {MAX_DEPTH} are read")
    return value


def _parse(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return _parse_mended(data, error)


def _parse_mended(data: bytes, error: orjson.JSONDecodeError) -> Any:
    """Another try without lone surrogates. The mended text is as long as the given one, so places in it are the same."""
    if "surrogate" in error.msg and b"\0" not in data:
        mended = _LONE.sub(rb"\\ufffd", data.replace(_ESCAPED_BACKSLASH, _STAND_IN)).replace(_STAND_IN, _ESCAPED_BACKSLASH)
        try:
            return orjson.loads(mended)
        except orjson.JSONDecodeError as second:
            error = second
    raise RequestError(_complaint(data, error))


def _complaint(data: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as no_text:
        before = data[: no_text.start].decode()
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return f"the body is not UTF-8: byte 0x{data[no_text.start]:02x} at line {line} column {column}; send JSON in UTF-8"
    return f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
