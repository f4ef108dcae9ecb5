"""The lines that the desk writes to an engine, parsed: one line becomes one command or one refusal, never an exception."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import ValidationError

from appliance.protocol import ControlErrorCode, Generate, Word


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class HoldThreads:
    """The last `num_threads` threads of the host pool sit out."""

    num_threads: int


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Shrink the expert cache until `free_mib` are free; None: take the planned size again."""

    free_mib: int | None


@dataclass(frozen=True, slots=True)
class AttachPeer:
    """Take the second card."""


@dataclass(frozen=True, slots=True)
class DetachPeer:
    """Give the second card back."""


@dataclass(frozen=True, slots=True)
class ServeLink:
    """Compute the other engine's rows, or no longer."""

    serving: bool


@dataclass(frozen=True, slots=True)
class ReportStats:
    pass


@dataclass(frozen=True, slots=True)
class Refusal:
    """What `CTL ERR` answers to a line that is no command."""

    code: ControlErrorCode
    text: str


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """The desk closed the pipe; nothing follows."""


Command: TypeAlias = Generate | Cancel | HoldThreads | FreeMemory | AttachPeer | DetachPeer | ServeLink | ReportStats | Refusal | EndOfInput

_LARGEST_NUMBER = 10**9
_SHOWN_CHARACTERS = 60


def parse_command(line: bytes) -> Command:
    """Parses one line without its newline. Anything wrong gives a `Refusal`."""
    text = line.decode("utf-8", errors="replace").strip()
    name, _, argument = text.partition(" ")
    argument = argument.strip()
    try:
        word = Word(name)
    except ValueError:
        return Refusal(ControlErrorCode.UNKNOWN, f"{_shown(text)} is not a control line")
    match word:
        case Word.GEN:
            return _parse_generate(argument)
        case Word.CANCEL:
            return _parse_cancel(argument)
        case Word.POOL_HOLD:
            number = _parse_number(argument)
            return HoldThreads(number) if number is not None else _malformed(word, "one number of threads", argument)
        case Word.VRAM:
            number = _parse_number(argument)
            if number is None and argument:
                return _malformed(word, "nothing or one number of MiB", argument)
            return FreeMemory(number)
        case Word.STATS:
            return ReportStats() if not argument else _malformed(word, "nothing", argument)
        case Word.PEER_ATTACH:
            return AttachPeer() if not argument else _malformed(word, "nothing", argument)
        case Word.PEER_DETACH:
            return DetachPeer() if not argument else _malformed(word, "nothing", argument)
        case Word.LINK_SERVE:
            return ServeLink(argument == "1") if argument in ("0", "1") else _malformed(word, "0 or 1", argument)
        case _:
            return Refusal(ControlErrorCode.UNKNOWN, f"{word} is a line that engines write, not one they read")


def _parse_generate(argument: str) -> Command:
    try:
        return Generate.model_validate_json(argument)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        where = f"{_readable_id(argument)}{field + ': ' if field else ''}"
        return Refusal(ControlErrorCode.MALFORMED, f"{where}{first['msg']}")


def _readable_id(argument: str) -> str:
    """`id: ` if the refused request has a usable id, so that the desk knows which one it was."""
    try:
        request = json.loads(argument)
    except (ValueError, RecursionError):
        return ""
    request_id = request.get("id") if isinstance(request, dict) else None
    return f"{request_id}: " if isinstance(request_id, str) and request_id.isprintable() and len(request_id) <= 128 else ""


def _parse_cancel(argument: str) -> Command:
    if not argument or " " in argument:
        return _malformed(Word.CANCEL, "one request id", argument)
    return Cancel(argument)


def _parse_number(argument: str) -> int | None:
    if not (argument.isascii() and argument.isdecimal()) or len(argument) > len(str(_LARGEST_NUMBER)):
        return None
    return int(argument)


def _malformed(word: Word, wanted: str, argument: str) -> Refusal:
    return Refusal(ControlErrorCode.MALFORMED, f"{word} takes {wanted}, not {_shown(argument)}")


def _shown(text: str) -> str:
    """`text` for a message: quoted, with escapes instead of control characters, and short."""
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")
