"""Every error as an HTTP answer, in the shape of the API that the request speaks.

    OpenAI       {"error": {"message", "type", "param", "code"}}
    Anthropic    {"type": "error", "error": {"type", "message", "details": {"error_code", "param"}}, "request_id"}

One table says which status a class of `appliance.errors` gets. The clients of both try again on 408, 409, 429 and everything
from 500 on; `x-should-retry: false` spares them the tries that cannot help, `Retry-After` tells them when one can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from flask import Flask, Response, jsonify, request
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from werkzeug.exceptions import HTTPException, MethodNotAllowed
from werkzeug.http import HTTP_STATUS_CODES
from werkzeug.wrappers import Response as BaseResponse

from appliance import errors
from appliance.complaints import shown, wanted
from appliance.web import request_api
from appliance.web.request_api import Api, api_of, request_id

log = structlog.get_logger(__name__)

HTTP_STATUS_CODES[529] = "Overloaded"
"""Anthropic's; HTTP itself has no words for it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one class of errors is answered."""

    status: int
    type: str
    """The coarse class in the answer's `error.type`."""
    anthropic_type: str
    """The same in Anthropic's words."""
    retry: bool = False
    """True: the same request may succeed in a moment, and `Retry-After` says when."""
    anthropic_status: int | None = None
    """Where Anthropic's API has another one."""


RULES: dict[type[errors.TandemError], Rule] = {
    errors.TandemError: Rule(500, "server_error", "api_error"),
    errors.RequestError: Rule(400, "invalid_request_error", "invalid_request_error"),
    errors.AuthenticationError: Rule(401, "authentication_error", "authentication_error"),
    errors.HostNotAllowedError: Rule(403, "permission_error", "permission_error"),
    errors.ModelNotFoundError: Rule(404, "invalid_request_error", "not_found_error"),
    errors.RouteNotFoundError: Rule(404, "invalid_request_error", "not_found_error"),
    errors.PayloadTooLargeError: Rule(413, "invalid_request_error", "request_too_large"),
    errors.UnsupportedMediaTypeError: Rule(415, "invalid_request_error", "invalid_request_error"),
    errors.CapacityError: Rule(503, "server_overloaded", "overloaded_error", retry=True),
    errors.QueueFullError: Rule(429, "rate_limit_error", "overloaded_error", retry=True, anthropic_status=529),
    errors.EngineDiedError: Rule(503, "server_error", "api_error", retry=True),
    errors.EngineTimeoutError: Rule(503, "server_error", "api_error", retry=True),
}
"""A class without a row of its own has that of its nearest base."""

ENGINE_RETRY_S = 2
"""A dead engine maps the arena again and is back within seconds."""


def rule_for(error: errors.TandemError) -> Rule:
    """The row of the error's class or of its nearest base."""
    return next(RULES[kind] for kind in type(error).__mro__ if kind in RULES)


def openai_body(error: errors.TandemError) -> dict[str, object]:
    """The JSON body; also the `data:` of an error inside a stream."""
    return {"error": {"message": error.message, "type": rule_for(error).type, "param": error.param, "code": error.code}}


def anthropic_body(error: errors.TandemError, asked_as: str) -> dict[str, object]:
    """The same for Anthropic's clients. `asked_as`: the request's name."""
    details = {"error_code": error.code, "param": error.param}
    return {
        "type": "error",
        "error": {"type": rule_for(error).anthropic_type, "message": error.message, "details": details},
        "request_id": asked_as,
    }


def error_response(error: errors.TandemError) -> Response:
    """The complete answer to the current request, with status and headers."""
    rule = rule_for(error)
    if api_of(request) is Api.ANTHROPIC:
        response = jsonify(anthropic_body(error, request_id()))
        response.status_code = rule.anthropic_status or rule.status
    else:
        response = jsonify(openai_body(error))
        response.status_code = rule.status
    if rule.retry:
        wait_s = error.retry_after_s if isinstance(error, errors.CapacityError) else ENGINE_RETRY_S
        response.headers["Retry-After"] = str(wait_s)
    elif rule.status >= 500:
        response.headers["x-should-retry"] = "false"
    if rule.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def error_from_event(code: str | None, text: str | None) -> errors.TandemError:
    """The error behind a terminal event of the desk or an engine, as an exception again."""
    message = text or "the engine ended this answer without saying why; see the server's log"
    kind = next((kind for kind in _descendants(errors.TandemError) if kind.code == code), errors.EngineError)
    return kind(message)


def _descendants(kind: type[errors.TandemError]) -> Iterator[type[errors.TandemError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _descendants(child)


def explain_validation(error: ValidationError, given: object) -> errors.RequestError:
    """A complaint of pydantic about `given`, a body, as one sentence that names the field.

    Of several it is the one that points deepest: where a field may be one of several kinds, that kind is most likely meant.
    """
    complaints = error.errors(include_url=False)
    paths = [_path(complaint, given) for complaint in complaints]
    path = max(paths, key=len)
    here = [complaint for at, complaint in zip(paths, complaints, strict=True) if at == path]
    return errors.RequestError(f"{_spelled(path)}{_sentence(here)}", param=_spelled(path))


def _sentence(complaints: Sequence[ErrorDetails]) -> str:
    """All of them are about the same field, which stands in front."""
    first = complaints[0]
    match first["type"]:
        case "value_error":
            return f": {first['ctx']['error']}"
        case "one_of":
            return f" {first['msg']}"
        case "missing":
            return " is missing; send it"
    kinds = dict.fromkeys(map(wanted, complaints))
    return f" must be {' or '.join(kinds)}, not {shown(first['input'])}"


def _spelled(path: Sequence[int | str]) -> str:
    """`messages[0].content`"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _path(complaint: ErrorDetails, given: Any) -> list[int | str]:
    """Where the complaint points to. pydantic's `loc` also names the kinds that it has tried; they are no part of the body."""
    path: list[int | str] = []
    for part in complaint["loc"]:
        is_given = part in given if isinstance(given, dict) else isinstance(given, list) and isinstance(part, int)
        is_missing = complaint["type"] == "missing" and part == complaint["loc"][-1]
        if is_given:
            given = given[part]
        if is_given or is_missing:
            path.append(part)
    return [*path, complaint["ctx"]["field"]] if complaint["type"] == "one_of" else path


def raise_validation(error: ValidationError) -> Response:
    """flask-openapi3's hook for bodies that do not fit their schema."""
    raise explain_validation(error, request.get_json())


def too_large(limit: int | None) -> errors.PayloadTooLargeError:
    """For a body of more than `limit` bytes."""
    return errors.PayloadTooLargeError(f"the request's body is larger than max_body_bytes = {limit}; send less or raise that setting")


def install(app: Flask) -> None:
    """Answers every error of this application in the shape of its API."""
    request_api.install(app)
    app.register_error_handler(errors.TandemError, error_response)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _unexpected)


def _http_error(raised: HTTPException) -> BaseResponse:
    """What Flask itself refuses: unknown routes and methods, too large or unreadable bodies."""
    if raised.code is None or raised.code < 400:  # redirects are raised too
        return raised.get_response()
    kinds = {
        404: errors.RouteNotFoundError("there is no such route here; docs/api.md lists the routes"),
        405: errors.RouteNotFoundError("this route does not answer this method; docs/api.md lists the routes"),
        413: too_large(request.max_content_length),
        415: errors.UnsupportedMediaTypeError("the body must be JSON; send Content-Type: application/json"),
    }
    answer = error_response(kinds.get(raised.code, errors.RequestError(raised.description or raised.name)))
    answer.status_code = raised.code
    if isinstance(raised, MethodNotAllowed) and raised.valid_methods:
        answer.headers["Allow"] = ", ".join(sorted(raised.valid_methods))
    return answer


def _unexpected(raised: Exception) -> Response:
    log.error("a request failed unexpectedly", exc_info=raised)
    return error_response(errors.TandemError("something went wrong inside the server; its log says what"))
