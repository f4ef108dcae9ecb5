"""Reads the lines that loader and engines write. `appliance.protocol` has their words and messages."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from appliance.errors import EngineError
from appliance.protocol import (
    EVENT,
    ControlErrorCode,
    Event,
    Fatal,
    LoadProgress,
    Ready,
    Reply,
    Stats,
    Word,
)


@dataclass(frozen=True, slots=True)
class ControlError:
    """`CTL ERR code text`: something the desk wrote could not be done; the engine goes on."""

    code: ControlErrorCode
    text: str


@dataclass(frozen=True, slots=True)
class ControlAnswer:
    """Any other `CTL` line, without the word."""

    text: str


EngineLine = LoadProgress | Ready | Event | Stats | ControlError | ControlAnswer | Fatal


def parse_line(text: str) -> EngineLine | None:
    """The message in one line; None when the line is none of ours, such as the output of a library.

    Raises EngineError when the line begins with a word of the protocol but cannot be read: something was lost.
    """
    word, _, rest = text.strip().partition(" ")
    try:
        match word:
            case Word.EV:
                return EVENT.validate_json(rest)
            case Word.LOAD:
                return LoadProgress.model_validate_json(rest)
            case Word.READY:
                return Ready.model_validate_json(rest)
            case Word.FATAL:
                return Fatal.model_validate_json(rest)
            case Word.CTL:
                return _parse_control(rest)
            case _:
                return None
    except ValueError as error:
        why = _first_error(error)
        raise EngineError(f"the line {_shorten(text)!r} cannot be read ({why}); desk and engine must be of the same version") from None


def _parse_control(rest: str) -> Stats | ControlError | ControlAnswer:
    word, _, body = rest.partition(" ")
    if word == Reply.STATS:
        return Stats.model_validate_json(body)
    if word == Reply.ERR:
        code, _, text = body.partition(" ")
        return ControlError(ControlErrorCode(code), text)
    return ControlAnswer(rest)


def _first_error(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'JSON'}: {first['msg']}"
    return str(error)


def _shorten(text: str, limit: int = 120) -> str:
    text = text.strip()
    return text if len(text) <= limit else text[:limit] + "..."
