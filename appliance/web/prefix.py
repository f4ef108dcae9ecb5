"""Behind a path prefix: `/notebook/me/v1/models` becomes `/v1/models` with SCRIPT_NAME `/notebook/me`.

The prefix is the setting `url_prefix`, or what a proxy says in `X-Forwarded-Prefix`. Paths without it are answered as well: some
proxies have removed it already, and probes come past the proxy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from flask import Flask
from werkzeug.utils import redirect

_SAFE_PREFIX = re.compile(r"(/[A-Za-z0-9._~@:+-]+)+")
_PERMANENT = 308


class PrefixMiddleware:
    """Moves the prefix from PATH_INFO into SCRIPT_NAME. Thread-safe (it has no state)."""

    def __init__(self, app: WSGIApplication, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        prefix = _forwarded_prefix(environ) or self._prefix
        if prefix and path == prefix:  # without the slash at its end the page's relative addresses would miss the prefix
            return redirect(prefix + "/", _PERMANENT)(environ, start_response)
        if prefix:
            environ["SCRIPT_NAME"] = prefix
            environ["PATH_INFO"] = path.removeprefix(prefix) if path.startswith(prefix + "/") else path
        return self._app(environ, start_response)


def _forwarded_prefix(environ: WSGIEnvironment) -> str:
    value = str(environ.get("HTTP_X_FORWARDED_PREFIX", "")).partition(",")[0].strip().rstrip("/")
    return value if _SAFE_PREFIX.fullmatch(value) else ""


def install(app: Flask, prefix: str) -> None:
    """Puts the middleware in front of the application."""
    app.wsgi_app = PrefixMiddleware(app.wsgi_app, prefix)  # type: ignore[method-assign]
