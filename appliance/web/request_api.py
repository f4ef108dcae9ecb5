"""Which API the current request speaks, where it is answered in more than one."""

from __future__ import annotations

import uuid
from enum import Enum, auto

from flask import Flask, Request, Response, g, request

_MESSAGES, _MODELS = "/v1/messages", "/v1/models"
_VERSION_HEADER = "anthropic-version"
"""Every client of the Messages API sends it, no other does."""


class Api(Enum):
    OPENAI = auto()
    """Also of everything that is in no API."""
    ANTHROPIC = auto()


def api_of(asked: Request) -> Api:
    """Anthropic's under `/v1/messages`, whether there is such a route or not, and for the models if its header was sent."""
    if _is_under(asked.path, _MESSAGES) or (_is_under(asked.path, _MODELS) and _VERSION_HEADER in asked.headers):
        return Api.ANTHROPIC
    return Api.OPENAI


def request_id() -> str:
    """The name of the current request; the same however often it is asked for."""
    if "request_id" not in g:
        g.request_id = f"req_{uuid.uuid4().hex}"
    return str(g.request_id)


def install(app: Flask) -> None:
    """Names each request in the header where Anthropic's clients look for it."""

    @app.after_request
    def name_request(response: Response) -> Response:
        if api_of(request) is Api.ANTHROPIC:
            response.headers["request-id"] = request_id()
        return response


def _is_under(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")
