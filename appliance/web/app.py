"""The Flask application: one factory, one blueprint per group of routes."""

from __future__ import annotations

import threading
from importlib.metadata import version as package_version
from typing import Any

import flask
import orjson
from flask.json.provider import JSONProvider
from flask_openapi3.models.info import Info
from flask_openapi3.openapi import OpenAPI

from appliance.desk.desk import Desk
from appliance.errors import CapacityError, RequestError, UnsupportedMediaTypeError
from appliance.settings import Settings
from appliance.text.chat_template import ChatTemplate
from appliance.text.tokenizer import Tokenizer
from appliance.web import anthropic, auth, errors, hosts, models, openai, ops, page, prefix, service
from appliance.web.client import Client
from appliance.web.json_body import parse_json
from appliance.web.model_info import ModelInfo
from appliance.web.schemas import ErrorBody

_BODY_SILENCE_S = 10.0
_ANSWER_SILENCE_S = 60.0
"""A client that stops sending its body, or stops reading its answer, for so long loses its connection: it holds a thread."""
READERS = 24
_READER_WAIT_S = 0.2
"""So many requests may be on their way in at once, or else slow ones would silence the probes."""
_KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}


def create_app(settings: Settings, desk: Desk, tokenizer: Tokenizer, template: ChatTemplate, model_info: ModelInfo) -> flask.Flask:
    """A WSGI application over a desk, which may still be loading. SettingsError if the API key file is unusable."""
    app = OpenAPI(
        "appliance.web",
        info=Info(title="Tandem", version=package_version("tandem-appliance")),
        validation_error_status=400,
        validation_error_model=ErrorBody,
        validation_error_callback=errors.raise_validation,
        doc_ui=False,
        static_folder=None,
    )
    app.json = _Json(app)
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    app.url_map.strict_slashes = False
    service.install(app, service.Service(settings, desk, tokenizer, template, model_info))
    errors.install(app)
    hosts.install(app, settings)
    if settings.api_key_file is not None:
        auth.install(app, auth.KeyRing.from_file(settings.api_key_file))
    app.before_request(_BodyReader().read)
    app.register_api(models.api)
    app.register_api(openai.api)
    app.register_api(anthropic.api)
    app.register_api(ops.ops)
    app.register_blueprint(page.page)
    ops.install_description(app, app.api_doc)
    page.install_headers(app)
    prefix.install(app, settings.url_prefix)
    return app


class _Json(JSONProvider):
    """orjson: quick, and strict about what is JSON."""

    def dumps(self, obj: Any, **kwargs: Any) -> str:
        del kwargs
        return orjson.dumps(obj, option=orjson.OPT_NON_STR_KEYS).decode()

    def loads(self, s: str | bytes, **kwargs: Any) -> Any:
        del kwargs
        return parse_json(s.encode() if isinstance(s, str) else s)


class _BodyReader:
    """Reads the body of every known POST before its schema is looked at; it is kept for the route. Thread-safe."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(READERS)

    def read(self) -> None:
        request = flask.request
        if request.method != "POST" or request.endpoint is None:
            return
        client = Client.of(request.environ)
        client.give_up_after(_BODY_SILENCE_S)
        if not request.is_json:
            raise UnsupportedMediaTypeError("the body must be JSON; send Content-Type: application/json")
        if not self._places.acquire(timeout=_READER_WAIT_S):
            client.ignore_rest()
            raise CapacityError("too many clients are sending their requests at once; send the request again")
        try:
            _check_length(request)
            given = request.get_json()
        finally:
            self._places.release()
        client.give_up_after(_ANSWER_SILENCE_S)
        if not isinstance(given, dict):
            raise RequestError(f"the body must be a JSON object, not {_KINDS[type(given)]}")


def _check_length(request: flask.Request) -> None:
    """A body of unknown length is read up to the limit without complaint; whether there is more shows only behind it."""
    limit = request.max_content_length
    if request.content_length is None and limit is not None and len(request.get_data()) == limit and request.environ["wsgi.input"].read(1):
        raise errors.too_large(limit)
