"""Names that browsers send in the headers `Host` and `Origin`, as settings may list them: what is refused could never match."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

_HOST = r"^(\*|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*|([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?)$"
_ORIGIN = r"^(\*|null|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?)$"
_PORT_NOT_SENT = re.compile(r"http:.*:80|https:.*:443")


def _host(value: str) -> str:
    if re.fullmatch(_HOST, value) is None:
        raise ValueError("it can never match; write a name or an address without scheme and path, such as lab.example, or * alone for all")
    return value


def _origin(value: str) -> str:
    if re.fullmatch(_ORIGIN, value) is None or _PORT_NOT_SENT.fullmatch(value):
        raise ValueError(
            "it can never match; write scheme and name, in lower case, with a port that is not the scheme's own and without a path, "
            "such as https://lab.example, or * alone for all"
        )
    return value


HostName = Annotated[str, AfterValidator(_host), WithJsonSchema({"type": "string", "pattern": _HOST})]
Origin = Annotated[str, AfterValidator(_origin), WithJsonSchema({"type": "string", "pattern": _ORIGIN})]
