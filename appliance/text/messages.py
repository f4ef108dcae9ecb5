"""Chat messages as templates expect them: OpenAI's many forms brought into one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from appliance.complaints import shown
from appliance.errors import RequestError
from appliance.json_depth import MAX_DEPTH, depth_of

Shape = Callable[[Mapping[str, object], str], dict[str, object]]
"""Brings one message into the form that a template reads; the text says where the request has it, for errors."""

_TEXT_PARTS = ("text", "input_text", "output_text")


def as_plain(message: Mapping[str, object], path: str) -> dict[str, object]:
    """The message with its content as one string, "" if there is none, and the arguments of tool calls as objects.

    Parts of text are joined with a line break, as llama.cpp and vLLM join them. RequestError for a part that is no text.
    """
    plain = {**message, "content": _flat(message.get("content"), f"{path}.content")}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return plain


def as_parts(message: Mapping[str, object], path: str) -> dict[str, object]:
    """Like `as_plain`, for templates that only read content in parts."""
    plain = as_plain(message, path)
    plain["content"] = [{"type": "text", "text": plain["content"]}]
    return plain


def map_texts(value: object, change: Callable[[str], str]) -> object:
    """A JSON value with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value


def texts_of(value: object) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from texts_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)


def _flat(content: object, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{path} must be a string or a list, not {shown(content)}", param=path)
    return "\n".join(_part_text(part, f"{path}[{number}]") for number, part in enumerate(content))


def _part_text(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in _TEXT_PARTS:
        raise RequestError(f"{path} is of type {shown(kind)}; this model reads parts of type 'text' only", param=path)
    if not isinstance(text, str):
        raise RequestError(f"{path}.text must be a string, not {shown(text)}", param=f"{path}.text")
    return text


def _with_parsed_arguments(call: object) -> object:
    """Clients send arguments as JSON text, templates write them with `tojson`."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call  # what is no JSON is for the template to judge
    if not isinstance(arguments, dict) or depth_of(arguments) > MAX_DEPTH:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
