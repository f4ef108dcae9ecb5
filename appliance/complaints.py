"""What pydantic finds wrong with a value, in the words of our sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

_WHOLE, _NUMBER, _SWITCH, _OBJECT = "a whole number", "a number", "true or false", "an object"
_WANTED: Mapping[str, str] = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "a finite number",
    "bool_type": _SWITCH,
    "bool_parsing": _SWITCH,
    "string_type": "a string",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "literal_error": "{expected}",
    "greater_than": "greater than {gt:.15g}",
    "greater_than_equal": "at least {ge:.15g}",
    "less_than_equal": "at most {le:.15g}",
    "too_short": "a list that is not empty",
    "string_too_short": "a string that is not empty",
}
"""By pydantic's name of the complaint; a test holds it against what the request bodies and the settings can meet."""

_MAX_SHOWN = 50


def wanted(complaint: ErrorDetails) -> str:
    """What the value must be, to stand behind `must be`."""
    return _WANTED[complaint["type"]].format(**complaint.get("ctx", {}))


def shown(value: Any) -> str:
    """A value as it was given, but not at length."""
    if isinstance(value, str):
        return repr(value[:_MAX_SHOWN])
    if isinstance(value, list | dict) and value:
        return "a list" if isinstance(value, list) else _OBJECT
    return json.dumps(value, default=str)
