"""The process in which chat templates run: started as a script by `template_process.py`, it needs jinja2 and nothing of ours.

A template comes with the model file, so it is a stranger's program. Jinja's sandbox keeps it from Python's internals, but not
from looping for ever or filling the memory in one C call that no other thread can interrupt. Hence a process, with limits
set by the kernel, that can be killed.

    -> {"sources": {name: template}, "memory_bytes": n, "max_characters": n}    <- {} or {"error": text}
    -> {"template": name, "variables": {...}}                               <- {"text": text}, {"error": text} or {"too_long": name}

One line of JSON each. The end of the input ends the process.
"""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_PR_SET_PDEATHSIG = 1


def make_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox with the options, filters and globals that templates for Hugging Face's `apply_chat_template` rely on."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        namespace=_Namespace,
    )
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model is trained to write; for inference it is only its contents."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """No names with an underscore in front, as with Hugging Face: they could shadow what jinja2 itself looks up."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Unlike jinja2's own, this does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


MAX_ERROR_CHARACTERS = 500
"""A template's own message is cut there."""


class TemplateTooLongError(Exception):
    """The text has more characters than are allowed."""


class Renderer:
    """Compiled templates by name."""

    def __init__(self, sources: Mapping[str, str], max_characters: int) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        environment = make_environment()
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        self._max_characters = max_characters

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """Whatever the template raises, and TemplateTooLongError."""
        pieces = []
        left = self._max_characters
        for piece in self._templates[name].generate(**variables):
            left -= len(piece)
            if left < 0:
                raise TemplateTooLongError
            pieces.append(piece)
        return "".join(pieces)


def main() -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a template that never returns does not see the end of the input
    order = json.loads(sys.stdin.buffer.readline())
    _limit(resource.RLIMIT_AS, order["memory_bytes"])
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    try:
        renderer = Renderer(order["sources"], order["max_characters"])
    except Exception as error:  # a template can fail to compile in any way
        _send({"error": _sentence(error)})
        return 1
    _send({})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _send(_answer(renderer, request["template"], request["variables"]))
    return 0


def _answer(renderer: Renderer, name: str, variables: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {"text": renderer.render(name, variables)}
    except TemplateTooLongError:
        return {"too_long": name}
    except Exception as error:  # a template can fail in any way
        return {"error": _sentence(error)}


def _sentence(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return f"{str(error)[:MAX_ERROR_CHARACTERS] or type(error).__name__}{where}"


def _send(message: Mapping[str, str]) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode("ascii") + b"\n")
    sys.stdout.buffer.flush()


def _limit(kind: int, value: int) -> None:
    """Lowers what the kernel lets this process use; never above a limit that is already set."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    sys.exit(main())
