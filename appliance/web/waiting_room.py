"""Answers on the server's port while the model is still being fetched: alive, not ready, and how far it is.

    GET /livez 200     GET /readyz 503     GET /status, / and the page's files as ever     anything else 503, try again

It runs in the first process, before the worker is forked, and is gone by then; a connection that comes in between waits in
the socket's queue for the worker.
"""

from __future__ import annotations

import socket
import threading
from importlib.metadata import version as package_version

import flask
from flask import Blueprint, Response, jsonify
from werkzeug.serving import WSGIRequestHandler, make_server

from appliance.desk.status import Counters, DeskStatus, Phase
from appliance.errors import NotReadyError
from appliance.protocol import LoadProgress
from appliance.settings import Settings
from appliance.web import auth, errors, hosts, page, prefix

RETRY_S = 10
_METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH"]


class WaitingRoom:
    """A thread with a small server on a socket that stays open for the one that follows. Thread-safe."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        """Serves at once. SettingsError if the API key file is unusable."""
        self._progress: LoadProgress | None = None
        app = _create_app(settings, self)
        host, port = listener.getsockname()[:2]
        self._server = make_server(host, port, app, threaded=True, fd=listener.fileno(), request_handler=_Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="waiting-room", daemon=True)
        self._thread.start()

    def show(self, progress: LoadProgress) -> None:
        self._progress = progress

    def close(self) -> None:
        """Answers what has begun, then leaves the socket to the next server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def status(self) -> DeskStatus:
        return DeskStatus(
            phase=Phase.LOADING,
            reason=None,
            load=self._progress,
            context=None,
            lanes=(),
            queue_length=0,
            counters=Counters(),
            unready_reason="the model is being fetched",
        )


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: object) -> None:
        """Nothing: the real server has no access log either."""
        del type, message, args


def _create_app(settings: Settings, room: WaitingRoom) -> flask.Flask:
    app = flask.Flask("appliance.web", static_folder=None)
    app.register_blueprint(_ops(room))
    app.register_blueprint(page.page)
    errors.install(app)
    hosts.install(app, settings)
    if settings.api_key_file is not None:
        auth.install(app, auth.KeyRing.from_file(settings.api_key_file))
    page.install_headers(app)
    prefix.install(app, settings.url_prefix)
    return app


def _ops(room: WaitingRoom) -> Blueprint:
    """Named as the real one, so that keys and host names are asked for in the same places."""
    ops = Blueprint("ops", __name__)

    @ops.get("/livez")
    def livez() -> Response:
        return jsonify({"status": "ok"})

    @ops.get("/status")
    def status() -> Response:
        plain = room.status().to_json()
        return jsonify({"version": package_version("tandem-appliance"), **plain, "model": None, "plan": None})

    @ops.get("/readyz")
    def readyz() -> Response:
        return _unavailable(room)

    @ops.route("/<path:_rest>", methods=_METHODS)
    def elsewhere(_rest: str) -> Response:
        return _unavailable(room)

    return ops


def _unavailable(room: WaitingRoom) -> Response:
    plain = room.status().to_json()
    response = errors.error_response(NotReadyError(plain["unready_reason"], retry_after_s=RETRY_S))
    body = {"status": "unavailable", "phase": plain["phase"], "reason": plain["unready_reason"], "load": plain["load"]}
    body |= response.get_json() or {}
    response.set_data(jsonify(body).get_data())
    return response
